"""The metrics page: valid whatever the parts hold, and its labels bounded by the fleet."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.admission.admission_queue import QueueStats
from kvatlas.router.admission.tenants import TenantStats
from kvatlas.router.api.admin_auth import AdminStats
from kvatlas.router.api.metric_families import PART_ROWS, PART_SAMPLES, Column, gauge, metrics_of, table
from kvatlas.router.api.metrics_page import ReloadStats, Sources, prepare
from kvatlas.router.api.metrics_page import families as all_families
from kvatlas.router.api.prometheus_text import page_steps
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.fleet.engines import DesiredState, EngineAddress, SourceStats
from kvatlas.router.fleet.sources import FleetSources
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.http.settings import ListenStats
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.observe.history import HistoryLog
from kvatlas.router.observe.receipts import ERROR_BUCKETS, Receipt
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.observe.usage import UsageStats
from kvatlas.router.openai.members import at_once, run_cooperatively
from kvatlas.router.pd.settings import PdStats
from kvatlas.router.placement.affinity import AffinityStats
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.inflight import InflightStats
from kvatlas.router.placement.load import LoadStats
from kvatlas.router.placement.shadow import ShadowStats
from kvatlas.router.prompts.settings import PromptStats
from kvatlas.router.proxy.settings import ProxyStats
from kvatlas.router.replication.gossip import GossipStats
from kvatlas.router.replication.leases import LeaseStats
from kvatlas.router.replication.lookup_fallback import LookupStats
from kvatlas.router.replication.pending import MirrorStats
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.replication.shared_blocks import SharedIndex
from kvatlas.router.services.epp.settings import EppStats

IDS = ("http://a:1", 'http://b:1/"quoted"\\')
STATS: tuple[tuple[type[msgspec.Struct], str], ...] = (
    *((kind, "") for kind in (FeedStats, ProxyStats, PromptStats, InflightStats, AffinityStats, ShadowStats)),
    *((kind, "") for kind in (LoadStats, LeaseStats, LookupStats, GossipStats, MirrorStats, SourceStats)),
    (AdminStats, ""),
    (PdStats, ""),
    (ListenStats, "listen"),
    (EppStats, "epp"),
)
"""Structs on the page of ``sources``, and the part that stands for ``*`` in their metrics' names."""
EVERY_STATS = (*(kind for kind, _ in STATS), TenantStats, QueueStats, ReloadStats)


def engine_of(fleet: Fleet[Engine], number: int) -> Engine:
    engine = fleet.get(IDS[number])
    assert engine is not None
    return engine


@pytest.fixture
def sources() -> Sources:
    """Two engines that have done something."""
    accounts = Accounts(lambda: 100.0)

    def make(address: EngineAddress, *, fleet_changed: Callable[[], None]) -> Engine:
        return Engine(address, accounts, fleet_changed=fleet_changed)

    fleet = Fleet([EngineAddress(name, role="both") for name in IDS], make)
    for engine in fleet:
        engine.load.admit(uncached_tokens=100, now=100.0)
    scopes = ModelIndexes(lambda _: ModelFacts())
    first = engine_of(fleet, 0)
    first.residency = scopes.assign(IDS[0], "m")
    first.feed = FeedStats(state=FeedState.READY, last_seq=None, malformed_frames={"too_large": 2})
    proxy = ProxyStats(requests=5, errors={"invalid_json": 2})
    shared = SharedIndex(IndexSettings(url="redis://127.0.0.1"), lambda now: {}, clock=lambda: 100.0)
    shared.index_of("m")  # nothing is connected before it runs
    origins = FleetSources([], [], DesiredState(engines_max=9), changed=lambda: None)
    origins.stats["static"].complain("fleet_full", "too many")
    return Sources(
        fleet,
        scopes,
        accounts,
        proxy,
        PromptStats(),
        ListenStats,
        RequestTracker(lambda: 100.0),
        HistoryLog(100.0),
        shared,
        origins,
        AdminStats(changes={"drain": 2}),
        epp=EppStats(picks={"duplex": 2}, calls_refused={"mode": 1}),
        pd=PdStats(aggregated={"local": 3}),
    )


def families(sources: Sources) -> dict[str, Any]:
    page = at_once(page_steps(all_families(sources))).decode()
    return {family.name: family for family in text_string_to_metric_families(page)}


def values(sources: Sources, name: str) -> dict[tuple[str, ...], float]:
    found = families(sources)[name]
    return {tuple(s.labels.values()): s.value for s in found.samples}


def receipt(engine_id: str, predicted: int, actual: int) -> Receipt:
    return Receipt(
        request_id="r",
        engine_id=engine_id,
        model="m",
        mode="native",
        feed="ready",
        prompt_tokens=100,
        predicted_tokens=predicted,
        actual_tokens=actual,
    )


def test_every_metric_of_every_part_is_exported(sources: Sources) -> None:
    found = families(sources)
    missing = [m.name for kind, part in STATS for m in metrics_of(kind, part) if m.name not in found]
    assert missing == []


@pytest.mark.parametrize("kind", EVERY_STATS)
def test_every_number_of_a_part_names_its_metric(kind: type[msgspec.Struct]) -> None:
    named = {metric.field for metric in metrics_of(kind)}
    unnamed = [
        name
        for name in kind.__struct_fields__
        if name not in named and not isinstance(getattr(kind(), name), str)  # text is on /kvatlas/engines
    ]
    assert unnamed == []


def test_every_metric_says_what_it_is(sources: Sources) -> None:
    words = {family.name: family.documentation for family in families(sources).values()}
    assert [name for name, text in words.items() if text == name] == []  # no text below the field
    assert min(len(text) for text in words.values()) > 9


def test_units_are_spelled_out(sources: Sources) -> None:
    short = [name for name in families(sources) if re.search(r"_(s|ms|kb|mb|monotonic)$", name)]
    assert short == []


def test_numbers_that_may_fall_are_gauges() -> None:
    kinds = {metric.name: metric.family for metric in metrics_of(UsageStats)}
    assert kinds["kvatlas_usage_queued"] is GaugeMetricFamily
    assert kinds["kvatlas_usage_written"] is CounterMetricFamily


def test_a_field_with_another_annotation_is_an_error() -> None:
    class Odd(msgspec.Struct):
        count: Annotated[int, "requests_total"] = 0

    with pytest.raises(TypeError, match=r"Odd\.count: not the name of a metric: requests_total"):
        metrics_of(Odd)


def test_labels_are_kept_apart_and_escaped(sources: Sources) -> None:
    assert set(values(sources, "kvatlas_engine_up")) == {(name,) for name in IDS}
    assert values(sources, "kvatlas_feed_malformed_frames") == {(IDS[0], "too_large"): 2}
    assert values(sources, "kvatlas_proxy_errors") == {("invalid_json",): 2}
    assert values(sources, "kvatlas_source_errors") == {("fleet_full", "static"): 1}
    assert values(sources, "kvatlas_admin_changes") == {("drain",): 2}


def test_one_feed_state_is_set_at_a_time(sources: Sources) -> None:
    states = values(sources, "kvatlas_feed_state")
    assert len(states) == len(FeedState)
    assert [key for key, value in states.items() if value] == [(IDS[0], "ready")]


def test_receipts_are_counted_by_outcome_with_a_histogram_of_errors(sources: Sources) -> None:
    for predicted, actual in ((0, 0), (64, 64), (100, 0), (0, 3000)):
        engine_of(sources.fleet, 0).receipts.add(astuple(receipt(IDS[0], predicted, actual)))
    assert values(sources, "kvatlas_receipts") == {
        (IDS[0], "exact"): 2,
        (IDS[0], "over"): 1,
        (IDS[0], "under"): 1,
    }
    buckets = values(sources, "kvatlas_prediction_error_tokens")
    assert buckets[IDS[0], "-1024"] == 1
    assert buckets[IDS[0], "0"] == 3
    assert buckets[IDS[0], "256"] == buckets[IDS[0], "+Inf"] == 4
    assert len(buckets) == len(ERROR_BUCKETS) + 1
    assert values(sources, "kvatlas_prediction_drifting") == {(IDS[0],): 0}


def test_how_removals_are_read_shows_with_its_evidence(sources: Sources) -> None:
    sources.scopes.apply(IDS[0], DecodedBatch(0.0, [], None, None, []))
    engine = sources.scopes.engine(IDS[0])
    assert values(sources, "kvatlas_index_removals") == {(IDS[0], "undecided"): 1}
    engine.removals.phantom()
    assert values(sources, "kvatlas_index_removals") == {(IDS[0], "last_copy"): 1}
    engine.removals.counted()
    assert values(sources, "kvatlas_index_removals") == {(IDS[0], "counted"): 1}
    assert values(sources, "kvatlas_index_removal_evidence") == {
        (IDS[0], "removed_again"): 0,
        (IDS[0], "told_counts"): 1,
        (IDS[0], "phantoms"): 1,
    }
    assert values(sources, "kvatlas_index_re_reports_suspected") == {(IDS[0],): 0}


def test_an_open_breaker_shows(sources: Sources) -> None:
    for _ in range(3):
        engine_of(sources.fleet, 1).breaker.record(False, 100.0)
    assert values(sources, "kvatlas_engine_breaker_open") == {(IDS[0],): 0, (IDS[1],): 1}


def test_engines_that_left_are_in_no_label(sources: Sources) -> None:
    engine_of(sources.fleet, 1).receipts.add(astuple(receipt(IDS[1], 1, 1)))
    assert IDS[1] in {label for labels in values(sources, "kvatlas_receipts") for label in labels}
    sources.fleet.replace(IDS[1], [])
    for name, family in families(sources).items():
        for sample in family.samples:
            assert IDS[1] not in sample.labels.values(), name


def test_the_number_of_series_does_not_grow_with_requests(sources: Sources) -> None:
    def series() -> int:
        return sum(len(family.samples) for family in families(sources).values())

    for outcome in ((0, 0), (1, 0), (0, 1)):
        engine_of(sources.fleet, 0).receipts.add(astuple(receipt(IDS[0], *outcome)))
    before = series()
    for n in range(500):
        engine_of(sources.fleet, 0).receipts.add(astuple(receipt(IDS[0], n, n % 7)))
        load = engine_of(sources.fleet, 0).load
        load.finish(load.admit(uncached_tokens=n, now=100.0), 100.0)
    assert series() == before


def test_every_value_is_a_number(sources: Sources) -> None:
    for family in families(sources).values():
        for sample in family.samples:
            assert not math.isnan(sample.value), sample


def test_transfers_that_went_wrong_are_shown_as_the_engine_counts_them(sources: Sources) -> None:
    assert values(sources, "kvatlas_engine_transfers_wrong") == {}
    engine_of(sources.fleet, 0).transfers = {"notifications_after_expiry": 2.0}
    key = (IDS[0], "notifications_after_expiry")
    assert values(sources, "kvatlas_engine_transfers_wrong") == {key: 2.0}


async def test_others_go_on_while_a_page_is_made(sources: Sources) -> None:
    found = list(all_families(sources))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    page = await run_cooperatively(page_steps(found, pause_every_s=0.0))
    beside.cancel()
    assert turns >= len(found)
    assert page == at_once(page_steps(found, pause_every_s=float("inf")))


ITSELF: Column[float] = gauge("engine_up", "1 if up", float)


def test_a_family_of_many_engines_is_made_in_parts_and_shown_as_one() -> None:
    rows = {f"e{number:04}": float(number) for number in range(3 * PART_SAMPLES)}
    parts = list(table("engine", [ITSELF], rows))
    assert [len(part.samples) for part in parts] == [PART_SAMPLES] * 3
    whole = GaugeMetricFamily("kvatlas_engine_up", "1 if up", labels=["engine"])
    for engine, value in rows.items():
        whole.add_metric([engine], value)
    assert at_once(page_steps(parts)) == at_once(page_steps([whole]))


def test_rows_without_samples_end_a_part_too() -> None:
    rows = dict.fromkeys([f"e{number}" for number in range(2 * PART_ROWS + 1)], 1.0)
    none: Column[float] = gauge("engine_up", "1 if up", lambda _: None)
    parts = list(table("engine", [none], rows))
    assert len(parts) == 3
    page = b"# HELP kvatlas_engine_up 1 if up\n# TYPE kvatlas_engine_up gauge\n"
    assert at_once(page_steps(parts)) == page


LETTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n')
VALUES = st.floats() | st.integers(-(10**20), 10**20)


@given(
    st.lists(
        st.tuples(st.dictionaries(st.from_regex("[a-z_]{1,9}", fullmatch=True), st.text(LETTERS)), VALUES)
    )
)
def test_samples_are_written_as_by_the_client_library(rows: list[tuple[dict[str, str], float]]) -> None:
    family = Metric("kvatlas_x", 'a "text"\nof \\ two lines', "gauge")
    family.samples = [Sample("kvatlas_x", labels, value) for labels, value in rows]

    class Collected(Collector):
        def collect(self) -> list[Metric]:
            return [family]

    assert at_once(page_steps([family])) == generate_latest(Collected())


def test_the_first_page_reads_no_source_of_a_struct(sources: Sources) -> None:
    """That is done before the port is open, since it takes long."""
    metrics_of.cache_clear()
    nothing = msgspec.structs.replace(
        sources,
        fleet=Fleet([], lambda *_, **__: None),
        scopes=ModelIndexes(lambda _: ModelFacts()),
        origins=FleetSources([], [], DesiredState(engines_max=9), changed=lambda: None),
        listen=lambda: None,
    )
    prepare(nothing)
    before = metrics_of.cache_info().misses
    families(sources)
    assert metrics_of.cache_info().misses == before


def test_rows_may_leave_between_two_parts() -> None:
    rows = dict.fromkeys([f"e{number}" for number in range(PART_SAMPLES + 1)], 1.0)
    parts = table("engine", [ITSELF], rows)
    first = next(parts)
    rows.popitem()
    assert len([*first.samples, *next(parts).samples]) == PART_SAMPLES + 1
