"""SGLang engines behind a whole router: every receipt is exact, also beside vLLM's.

The engines are simulated: SGLang's radix tree, its own events over real sockets, ``/server_info`` and gauges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from publisher.engine import SimulatedEngine
from router.openai.request import CHAT, COMPLETION
from router.proxy.settings import ProxySettings
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, number, routing, running

SGLANG: dict[str, Any] = {"kind": "sglang", "groups": "full", "max_model_len": 4096}
PINNED = ProxySettings(pin_header=True)


def bodies(salt: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Completions and chats about two stories, each sent again, cut, and continued."""
    extra = {} if salt is None else {"cache_salt": salt}
    made: list[tuple[str, dict[str, Any]]] = []
    for name in ("first", "second"):
        story = f"The {name} story. {TEXT * 20}"
        for text in (story, story, story[: len(story) // 2], story + TEXT):
            body = {"model": MODEL, "max_tokens": 20, "ignore_eos": True, **extra}
            made.append((COMPLETION, {**body, "prompt": text}))
            made.append((CHAT, {**body, "messages": [{"role": "user", "content": text}]}))
    return made


async def ask(rig: Rig, engine: SimulatedEngine, path: str, body: dict[str, Any]) -> int:
    """One request at this engine; returns its cached tokens, when the router knows what it stored."""
    headers = {"x-kvatlas-engine": engine.base_url}
    status, answer = await rig.ask("POST", path, body, headers)
    assert status == 200, answer
    await until(lambda: rig.idle, "answered")
    await rig.caught_up(engine)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def exchange(rig: Rig, engines: Sequence[SimulatedEngine], salt: str | None = None) -> None:
    """All bodies at each engine: every receipt is exact, and repeated prompts hit."""
    for engine in engines:
        hits = [await ask(rig, engine, path, body) for path, body in bodies(salt)]
        assert sum(hit > 0 for hit in hits) >= len(hits) // 2
    check(rig)


def check(rig: Rig) -> None:
    receipts = list(rig.router.accounts.receipts.latest)
    assert receipts
    assert {receipt.outcome for receipt in receipts} == {"exact"}, [
        (one.outcome, one.predicted_tokens, one.actual_tokens) for one in receipts if one.outcome != "exact"
    ]


def test_every_receipt_is_exact() -> None:
    async def main() -> None:
        async with running(SGLANG) as engines, routing(configure(*engines)) as rig:
            await exchange(rig, engines)
            await exchange(rig, engines, salt="tenant")
            (shown,) = (await rig.ask("GET", "/kvatlas/engines"))[1]
            assert (shown["frontend"], shown["mode"]) == ("sglang", "native")
            engines[0].pool.check_integrity()

    run(main())


def test_a_small_pool_evicts_and_receipts_stay_exact() -> None:
    async def main() -> None:
        small = {**SGLANG, "num_blocks": 40, "max_model_len": 600}
        async with running(small) as engines, routing(configure(*engines)) as rig:
            for number_ in range(12):
                text = f"Story {number_ % 5}. {TEXT * 8}"
                await ask(rig, engines[0], COMPLETION, {"model": MODEL, "max_tokens": 4, "prompt": text})
            check(rig)
            residency = rig.router.scopes.engine(engines[0].base_url)
            assert residency is not None
            assert residency.index.physical(engines[0].base_url, "GPU") <= 39

    run(main())


def test_a_router_that_starts_late_knows_what_the_engine_holds() -> None:
    async def main() -> None:
        async with running(SGLANG) as engines:
            async with routing(configure(*engines)) as rig:
                await exchange(rig, engines)
            async with routing(configure(*engines)) as late:
                path, body = bodies()[0]
                assert await ask(late, engines[0], path, body) > 0
                await exchange(late, engines)

    run(main())


def test_an_engine_that_restarts_holds_nothing() -> None:
    async def main() -> None:
        async with running(SGLANG) as (engine,), routing(configure(engine)) as rig:
            await exchange(rig, [engine])
            assert engine.events_endpoint is not None
            assert engine.replay_endpoint is not None
            ports = {
                "port": number(engine.base_url),
                "events_port": number(engine.events_endpoint),
                "replay_port": number(engine.replay_endpoint),
            }
            await engine.stop()
            (status,) = rig.router.fleet
            await until(lambda: not status.up, "the router saw it end")
            async with running({**SGLANG, **ports}) as (again,):
                await rig.ready()
                path, body = bodies()[0]
                assert await ask(rig, again, path, body) == 0
                await exchange(rig, [again])

    run(main())


def test_vllm_and_sglang_engines_of_one_model() -> None:
    """Their hashes, and for some chats their tokens, differ; each engine is predicted by its own."""

    async def main() -> None:
        async with (
            running({"groups": "full"}, SGLANG, {}, SGLANG) as engines,
            routing(configure(*engines, proxy=PINNED)) as rig,
        ):
            await exchange(rig, engines)
            shown = (await rig.ask("GET", "/kvatlas/engines"))[1]
            assert [one["frontend"] for one in shown] == ["python", "sglang", "python", "sglang"]
            await asyncio.gather(*(rig.ask("POST", path, body) for path, body in bodies("tenant")))
            await until(lambda: rig.idle, "answered")
            rig.check_books()

    run(main())


@pytest.mark.parametrize("changes", [{"groups": "gemma3-like"}, {"role": "decode"}, {"host_blocks": 8}])
def test_what_is_not_simulated_is_refused(changes: dict[str, Any]) -> None:
    async def main() -> None:
        (name,) = changes
        with pytest.raises(ValueError, match=f"{name} = .*sglang"):
            async with running({**SGLANG, **changes}):
                pass

    run(main())
