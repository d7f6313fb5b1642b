"""Pages of several workers become one: counts add up and never fall, what all see alike counts once."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas.router.api.prometheus_text import page_steps
from kvatlas.router.openai.members import at_once
from kvatlas.router.workers.merged_metrics import (
    CounterStore,
    WorkerPage,
    decoded_page,
    encoded_family,
    encoded_page,
    family_of,
    merged,
)


def page(slot: int, life: int, requests: float = 0.0, *more: Metric) -> WorkerPage:
    counter = CounterMetricFamily("kvatlas_requests", "text", labels=["model"])
    counter.add_metric(["m"], requests)
    return WorkerPage(slot, life, [family_of(one) for one in (counter, *more)])


def value(found: list[Metric], name: str, **labels: str) -> float:
    (sample,) = [s for f in found for s in f.samples if (s.name, s.labels) == (name, labels)]
    return float(sample.value)


def gauge(name: str, number: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, "text", value=number)


def test_own_numbers_add_up_and_what_all_see_alike_counts_once() -> None:
    pages = [
        page(0, 0, 3.0, gauge("kvatlas_proxy_requests_active", 2), gauge("kvatlas_index_blocks", 700)),
        page(1, 0, 4.0, gauge("kvatlas_proxy_requests_active", 5), gauge("kvatlas_index_blocks", 710)),
    ]
    alone = merged(pages, CounterStore(), shared_index=False)
    assert value(alone, "kvatlas_requests_total", model="m") == 7.0
    assert value(alone, "kvatlas_proxy_requests_active") == 7.0
    assert value(alone, "kvatlas_index_blocks") == 710.0
    shared = merged(pages, CounterStore(), shared_index=True)  # each worker writes for its own engines
    assert value(shared, "kvatlas_index_blocks") == 1410.0


def test_a_page_is_the_same_after_its_way_to_a_sibling() -> None:
    whole = page(2, 1, 3.0, gauge("kvatlas_index_blocks", 700))
    counter = CounterMetricFamily("kvatlas_requests", "text", labels=["model"])
    counter.add_metric(["m"], 3.0)
    sent = [encoded_family(one) for one in (counter, gauge("kvatlas_index_blocks", 700))]
    assert decoded_page(encoded_page(2, 1, sent)) == whole


def test_histograms_add_up_bucket_by_bucket_and_the_page_is_valid() -> None:
    def times(low: float, high: float) -> HistogramMetricFamily:
        family = HistogramMetricFamily("kvatlas_request_duration_seconds", "text", labels=["model"])
        family.add_metric(["m"], [("0.1", low), ("+Inf", high)], high / 10)
        return family

    found = merged(
        [page(0, 0, 1, times(1, 3)), page(1, 0, 1, times(2, 2))], CounterStore(), shared_index=False
    )
    text = at_once(page_steps(found)).decode()
    assert 'kvatlas_request_duration_seconds_bucket{le="0.1",model="m"} 3.0' in text
    assert 'kvatlas_request_duration_seconds_bucket{le="+Inf",model="m"} 5.0' in text
    assert 'kvatlas_request_duration_seconds_count{model="m"} 5.0' in text


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["counts", "dies", "is late"]), st.integers(1, 9)),
        max_size=40,
    )
)
def test_a_count_never_falls_and_nothing_that_was_shown_is_lost(steps: list[tuple[int, str, int]]) -> None:
    file = os.memfd_create("counters")
    try:
        lives, counts, past = [0, 0, 0], [0, 0, 0], 0
        counters = CounterStore(file)
        merged([page(slot, 0) for slot in range(3)], counters, shared_index=False)
        for slot, what, number in steps:
            if what == "counts":
                counts[slot] += number
            elif what == "dies":
                past += counts[slot]
                lives[slot], counts[slot] = lives[slot] + 1, 0
                if slot == 0:  # the one that merges
                    counters = CounterStore(file)
            late = {slot} - {0} if what == "is late" else set()
            pages = [page(one, lives[one], counts[one]) for one in range(3) if one not in late]
            found = merged(pages, counters, shared_index=False)
            # Every step ends with a page that shows all: so nothing that was counted is ever missing.
            assert value(found, "kvatlas_requests_total", model="m") == past + sum(counts)
    finally:
        os.close(file)


def test_a_truncated_counter_file_is_replaced() -> None:
    file = os.memfd_create("counters")
    try:
        os.pwrite(file, (100).to_bytes(8, "little") + b"\x93half", 0)
        found = merged([page(0, 0, 5.0)], CounterStore(file), shared_index=False)
        assert value(found, "kvatlas_requests_total", model="m") == 5.0
        again = merged([page(0, 1, 1.0)], CounterStore(file), shared_index=False)
        assert value(again, "kvatlas_requests_total", model="m") == 6.0
    finally:
        os.close(file)
