"""Engines are probed when they join: what they do not do is shown, counts less, and no client notices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.events import BlockStored, Event
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.fleet.engine_probe import PROBED, UNSHOWN_SHARE
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.salt_proof import AGAIN_S
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.placement.candidate import PullSettings
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.probing import Send
from tests.support.waiting import until
from tests.support.whole_router import OFTEN, TEXT, Rig, configure, routing, running
from tests.world.loop import VirtualLoop
from tests.world.seams import run_with

SELDOM = FleetSettings(probe=True)
"""Polls for stories that last minutes."""
PROBING = msgspec.structs.replace(OFTEN, probe=True)
Story = Callable[[Rig, list[SimulatedEngine]], Awaitable[None]]


def probing(
    fleet: list[dict[str, Any]],
    story: Story,
    *,
    lie: Callable[[Send], Send] | None = None,
    change: Callable[[SimulatedEngine], None] | None = None,
    wait: bool = True,
    polls: FleetSettings = PROBING,
    **changes: Any,
) -> None:
    """Play a story before engines that are probed. ``lie``: changes the answers to probes; ``change``: an
    engine before the router knows it; ``wait``: until every engine is probed."""

    async def main(loop: VirtualLoop) -> None:
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(running(*fleet))
            for engine in engines:
                if change is not None:
                    change(engine)
            config = configure(*engines, fleet=polls, **changes)
            rig = await stack.enter_async_context(routing(config, wait=False))
            if lie is not None and rig.router.probes is not None:
                rig.router.probes.send = lie(rig.router.probes.send)
            await rig.ready()
            if wait:
                await until(lambda: all(one.probe for one in rig.router.fleet), "every engine is probed")
            await story(rig, engines)

    run_with(main)


def only(rig: Rig) -> Engine:
    (engine,) = rig.router.fleet
    return engine


def answering(change: Callable[[str, Any], Any]) -> Callable[[Send], Send]:
    """A lie: the decoded answer to each prompt of a probe is changed."""

    def lie(send: Send) -> Send:
        async def sends(method: str, url: str, body: bytes | None, *rest: Any) -> tuple[int, bytes]:
            status, answer = await send(method, url, body, *rest)
            if method == "GET":
                return (404, b"") if url.endswith("/metrics") else (status, answer)
            return status, msgspec.json.encode(change(url, msgspec.json.decode(answer)))

        return sends

    return lie


def with_cached(tokens: int | None) -> Callable[[Send], Send]:
    """A lie: every answer reports this many cached tokens; None: none at all."""

    def change(url: str, answer: Any) -> Any:
        usage = answer["usage"]
        prompt = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
        answer["usage"] = {"prompt_tokens": prompt}
        if tokens is not None:
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": tokens}
        return answer

    return answering(change)


@pytest.mark.parametrize("groups", ["full", "gemma3-like", "mamba-hybrid", "gptoss-like"])
def test_an_engine_in_good_health_is_proven(groups: str) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        probe = only(rig).probe
        assert probe is not None
        assert set(probe.summary().values()) == {"proven"}, probe.summary()
        assert probe.apis.keys() == set(PROBED)
        (shown,) = await rig.ok("GET", "/kvatlas/engines")
        assert shown["probe"]["events"] == shown["probe"][f"hits of {CHAT}"] == "proven"
        assert shown["hit_share"] == 1.0
        assert "engine.unproven" not in str(await rig.ok("GET", "/kvatlas/problems"))

    probing([{"groups": groups}], story)


def test_a_probe_is_no_request_of_a_client(tmp_path: Path) -> None:
    record = tmp_path / "usage"

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        router, stats = rig.router, engines[0].scheduler.stats
        assert router.probes is not None
        assert router.probes.stats.requests >= 2 * len(PROBED)
        assert stats.prompt_tokens > 0
        assert stats.generation_tokens <= router.probes.stats.requests, "one token for each"
        assert not router.accounts.receipts.kept
        assert only(rig).receipts.outcomes == {}
        assert (router.accounts.load_stats.admitted, only(rig).answers) == (0, 0)
        assert not router.proxy.requests.counts
        rig.check_books()
        await rig.chat(TEXT * 20)
        await rig.over()
        assert router.accounts.load_stats.admitted == 1

    probing([{}], story, usage=UsageSettings(path=str(record)))
    assert record.read_text().count("\n") == 1


def test_switched_off_no_engine_is_asked() -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        await asyncio.sleep(20.0)
        assert rig.router.probes is None
        assert engines[0].scheduler.stats.prompt_tokens == 0
        (shown,) = await rig.ok("GET", "/kvatlas/engines")
        assert (shown["probe"], shown["hit_share"]) == ({}, 1.0)

    probing([{}], story, wait=False, polls=OFTEN)


def silent(engine: SimulatedEngine) -> None:
    """It stores, and publishes batches without events."""
    assert engine.publisher is not None
    publish = engine.publisher.publish
    engine.publisher.publish = lambda _events, **more: publish([], **more)  # type: ignore[method-assign]


def misnaming(engine: SimulatedEngine) -> None:
    """One hash in each event is of another block."""
    assert engine.publisher is not None
    publish = engine.publisher.publish

    def wrong(event: Event) -> Event:
        if isinstance(event, BlockStored) and len(event.block_hashes) > 1:
            *others, last = event.block_hashes
            other = last ^ 0x5A5A if isinstance(last, int) else last[::-1]
            return msgspec.structs.replace(event, block_hashes=[*others, other])
        return event

    engine.publisher.publish = lambda events, **more: publish(  # type: ignore[method-assign]
        [wrong(one) for one in events], **more
    )


@pytest.mark.parametrize(
    ("ways", "what", "said", "share"),
    [
        ({"change": silent}, "events", "did not come", None),
        ({"lie": with_cached(0)}, f"hits of {CHAT}", "tokens predicted, 0 came", 0.0),
        ({"lie": with_cached(16)}, f"hits of {COMPLETION}", "tokens predicted, 16 came", None),
        ({"lie": with_cached(10**6)}, f"hits of {MESSAGES}", "1000000 cached tokens reported of", 0.0),
        (
            {"lie": with_cached(None)},
            f"cached_tokens of {RESPONSES}",
            "--enable-prompt-tokens-details",
            UNSHOWN_SHARE,
        ),
        (
            {"lie": answering(lambda _url, _answer: [1])},
            f"hits of {CHAT}",
            "cannot be checked",
            UNSHOWN_SHARE,
        ),
        (
            {"lie": answering(lambda _, it: {**it, "usage": {"prompt_tokens": 7}})},
            f"hits of {CHAT}",
            "7 at the engine",
            0.0,
        ),
    ],
)
def test_each_lie_is_shown_and_counts(
    ways: dict[str, Any], what: str, said: str, share: float | None
) -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        engine = only(rig)
        assert engine.probe is not None
        verdict, _, why = engine.probe.summary()[what].partition(": ")
        assert verdict in {"refuted", "unshown"}
        assert said in why
        if share is not None:
            assert engine.hit_share == share
        problems = await rig.ok("GET", "/kvatlas/problems")
        (found,) = [one for one in problems[engine.engine_id] if one["check"] == "engine.unproven"]
        assert what in found["seen"]
        assert said in found["seen"]
        assert (await rig.ok("GET", "/kvatlas/engines"))[0]["probe"][what].startswith(verdict)
        await rig.chat(TEXT * 20)

    probing([{"groups": "full"}], story, **ways)


def test_events_that_name_other_blocks_are_found() -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        probe = only(rig).probe
        assert probe is not None
        assert "refuted" in {api.hits.verdict for api in probe.apis.values()}, probe.summary()

    probing([{"groups": "full"}], story, change=misnaming)


def test_hits_that_do_not_come_are_discounted_in_decisions() -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        for _ in range(2):
            await rig.chat(TEXT * 40)
            await rig.caught_up(*engines)
        body = {"model": "kvatlas-demo", "messages": [{"role": "user", "content": TEXT * 40}]}
        shown = await rig.ok("POST", f"/kvatlas/explain?path={CHAT}", body)
        (told,) = shown["engines"]
        engine = only(rig)
        assert 0.0 < engine.hit_share < 1.0
        held = rig.router.accounts.receipts.latest[-1].actual_tokens
        assert held
        assert told["hit_share"] == engine.hit_share
        assert told["cost"]["uncached_tokens"] == shown["prompt"]["tokens"] - int(engine.hit_share * held)
        assert engine.receipts.outcomes.keys() <= {"exact", "unpredicted"}, "receipts say what was predicted"

    probing([{"groups": "full"}], story, lie=with_cached(16))


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_engine_that_refuses_is_left_in_peace(status: int) -> None:
    def lie(send: Send) -> Send:
        async def sends(method: str, *rest: Any) -> tuple[int, bytes]:
            return (status, b"{}") if method == "POST" else await send(method, *rest)

        return sends

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        engine, probes = only(rig), rig.router.probes
        assert engine.probe is not None
        assert probes is not None
        assert engine.hit_share == 1.0
        sent = probes.stats.requests
        assert sent == len(PROBED)
        await asyncio.sleep(AGAIN_S - 5.0)
        assert probes.stats.requests == sent
        await asyncio.sleep(10.0)
        tried_again = status != 400
        assert (probes.stats.requests > sent) == tried_again
        assert engine.breaker.allows(rig.router.clock())
        await rig.chat(TEXT)

    probing([{}], story, lie=lie, polls=SELDOM)


def test_an_engine_that_hangs_holds_no_other_up() -> None:
    def lie(send: Send) -> Send:
        async def sends(method: str, url: str, *rest: Any) -> tuple[int, bytes]:
            if method == "POST" and ":30003" in url:
                await asyncio.sleep(rest[2])
                raise TimeoutError
            return await send(method, url, *rest)

        return sends

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        by_id = {one.engine_id: one for one in rig.router.fleet}
        hanging = [one for name, one in by_id.items() if ":30003" in name]
        for one in by_id.values():
            assert one.probe is not None
            assert one.probe.again == (one in hanging)
        assert len(hanging) == 1
        assert hanging[0].probe is not None
        assert hanging[0].probe.apis[CHAT].hits.verdict == "later"
        await rig.chat(TEXT)

    probing([{}, {}, {}], story, lie=lie, polls=SELDOM)


def test_a_restart_in_the_middle_ends_the_probe() -> None:
    asked = asyncio.Event()

    def lie(send: Send) -> Send:
        async def sends(*words: Any) -> tuple[int, bytes]:
            answer = await send(*words)
            asked.set()
            return answer

        return sends

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        engine, probes = only(rig), rig.router.probes
        assert probes is not None
        await asked.wait()
        rig.router.lifecycle.engine_restarted(engine)
        await until(lambda: probes.stats.probes != {}, "the probe ends")
        assert probes.stats.probes == {"ended": 1}
        assert engine.probe is None
        await until(lambda: engine.probe is not None, "it is probed again")
        assert engine.probe.summary()["events"] == "proven"  # type: ignore[attr-defined]

    probing([{}], story, lie=lie, wait=False, polls=SELDOM)


def test_an_engine_that_is_drained_is_asked_no_more() -> None:
    asked: list[Any] = []

    def lie(send: Send) -> Send:
        async def sends(*words: Any) -> tuple[int, bytes]:
            asked.append(words)
            return await send(*words)

        return sends

    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        engine = only(rig)
        while not asked:
            await asyncio.sleep(0.001)
        engine.held = "drained by ann"
        await asyncio.sleep(10.0)
        before = len(asked)
        await asyncio.sleep(AGAIN_S + 5.0)
        assert len(asked) == before
        engine.held = ""
        await asyncio.sleep(2 * AGAIN_S)
        assert engine.probe is not None
        assert not engine.probe.again

    probing([{}], story, lie=lie, wait=False, polls=SELDOM)


def test_engines_without_events_are_asked_whether_they_report() -> None:
    async def story(rig: Rig, engines: list[SimulatedEngine]) -> None:
        probe = only(rig).probe
        assert probe is not None
        assert probe.events.verdict == probe.apis[CHAT].hits.verdict == "absent"
        assert probe.apis[CHAT].reports.verdict == "proven"
        assert only(rig).hit_share == 1.0

    probing([{"publish_events": False}], story)


def test_nothing_is_pulled_from_an_address_that_does_not_answer() -> None:
    async def main(loop: VirtualLoop) -> None:
        offload = {"kv_connector": "offloading", "host_blocks": 512}
        async with running(offload, offload) as engines:
            connector = engines[0].connector
            assert connector is not None
            host, port = connector.address
            address = EngineAddress(engines[0].base_url, kv_source=f"{host}:{port}")
            silent_one = EngineAddress(engines[1].base_url, kv_source="127.0.0.1:9")
            config = configure(address, silent_one, fleet=PROBING, pull=PullSettings(enabled=True))
            async with routing(config) as rig:
                await until(lambda: all(one.probe for one in rig.router.fleet), "every engine is probed")
                answers, silent_engine = (
                    rig.router.fleet.get(one.engine_id) for one in (address, silent_one)
                )
                assert answers is not None
                assert silent_engine is not None
                assert answers.probe is not None
                assert silent_engine.probe is not None
                assert answers.probe.summary()["pull source"] == "proven"
                assert silent_engine.probe.summary()["pull source"].startswith("refuted: does not answer")

    run_with(main)
