"""Other routers' formulas on cases worked out by hand, and what such a router sees of a simulated fleet."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import peers as peer_router
from benchmarks.peers import (
    COMPARED,
    FORMULAS,
    PEERS,
    FirstTokenRegression,
    History,
    PeerRouter,
    PeerView,
    cache_aware,
    dynamo,
    llm_d,
    vllm_router,
)
from kvatlas.publisher.events import BlockHash
from kvatlas.router.simulation.other_router import PrefixHit
from kvatlas.router.simulation.router_view import NOTHING
from kvatlas.router.simulation.variants import variants_of
from tests.router.simulation.support import FULL, fleet_run, request


def test_dynamo_adds_blocks_to_prefill_and_blocks_to_decode() -> None:
    views = [
        PeerView(prefix_tokens=640, prefilling_tokens=0, active_blocks=26),  # 360/64 + 26 = 31.6
        PeerView(prefix_tokens=0, prefilling_tokens=0, active_blocks=16),  # 1000/64 + 16 = 31.6
        PeerView(prefix_tokens=640, prefilling_tokens=320, active_blocks=20),  # 680/64 + 20 = 30.6
    ]
    assert dynamo(views, 1000, 64) == [2]
    assert dynamo([PeerView(prefix_tokens=1024), PeerView(active_blocks=1)], 1000, 64) == [0], "no credit"
    assert dynamo([PeerView(), PeerView()], 1000, 64) == [0, 1]


def test_llm_d_weighs_prefix_usage_and_queue() -> None:
    views = [
        PeerView(prefix_tokens=500, usage=0.9, waiting=4),  # 1.5 + 0.2 + 0 + 1 = 2.7
        PeerView(prefix_tokens=0, usage=0.5, waiting=2),  # 0 + 1.0 + 1 + 1 = 3.0
        PeerView(prefix_tokens=100, usage=0.5, waiting=0),  # 0.3 + 1.0 + 2 + 1 = 4.3
    ]
    assert llm_d(views, 1000, 64) == [2]
    assert llm_d(views[:2], 1000, 64) == [1], "0.5 + 1 against 1.5 + 0.2 + 1, and 2 for the shorter queue"


def test_llm_d_sends_cold_prompts_in_turn() -> None:
    never, long_ago, lately = PeerView(), PeerView(cold_turn=3), PeerView(cold_turn=9)
    assert llm_d([lately, never, long_ago], 100, 64) == [1]
    assert llm_d([lately, long_ago], 100, 64) == [1]
    assert llm_d([PeerView(prefix_tokens=64, cold_turn=9), long_ago], 100, 64) == [0], "only cold ones"
    assert llm_d([lately], 100, 64) == [0]


def test_smg_takes_the_least_loaded_holder_of_a_deep_match() -> None:
    views = [
        PeerView(prefix_tokens=600, requests=5),
        PeerView(prefix_tokens=600, requests=3),
        PeerView(prefix_tokens=500, requests=0),
    ]
    assert cache_aware(views, 1000, 64) == [1]
    assert cache_aware(views, 1200, 64) == [2], "half is not more than half: fewest requests"
    busy = [PeerView(prefix_tokens=600, requests=60), PeerView(requests=1), PeerView(requests=1)]
    assert cache_aware(busy, 1000, 64) == [1, 2], "60 > 20.7 + 32"
    even = [PeerView(prefix_tokens=600, requests=50), PeerView(requests=20), PeerView(requests=20)]
    assert cache_aware(even, 1000, 64) == [0], "50 < 30 + 32"


def test_vllm_router_looks_at_load_only_where_it_is_very_uneven() -> None:
    holder = PeerView(prefix_tokens=400, requests=64, tree_tokens=900)
    assert vllm_router([holder, PeerView(tree_tokens=10)], 1000, 64) == [0], "not more than 64 apart"
    hot = PeerView(prefix_tokens=400, requests=65, tree_tokens=900)
    assert vllm_router([hot, PeerView(tree_tokens=10)], 1000, 64) == [1]
    shallow = PeerView(prefix_tokens=300, tree_tokens=900)
    smallest = PeerView(tree_tokens=10, requests=9)
    assert vllm_router([shallow, smallest], 1000, 64) == [1], "the smallest history, whatever its load"


@pytest.mark.parametrize("name", FORMULAS)
def test_a_router_forgets_what_has_ended(name: str) -> None:
    router = PeerRouter(name, 2, 64, random.Random(1))
    hashes = [BlockHash(number) for number in range(5)]
    seen = [NOTHING, NOTHING]
    places = [router.place(index, 330, hashes, seen, 0.0)[0] for index in range(4)]
    for index in range(4):
        router.first_token(index)
        router.ended(index)
    assert not router._sent
    for engine in router._engines:
        assert (engine.requests, engine.prefilling_tokens, len(engine.active)) == (0, 0, 0)
    if name in peer_router.TREES:
        assert len(set(places)) == 1, "its own history says that it is there"
        assert router.place(9, 330, hashes, seen, 0.0) == (places[0], 320)
    else:
        assert router.place(9, 330, hashes, seen, 0.0)[1] == 0, "no event has said that anything is cached"


def test_dynamo_counts_shared_blocks_of_one_engine_once() -> None:
    router = PeerRouter("dynamo", 2, 64, random.Random(1))
    hashes = [BlockHash(number) for number in range(5)]
    first, _ = router.place(0, 320, hashes, [NOTHING, NOTHING], 0.0)
    router.first_token(0)
    views = router._views([0, 0], hashes)
    assert views[first].active_blocks == views[1 - first].active_blocks == 5
    assert views[first].prefilling_tokens == 0


def test_llm_d_sees_prompts_in_flight_and_dynamo_does_not() -> None:
    hashes = [BlockHash(number) for number in range(5)]
    for name, cached in (("llm-d", 320), ("dynamo", 0)):
        router = PeerRouter(name, 2, 64, random.Random(1))
        place, _ = router.place(0, 330, hashes, [NOTHING, NOTHING], 0.0)
        again, believed = router.place(1, 330, hashes, [NOTHING, NOTHING], 0.0)
        assert (again == place, believed) == (name == "llm-d", cached)


def test_events_tell_and_gauges_are_as_of_the_last_poll() -> None:
    router = PeerRouter("llm-d", 2, 64, random.Random(1))
    hashes = [BlockHash(number) for number in range(5)]
    router.polled(1, waiting=7, usage=0.5)
    assert [view.waiting for view in router._views([0, 0], hashes)] == [0, 7]
    place, cached = router.place(0, 330, hashes, [NOTHING, PrefixHit(0, 256)], 0.0)
    assert (place, cached) == (0, 0), "3 x 256/330 + 1 + 1 against 2 + 2 + 1"


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
