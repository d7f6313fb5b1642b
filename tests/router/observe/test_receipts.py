"""Receipts: outcomes, sums, histograms and drift."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from kvatlas.router.observe import receipt_log
from kvatlas.router.observe.cache_funnel import FUNNELS_MAX, OTHER, CacheFunnel
from kvatlas.router.observe.cache_worth import WORTH_HALF_LIFE_S, CacheWorth
from kvatlas.router.observe.receipt_log import RECEIPTS_KEPT, ReceiptLog
from kvatlas.router.observe.receipts import (
    DRIFT_MIN,
    DRIFT_SHARE,
    ERROR_BUCKETS,
    WINDOW,
    Contradiction,
    EngineReceipts,
    Outcome,
    Receipt,
)

ENGINE = "http://h:1"


def receipt(predicted: int | None, actual: int | None, engine_id: str = ENGINE) -> Receipt:
    return Receipt(
        request_id="r",
        engine_id=engine_id,
        model="m",
        mode="native",
        feed="ready",
        prompt_tokens=1000,
        predicted_tokens=predicted,
        actual_tokens=actual,
    )


class Book:
    """Receipts as a router keeps them: the latest of all engines, and the sums of each."""

    def __init__(self) -> None:
        self.log = ReceiptLog()
        self.engines: dict[str, EngineReceipts] = {}

    def add(self, one: Receipt) -> None:
        kept = astuple(one)
        self.log.add(kept)
        self.engines.setdefault(one.engine_id, EngineReceipts()).add(kept)


@pytest.mark.parametrize(
    ("predicted", "actual", "outcome"),
    [
        (0, 0, "exact"),
        (64, 64, "exact"),
        (64, 0, "over"),
        (0, 64, "under"),
        (None, 64, "unpredicted"),
        (None, None, "unpredicted"),
        (0, None, "unreported"),
    ],
)
def test_outcomes(predicted: int | None, actual: int | None, outcome: Outcome) -> None:
    book = Book()
    book.add(receipt(predicted, actual))
    assert book.log.latest[-1].outcome == outcome
    assert book.engines[ENGINE].outcomes == {outcome: 1}


tokens = st.none() | st.integers(0, 100_000)


@given(st.lists(st.tuples(tokens, tokens, st.sampled_from(["a", "b"])), max_size=60))
def test_sums_and_histogram_are_those_of_the_receipts(
    pairs: list[tuple[int | None, int | None, str]],
) -> None:
    book = Book()
    for predicted, actual, engine_id in pairs:
        book.add(receipt(predicted, actual, engine_id))
    for engine_id, sums in book.engines.items():
        compared = [(p, a) for p, a, e in pairs if e == engine_id and p is not None and a is not None]
        assert sum(sums.outcomes.values()) == sum(e == engine_id for *_, e in pairs)
        assert sums.predicted_tokens == sum(p for p, _ in compared)
        assert sums.actual_tokens == sum(a for _, a in compared)
        assert sums.abs_error_tokens == sum(abs(p - a) for p, a in compared)
        bounds = [-float("inf"), *ERROR_BUCKETS, float("inf")]
        counts = [sum(low < p - a <= high for p, a in compared) for low, high in itertools.pairwise(bounds)]
        assert sums.errors.counts == counts
        assert len(sums.window) == min(len(compared), WINDOW)


def test_the_bucket_of_zero_holds_the_exact_ones_alone() -> None:
    book = Book()
    for error in (-1, 0, 1):
        book.add(receipt(100 + error, 100))
    at_zero = ERROR_BUCKETS.index(0)
    assert book.engines[ENGINE].errors.counts[at_zero - 1 : at_zero + 2] == [1, 1, 1]


def test_reports_that_contradict_the_engines_events_are_shown_with_evidence() -> None:
    sums = EngineReceipts()
    for number in range(DRIFT_MIN):
        one = receipt(512, 0 if number % 3 == 0 else 512)
        sums.add(astuple(replace(one, request_id=f"r{number}")))
    assert sums.contradictions == {"fewer": 7}
    assert [one.request_id for one in sums.contradicting] == ["r9", "r12", "r15", "r18"]
    assert sums.contradicting[0] == Contradiction(
        request_id="r9", kind="fewer", predicted_tokens=512, reported_tokens=0, prompt_tokens=1000
    )
    for _ in range(WINDOW):
        sums.add(astuple(receipt(512, 512)))
    assert sums.contradicting == []


def test_more_cached_tokens_than_the_prompt_has_are_evidence_immediately() -> None:
    sums = EngineReceipts()
    sums.add(astuple(replace(receipt(512, 900), reported_prompt_tokens=800, mode="learned")))
    assert [one.kind for one in sums.contradicting] == ["impossible"]


@pytest.mark.parametrize(
    "doubt",
    [
        {"mode": "assumed"},
        {"mode": "shadow"},
        {"feed": "replaying"},
        {"storage_tokens": 16},
        {"reported_prompt_tokens": 999},
    ],
)
def test_possible_faults_of_the_router_are_no_evidence(doubt: dict[str, Any]) -> None:
    sums = EngineReceipts()
    for _ in range(WINDOW):
        sums.add(astuple(replace(receipt(512, 0), **doubt)))
    assert (sums.contradicting, sums.contradictions) == ([], {})


def test_an_engine_drifts_when_too_many_of_its_latest_predictions_are_wrong() -> None:
    book = Book()
    for _ in range(DRIFT_MIN - 1):
        book.add(receipt(1, 0))
    assert not book.engines[ENGINE].drifting  # too few to tell
    book.add(receipt(1, 0))
    assert book.engines[ENGINE].drifting
    for _ in range(WINDOW - DRIFT_MIN):
        book.add(receipt(1, 1))
    assert not book.engines[ENGINE].drifting  # one in four is allowed
    book.add(receipt(None, 0))
    book.add(receipt(5, None))
    assert len(book.engines[ENGINE].window) == WINDOW  # what was not compared is no evidence
    for _ in range(int(WINDOW * DRIFT_SHARE) + 1):
        book.add(receipt(0, 1))
    assert book.engines[ENGINE].drifting


def test_memory_is_bounded() -> None:
    book = Book()
    for n in range(RECEIPTS_KEPT + WINDOW):
        book.add(receipt(n, n))
    assert len(book.log.latest) == RECEIPTS_KEPT
    assert book.log.latest[-1].predicted_tokens == RECEIPTS_KEPT + WINDOW - 1


def test_receipts_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*fields: Any) -> Receipt:
        made.append(fields)
        return Receipt(*fields)

    monkeypatch.setattr(receipt_log, "Receipt", make)
    book, one = Book(), receipt(64, 48)
    book.add(one)
    assert not made
    assert book.log.latest == [one]
    assert made == [astuple(one)]


def test_a_listener_gets_every_receipt() -> None:
    book, told = Book(), []
    book.log.listener = told.append
    for n in range(3):
        book.add(receipt(n, None))
    assert [r.predicted_tokens for r in told] == [0, 1, 2]


def loaded(predicted: int, actual: int, *, cpu: int = 0, storage: int = 0) -> Receipt:
    return replace(receipt(predicted, actual), cpu_tokens=cpu, storage_tokens=storage)


def test_predictions_are_reported_by_medium() -> None:
    book = Book()
    book.add(loaded(160, 160))
    book.add(loaded(160, 96, cpu=64))
    book.add(loaded(320, 320, cpu=64, storage=128))
    book.add(receipt(None, 64))
    sums = book.engines[ENGINE]
    assert sums.predicted_by_medium == {"GPU": 160 + 96 + 128, "CPU": 128, "STORAGE": 128}
    assert sum(sums.predicted_by_medium.values()) == sums.predicted_tokens
    assert sums.by_medium == {("GPU", "exact"): 1, ("CPU", "over"): 1, ("STORAGE", "exact"): 1}
    assert [r.by_medium for r in book.log.latest][1:3] == [
        {"GPU": 96, "CPU": 64, "STORAGE": 0},
        {"GPU": 128, "CPU": 64, "STORAGE": 128},
    ]
    assert book.log.latest[-1].by_medium == {}


def test_reordering_by_the_engine_is_no_drift() -> None:
    book = Book()
    for _ in range(2 * DRIFT_MIN):
        book.add(replace(loaded(160, 32), mode="pending"))
    sums = book.engines[ENGINE]
    assert not sums.drifting
    assert (sums.outcomes, sums.contradictions) == ({"over": 2 * DRIFT_MIN}, {})


def test_evictions_of_a_store_are_no_drift() -> None:
    book = Book()
    for _ in range(2 * DRIFT_MIN):
        book.add(loaded(160, 32, storage=128))
    assert not book.engines[ENGINE].drifting
    assert book.engines[ENGINE].abs_error_tokens == 2 * DRIFT_MIN * 128
    for _ in range(DRIFT_MIN):
        book.add(loaded(160, 32, cpu=128))
    assert book.engines[ENGINE].drifting


def funnel_receipt(predicted: int, actual: int | None, **more: Any) -> Receipt:
    return replace(receipt(predicted, actual), reported_prompt_tokens=1000, **more)


@pytest.mark.parametrize(
    ("one", "held", "missed"),
    [
        (funnel_receipt(960, 960, held_tokens=960), 960, {"new": 40}),
        (funnel_receipt(0, 0, salted=True), 0, {"salted": 1000}),
        (funnel_receipt(256, 256, held_tokens=256, seen_tokens=512), 256, {"evicted": 256, "new": 488}),
        (funnel_receipt(256, 256, held_tokens=512, missed="load"), 512, {"load": 256, "new": 488}),
        (funnel_receipt(0, 0, held_tokens=512, missed="pages"), 512, {"pages": 512, "new": 488}),
        (funnel_receipt(512, 128, held_tokens=512), 512, {"lost": 384, "new": 488}),
        (
            replace(funnel_receipt(512, 0), reported_prompt_tokens=990),
            512,
            {"template": 512, "new": 488},
        ),
        (funnel_receipt(0, 512), 0, {"new": 1000}),
    ],
)
def test_the_funnel_says_why_tokens_were_missed(one: Receipt, held: int, missed: dict[str, int]) -> None:
    funnel = CacheFunnel()
    funnel.add(astuple(one))
    counts = funnel.counts["m", ""]
    assert (counts.prompt, counts.held, counts.missed) == (1000, held, missed)
    assert (counts.chosen, counts.delivered) == (one.predicted_tokens, one.actual_tokens)


def test_the_funnel_counts_what_was_predicted_and_reported() -> None:
    funnel = CacheFunnel()
    funnel.add(astuple(receipt(None, 64)))
    funnel.add(astuple(receipt(64, None)))
    assert funnel.counts == {}


def test_pairs_of_model_and_tenant_beyond_the_bound_are_counted_together() -> None:
    funnel = CacheFunnel()
    for number in range(2 * FUNNELS_MAX):
        funnel.add(astuple(replace(receipt(0, 0), tenant=f"t{number}")))
    assert len(funnel.counts) == FUNNELS_MAX + 1
    assert funnel.counts[OTHER, OTHER].prompt == FUNNELS_MAX * 1000


TOKENS = st.integers(0, 1000)


@given(held=TOKENS, chosen=TOKENS, delivered=TOKENS, seen=st.integers(0, 2000))
def test_missed_tokens_add_up(held: int, chosen: int, delivered: int, seen: int) -> None:
    funnel = CacheFunnel()
    funnel.add(astuple(funnel_receipt(chosen, delivered, held_tokens=held, seen_tokens=seen)))
    counts = funnel.counts["m", ""]
    assert counts.prompt >= counts.held >= counts.chosen
    assert sum(counts.missed.values()) == 1000 - min(chosen, delivered)
    assert all(count >= 0 for count in counts.missed.values())


@given(st.floats(0.01, 5.0), st.floats(0.5, 20.0))
def test_the_worth_of_a_steady_rate_is_that_rate(seconds: float, interval_s: float) -> None:
    worth, now = CacheWorth(), 0.0
    while now < 12 * WORTH_HALF_LIFE_S:
        now += interval_s
        worth.add(seconds, now)
    assert worth.per_minute(now) == pytest.approx(60 * seconds / interval_s, rel=0.02)
    assert worth.per_minute(now + WORTH_HALF_LIFE_S) == pytest.approx(worth.per_minute(now) / 2)


def test_a_pull_says_nothing_of_the_engine_s_own_cache() -> None:
    sums = EngineReceipts()
    for _ in range(2 * DRIFT_MIN):
        one = replace(receipt(900, 100), pulled_tokens=800)
        sums.add(astuple(one))
    assert not sums.drifting
    assert not sums.contradicting
    assert sums.outcomes == {}
