"""One list of what is wrong: its rules, and that log, ``/ready``, page, ``top`` and doctor show the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import astuple
from structlog.testing import capture_logs

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.api.explanation import ended_by
from kvatlas.router.api.findings import _usage_record, of_engine, of_router
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engines import EngineAddress, SourceStats
from kvatlas.router.http.client import HttpClient
from kvatlas.router.index.query_plan import ClassHit, EngineHit
from kvatlas.router.observe.findings import LOGGED_AFTER_S, Finding, FindingLog, Severity, counts, joined
from kvatlas.router.observe.receipts import Receipt
from kvatlas.router.observe.usage import UsageLog, UsageSettings
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.first_token import ACCURATE_OF_MIN
from kvatlas.router.placement.seconds import SpeedChange
from kvatlas.router.prompts.tokenizer_finder import ModelOrigin
from kvatlas.router.tools.doctor.http import Http
from kvatlas.router.tools.top import take_snapshot
from tests.router.tools.doctor.rig import examined
from tests.support.waiting import until
from tests.support.whole_router import configure, routing, running

NAME = "http://e:1"


def engine() -> Engine:
    made = Engine(EngineAddress(NAME, events="tcp://e:2"), Accounts(lambda: 0.0))
    made.up, made.problem = True, ""
    made.feed = FeedStats(state=FeedState.READY)
    return made


def down(one: Engine) -> None:
    one.up, one.problem = False, "refused"


def held(one: Engine) -> None:
    one.held = "drained by ann"


def asleep(one: Engine) -> None:
    one.asleep = True


def feed(state: FeedState, reason: str = "", **more: Any) -> Callable[[Engine], None]:
    def change(one: Engine) -> None:
        one.feed = FeedStats(state=state, reason=reason, **more)

    return change


def refused(one: Engine) -> None:
    for _ in range(100):
        one.breaker.record(False, 0.0)


def receipt(**fields: Any) -> Receipt:
    base: dict[str, Any] = {"request_id": "r9", "engine_id": NAME, "model": "m", "mode": "native"}
    base |= {"feed": "ready", "prompt_tokens": 700, "predicted_tokens": 512, "actual_tokens": 512}
    return Receipt(**(base | {"reported_prompt_tokens": 700} | fields))


def receipts(number: int, **fields: Any) -> Callable[[Engine], None]:
    def change(one: Engine) -> None:
        for _ in range(number):
            one.receipts.add(astuple(receipt(**fields)))

    return change


def late_tokens(one: Engine) -> None:
    for _ in range(ACCURATE_OF_MIN):
        one.first_tokens.add("m", 1.0, 3.0)


def slower(one: Engine) -> None:
    one.rates.model.change = SpeedChange(0.0, 0.0, 1.54)


def faster(one: Engine) -> None:
    one.rates.model.change = SpeedChange(0.0, 0.0, 0.25)


CASES: list[tuple[Callable[[Engine], None], str, Severity, str]] = [
    (down, "engine.down", Severity.ERROR, "down: refused"),
    (held, "engine.on_hold", Severity.INFO, "gets no new requests: drained by ann"),
    (asleep, "engine.asleep", Severity.INFO, "until it wakes"),
    (
        feed(FeedState.COLD),
        "feed.state",
        Severity.WARNING,
        "the router is not connected to its events: the feed is cold",
    ),
    (feed(FeedState.STALE), "feed.state", Severity.WARNING, "feed is stale"),
    (feed(FeedState.DEGRADED, "history_rolled"), "feed.state", Severity.WARNING, "degraded (history_rolled)"),
    (feed(FeedState.READY, phantom_alarms=2), "feed.phantoms", Severity.WARNING, "2 phantom alarm(s)"),
    (receipts(30, actual_tokens=0, mode="learned"), "predictions.drift", Severity.WARNING, "drift"),
    (
        receipts(30, actual_tokens=0),
        "predictions.contradicted",
        Severity.WARNING,
        "request r9: 0 reported of 700, 512 by its events",
    ),
    (
        late_tokens,
        "predictions.first_token",
        Severity.WARNING,
        "20 of 20 times to first token differ",
    ),
    (slower, "engine.speed", Severity.INFO, "about 1.5 times as late as before"),
    (faster, "engine.speed", Severity.INFO, "about 4.0 times as soon as before"),
    (receipts(3, reported_prompt_tokens=701), "tokens.length", Severity.ERROR, "3 prompt(s)"),
]


def test_a_change_of_speed_is_shown_for_ten_minutes() -> None:
    one = engine()
    one.rates.model.change = SpeedChange(1000.0, 0.0, 2.0)
    assert [found.check for found in of_engine(one, 1599.0)] == ["engine.speed"]
    assert list(of_engine(one, 1601.0)) == []


@pytest.mark.parametrize(
    ("classes", "more", "told"),
    [
        ((), {}, None),
        ((96, 64), {}, ("window", 64)),
        ((64, 96), {}, ("full", 64)),
        ((96, 80), {}, ("no common boundary", 64)),
        ((32, 16), {"hit_tokens": 0, "replay_tokens": 16}, ("bounded replay", 16)),
        ((32, 1), {"hit_tokens": 0, "replay_tokens": 16}, ("bounded replay", 1)),
        ((32, 0), {"hit_tokens": 0, "replay_tokens": 16}, ("window", 0)),
        ((32, 16), {"hit_tokens": 0, "replay_tokens": 15}, ("no common boundary", 0)),
        ((96, 64), {"alignment": 35}, ("window", 64)),
        ((96, 64), {"alignment": 36}, ("none: the whole prompt but its last tokens", 64)),
    ],
)
def test_the_end_of_a_match_is_named(
    classes: tuple[int, ...], more: dict[str, int], told: tuple[str, int] | None
) -> None:
    by_class = tuple(ClassHit(*one, {}) for one in zip(("full", "window"), classes, strict=False))
    hit = EngineHit("native", by_class=by_class, **{"hit_tokens": 64, "alignment": 16, **more})  # type: ignore[arg-type]
    named = None if told is None else {"spec_class": told[0], "at_token": told[1]}
    assert ended_by(hit, 100) == named


def test_an_engine_without_problems_has_no_findings() -> None:
    one = engine()
    receipts(30)(one)
    assert list(of_engine(one, 0.0)) == []


@pytest.mark.parametrize(("change", "check", "severity", "words"), CASES, ids=[case[1] for case in CASES])
def test_the_problems_of_an_engine(
    change: Callable[[Engine], None], check: str, severity: Severity, words: str
) -> None:
    one = engine()
    change(one)
    (found,) = [finding for finding in of_engine(one, 0.0) if finding.check == check]
    assert (found.severity, found.subject) == (severity, NAME)
    assert words in found.seen
    assert found.cause
    assert found.remedy


def test_an_open_breaker_is_a_finding() -> None:
    one = engine()
    refused(one)
    assert [finding.check for finding in of_engine(one, 0.0)] == ["engine.breaker"]


async def test_models_whose_prompts_engines_tokenize_are_findings() -> None:
    origins = {
        "a": ModelOrigin("here", "org/a@1"),
        "b": ModelOrigin("engine", reason="gated", problem="org/b is gated", remedy="set HF_TOKEN"),
        "c": ModelOrigin("here", reason="differs", problem="other tokens", remedy="give another"),
    }
    async with routing(configure(), wait=False) as rig:
        sources = rig.router.sources
        sources.tokenizer_origins = lambda: origins
        found = list(of_router(sources))
    assert [(one.check, one.subject, one.cause, one.remedy) for one in found] == [
        ("tokens.tokenizer", "b", "org/b is gated", "set HF_TOKEN"),
        ("tokens.tokenizer", "c", "other tokens", "give another"),
    ]
    assert "its prompts are tokenized by engines (gated)" in found[0].seen
    assert "the configured tokenizer is used" in found[1].seen


@pytest.mark.parametrize(
    ("synced", "failing", "engines", "checks"),
    [
        (False, False, 0, []),
        (True, False, 0, ["engine.none"]),
        (True, False, 3, []),
        (True, True, 0, ["source.dns"]),
    ],
)
async def test_sources_that_fail_or_find_nothing(
    synced: bool, failing: bool, engines: int, checks: list[str]
) -> None:
    async with routing(configure(), wait=False) as rig:
        sources = rig.router.sources
        dns = SourceStats(synced, engines, failing=failing)
        stats = {"static": SourceStats(synced=True), "dns": dns}
        sources.origins = cast("Any", SimpleNamespace(stats=stats))
        found = list(of_router(sources))
        assert [one.check for one in found] == checks
        assert all("fleet.dns.names" in one.remedy for one in found)


async def test_settings_without_effect_are_a_problem() -> None:
    queue = QueueSettings(engine_requests_max=8)
    async with running({}) as engines, routing(configure(*engines, queue=queue)) as rig:
        _, problems = await rig.ask("GET", "/kvatlas/problems")
        (found,) = problems["router"]
        assert (found["check"], found["severity"]) == ("config.unused", "warning")
        assert found["seen"] == "queue.engine_requests_max has no effect without queue.saturation_s"


def finding(subject: str = NAME, severity: Severity = Severity.WARNING, **more: Any) -> Finding:
    return Finding("feed.state", severity, subject, "seen", "cause", "remedy", **more)


def test_a_finding_keeps_its_beginning_and_is_logged_once_it_lasts() -> None:
    log = FindingLog()
    with capture_logs() as lines:
        assert [one.since_s for one in log.update([finding()], 100.0)] == [100.0]
        assert lines == []
        for later in (LOGGED_AFTER_S, LOGGED_AFTER_S + 1):
            assert [one.since_s for one in log.update([finding()], 100.0 + later)] == [100.0]
        assert log.update([], 120.0) == []
        assert [one.since_s for one in log.update([finding()], 130.0)] == [130.0]
    assert [(line["event"], line["subject"]) for line in lines] == [
        ("problem", NAME),
        ("problem ended", NAME),
    ]
    assert (lines[0]["seen"], lines[0]["cause"], lines[0]["remedy"]) == ("seen", "cause", "remedy")


def test_a_thousand_findings_of_a_kind_are_a_few_lines() -> None:
    log, many = FindingLog(), [finding(f"http://e:{number}") for number in range(1000)]
    with capture_logs() as lines:
        log.update(many, 0.0)
        log.update(many, LOGGED_AFTER_S)
        log.update([], 2 * LOGGED_AFTER_S)
    assert [line.get("subjects_not_shown") for line in lines] == [*[None] * 8, 992, 1000]


def test_workers_lists_are_joined_by_subject_and_id() -> None:
    one = finding(since_s=7.0)
    other = finding(severity=Severity.ERROR, since_s=9.0)
    found = joined([[one], [other, finding("m", since_s=3.0)]])
    assert [(f.subject, f.severity, f.since_s) for f in found] == [
        (NAME, Severity.ERROR, 7.0),
        ("m", Severity.WARNING, 3.0),
    ]
    assert counts(found) == {"error": 1, "warning": 1}


async def test_every_view_shows_the_same_problems() -> None:
    gone = [EngineAddress(f"http://127.0.0.1:{port}") for port in (9, 11)]
    async with (
        running({}) as (live,),
        routing(configure(live, *gone), wait=False) as rig,
        HttpClient() as client,
    ):
        await until(lambda: rig.router.readiness().ready, "one engine is ready")
        await until(lambda: all("connect" in one.problem for one in list(rig.router.fleet)[1:]), "polled")
        _, by_subject = await rig.ask("GET", "/kvatlas/problems")
        listed = [one for found in by_subject.values() for one in found if one["severity"] != "info"]
        ids = sorted((one["subject"], one["check"]) for one in listed)
        assert (gone[0].base_url, "engine.down") in ids
        _, ready = await rig.ask("GET", "/ready")
        assert sorted((one["subject"], one["check"]) for one in ready["problems"]) == ids
        assert ready["problem_counts"] == {"error": 2}
        top = await take_snapshot(Http(client, 3.0), rig.ops_url)
        assert sorted((one.subject, one.seen) for one in top.problems) == sorted(
            (one["subject"], one["seen"]) for one in listed
        )
        doctor = await examined(live.base_url, *gone, router=rig.ops_url, timeout_s=0.5)
        told = {(one.subject, one.check, one.since_s) for one in doctor}
        assert {(one["subject"], one["check"], one["since_s"]) for one in listed} <= told


@pytest.mark.parametrize(("missed", "count", "told"), [(6, 20, True), (5, 20, False), (19, 19, False)])
def test_a_store_that_delivers_less_than_it_reported_is_a_problem(
    missed: int, count: int, told: bool
) -> None:
    one = engine()
    for number in range(count):
        came = 512 if number >= missed else 256
        one.receipts.add(astuple(receipt(storage_tokens=256, actual_tokens=came)))
    found = [finding for finding in of_engine(one, 0.0) if finding.check == "predictions.store"]
    assert [finding.seen for finding in found] == (
        [f"{missed} of the latest {count} hits from a store were not delivered"] if told else []
    )


@pytest.mark.parametrize(("wrong", "told"), [(6, True), (4, False)])
def test_a_usage_record_that_contradicts_or_cannot_be_written_is_a_problem(
    tmp_path: Path, wrong: int, told: bool
) -> None:
    log = UsageLog(UsageSettings(path=str(tmp_path / "usage.jsonl")))
    assert list(_usage_record(log)) == []
    for number in range(20):
        log._compare(number >= wrong)
    assert [one.check for one in _usage_record(log)] == ["record.unverified"] * told
    assert log.stats.unverified == wrong
    log._failing = True
    first = next(_usage_record(log))
    assert (first.check, first.severity) == ("record.unwritten", Severity.ERROR)


def test_an_error_from_the_api_does_not_mean_down() -> None:
    one = engine()
    one.up, one.problem = False, "404 from /v1/models"
    (found,) = of_engine(one, 0.0)
    assert found.cause == "it answers with an error, or something else listens there"
