"""Memory outside the GPUs of a simulated fleet: what it takes to load, who shares what, what flags say."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.pool.retention_order import RetentionHint
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.simulation.command import read_tiers
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import block_hashes, continued
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.tiers import (
    WRITES_MAX,
    Link,
    SharedStore,
    TierSetup,
    TierSpec,
    block_bytes,
    read_host,
    read_store,
    tiers_of,
)
from kvatlas.router.simulation.variants import variants_of
from kvatlas.router.simulation.workload import agents
from tests.router.simulation.support import FAST, FULL, HYBRID, Bench, fleet_run, request
from tests.support.examples import examples

BYTES = 1000
FAR = 1e9
"""Bytes per second, of a link that takes no time worth speaking of."""


def host(blocks: int = 10_000, bytes_per_s: float = FAR, **more: float) -> TierSetup:
    return TierSetup(
        block_bytes=BYTES,
        host=TierSpec(blocks=blocks, bytes_per_s=bytes_per_s, **more),  # type: ignore[arg-type]
    )


def store(blocks: int = 10_000, bytes_per_s: float = FAR, **more: float) -> TierSetup:
    return TierSetup(
        block_bytes=BYTES,
        store=TierSpec(blocks=blocks, bytes_per_s=bytes_per_s, **more),  # type: ignore[arg-type]
    )


def bench(tiers: TierSetup, num_blocks: int = 24, **more: Any) -> Bench:
    return Bench(num_blocks=num_blocks, tiers=tiers, **more)


PROMPT = request(0, 640, 1, 1)
OTHER = request(5, 1472, 1, 100)
AGAIN = request(10, 640, 1, 1)
"""Between them a prompt that fills the GPU."""


def test_evicted_blocks_are_loaded_in_the_time_of_their_bytes() -> None:
    one = bench(host(bytes_per_s=9 * BYTES / 0.5, latency_s=0.25))
    first, _, again = one.run([PROMPT, OTHER, AGAIN])
    assert (first.hit, first.loaded, first.medium) == (0, 0, None)
    assert (again.hit, again.loaded, again.medium) == (576, 576, "CPU"), "nine blocks of 64"
    assert again.first_token_s == pytest.approx(10 + 0.5 + 0.25 + 0.064)
    assert one.engine.computed_tokens == 640 + 1472 + 64


def test_a_load_may_take_something_away_from_computing() -> None:
    one = bench(host(bytes_per_s=9 * BYTES / 0.5, busy_share=0.2))
    again = one.run([PROMPT, OTHER, AGAIN])[2]
    assert again.first_token_s == pytest.approx(10 + 0.5 + 0.064 + 0.1)
    assert one.engine.busy_s == pytest.approx(0.64 + 1.472 + 0.064 + 0.1)


def test_others_compute_while_a_prompt_is_loaded() -> None:
    one = bench(host(bytes_per_s=9 * BYTES / 2.0), num_blocks=34)
    _, _, _, again, beside = one.run(
        [PROMPT, OTHER, request(6, 1200, 1, 200), AGAIN, request(10.1, 300, 1, 300)]
    )
    assert beside.first_token_s == pytest.approx(10.1 + 0.3)
    assert again.first_token_s == pytest.approx(10 + 2.0 + 0.064)


def test_loads_of_one_engine_share_its_link() -> None:
    timing = Timing(prefill_s_per_token=0.001, decode_s=0.01, chunk_tokens=512, seqs_max=4)
    one = bench(host(bytes_per_s=9 * BYTES / 1.0), num_blocks=30, timing=timing)
    fillers = [request(5, 1700, 1, 100)]
    two = [request(10, 640, 1, 1), request(10, 640, 1, 50)]
    runs = one.run([PROMPT, request(1, 640, 1, 50), *fillers, *two])
    first, second = runs[-2:]
    assert (first.loaded, second.loaded) == (576, 576)
    assert first.first_token_s == pytest.approx(11.064)
    assert second.first_token_s == pytest.approx(12.064)


def test_host_memory_that_is_too_small_gives_up_the_oldest() -> None:
    again = bench(host(blocks=10)).run([PROMPT, OTHER, AGAIN])[2]
    assert again.hit == 0


def test_a_block_is_in_the_store_once_it_has_been_written() -> None:
    spec = TierSpec(blocks=100, bytes_per_s=BYTES / 1.0, latency_s=0.5)
    one, pool = SharedStore(spec, bench(host()).engine.pool.layout), Link(spec.bytes_per_s)
    assert one.write(pool, [(0, 1), (0, 2)], BYTES, 10.0) == 0
    assert one.write(pool, [(0, 2), (0, 3)], BYTES, 10.0) == 0, "what is on its way is not sent again"
    for now, there in ((12.4, 0), (12.5, 2), (13.4, 2), (13.5, 3)):
        one.settle(now)
        assert len(one.held) == there


def test_too_much_on_its_way_is_left_out() -> None:
    spec = TierSpec(blocks=100_000, bytes_per_s=1.0)
    one, link = SharedStore(spec, bench(host()).engine.pool.layout), Link(1.0)
    chain = [(0, at) for at in range(WRITES_MAX + 5)]
    assert one.write(link, chain, BYTES, 0.0) == 5
    assert one.write(Link(1.0), [(0, -1)], BYTES, 0.0) == 0, "of another engine nothing waits"


def test_one_engine_loads_the_blocks_of_another() -> None:
    requests = [request(0, 1280, 1, 1), request(20, 1280, 1, 1)]
    alone = fleet_run(requests, "round-robin", engines=2, tiers=host())
    shared = fleet_run(requests, "round-robin", engines=2, tiers=store())
    assert [row.hit for row in alone.rows] == [0, 0]
    assert [(row.engine, row.hit, row.storage) for row in shared.rows] == [(0, 0, 0), (1, 1216, 1216)]
    assert shared.moved_bytes == (19 + 2) * BYTES, "all of full attention, and the window"


def test_the_nearest_of_equals_is_loaded_from() -> None:
    both = TierSetup(block_bytes=BYTES, host=host().host, store=store().store)
    again = bench(both).run([PROMPT, OTHER, AGAIN])[2]
    assert again.medium == "CPU"


def test_a_variant_sees_memory_outside_the_gpus_or_not() -> None:
    requests = continued(agents(150, 150.0, 3))
    told = {
        variant: fleet_run(requests, f"{variant}:spread=0", num_blocks=500, timing=FAST, tiers=store())
        for variant in ("kvatlas", "gpu-only")
    }
    errors = {variant: sum(abs(row.predicted - row.hit) for row in run.rows) for variant, run in told.items()}
    assert errors["kvatlas"] < errors["gpu-only"] / 4
    assert sum(row.storage for row in told["gpu-only"].rows) > 0, "engines still load"


def test_a_busy_engines_prefix_is_pulled_from_its_host_memory() -> None:
    requests = continued(agents(200, 30.0, 3))
    setup = TierSetup(block_bytes=BYTES, host=host().host, pull_bytes_per_s=FAR)
    slow = Timing(prefill_s_per_token=1e-3)
    runs = {
        variant: fleet_run(requests, variant, num_blocks=500, timing=slow, tiers=setup)
        for variant in ("kvatlas", "kvatlas:pull=0")
    }
    pulled = [row for row in runs["kvatlas"].rows if row.pulled]
    assert pulled
    assert all(row.pulled <= row.hit for row in pulled)
    # A source may evict a prefix meanwhile.
    assert sum(row.pulled for row in pulled) > 0.75 * sum(row.promised for row in runs["kvatlas"].rows)
    assert not any(row.pulled or row.promised for row in runs["kvatlas:pull=0"].rows)


def test_pulling_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match=r"--pull 100: .*add --host-memory"):
        read_tiers(None, "400%", 100.0, HYBRID, 1000, 8, pull_gbit_s=100.0)
    with pytest.raises(ValueError, match="only kvatlas pulls"):
        variants_of(["hash:pull=1"])


def test_runs_depend_on_their_inputs_alone() -> None:
    requests = continued(agents(100, 100.0, 3))
    setup = TierSetup(block_bytes=BYTES, host=host(500).host, store=store(bytes_per_s=1e6).store)
    runs = [fleet_run(requests, num_blocks=500, tiers=setup) for _ in range(2)]
    assert runs[0].rows == runs[1].rows


arrivals = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 1500), st.integers(0, 400), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(60))
@given(
    arrivals,
    st.sampled_from([24, 40, 60]),
    st.sampled_from([FULL, HYBRID]),
    st.sampled_from([math.inf, 1e5, 2e3]),
    st.sampled_from([30, 10_000]),
)
def test_every_request_ends_once_whatever_is_loaded(
    drawn: list[tuple[float, int, int, int]], num_blocks: int, groups: Any, bytes_per_s: float, blocks: int
) -> None:
    one = bench(host(blocks, bytes_per_s), num_blocks=num_blocks, groups=groups)
    made = [request(at_s, tokens, output, 100 * head) for at_s, tokens, output, head in drawn]
    runs = one.run(sorted(made, key=lambda each: each.at_s))
    assert sorted(one.of("ended") + one.of("refused")) == list(range(len(runs)))
    one.engine.pool.check_integrity()
    assert one.engine.pool.num_free_blocks == num_blocks - 1
    assert all(0 <= run.loaded <= run.hit < run.input_tokens for run in runs)


def test_sizes_and_links_as_flags_say_them() -> None:
    size = block_bytes(HYBRID, 100.0)
    assert size == 64 * 100 * 1024
    assert read_host("400%", 1000, size).blocks == 4000
    assert read_host("64GiB", 1000, size).blocks == (64 << 30) // size
    assert read_host("20000:gbyte_s=20+latency_ms=1+busy=0.1", 1000, size) == TierSpec(
        blocks=20_000, bytes_per_s=20e9, latency_s=0.001, busy_share=0.1
    )
    assert read_store("2TiB:gbit_s=25+total_gbit_s=100", 1000, size) == TierSpec(
        blocks=(2 << 40) // size, bytes_per_s=25e9 / 8, total_bytes_per_s=100e9 / 8, latency_s=0.002
    )
    for text in ("", "x", "-5", "0", "64GB", "400%:speed=1", "400%:gbit_s=x", "5:gbit_s=0", "5:busy=2"):
        with pytest.raises(ValueError, match=r"expected|there are|must be"):
            read_store(text, 1000, size)
    with pytest.raises(ConfigError, match="--host-memory 0%"):
        read_tiers("0%", None, 100.0, HYBRID, 1000, 8)
    assert read_tiers(None, None, 100.0, HYBRID, 1000, 8) is None


def test_the_cost_of_a_load_is_that_of_the_slower_link() -> None:
    setup = TierSetup(block_bytes=64_000, store=TierSpec(blocks=1, bytes_per_s=1e6, total_bytes_per_s=0.5e6))
    assert setup.load_s_per_token("STORAGE", HYBRID) == pytest.approx(1000 / 0.5e6)
    assert setup.load_s_per_token("STORAGE", HYBRID[1:]) == pytest.approx(1000 / 0.5e6)
    assert setup.load_s_per_token("CPU", HYBRID) == 0.0


def test_knobs_of_an_variant() -> None:
    variant = variants_of(["kvatlas:beta=0.5+premium=0+delay=1"])["kvatlas:beta=0.5+premium=0+delay=1"]
    assert dict(variant.settings) == {"beta": 0.5, "eviction_premium": 0.0, "delay": 1.0}
    for name in (
        "kvatlas:beta=2",
        "kvatlas:premium=9",
        "kvatlas:delay=900",
        "kvatlas:load=1",
        "kvatlas:beta=0.5+",
        "kvatlas:x",
    ):
        with pytest.raises(ValueError, match="after the colon"):
            variants_of([name])


def test_no_tiers_no_ways_to_them() -> None:
    pools = [bench(host()).engine.pool]
    assert tiers_of(None, pools) == [None]
    assert tiers_of(TierSetup(block_bytes=1), pools) == [None]


def test_host_memory_obeys_hints_within_the_share_only_if_the_router_sends_them() -> None:
    def held(hint_share: float) -> int:
        setup = msgspec.structs.replace(host(blocks=16), hint_share=hint_share)
        (tiers,) = tiers_of(setup, [bench(host()).engine.pool])
        assert tiers is not None
        assert tiers.host is not None
        kept = [(0, BlockHash(at)) for at in range(8)]
        tiers.store(kept, 0.0, RetentionHint(ttl_s=60.0))
        for at in range(100, 130):
            tiers.store([(0, BlockHash(at))], 1.0)
        return sum(key in tiers.host for key in kept)

    assert [held(share) for share in (0.0, 0.25, 0.5)] == [0, 4, 8]


def test_a_block_stays_in_use_to_the_end_of_the_step_after_its_own_copied_meanwhile() -> None:
    engine = bench(host()).engine
    for index, output in enumerate((10, 1)):
        pooled = engine.pool.request([0] * 128, hashes=block_hashes(request(0, 128, output, 10 * index), 64))
        engine.arrive(RequestRun(index, pooled, 128, output, 0.0), 0.0)
    used = []
    for _ in range(3):
        engine.advance()
        used.append(23 - engine.pool.num_free_blocks)
    assert used == [5, 5, 3], "the second prompt ends with its step, the second one"
