"""Engines are given the order of their prompts: by a header, within classes, and not where they refuse it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.simulator.api_protocol import ChatRequest, CompletionRequest, invalid
from kvatlas.publisher.simulator.http_agents import Call
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.engine_order import BAND_MS
from tests.router.app.test_keys import RULES
from tests.support.proxy_rig import Engine, answer, ask, request, says
from tests.support.proxy_rig import routing as proxying
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, routed, tenants

ORDERED = PolicySettings(engine_priority=2.0)


def watched(engine: SimulatedEngine) -> list[int]:
    """Priorities of the requests that come in."""
    seen: list[int] = []
    add = engine.scheduler.add

    def note(asked: Any) -> None:
        seen.append(asked.priority)
        add(asked)

    engine.scheduler.add = note  # type: ignore[method-assign, assignment]
    return seen


@asynccontextmanager
async def ordered(**changes: Any) -> AsyncIterator[tuple[Rig, list[int]]]:
    async with routed({"scheduling_policy": "priority"}, **{"policy": ORDERED, **changes}) as (rig, engines):
        yield rig, watched(engines[0])


async def test_a_prompt_has_its_arrival_and_twice_its_work_as_priority() -> None:
    async with ordered() as (rig, seen):
        rig.router.accounts.wall = lambda: 1_800_000_000.0
        await rig.chat("a short question")
        await rig.chat("a long question " * 2000)
        await rig.chat("another short question")
        assert 0 < seen[0] < BAND_MS
        (engine,) = rig.router.fleet
        tokens = rig.router.accounts.receipts.latest[1].prompt_tokens or 0
        rate = engine.rates.prefill_s_per_token(0.0)
        assert seen[1] - seen[0] == pytest.approx(2000 * rate * tokens, rel=0.01)
        assert seen[2] - seen[0] < 10, "it passes the long one, which came before"
        for number in (4, 1):
            prompts = [f"{at} of {number} words " + "and more " * 300 for at in range(number)]
            await rig.ok("POST", COMPLETION, {"model": MODEL, "prompt": prompts, "max_tokens": 1})
        assert {*seen[3:7]} == {seen[3]}, "of one request"
        assert seen[3] - seen[0] == pytest.approx(4 * (seen[7] - seen[0]), rel=0.15)


@asynccontextmanager
async def two_waiting(policy: PolicySettings, ahead: dict[str, str]) -> AsyncIterator[tuple[Rig, list[int]]]:
    """Two prompts with a common beginning wait in an engine that computes one request at a time; ``ahead``:
    header fields of the first one."""
    # Busy for a second with the first: far longer than a request takes to get there.
    one_at_a_time = {"scheduling_policy": "priority", "max_num_seqs": 1, "decode_s_per_token": 0.01}
    async with routed(one_at_a_time, policy=policy) as (rig, engines):
        seen = watched(engines[0])
        await rig.chat("a first question " * 20)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.chat("another question", max_tokens=100))
            await until(lambda: len(seen) == 2, "the engine is busy")
            group.create_task(rig.chat("a long question " * 50, extra_headers=ahead))
            await until(lambda: len(seen) == 3, "a prompt waits")
            group.create_task(rig.chat("a long question " * 51))
        await until(lambda: len(rig.router.accounts.receipts.latest) == 4, "every receipt")
        yield rig, seen


async def test_a_prompt_waits_for_the_one_whose_blocks_it_is_predicted_to_hit() -> None:
    """It has less work left than the one ahead, but passing it would leave nothing to hit."""
    async with two_waiting(ORDERED, {}) as (rig, seen):
        assert seen[3] > seen[2]
        (last,) = [one for one in rig.router.accounts.receipts.latest if (one.predicted_tokens or 0) > 100]
        assert (last.mode, last.outcome) == ("native", "exact")


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [("1", ("pending", "over")), ("0", ("native", "exact")), ("-1", ("native", "exact"))],
)
async def test_a_hit_of_a_prompt_that_its_client_puts_behind_is_pending(
    ahead: str, expected: tuple[str, str]
) -> None:
    async with two_waiting(PolicySettings(), {"x-vllm-priority": ahead}) as (rig, _):
        (last,) = [one for one in rig.router.accounts.receipts.latest if (one.predicted_tokens or 0) > 100]
        assert (last.mode, last.outcome) == expected


@pytest.mark.parametrize(
    ("fields", "band"),
    [
        ({}, 0),
        ({"extra_headers": {"x-kvatlas-priority": "low"}}, 1),
        ({"extra_headers": {"x-kvatlas-priority": "high"}}, -1),
        ({"extra_headers": {"x-vllm-priority": "-7"}}, -1),
        ({"extra_body": {"priority": 3}}, 1),
        ({"extra_body": {"priority": 3}, "extra_headers": {"x-vllm-priority": "0"}}, 0),
    ],
)
async def test_the_class_that_a_request_asks_for_goes_before_its_place(fields: Any, band: int) -> None:
    async with ordered() as (rig, seen):
        await rig.chat("hi", **fields)
        assert seen[0] // BAND_MS == band


async def test_a_tenant_is_never_above_its_class(tmp_path: Path) -> None:
    async with ordered(keys=tenants(tmp_path, RULES)) as (rig, seen):
        for tenant, band in (("free", 0), ("low", 1), ("high", -1)):
            for asked in ({}, {"x-vllm-priority": "-99"}, {"x-kvatlas-priority": "high"}):
                headers = {"authorization": f"Bearer key-of-{tenant}", **asked}
                await rig.chat("hi", extra_headers=headers)
                assert seen.pop() // BAND_MS == band


@pytest.mark.parametrize("keys", [False, True])
async def test_without_the_setting_a_clients_own_priority_is_passed_on_as_its_class_allows(
    tmp_path: Path, keys: bool
) -> None:
    changes = {"keys": tenants(tmp_path, RULES)} if keys else {}
    async with ordered(policy=PolicySettings(), **changes) as (rig, seen):
        for tenant, given, capped in (
            ("free", "-5", 0),
            ("free", "5", 5),
            ("free", "of use", 0),
            ("low", "-5", 1),
            ("high", "-5", -5),
        ):
            headers = {"x-vllm-priority": given}
            if keys:
                headers["authorization"] = f"Bearer key-of-{tenant}"
            await rig.chat("hi", extra_headers=headers)
            own = int(given) if given != "of use" else 0
            assert seen.pop() == (capped if keys else own)


async def test_an_engine_that_refuses_priorities_is_asked_without_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    apply_headers = Call.apply_headers

    def refusing(self: Call, request: ChatRequest | CompletionRequest) -> None:
        apply_headers(self, request)
        calls.append(request.priority)
        if request.priority:
            raise invalid(f"Got priority {request.priority} but Priority scheduling is not enabled.")

    monkeypatch.setattr(Call, "apply_headers", refusing)
    async with ordered() as (rig, seen):
        for _ in range(3):
            assert (await rig.chat("hi")).http_response.status_code == 200
        assert [bool(priority) for priority in calls] == [True, False, False, False]
        assert seen == [0, 0, 0]
        assert rig.router.proxy.stats.priorities_refused == 1
        (engine,) = rig.router.fleet
        engine.abandon(lambda attempt: False)  # as when it goes down
        await rig.chat("hi")
        assert rig.router.proxy.stats.priorities_refused == 2
        rig.check_books()


async def test_a_request_refused_for_another_reason_says_nothing_of_priorities() -> None:
    async with ordered() as (rig, seen):
        status, _ = await rig.ask(
            "POST",
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 1000},
        )
        assert status == 400
        assert rig.router.proxy.stats.priorities_refused == 0
        await rig.chat("hi")
        assert seen[0] > 0


async def test_the_body_is_not_touched() -> None:
    async def script(engine: Engine, call: Any, writer: Any) -> None:
        refuses = "x-vllm-priority" in call.head
        writer.write(answer(400 if refuses else 200, b"no" if refuses else b"yes"))

    async with Engine(script) as engine, proxying(engine.url) as rig:
        rig.planner.engine_headers = ((b"x-vllm-priority", b"5"),)
        body = b'{ "model":"m" ,"priority": 0,"prompt":"\\u0061"}'
        got = await ask(rig, request(body, target="/v1/completions"))
        assert (got.status, got.body) == (200, b"yes")
        assert [call.body for call in engine.calls] == [body, body]

    async with Engine(says(400, b"no")) as engine, proxying(engine.url) as rig:
        assert (await ask(rig)).body == b"no"
        assert len(engine.calls) == 1, "no priority was given"
