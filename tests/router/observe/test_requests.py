"""Outcomes of requests: counts, times and log lines, with a settable clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.events import BlockHash
from kvatlas.router.api.metrics_page import _TIMES
from kvatlas.router.observe import requests as requests_module
from kvatlas.router.observe.books import ENTRIES_MAX, Books
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.requests import (
    ENDED_KEPT,
    MODELS_MAX,
    OTHER,
    REQUEST_ID_CHARS_MAX,
    SESSIONS_MAX,
    TURNS_MAX,
    RequestRecord,
    RequestTracker,
    SessionLedger,
)
from kvatlas.router.openai.request import Session, Usage


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answered(tracker: RequestTracker, clock: Clock, model: str = "m", engine: str = "e") -> RequestRecord:
    """A stream of three pieces: 20 ms in the router, 0.5 s to the first, 0.1 s between."""
    record = tracker.begin("POST", "/v1/chat/completions")
    clock.now += 0.002
    record.read_s, record.bytes_in = clock(), 1000
    record.model = model
    clock.now += 0.02
    record.placed(engine, completion=True)
    clock.now += 0.478
    for _ in range(3):
        record.piece()
        clock.now += 0.1
    record.status, record.usage, record.bytes_out = 200, Usage(10, 3, 8), 300
    tracker.end(record)
    return record


@given(st.lists(st.floats(0, 10), max_size=50))
def test_a_histogram_counts_every_value_once_at_its_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 5.0))
    for value in values:
        histogram.observe(value)
    expected = [(str(b), sum(v <= b for v in values)) for b in (0.5, 1.0, 5.0)]
    assert histogram.buckets() == [*expected, ("+Inf", len(values))]
    assert abs(histogram.total - sum(values)) < 1e-6


def test_times_of_a_stream() -> None:
    clock = Clock()
    tracker = RequestTracker(clock)
    answered(tracker, clock)
    times = tracker.models["m"]
    found: dict[str, tuple[int, float]] = {
        name: (sum(getattr(times, name).counts), round(getattr(times, name).total, 6))
        for name in ("overhead", "first_token", "between", "whole")
    }
    assert found == {"overhead": (1, 0.02), "first_token": (1, 0.5), "between": (2, 0.2), "whole": (1, 0.8)}
    assert tracker.counts == {("m", "e", "200"): 1}


def test_failed_answers_have_no_duration_and_other_paths_no_times() -> None:
    clock = Clock()
    tracker = RequestTracker(clock)
    for status, gone, broken, label in (
        (500, False, False, "500"),
        (200, True, False, "client_gone"),
        (200, False, True, "broken_stream"),
        (0, True, False, "client_gone"),
    ):
        record = tracker.begin("POST", "/v1/chat/completions")
        record.model = "m"
        record.placed("e", completion=True)
        record.status, record.gone, record.broken = status, gone, broken
        tracker.end(record)
        assert ("m", "e", label) in tracker.counts
    tokenize = tracker.begin("POST", "/tokenize")
    tokenize.placed("e", completion=False)
    tokenize.piece()
    tokenize.status = 200
    tracker.end(tokenize)
    assert sum(tracker.models["m"].whole.counts) == 0
    assert sum(tracker.models[""].whole.counts) == 0


def test_series_are_bounded_by_the_fleet_whatever_clients_send() -> None:
    clock, fleet = Clock(), {"e"}
    tracker = RequestTracker(clock, here=fleet.__contains__)
    for number in range(MODELS_MAX + 50):
        answered(tracker, clock, model=f"adapter-{number}")
    assert len(tracker.models) == MODELS_MAX + 1
    assert sum(tracker.models[OTHER].whole.counts) == 50
    for number in range(50):  # no engine serves these
        record = tracker.begin("POST", "/v1/chat/completions")
        record.model = f"nonsense-{number}"
        record.status = 404
        tracker.end(record)
    assert tracker.counts["", "", "404"] == 50
    fleet.clear()
    tracker.forget("e")
    answered(tracker, clock)  # was under way when its engine left
    assert not any(engine for _, engine, _ in tracker.counts)


def test_a_line_for_each_request_if_asked_for_and_none_else() -> None:
    clock = Clock()
    with structlog.testing.capture_logs() as logs:
        answered(RequestTracker(clock), clock)
        tracker = RequestTracker(clock, log=True)
        answered(tracker, clock, model="m" * 5000)
    (line,) = logs
    shown: dict[str, Any] = {
        "event": "request",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/chat/completions",
        "engine": "e",
        "status": 200,
        "outcome": "200",
        "attempts": 1,
        "request_bytes": 1000,
        "answer_bytes": 300,
        "first_token_s": 0.5,
        "duration_s": 0.8,
        "prompt_tokens": 10,
        "cached_tokens": 8,
        "completion_tokens": 3,
        "request_id": "",
    }
    assert len(line.pop("model")) == 200
    assert line == shown


def test_frequent_messages_are_logged_seldom_with_the_number_left_out() -> None:
    clock = Clock()
    tracker = RequestTracker(clock)
    record = tracker.begin("POST", "/v1/completions")
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            tracker.warn("request retried", record, "e", engine="e")
        tracker.warn("request retried", record, "f", engine="f")
        clock.now += 5.0
        tracker.warn("request retried", record, "e", engine="e")
    assert [(line["engine"], line.get("unsaid", 0)) for line in logs] == [("e", 0), ("f", 0), ("e", 99)]


def test_the_latest_are_kept_without_prompts_and_with_texts_cut() -> None:
    clock = Clock()
    tracker = RequestTracker(clock)
    for number in range(ENDED_KEPT + 5):
        record = tracker.begin("POST", "/" + "p" * 10_000)
        record.model, record.request_id = "m" * 10_000, f"{number} " + "i" * 10_000
        record.why = lambda prompt="a prompt": {"prompt": prompt}  # type: ignore[misc]
        clock.now += 1
        tracker.end(record)
    assert len(tracker.ended) == ENDED_KEPT
    oldest, latest = tracker.ended[0], tracker.ended[-1]
    assert oldest.request_id.startswith("5 ")
    assert latest.ended_s == clock.now
    assert latest.why() == {}
    assert max(len(latest.path), len(latest.model), len(latest.request_id)) <= REQUEST_ID_CHARS_MAX


def turn(tracker: RequestTracker, session: Session | None, tenant: str = "ada", engine: str = "e") -> None:
    record = tracker.begin("POST", "/v1/chat/completions")
    record.session, record.tenant, record.engine = session, tenant, engine
    record.usage = Usage(10, 3, 8)
    tracker.end(record)


def test_a_sessions_turns_are_kept_by_tenant_and_bounded() -> None:
    tracker = RequestTracker(Clock())
    ledger = tracker.sessions
    for _ in range(TURNS_MAX + 4):
        turn(tracker, Session("s", "helper"))
    turn(tracker, Session("s"), tenant="eve")
    turn(tracker, Session("s"), tenant="eve", engine="")  # no engine was asked
    turn(tracker, None)
    assert [(key, turns.count) for key, turns in ledger.sessions.items()] == [
        (("ada", "s"), TURNS_MAX + 4),
        (("eve", "s"), 1),
    ]
    first = ledger.sessions["ada", "s"]
    assert (len(first.latest), list(first.names)) == (TURNS_MAX, ["s", "helper"])
    assert (first.prompt_tokens, first.cached_tokens) == (10 * first.count, 8 * first.count)
    turn(tracker, Session("s"))  # used last, so it stays longest
    for number in range(SESSIONS_MAX - 1):
        turn(tracker, Session(f"another {number}"))
    assert (len(ledger.sessions), ledger.stats.dropped) == (SESSIONS_MAX, 1)
    assert ("ada", "s") in ledger.sessions
    assert ("eve", "s") not in ledger.sessions


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("efg"), st.sampled_from("stuv"), st.integers(0, 7)),
            st.sampled_from("efg"),
        ),
        max_size=60,
    )
)
def test_blocks_of_sessions_are_the_latest_within_the_bounds(steps: list[tuple[str, str, int] | str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in (("BLOCKS_MAX", 24), ("SESSION_BLOCKS_MAX", 8), ("SESSIONS_MAX", 3)):
            patch.setattr(requests_module, name, bound)
        ledger, added, forgotten = SessionLedger(), 0, 0
        for step in steps:
            kept = {name: {e: list(b) for e, b in ledger.blocks(name).items()} for name in "stuv"}
            if isinstance(step, str):
                ledger.forget(step)
                forgotten += sum(len(by_engine.get(step, ())) for by_engine in kept.values())
                continue
            engine, name, count = step
            hashes = [BlockHash(added + number) for number in range(count)]
            added += count
            ledger.stored(engine, name, hashes)
            assert list(ledger.blocks(name)[engine]) == [*kept[name].get(engine, []), *hashes][-8:]
        left = [len(blocks) for name in "stuv" for blocks in ledger.blocks(name).values()]
        assert sum(bool(ledger.blocks(name)) for name in "stuv") <= 3
        assert sum(left) <= 24
        assert added == sum(left) + forgotten + ledger.stats.blocks_dropped


async def test_entries_are_settled_in_order_after_a_while() -> None:
    books, seen, done = Books(), list[int](), asyncio.Event()
    for number in range(3):
        books.add(seen.append, number)
    books.add(done.set)
    assert (seen, len(books)) == ([], 4)
    await done.wait()
    assert (seen, len(books)) == ([0, 1, 2], 0)
    # Later ones too.
    done.clear()
    books.add(done.set)
    await done.wait()


async def test_no_more_updates_wait_than_the_bound() -> None:
    books, seen = Books(), list[int]()
    for number in range(ENTRIES_MAX + 1):
        books.add(seen.append, number)
    assert (seen, len(books), books.stats.full) == (list(range(ENTRIES_MAX)), 1, 1)


async def test_an_update_may_read_what_others_change_and_a_failed_one_stops_no_other() -> None:
    books, seen = Books(), list[str]()

    def read() -> None:
        books.settle()
        seen.append("read")

    books.add(read)
    books.add(seen.append, "next")
    books.settle()
    assert seen == ["read", "next"]
    books.add([].pop)
    books.add(seen.append, "last")
    books.settle()
    assert seen[2:] == ["last"]


def test_without_an_event_loop_updates_are_applied_immediately() -> None:
    books, seen = Books(), list[int]()
    books.add(seen.append, 1)
    assert seen == [1]


async def test_counts_are_read_with_what_was_deferred() -> None:
    clock, books = Clock(), Books()
    tracker = RequestTracker(clock, books=books)
    assert tracker.books is books  # also while they are empty
    answered(tracker, clock)
    assert len(tracker.books) == 1
    assert list(tracker.counts.values()) == [1]
    assert len(tracker.books) == 0
    ended = answered(tracker, clock)
    assert tracker.ended[-1] is ended
    answered(tracker, clock)
    assert tracker.models["m"].whole.total > 0
    assert [len(tracker.books), len(tracker.ended)] == [0, 3]


async def test_after_an_update_that_ends_the_program_the_next_reader_applies_the_rest() -> None:
    """``KeyboardInterrupt`` in one of them must not leave all later ones waiting for ever."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    books, seen = Books(), list[int]()
    books.add(interrupt)
    books.add(seen.append, 1)
    with pytest.raises(KeyboardInterrupt):
        books.settle()
    books.add(seen.append, 2)
    books.settle()
    assert (seen, len(books)) == ([1, 2], 0)


@pytest.mark.parametrize(
    ("reported", "events", "generated", "how"),
    [
        (40, 40, 20, "counted"),
        (41, 40, 20, "counted"),  # an end without an event
        (120, 40, 60, "estimated"),  # it speculates
        (20, 40, 10, "estimated"),  # names of calls
        (10**12, 1, 320, "estimated"),  # no report is believed beyond a bound
        (None, 40, 20, "counted"),
    ],
)
def test_tokens_of_a_cut_stream_follow_the_streams_that_were_reported(
    reported: int | None, events: int, generated: int, how: str
) -> None:
    tracker = RequestTracker(Clock())

    def streamed(events: int, usage: Usage | None) -> RequestRecord:
        record = tracker.begin("POST", "/v1/chat/completions")
        record.placed("e", completion=True)
        record.piece()
        record.status, record.streamed_tokens, record.usage = 200, events, usage
        return record

    for _ in range(3):
        whole = streamed(events, None if reported is None else Usage(10, reported, 0))
        tracker.end(whole)
    cut = streamed(20, None)
    assert (cut.generated_tokens, cut.generated_is) == (generated, how)
    if reported is not None:
        assert (whole.generated_tokens, whole.generated_is) == (reported, "measured")
    tracker.end(cut)
    assert (streamed(0, None).generated_tokens, streamed(0, None).generated_is) == (None, None)
    tracker.forget("e")
    assert tracker.tokens_per_event("e") == 1.0


def test_names_of_a_span_are_those_of_the_conventions_and_its_stream_has_its_times() -> None:
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for value in vars(names).values() if isinstance(value, str)}
    clock = Clock()
    record = answered(RequestTracker(clock), clock)
    record.streams, record.session = True, Session("s", "a")
    told = {name: value for name, value in record.facts().items() if name.startswith("gen_ai.")}
    assert told.keys() <= known
    assert None not in told.values()
    assert told["gen_ai.operation.name"] in {one.value for one in names.GenAiOperationNameValues}
    assert told["gen_ai.response.time_to_first_chunk"] == 0.5
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    ours = {f"{name.removesuffix('_seconds')}" for _, name, _ in _TIMES if name.startswith("gen_ai")}
    assert ours <= {value.replace(".", "_") for value in vars(metrics).values() if isinstance(value, str)}
