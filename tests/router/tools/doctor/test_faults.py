"""``kvatlas doctor --probe``: engines with one fault each, and the checks that name it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.events import BlockRemoved, BlockStored, Event
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import BAD
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.tools.doctor.checks import run_checks
from kvatlas.router.tools.doctor.examine import ExamineSettings, examine
from tests.support.whole_router import LOCAL, running

SMALL_POOL = {"groups": "full", "num_blocks": 200}


async def bad_checks(url: str, *, model: ModelConfig = LOCAL) -> set[str]:
    """The checks that warn of an engine after a probe; each with cause and remedy."""
    config = Config(engines=(EngineAddress(url),), models={ANY_MODEL: model})
    settings = ExamineSettings(seconds=0.0, timeout_s=2.0, probe_timeout_s=10.0, probe=True)
    seen = await examine(config, settings, router_url=None, progress=lambda _text: None)
    bad = [finding for finding in run_checks(seen) if finding.severity in BAD]
    assert all(finding.cause and finding.remedy for finding in bad), bad
    return {finding.check for finding in bad}


Change = Callable[[list[Event]], list[Event] | None]


@asynccontextmanager
async def publishing_otherwise(change: Change, **settings: Any) -> AsyncIterator[SimulatedEngine]:
    """An engine whose events are changed before they are published; None: the batch's number is skipped."""
    async with running({**SMALL_POOL, **settings}) as (engine,):
        publisher = engine.publisher
        assert publisher is not None
        publish = publisher.publish

        def publish_changed(events: list[Event], **options: Any) -> int:
            changed = change(events)
            if changed is None:
                publisher.renumber(publisher.next_seq + 1)
                return publisher.next_seq
            return publish(changed, **options)

        publisher.publish = publish_changed  # type: ignore[method-assign]
        yield engine


def each(change: Callable[[Event], Event | None]) -> Change:
    """A change of every event by itself."""
    return lambda events: [new for event in events if (new := change(event)) is not None]


@pytest.mark.parametrize(
    "groups", ["full", pytest.param("gptoss-like", marks=pytest.mark.long), "mamba-hybrid"]
)
async def test_an_engine_in_good_health_has_no_problem(groups: str) -> None:
    async with running({"groups": groups, "num_blocks": 400}) as (engine,):
        facts = ModelConfig(tokenizer=LOCAL.tokenizer, mamba_cache_mode="align")
        assert await bad_checks(engine.base_url, model=facts) == set()


def every_second(kind: type[Event]) -> Change:
    """Every second event of this kind is not published."""
    seen = 0

    def change(event: Event) -> Event | None:
        nonlocal seen
        seen += isinstance(event, kind)
        return None if isinstance(event, kind) and seen % 2 == 0 else event

    return each(change)


def lost_batches() -> Change:
    batches = 0

    def lose(events: list[Event]) -> list[Event] | None:
        nonlocal batches
        batches += 1
        return None if batches % 2 else events

    return lose


def twisted(*, all_hashes: bool) -> Change:
    """All hashes of each event are wrong, or the last one."""

    def twist(event: Event) -> Event:
        if not isinstance(event, BlockStored) or len(event.block_hashes) < 2:
            return event
        hashes = [block ^ 0x5A5A if isinstance(block, int) else block for block in event.block_hashes]
        kept = hashes if all_hashes else [*event.block_hashes[:-1], hashes[-1]]
        return msgspec.structs.replace(event, block_hashes=kept)

    return each(twist)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lost_batches(), {"events.flow"}, id="batches are lost"),
        pytest.param(every_second(BlockStored), {"events.removals"}, id="stores are not published"),
        pytest.param(every_second(BlockRemoved), {"cache.pool"}, id="removals are not published"),
        pytest.param(
            lambda events: [*events, BlockRemoved([4711], "GPU", 0)],
            {"events.removals"},
            id="unknown removals",
        ),
        pytest.param(twisted(all_hashes=True), {"cache.scheme"}, id="all hashes are wrong"),
        pytest.param(twisted(all_hashes=False), {"probe.exact"}, id="one hash in each event is wrong"),
        pytest.param(lambda _events: [], {"events.flow", "probe.exact"}, id="no events"),
    ],
)
async def test_a_fault_of_events(change: Change, expected: set[str]) -> None:
    async with publishing_otherwise(change) as engine:
        assert expected <= await bad_checks(engine.base_url)


@pytest.mark.parametrize("untrue", [lambda cached: 0, lambda cached: cached + 16], ids=["nothing", "more"])
async def test_untrue_cached_tokens(untrue: Callable[[int], int]) -> None:
    async with running(SMALL_POOL) as (engine,):
        count = engine.scheduler._count_hit

        def lie(request: Any, hit: int, cached: int) -> None:
            count(request, hit, untrue(cached))

        engine.scheduler._count_hit = lie  # type: ignore[method-assign]
        assert "probe.exact" in await bad_checks(engine.base_url)


async def test_prefix_caching_off() -> None:
    async with publishing_otherwise(lambda _events: []) as engine:
        find, cache = engine.pool.start, engine.model._cache

        def start(*arguments: Any, **options: Any) -> int | None:
            engine.pool.reset()
            return find(*arguments, **options)

        engine.pool.start = start  # type: ignore[method-assign]
        engine.model._cache = msgspec.structs.replace(cache, enable_prefix_caching=False)
        found = await bad_checks(engine.base_url)
        assert {"cache.prefix_caching", "events.flow"} <= found


async def test_events_off() -> None:
    async with running({**SMALL_POOL, "publish_events": False}) as (engine,):
        assert "http.event_sources" in await bad_checks(engine.base_url)
