"""Tenants with isolated caches reach only engines that are proven to isolate the API that they use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.salt_proof import AGAIN_S, SaltProof, SaltProver
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, MESSAGES, RESPONSES
from tests.support.whole_router import MODEL, OFTEN, Rig, configure, routing, running, tenants
from tests.world.loop import VirtualLoop
from tests.world.seams import run_with

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    COMPLETION: {"prompt": "x", "max_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    BATCH: {"messages": [[{"role": "user", "content": "x"}]], "max_tokens": 1},
}


async def ask(rig: Rig, path: str) -> tuple[int, Any]:
    return await rig.ask(
        "POST", path, {"model": MODEL, **BODIES[path]}, {"authorization": "Bearer key-of-ada"}
    )


async def up(rig: Rig) -> None:
    while not all(engine.up for engine in rig.router.fleet):
        await asyncio.sleep(0.05)


def isolating(
    folder: Path,
    fleet: list[dict[str, Any]],
    story: Callable[[Rig, list[SimulatedEngine]], Awaitable[None]],
    polls: FleetSettings = OFTEN,
    **keys: Any,
) -> None:
    secret = folder / "secret"
    secret.write_text("s" * 32)
    settings = tenants(
        folder, {"ada": "", "eve": ""}, **{"isolate": "tenant", "isolate_secret_file": str(secret), **keys}
    )

    async def main(loop: VirtualLoop) -> None:
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(running(*fleet))
            rig = await stack.enter_async_context(
                routing(configure(*engines, keys=settings, fleet=polls), wait=False)
            )
            await up(rig)
            await story(rig, engines)

    run_with(main)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, MESSAGES, RESPONSES])
def test_an_api_that_drops_the_salt_is_refused_with_the_reason(path: str, tmp_path: Path) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        status, answer = await ask(rig, path)
        said = answer["error"]["message"]
        assert (status, answer["error"]["code"]) == (400, "cache_salt_not_accepted")
        assert f"{path} drops cache_salt: a prompt with another salt took" in said
        for other in BODIES:
            if other not in (path, BATCH):
                assert (await ask(rig, other))[0] == 200, other
        problems = await rig.ok("GET", "/kvatlas/problems")
        found = next(one for one in problems[engines[0].base_url] if one["check"] == "isolation.unproven")
        assert f"{path} drops cache_salt" in found["seen"]
        (shown,) = await rig.ok("GET", "/kvatlas/engines")
        told = {name: verdict.partition(":")[0] for name, verdict in shown["probe"].items()}
        assert told.pop(f"cache_salt of {path}") == "refuted"
        assert set(told.values()) == {"proven", "absent"}, "no test is known for batches"

    isolating(tmp_path, [{"drops_salt": path}], story)


def test_requests_avoid_an_engine_that_drops_salts_or_wait(tmp_path: Path) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        for _ in range(4):
            status, _ = await ask(rig, MESSAGES)
            assert status == 200
        receipts = list(rig.router.accounts.receipts.latest)
        assert {one.engine_id for one in receipts} == {engines[1].base_url}
        await engines[1].stop()
        while rig.router.fleet.get(engines[1].base_url).up:  # type: ignore[union-attr]
            await asyncio.sleep(0.05)
        status, answer = await ask(rig, MESSAGES)
        assert (status, answer["error"]["code"]) == (400, "cache_salt_not_accepted")
        assert (await ask(rig, CHAT))[0] == 200

    isolating(tmp_path, [{"drops_salt": MESSAGES}, {}], story)


def test_another_release_at_the_address_is_tried_again(tmp_path: Path) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        (old,) = engines
        assert (await ask(rig, MESSAGES))[0] == 200
        await old.stop()
        while rig.router.fleet.get(old.base_url).up:  # type: ignore[union-attr]
            await asyncio.sleep(0.05)
        port = int(old.base_url.rpartition(":")[2])
        async with running({"drops_salt": MESSAGES, "port": port}):
            await up(rig)
            assert (await ask(rig, MESSAGES))[0] == 400
            assert (await ask(rig, CHAT))[0] == 200

    isolating(tmp_path, [{}], story)


def test_a_restart_that_no_poll_saw_ends_what_was_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = [1.0]
    monkeypatch.setattr("kvatlas.router.fleet.poller.read_started", lambda page: started[0])

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        assert (await ask(rig, MESSAGES))[0] == 200
        await asyncio.sleep(1.0)
        engines[0]._server.config.app._drops_salt = frozenset({MESSAGES})  # type: ignore[union-attr]
        started[0] = 2.0
        await asyncio.sleep(1.0)
        assert (await ask(rig, MESSAGES))[0] == 400

    isolating(tmp_path, [{}], story)


def test_a_proof_that_a_busy_engine_missed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SaltProver.prove
    times: list[int] = []

    async def prove(self: SaltProver, proof: SaltProof) -> None:
        times.append(1)
        if len(times) == 1:
            proof.apis = dict.fromkeys(BODIES, Shown("later", "could not be tried: status 503"))
            proof.again = True
        else:
            await real(self, proof)

    monkeypatch.setattr(SaltProver, "prove", prove)

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        status, answer = await ask(rig, CHAT)
        assert (status, answer["error"]["code"]) == (503, "no_ready_engine")
        assert "could not be tried: status 503" in answer["error"]["message"]
        await asyncio.sleep(AGAIN_S + 1.0)
        assert (await ask(rig, CHAT))[0] == 200
        assert len(times) == 2

    isolating(tmp_path, [{}], story, FleetSettings(poll_interval_s=5.0, gauge_interval_s=5.0))


def test_without_isolation_no_engine_is_tried(tmp_path: Path) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        assert engines[0].stepper.scheduler.stats.prefix_cache_queries == 0
        assert (await ask(rig, MESSAGES))[0] == 200

    isolating(tmp_path, [{"drops_salt": MESSAGES}], story, isolate="off", isolate_secret_file=None)
