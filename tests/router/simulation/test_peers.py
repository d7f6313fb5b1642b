"""Other routers' formulas on cases worked out by hand, and what such a router sees of a simulated fleet."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import (
    COMPARED,
    PEERS,
    FirstTokenRegression,
    History,
    PeerRouter,
    PeerView,
    dynamo,
    llm_d,
    llm_d_lmetric,
    llm_d_precise,
    smg,
    vllm_router,
)
from kvatlas.publisher.events import BlockHash
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.other_router import OtherRouter, PrefixHit
from kvatlas.router.simulation.router_view import NOTHING
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.variants import Variant, variants_of
from tests.router.simulation.support import FAST, FULL, fleet_run, request

TWO = FleetSetup(groups=FULL, num_blocks=100, engines=2)


def router_of(name: str, setup: FleetSetup = TWO) -> PeerRouter:
    return PeerRouter(name, setup, 64, random.Random(1))


def test_dynamo_adds_blocks_to_prefill_and_blocks_to_decode() -> None:
    views = [
        PeerView(prefix_tokens=640, prefilling_tokens=0, active_blocks=26),  # 360/64 + 26 = 31.6
        PeerView(prefix_tokens=0, prefilling_tokens=0, active_blocks=16),  # 1000/64 + 16 = 31.6
        PeerView(prefix_tokens=640, prefilling_tokens=320, active_blocks=20),  # 680/64 + 20 = 30.6
    ]
    assert dynamo(views, 1000, 64) == [2]
    assert dynamo([PeerView(prefix_tokens=1024), PeerView(active_blocks=1)], 1000, 64) == [0], "no credit"
    assert dynamo([PeerView(), PeerView()], 1000, 64) == [0, 1]


def test_llm_d_precise_weighs_prefix_usage_and_queue() -> None:
    views = [
        PeerView(prefix_tokens=500, usage=0.9, waiting=4),  # 1.5 + 0.2 + 0 + 1 = 2.7
        PeerView(prefix_tokens=0, usage=0.5, waiting=2),  # 0 + 1.0 + 1 + 1 = 3.0
        PeerView(prefix_tokens=100, usage=0.5, waiting=0),  # 0.3 + 1.0 + 2 + 1 = 4.3
    ]
    assert llm_d_precise(views, 1000, 64) == [2]
    assert llm_d_precise(views[:2], 1000, 64) == [1], "1.5 + 0.2 + 1 against 1 + 1, and 2 for the queue"


def test_llm_d_precise_sends_cold_prompts_in_turn() -> None:
    never, long_ago, lately = PeerView(), PeerView(cold_turn=3), PeerView(cold_turn=9)
    assert llm_d_precise([lately, never, long_ago], 100, 64) == [1]
    assert llm_d_precise([lately, long_ago], 100, 64) == [1]
    assert llm_d_precise([PeerView(prefix_tokens=64, cold_turn=9), long_ago], 100, 64) == [0], (
        "only cold ones"
    )
    assert llm_d_precise([lately], 100, 64) == [0]


def test_llm_d_sticks_to_engines_that_hold_most_of_a_prompt_until_they_are_18_s_behind() -> None:
    # 1,000 tokens are 15 whole blocks of 64: 0.8 of 960 is 768.
    holder, idle = PeerView(prefix_tokens=768, prefilling_tokens=100_000), PeerView()
    assert llm_d([holder, idle], 1000, 64) == [0], "12.5 s behind"
    late = PeerView(prefix_tokens=768, prefilling_tokens=144_000)
    assert llm_d([late, idle], 1000, 64) == [0], "18 s are not more than 18 s"
    later = PeerView(prefix_tokens=768, prefilling_tokens=144_001)
    assert llm_d([later, idle], 1000, 64) == [1]
    assert llm_d([later, holder, idle], 1000, 64) == [1], "another holder is not"
    fast = PeerView(prefix_tokens=768, prefilling_tokens=144_001, tokens_per_s=16_000.0)
    assert llm_d([fast, PeerView(tokens_per_s=16_000.0)], 1000, 64) == [0]


def test_llm_d_takes_the_least_uncached_tokens_this_prompt_s_included() -> None:
    shallow = PeerView(prefix_tokens=704, prefilling_tokens=500)  # 796 with this prompt, no holder
    assert llm_d([shallow, PeerView(prefilling_tokens=0)], 1000, 64) == [0]
    assert llm_d([shallow, PeerView(prefilling_tokens=0)], 700, 64) == [0], "704 of 640: held"
    assert llm_d([PeerView(prefilling_tokens=300), PeerView(prefilling_tokens=200)], 1000, 64) == [1]
    beyond = [PeerView(prefilling_tokens=5_000_000), PeerView(prefilling_tokens=4_300_000)]
    assert llm_d(beyond, 1000, 64) == [0, 1], "scores end at 4,194,304 tokens"


def test_lmetric_multiplies_uncached_tokens_and_requests() -> None:
    views = [
        PeerView(prefix_tokens=640, requests=5),  # 320 x 6
        PeerView(requests=1),  # 960 x 2
        PeerView(prefix_tokens=320, requests=2),  # 640 x 3
    ]
    assert llm_d_lmetric(views, 1000, 64) == [0, 1, 2]
    assert llm_d_lmetric([*views, PeerView(requests=0)], 1000, 64) == [3]
    whole = PeerView(prefix_tokens=960, requests=99)
    assert llm_d_lmetric([whole, PeerView()], 1000, 64) == [0], "what is left of a block counts nothing"


def test_smg_takes_the_holder_of_a_deep_match_with_the_shortest_expected_wait() -> None:
    views = [
        PeerView(prefix_tokens=600, waiting=2),  # 2 x 1024 / 2000 s
        PeerView(prefix_tokens=600, dispatched=1, usage=0.5),  # 1024 / 2000 + 0.15 s
        PeerView(prefix_tokens=500),
    ]
    assert smg(views, 1000, 64) == [1]
    assert smg(views, 2000, 64) == [2], "0.3 is not more than 0.3: shortest wait of all"
    full = [PeerView(prefix_tokens=600, usage=1.0), PeerView(prefix_tokens=600, waiting=99)]
    assert smg(full, 1000, 64) == [1], "a full cache is 150 s away"


def test_smg_leaves_holders_that_have_far_more_requests_than_the_mean() -> None:
    hot = PeerView(prefix_tokens=600, requests=100)
    assert smg([hot, PeerView(requests=1), PeerView(requests=1)], 1000, 64) == [1, 2], "100 > 34 + 64"
    even = PeerView(prefix_tokens=600, requests=90)
    assert smg([even, PeerView(), PeerView()], 1000, 64) == [0], "90 < 30 + 64"
    holders = [hot, PeerView(prefix_tokens=600, requests=3, waiting=9), PeerView()]
    assert smg(holders, 1000, 64) == [1], "the other holder"


def test_vllm_router_looks_at_load_only_where_it_is_very_uneven() -> None:
    holder = PeerView(prefix_tokens=400, requests=64, tree_tokens=900)
    assert vllm_router([holder, PeerView(tree_tokens=10)], 1000, 64) == [0], "not more than 64 apart"
    hot = PeerView(prefix_tokens=400, requests=65, tree_tokens=900)
    assert vllm_router([hot, PeerView(tree_tokens=10)], 1000, 64) == [1]
    shallow = PeerView(prefix_tokens=300, tree_tokens=900)
    smallest = PeerView(tree_tokens=10, requests=9)
    assert vllm_router([shallow, smallest], 1000, 64) == [1], "the smallest history, whatever its load"


@pytest.mark.parametrize("name", PEERS)
def test_a_router_forgets_what_has_ended(name: str) -> None:
    router = router_of(name)
    hashes = [BlockHash(number) for number in range(5)]
    seen = [NOTHING, NOTHING]
    places = [router.place(index, 330, hashes, seen, 0.0)[0] for index in range(4)]
    for index in range(4):
        router.first_token(index)
        router.ended(index)
    assert not router._sent
    for engine in router._engines:
        assert (engine.requests, engine.prefilling_tokens, len(engine.active)) == (0, 0, 0)
    if PEERS[name].view == "blind":
        assert len(set(places)) == 1, "its own history says that it is there"
        assert router.place(9, 330, hashes, seen, 0.0) == (places[0], 320)
    else:
        assert router.place(9, 330, hashes, seen, 0.0)[1] == 0, "no event has said that anything is cached"


def test_dynamo_counts_shared_blocks_of_one_engine_once() -> None:
    router = router_of("dynamo")
    hashes = [BlockHash(number) for number in range(5)]
    first, _ = router.place(0, 320, hashes, [NOTHING, NOTHING], 0.0)
    router.first_token(0)
    views = router._views([0, 0], hashes)
    assert views[first].active_blocks == views[1 - first].active_blocks == 5
    assert views[first].prefilling_tokens == 0


def test_llm_d_sees_prompts_in_flight_and_dynamo_does_not() -> None:
    hashes = [BlockHash(number) for number in range(5)]
    for name, cached in (("llm-d-precise", 320), ("llm-d-lmetric", 320), ("dynamo", 0)):
        router = router_of(name)
        place, _ = router.place(0, 330, hashes, [NOTHING, NOTHING], 0.0)
        again, believed = router.place(1, 330, hashes, [NOTHING, NOTHING], 0.0)
        assert (again == place, believed) == (bool(cached), cached)


def test_events_tell_and_gauges_are_as_of_the_last_poll() -> None:
    router = router_of("llm-d-precise")
    hashes = [BlockHash(number) for number in range(5)]
    router.polled(1, waiting=7, usage=0.5)
    assert [view.waiting for view in router._views([0, 0], hashes)] == [0, 7]
    place, cached = router.place(0, 330, hashes, [NOTHING, PrefixHit(0, 256)], 0.0)
    assert (place, cached) == (0, 0), "3 x 256/330 + 1 + 1 against 2 + 2 + 1"


def test_llm_d_believes_that_an_engine_keeps_as_many_blocks_as_it_has() -> None:
    router = router_of("llm-d", FleetSetup(groups=FULL, num_blocks=8, engines=1))
    first, second = ([BlockHash(10 * start + at) for at in range(5)] for start in (1, 2))
    believed = [
        router.place(index, 330, hashes, [NOTHING], 0.0)[1]
        for index, hashes in enumerate((first, first, second, second, first))
    ]
    assert believed == [0, 320, 0, 320, 0], "the start of a prompt is forgotten first"


def test_smg_counts_what_it_has_sent_since_the_last_poll() -> None:
    router = router_of("smg")
    hashes = [BlockHash(number) for number in range(5)]
    place, _ = router.place(0, 330, hashes, [NOTHING, NOTHING], 0.0)
    assert router.place(1, 330, [BlockHash(77)], [NOTHING, NOTHING], 0.0)[0] == 1 - place
    router.polled(place, waiting=0, usage=0.0)
    assert router.place(2, 330, [BlockHash(78)], [NOTHING, NOTHING], 0.0)[0] == place


def test_dynamo_s_queue_keeps_prompts_while_every_engine_has_16_steps_to_prefill() -> None:
    router = router_of("dynamo-queue")
    cold = [NOTHING, NOTHING]
    for index in range(2):
        assert not router.full()
        router.place(index, 131_073, [BlockHash(index)], cold, 0.0)
    assert router.full(), "16 x 8,192"
    assert not router_of("dynamo").full()
    router.first_token(0)
    assert not router.full()


class Recorder(OtherRouter):
    """Sends all to the first engine, ten at a time at most, and notes what it hears."""

    gauge_s = 0.5

    def __init__(self) -> None:
        self.placed: list[tuple[int, float]] = []
        self.open: set[int] = set()
        self.waiting: list[int] = []

    def place(
        self,
        index: int,
        prompt_tokens: int,
        hashes: Sequence[BlockHash],
        seen: Sequence[PrefixHit],
        now: float,
    ) -> tuple[int, int]:
        self.placed.append((index, now))
        self.open.add(index)
        return 0, 0

    def misses(
        self, prompt_tokens: int, hashes: Sequence[BlockHash], seen: Sequence[PrefixHit], left_s: float
    ) -> bool:
        return False

    def first_token(self, index: int, now: float | None = None) -> None:
        self.open.discard(index)

    def ended(self, index: int) -> None:
        self.open.discard(index)

    def polled(self, engine: int, waiting: int, usage: float) -> None:
        self.waiting.append(waiting)

    def full(self) -> bool:
        return len(self.open) >= 2


def test_requests_wait_in_a_router_that_is_full_in_their_order() -> None:
    # Each prompt takes a second of prefill; all arrive at once.
    requests = [request(0.01 * index, 1000, 1, 100 * index) for index in range(6)]
    recorder = Recorder()
    variant = Variant(policy="kvatlas", view="truth", other=lambda *_: recorder, what="")
    run = FleetSim(FleetSetup(groups=FULL, num_blocks=400, engines=1, timing=FAST), variant).run(requests)
    assert [index for index, _ in recorder.placed] == list(range(6))
    assert [round(at_s) for _, at_s in recorder.placed] == [0, 0, 1, 2, 3, 4]
    assert [row.arrived_s for row in run.rows] == [0.01 * index for index in range(6)], "they waited"
    assert [round(row.ttft_s) for row in run.rows] == [1, 2, 3, 4, 5, 6]


def test_another_router_polls_gauges_at_its_own_interval() -> None:
    recorder = Recorder()
    variant = Variant(policy="kvatlas", view="truth", other=lambda *_: recorder, what="")
    # Two prompts of a second each: one waits until the first is computed.
    requests = [request(0.0, 1000, 1, 0), request(0.1, 1000, 1, 100), request(9.0, 100, 1, 200)]
    setup = FleetSetup(groups=FULL, num_blocks=400, engines=1, timing=FAST, gauge_s=50.0)
    FleetSim(setup, variant).run(requests)
    assert (recorder.waiting[0], recorder.waiting[-1]) == (1, 0)
    assert len(recorder.waiting) < 9, "18 intervals, but nothing changes in most"


@pytest.mark.parametrize("name", PEERS)
def test_an_idle_fleet_serves_repeats_where_they_are_cached(name: str) -> None:
    requests = [request(30.0 * index, 1500, 3, 100 * (index % 3)) for index in range(12)]
    run = fleet_run(requests, name, groups=FULL)
    assert sum(row.hit > 0 for row in run.rows) == 9
    assert all(row.predicted == row.hit for row in run.rows)


def test_other_routers_take_no_settings() -> None:
    with pytest.raises(ValueError, match="llm-d:beta=0: llm-d is another router with its own defaults"):
        variants_of(["llm-d:beta=0"], COMPARED)


def test_the_regression_learns_what_its_first_tokens_depend_on() -> None:
    regression, rng = FirstTokenRegression(), random.Random(1)
    for _ in range(200):
        view = PeerView(
            prefix_tokens=rng.randrange(500), prefilling_tokens=rng.randrange(4000), waiting=rng.randrange(9)
        )
        found = regression.features(view, 1000)
        regression.learn(found, 0.1 + 0.5 * found[1] + 0.4 * found[2] + 0.02 * view.waiting)
    view = PeerView(prefix_tokens=100, prefilling_tokens=2000, waiting=3)
    assert regression.predict(view, 1000) == pytest.approx(0.1 + 0.45 + 0.8 + 0.06, rel=0.01)
    assert regression.shortest([view, PeerView(prefix_tokens=100)], 1000, 16) == [1]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("kvatlas:refuse=1", "refuse= needs slo="),
        ("llm-d:slo=1", "it has no parameters"),
        ("ttft-regression:hold=1", "it has no parameters"),
    ],
)
def test_parameters_that_a_variant_lacks_are_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        variants_of([name], COMPARED)


def test_the_regression_refuses_what_it_predicts_to_be_late_everywhere() -> None:
    requests = [request(1.0 * index, 3000, 1, 100 * index) for index in range(100)]
    rows = fleet_run(requests, "ttft-regression:slo=2+refuse=1", engines=2).rows
    assert 10 < sum(row.ttft_s < 0 for row in rows) < 90


# The history of a router without events, against a naive one.

paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join)


def hashes_of(path: str) -> list[BlockHash]:
    """Chained: one per prefix."""
    return [BlockHash(hash(path[: end + 1]) & (1 << 63) - 1) for end in range(len(path))]


@given(st.lists(st.tuples(st.integers(0, 1), paths), max_size=20), paths)
def test_an_uncapped_history_is_every_prefix_that_was_sent(sent: list[tuple[int, str]], asked: str) -> None:
    history = History(2, 16, None)
    for engine, path in sent:
        history.placed(engine, 16 * len(path) + 1, hashes_of(path))
    for engine, seen in enumerate(history.look(16 * len(asked) + 1, hashes_of(asked))):
        prefixes = {path[:end] for where, path in sent if where == engine for end in range(1, len(path) + 1)}
        longest = max((end for end in range(1, len(asked) + 1) if asked[:end] in prefixes), default=0)
        assert seen == PrefixHit(16 * longest, 16 * longest)


def test_the_last_token_is_always_computed() -> None:
    history = History(1, 16, None)
    history.placed(0, 32, hashes_of("ab"))
    assert history.look(32, hashes_of("ab")) == [PrefixHit(16, 16)]


@given(st.lists(paths, min_size=1, max_size=30), st.integers(1, 6))
def test_a_capped_history_holds_the_latest_blocks_and_whole_prefixes(sent: list[str], cap: int) -> None:
    history = History(1, 16, cap)
    used: list[str] = []
    for path in sent:
        history.placed(0, 16 * len(path) + 1, hashes_of(path))
        for end in range(len(path), 0, -1):  # the start of a prefix is used last
            if path[:end] in used:
                used.remove(path[:end])
            used.append(path[:end])
        used = used[-cap:]
    for path in sent:
        known = next((end for end in range(len(path)) if path[: end + 1] not in used), len(path))
        assert history.look(16 * len(path) + 1, hashes_of(path))[0].hit == 16 * known
