"""``kvatlas certify``: engines in good health, and engines with one fault each, named by its property."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.events import BlockRemoved, BlockStored, Event
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import Severity
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.tools.doctor.checks import run_checks
from kvatlas.router.tools.doctor.examine import ExamineSettings, examine
from kvatlas.router.tools.doctor.findings import NOTES, PROPERTIES, EngineVerdict, engine_verdict, names
from kvatlas.router.tools.doctor.prober import LoadPlan
from tests.support.paths import ROOT
from tests.support.whole_router import LOCAL, MODEL, running

DOWN = "http://127.0.0.1:9"
SMALL_POOL = {"groups": "full", "num_blocks": 200}
LOAD = LoadPlan(conversations=2, turns=2, burst_requests=2, quiet_s=0.05)


async def certify(
    url: str, *, model: ModelConfig = LOCAL, name: str = "", timeout_s: float = 2.0
) -> EngineVerdict:
    """The verdict on an engine, under a load smaller than the command's."""
    config = Config(engines=(EngineAddress(url),), models={ANY_MODEL: model})
    settings = ExamineSettings(
        seconds=0.0, timeout_s=timeout_s, probe_timeout_s=10.0, probe=True, model=name, load=LOAD
    )
    seen = await examine(config, settings, router_url=None, progress=lambda _text: None)
    (engine,) = seen.engines
    return engine_verdict(engine.engine_id, run_checks(seen))


def states(verdict: EngineVerdict) -> dict[str, str]:
    return {each.name: each.state for each in verdict.properties}


def bad_checks(verdict: EngineVerdict) -> set[str]:
    """The checks that warned; each with cause and remedy."""
    bad = [
        finding
        for each in verdict.properties
        for finding in each.findings
        if finding.severity in {Severity.WARNING, Severity.ERROR}
    ]
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
async def test_an_engine_in_good_health_is_certified(groups: str) -> None:
    async with running({"groups": groups, "num_blocks": 400}) as (engine,):
        facts = ModelConfig(tokenizer=LOCAL.tokenizer, mamba_cache_mode="align")
        verdict = await certify(engine.base_url, model=facts, name=MODEL)
        assert bad_checks(verdict) == set()
        assert set(states(verdict).values()) == {"pass"}, states(verdict)
        assert verdict.certified


@pytest.mark.long
async def test_a_pool_that_is_not_filled_shows_no_removal_and_is_certified() -> None:
    async with running({"groups": "full", "num_blocks": 1 << 16}) as (engine,):
        verdict = await certify(engine.base_url)
        assert states(verdict)["removals"] == "not_shown"
        assert verdict.certified


@pytest.mark.long
async def test_batches_that_are_lost_are_a_gap() -> None:
    batches = 0

    def lose(events: list[Event]) -> list[Event] | None:
        nonlocal batches
        batches += 1
        return None if batches % 4 == 0 else events

    async with publishing_otherwise(lose) as engine:
        verdict = await certify(engine.base_url, timeout_s=0.5)
        assert not verdict.certified
        assert states(verdict)["complete"] == "fail"
        assert "events.flow" in bad_checks(verdict)


@pytest.mark.long
async def test_stores_that_are_never_published_are_hits_not_predicted() -> None:
    stores = 0

    def lose(event: Event) -> Event | None:
        nonlocal stores
        stores += isinstance(event, BlockStored)
        return None if isinstance(event, BlockStored) and stores % 4 == 0 else event

    async with publishing_otherwise(each(lose)) as engine:
        verdict = await certify(engine.base_url, timeout_s=0.5)
        assert not verdict.certified
        assert {"load.hits", "events.removals"} <= bad_checks(verdict)
        assert (states(verdict)["hits"], states(verdict)["removals"]) == ("fail", "fail")
        assert states(verdict)["complete"] == "pass"


@pytest.mark.parametrize("all_of_them", [True, False], ids=["all hashes", "one hash in each event"])
async def test_wrong_hashes(all_of_them: bool) -> None:
    def twist(event: Event) -> Event:
        if not isinstance(event, BlockStored) or len(event.block_hashes) < 2:
            return event
        hashes = [block ^ 0x5A5A if isinstance(block, int) else block for block in event.block_hashes]
        kept = hashes if all_of_them else [*event.block_hashes[:-1], hashes[-1]]
        return msgspec.structs.replace(event, block_hashes=kept)

    async with publishing_otherwise(each(twist)) as engine:
        verdict = await certify(engine.base_url, timeout_s=0.5)
        assert not verdict.certified
        assert states(verdict)["hashes"] == "fail"
        assert "load.hashes" in bad_checks(verdict)


@pytest.mark.long
async def test_blocks_whose_removal_is_not_published_are_phantoms() -> None:
    def keep(event: Event) -> Event | None:
        return None if isinstance(event, BlockRemoved) else event

    async with publishing_otherwise(each(keep)) as engine:
        verdict = await certify(engine.base_url)
        assert not verdict.certified
        assert bad_checks(verdict) == {"load.phantoms", "cache.pool"}
        assert [name for name, state in states(verdict).items() if state == "fail"] == ["no_phantoms"]


@pytest.mark.long
async def test_removals_of_blocks_that_were_never_stored() -> None:
    def invent(events: list[Event]) -> list[Event]:
        return [*events, BlockRemoved([4711], "GPU", 0)]

    async with publishing_otherwise(invent) as engine:
        verdict = await certify(engine.base_url)
        assert bad_checks(verdict) == {"events.removals"}
        assert states(verdict)["removals"] == "fail"


@pytest.mark.long
@pytest.mark.parametrize("untrue", [lambda cached: 0, lambda cached: cached + 16], ids=["nothing", "more"])
async def test_untrue_cached_tokens(untrue: Callable[[int], int]) -> None:
    async with running(SMALL_POOL) as (engine,):
        count = engine.scheduler._count_hit

        def lie(request: Any, hit: int, cached: int) -> None:
            count(request, hit, untrue(cached))

        engine.scheduler._count_hit = lie  # type: ignore[method-assign]
        verdict = await certify(engine.base_url)
        assert not verdict.certified
        assert states(verdict)["usage"] == "fail"
        assert "load.usage" in bad_checks(verdict)
        assert "load.hits" not in bad_checks(verdict)
        assert states(verdict)["no_phantoms"] == "pass"


async def test_prefix_caching_off() -> None:
    async with publishing_otherwise(lambda _events: []) as engine:
        find, cache = engine.pool.start, engine.model._cache

        def start(*arguments: Any, **options: Any) -> int | None:
            engine.pool.reset()
            return find(*arguments, **options)

        engine.pool.start = start  # type: ignore[method-assign]
        engine.model._cache = msgspec.structs.replace(cache, enable_prefix_caching=False)
        verdict = await certify(engine.base_url, timeout_s=0.3)
        assert not verdict.certified
        assert states(verdict)["hits"] == "fail"
        assert {"cache.prefix_caching", "events.flow"} <= bad_checks(verdict)


async def test_events_off() -> None:
    async with running({**SMALL_POOL, "publish_events": False}) as (engine,):
        verdict = await certify(engine.base_url)
        assert not verdict.certified
        assert states(verdict)["complete"] == "fail"
        assert states(verdict)["answers"] == "pass"
        assert "http.event_sources" in bad_checks(verdict)


async def test_an_engine_that_is_not_there() -> None:
    verdict = await certify(DOWN)
    assert not verdict.certified
    assert states(verdict)["answers"] == "fail"
    assert "http.health" in bad_checks(verdict)


@pytest.mark.long
async def test_another_model_than_expected() -> None:
    async with running(SMALL_POOL) as (engine,):
        verdict = await certify(engine.base_url, name="llama")
        assert not verdict.certified
        assert bad_checks(verdict) == {"http.models"}
        assert states(verdict)["answers"] == "fail"


@pytest.mark.long
async def test_the_tokenizer_of_another_model(tmp_path: Any) -> None:
    vocabulary = json.loads((DEMO_TOKENIZER_DIR / "tokenizer.json").read_text())
    names = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].__getitem__)
    one, other = names[-1], names[-2]
    ids = vocabulary["model"]["vocab"]
    ids[one], ids[other] = ids[other], ids[one]
    vocabulary["model"]["merges"] = vocabulary["model"]["merges"][:200]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = DEMO_TOKENIZER_DIR / "tokenizer_config.json"
    (tmp_path / config.name).write_text(config.read_text())
    for template in DEMO_TOKENIZER_DIR.glob("*.jinja"):
        (tmp_path / template.name).write_text(template.read_text())

    async with running(SMALL_POOL) as (engine,):
        verdict = await certify(engine.base_url, model=ModelConfig(tokenizer=str(tmp_path)))
        assert not verdict.certified
        assert states(verdict)["tokens"] == "fail"
        assert {"tokens.parity", "load.tokens"} <= bad_checks(verdict)


def test_every_check_of_an_engine_is_part_of_a_verdict() -> None:
    used = [check for each in PROPERTIES for check in (*each.shown_by, *each.failed_by)]
    assert sorted([*used, *NOTES]) == sorted(names(engines_only=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--engine"),
        (["--engine", "nonsense"], "expected http://HOST:PORT"),
        (["--engine", DOWN, "--seconds", "0"], "--seconds"),
        (["--engine", DOWN, "--seconds", "-1"], "--seconds: -1.0"),
        (["--engine", DOWN, "--timeout", "0"], "--timeout: 0.0"),
        (["--engine", DOWN, "--tokenizer", "/nowhere"], "models.*.tokenizer: /nowhere"),
    ],
)
def test_bad_arguments_end_with_status_2(
    arguments: list[str], words: str, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = kvatlas("certify", *arguments)
    assert ended.returncode == 2, ended
    assert words in ended.stderr + ended.stdout


def test_an_engine_that_is_down_ends_with_status_1(
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    ended = kvatlas("certify", "--engine", DOWN)
    assert ended.returncode == 1, ended
    for words in (
        "not certified: ",
        "fail",
        "http.health",
        "cannot connect",
        "cause: ",
        "remedy: ",
        "not shown",
    ):
        assert words in ended.stdout


@pytest.mark.process
@pytest.mark.long
async def test_the_command_certifies_an_engine() -> None:
    async with running(SMALL_POOL) as (engine,):
        words = ["certify", "--engine", engine.base_url, "--tokenizer", str(DEMO_TOKENIZER_DIR), "--json"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvatlas", *words, cwd=ROOT, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate()
        report = json.loads(out)
        assert process.returncode == 0, report
        assert report["certified"]
        (only,) = report["engines"]
        assert (only["engine"], only["certified"]) == (engine.base_url, True)
        assert {each["name"] for each in only["properties"]} == {each.name for each in PROPERTIES}
