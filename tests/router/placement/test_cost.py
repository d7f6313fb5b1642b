"""The cost model and the choice: parts, ties, probes, and how far queues drift apart."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.placement.candidate import (
    Candidate,
    Cost,
    PolicySettings,
    placement_request,
)
from kvatlas.router.placement.cost import (
    DELAY_MAX_S,
    PROBE_COST_MAX_S,
    TIE_S,
    choose,
    score,
)
from tests.router.placement.candidates import changed, make_candidate
from tests.support.examples import examples

DEFAULTS = PolicySettings()
RATE = 1 / 8000


def fleet(count: int, **fields: object) -> list[Candidate]:
    return [
        changed(make_candidate(f"http://engine-{i}:8000", prefill_s_per_token=RATE), **fields)
        for i in range(count)
    ]


def cost(candidate: Candidate, prompt_tokens: int, settings: PolicySettings) -> Cost:
    return score((candidate,), prompt_tokens, settings).cost(0)


def test_cost_is_the_stated_formula() -> None:
    candidate = make_candidate(
        "e",
        hit_tokens=1000,
        shared_prefix_tokens=5000,
        cpu_tokens=2000,
        queue_s=0.7,
        running=10,
        prefill_s_per_token=0.001,
        decode_interference_s=0.002,
    )
    knobs = PolicySettings(
        beta=0.5, eviction_premium=0.1, delay=0.025, load_s_per_token=0.0001, sequence_s=0.0
    )
    parts = cost(candidate, 8000, knobs)
    assert parts.queue_s == 0.7
    assert parts.prefill_s == pytest.approx(5.0)  # 8000 - 1000 - 2000 tokens
    assert parts.load_s == pytest.approx(0.2)
    assert parts.decode_s == pytest.approx(0.02)
    assert parts.credit_s == pytest.approx(1.0)  # half of 2000 tokens
    assert parts.delay_s == pytest.approx(1.0)  # of 5.0 - 1.0, times 0.025, times 10 requests
    assert parts.total_s == pytest.approx(0.7 + 5.0 + 0.2 + 0.02 - 1.0 + 1.0)
    assert parts.uncached_tokens == 5000


def test_recomputed_tokens_are_no_gain() -> None:
    """Bounded replay: of a hit, a window is computed again."""
    plain = make_candidate("e", hit_tokens=1000, shared_prefix_tokens=3000, prefill_s_per_token=0.001)
    replays = make_candidate("e", hit_tokens=1000, shared_prefix_tokens=3000, prefill_s_per_token=0.001)
    replays.hit.replay_tokens = 128
    without, with_replay = (cost(candidate, 8000, DEFAULTS) for candidate in (plain, replays))
    assert with_replay.uncached_tokens == without.uncached_tokens + 128
    assert with_replay.prefill_s == pytest.approx(without.prefill_s + 0.128)
    assert with_replay.credit_s == pytest.approx(without.credit_s)
    assert with_replay.total_s > without.total_s


def test_recent_work_beyond_the_mean_has_a_price() -> None:
    """Two engines without a queue that hold as much: the one that got less work recently."""
    busy, rested = fleet(2)
    busy.recent_s, rested.recent_s = 9.0, 3.0
    choice = choose([busy, rested], 1000, PolicySettings(spread=0.5))
    assert choice.index == 1
    assert [c.spread_s for c in choice.costs] == [pytest.approx(1.5), 0.0]
    assert choice.costs[0].first_token_s == choice.costs[1].first_token_s
    assert choose([busy, rested], 1000, PolicySettings(spread=0.0)).reason == "tie"


def test_waiting_for_pages_counts_in_part_and_is_predicted_whole() -> None:
    full, empty = fleet(2)
    full.room_s, full.waiting = 10.0, 4
    knobs = PolicySettings(room_share=0.3, eviction_premium=0.0, delay=0.0)
    parts = cost(full, 8000, knobs)
    assert (parts.queue_s, parts.wait_s) == (3.0, 10.0)
    assert parts.first_token_s == pytest.approx(11.0)
    assert parts.total_s == pytest.approx(3.0 + 1.0)
    assert choose([full, empty], 8000, knobs).index == 1
    full.queue_s = 12.0
    assert (cost(full, 8000, knobs).queue_s, cost(full, 8000, knobs).wait_s) == (12.0, 12.0)


def test_beliefs_beyond_the_prompt_are_clamped_to_all_but_its_last_token() -> None:
    parts = cost(make_candidate("e", hit_tokens=500, shared_prefix_tokens=900, cpu_tokens=50), 100, DEFAULTS)
    assert parts.uncached_tokens == 1
    assert parts.credit_s == 0
    assert parts.load_s == 0
    low_shared_prefix = cost(make_candidate("e", hit_tokens=50, shared_prefix_tokens=10), 100, DEFAULTS)
    assert low_shared_prefix.credit_s == 0
    assert low_shared_prefix.shared_prefix_tokens == 50


def test_the_exact_hit_wins_on_equal_engines() -> None:
    engines = fleet(4)
    engines[2] = changed(engines[2], hit_tokens=4096, shared_prefix_tokens=4096)
    choice = choose(engines, 8192, DEFAULTS)
    assert choice.index == 2
    assert choice.reason == "cheapest"
    assert choice.uncached_tokens == 4096
    assert [c.engine_id for c in choice.costs] == [e.engine_id for e in engines]


def test_shared_prefix_draws_siblings_together_and_beta_zero_does_not() -> None:
    shared_prefix = make_candidate("shared_prefix", shared_prefix_tokens=6000, queue_s=0.3)
    other = make_candidate("other")
    assert choose([shared_prefix, other], 8000, DEFAULTS).engine_id == "shared_prefix"
    assert choose([shared_prefix, other], 8000, PolicySettings(beta=0.0)).engine_id == "other"
    # whatever draws it there, the account is charged with what the engine has to compute
    assert choose([shared_prefix, other], 8000, DEFAULTS).uncached_tokens == 8000


def test_computing_costs_what_it_delays() -> None:
    """The mean engine's requests, prompts that wait there, and its answers where prompts wait for pages."""
    engines = fleet(4)
    engines[1] = changed(engines[1], running=6, waiting=2)
    knobs = PolicySettings(delay=0.5)

    def prices(*engines: Candidate) -> list[float]:
        costs = choose(engines, 8000, knobs).costs
        return [one.delay_s for one in costs]

    assert prices(*engines) == pytest.approx([1.0, 2.0, 1.0, 1.0])
    engines[1].room_s = 9.0
    assert prices(*engines) == pytest.approx([1.0, 5.0, 1.0, 1.0])
    engines[1].queue_s = 10.0  # computing is what they wait for
    assert prices(*engines) == pytest.approx([1.0, 2.0, 1.0, 1.0])
    assert prices(*engines[2:]) == [0.75, 0.75]  # of an idle fleet: that of the pages
    hit = changed(engines[0], hit_tokens=6000, shared_prefix_tokens=7000)  # 2000 tokens, less the credit
    assert prices(hit, *engines[1:])[0] == pytest.approx((2000 - 0.25 * 1000) * RATE)
    engines[3].waiting = 400  # no prompt is put off for longer
    assert prices(*engines) == pytest.approx([51.0, 52.0, 51.0, DELAY_MAX_S])


def test_an_idle_fleet_waits_for_a_holder_as_long_as_a_copy_takes_and_costs_others() -> None:
    """Beyond its prefill and the price of its pages it leaves, and not before."""
    holder = make_candidate("holder", hit_tokens=7600, shared_prefix_tokens=7600, running=1, queue_s=1.6)
    assert choose([holder, make_candidate("idle")], 8000, DEFAULTS).engine_id == "holder"
    longer = changed(holder, queue_s=1.7)
    assert choose([longer, make_candidate("idle")], 8000, DEFAULTS).engine_id == "idle"


def test_a_prompt_is_put_off_for_others_by_a_minute_at_most() -> None:
    """However long it is, and however many wait."""
    for tokens in (800_000, 8_000_000):
        long_s = tokens * RATE
        holder = make_candidate("holder", hit_tokens=tokens - 1, shared_prefix_tokens=tokens - 1, waiting=99)
        other = make_candidate("other", waiting=99)
        engines = [changed(holder, queue_s=long_s + DELAY_MAX_S - 0.1), other]
        assert choose(engines, tokens, DEFAULTS).engine_id == "holder"
        engines = [changed(holder, queue_s=long_s + DELAY_MAX_S + 0.1), other]
        assert choose(engines, tokens, DEFAULTS).engine_id == "other"


@pytest.mark.parametrize("running", [0, 4, 8])
def test_a_cached_prefix_is_worth_its_prefill_and_what_that_delays_and_no_more(running: int) -> None:
    knobs = PolicySettings(eviction_premium=0.0, delay=0.25)
    worth_s = (1 + 0.25 * running) * 4000 * RATE
    cached = make_candidate("cached", hit_tokens=4000, shared_prefix_tokens=4000, queue_s=worth_s + 0.1)
    cached.running = running
    idle = make_candidate("idle", running=running)
    assert choose([cached, idle], 8000, knobs).engine_id == "idle"
    shorter = changed(cached, queue_s=worth_s - 0.1)
    assert choose([shorter, idle], 8000, knobs).engine_id == "cached"


def test_the_account_is_charged_without_the_delay() -> None:
    """Others pay it, and later; the queue gets what this prompt computes."""
    engines = fleet(2, running=4)
    dear = choose(engines, 8000, PolicySettings(delay=2.0))
    plain = choose(engines, 8000, PolicySettings(delay=0.0))
    assert dear.uncached_tokens == plain.uncached_tokens
    assert dear.cost.prefill_s == pytest.approx(8000 * RATE)


def test_offloaded_blocks_beat_computing_and_lose_to_gpu_blocks() -> None:
    gpu = make_candidate("gpu", hit_tokens=4000, shared_prefix_tokens=4000)
    cpu = make_candidate("cpu", cpu_tokens=4000, shared_prefix_tokens=4000)
    none = make_candidate("none")
    slow = PolicySettings(load_s_per_token=RATE / 4)
    assert choose([none, cpu], 8000, slow).engine_id == "cpu"
    assert choose([none, cpu, gpu], 8000, slow).engine_id == "gpu"


def test_every_medium_costs_its_own_time() -> None:
    knobs = PolicySettings(load_s_per_token=1e-6, storage_load_s_per_token=1e-5)
    both = make_candidate("e", hit_tokens=1000, cpu_tokens=2000, storage_tokens=3000)
    parts = cost(both, 8000, knobs)
    assert parts.uncached_tokens == 2000
    assert parts.load_s == pytest.approx(2000 * 1e-6 + 3000 * 1e-5)
    replace = changed
    coming = cost(replace(both, coming_tokens=2500), 8000, knobs)  # host memory gives 500 of what is left
    assert coming.load_s == pytest.approx(500 * 1e-6 + 3000 * 1e-5)
    assert cost(replace(both, coming_tokens=4000), 8000, knobs).load_s == pytest.approx(2000 * 1e-5)
    short = cost(both, 2501, knobs)  # the last token is computed, whatever there is
    assert (short.uncached_tokens, short.load_s) == (1, pytest.approx(1500 * 1e-6))


def test_slow_storage_is_worth_less_than_host_memory() -> None:
    cpu = make_candidate("cpu", cpu_tokens=4000, shared_prefix_tokens=4000)
    storage = make_candidate("storage", storage_tokens=4000, shared_prefix_tokens=4000)
    none = make_candidate("none")
    assert choose([none, storage, cpu], 8000, DEFAULTS).engine_id == "cpu"
    assert choose([none, storage], 8000, DEFAULTS).engine_id == "storage"


def test_where_prompts_are_loaded_every_request_an_engine_has_costs_and_elsewhere_none_does() -> None:
    knobs = PolicySettings(sequence_s=0.05, delay=0.0)
    loads = make_candidate("loads", cpu_tokens=4000, shared_prefix_tokens=4000, running=3, waiting=1)
    computes = make_candidate("computes", running=2)
    free = PolicySettings(sequence_s=0.0, delay=0.0)
    for candidate, sequences in zip(choose([loads, computes], 8000, knobs).costs, (4, 2), strict=True):
        plain = cost(loads if sequences == 4 else computes, 8000, free)
        assert candidate.decode_s == pytest.approx(plain.decode_s + 0.05 * sequences)
        assert candidate.total_s == pytest.approx(plain.total_s + 0.05 * sequences)
    alone = choose([computes, make_candidate("idle")], 8000, knobs).costs[0]
    assert alone.decode_s == cost(computes, 8000, knobs).decode_s == 0.0
    crowded = changed(loads, running=40)
    assert choose([crowded, changed(loads, engine_id="free")], 8000, knobs).engine_id == "free"


def test_scarce_pages_have_a_price_whether_computed_or_loaded_and_only_beside_loads() -> None:
    knobs = PolicySettings(scarcity_premium=2.0)
    held = make_candidate("held", hit_tokens=6000, shared_prefix_tokens=6000, queue_s=1.0)
    loads = make_candidate("loads", cpu_tokens=6000, shared_prefix_tokens=6000)
    computes = make_candidate("computes")

    def charged(late_s: float, *candidates: Candidate) -> list[float]:
        late = [changed(each, late_s=late_s) for each in candidates]
        free = choose(late, 8000, PolicySettings(scarcity_premium=0.0)).costs
        dear = choose(late, 8000, knobs).costs
        more = [one.delay_s - other.delay_s for one, other in zip(dear, free, strict=True)]
        assert more == pytest.approx(
            [one.total_s - other.total_s for one, other in zip(dear, free, strict=True)]
        )
        return more

    rate = held.prefill_s_per_token
    for late_s, price in ((0.0, 0.0), (2.5, 1.0), (5.0, 2.0), (60.0, 2.0)):
        pages = [price * rate * tokens for tokens in (2000, 8000, 8000)]
        assert charged(late_s, held, loads, computes) == pytest.approx(pages)
    assert charged(60.0, held, computes) == [0.0, 0.0]
    both = [held, loads]
    assert choose(both, 8000, knobs).engine_id == "loads"
    assert choose([changed(each, late_s=5.0) for each in both], 8000, knobs).engine_id == "held"


def test_blocks_of_a_prompt_in_flight_are_neither_computed_nor_loaded_again() -> None:
    knobs = PolicySettings(load_s_per_token=0.0001)
    candidate = make_candidate("e", hit_tokens=1000, cpu_tokens=2000, coming_tokens=2500)
    parts = cost(candidate, 8000, knobs)
    assert parts.uncached_tokens == 5000
    assert parts.load_s == pytest.approx(500 * 0.0001)
    assert cost(changed(candidate, coming_tokens=7000), 8000, knobs).load_s == 0


def test_a_probe_does_not_wait_longer() -> None:
    due, other = make_candidate("due", queue_s=0.3, idle_s=60.0), make_candidate("other", queue_s=0.2)
    choice = choose([due, other], 1000, PolicySettings())
    assert (choice.engine_id, choice.reason) == ("other", "cheapest")
    choice = choose([changed(due, queue_s=0.2, prefill_s_per_token=2 * RATE), other], 1000, PolicySettings())
    assert (choice.engine_id, choice.reason) == ("due", "probe")


def test_cold_prompts_spread_evenly_and_repeat_themselves() -> None:
    engines = fleet(8)
    rng = random.Random(7)
    keys = [rng.getrandbits(64) for _ in range(4000)]
    placed = [choose(engines, 2000, DEFAULTS, prompt_key=key).engine_id for key in keys]
    counts = Counter(placed)
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * 500  # binomial: 5 sigma is 1.21
    assert min(counts.values()) > 0.8 * 500
    shuffled = rng.sample(engines, 8)
    assert placed == [choose(shuffled, 2000, DEFAULTS, prompt_key=key).engine_id for key in keys]


def test_an_engine_that_leaves_moves_only_its_own_cold_prompts() -> None:
    engines = fleet(8)
    for key in range(500):
        before = choose(engines, 2000, DEFAULTS, prompt_key=key)
        after = choose(engines[1:], 2000, DEFAULTS, prompt_key=key)
        assert before.index == 0 or after.engine_id == before.engine_id


def test_noise_of_learned_rates_does_not_draw_every_cold_prompt_to_one_engine() -> None:
    """Recent work makes up for it."""
    engines = [changed(e, prefill_s_per_token=RATE * (1 + 0.002 * i)) for i, e in enumerate(fleet(8))]
    chosen = Counter[int]()
    for key in range(80):
        choice = choose(engines, 4000, DEFAULTS, prompt_key=key)
        chosen[choice.index] += 1
        engines[choice.index].recent_s += choice.cost.prefill_s
    assert min(chosen.values()) >= 9


def test_equal_costs_go_to_the_longer_shared_prefix() -> None:
    credit_s = DEFAULTS.beta * (1 + DEFAULTS.eviction_premium) * 4000 * RATE
    with_shared_prefix = make_candidate("with", shared_prefix_tokens=4000, queue_s=credit_s)
    without = make_candidate("without")
    for key in range(20):
        choice = choose([without, with_shared_prefix], 8000, DEFAULTS, prompt_key=key)
        assert (choice.engine_id, choice.reason) == ("with", "tie")


def test_a_starved_engine_gets_the_next_cold_prompt_even_if_it_seems_slower() -> None:
    engines = fleet(4)
    slow = changed(engines[3], prefill_s_per_token=3 * RATE, idle_s=31.0)
    choice = choose([*engines[:3], slow], 2000, DEFAULTS)
    assert (choice.index, choice.reason) == (3, "probe")
    fresh = msgspec.structs.replace(slow, idle_s=29.0)
    assert choose([*engines[:3], fresh], 2000, DEFAULTS).index != 3


def test_a_probe_gives_up_no_saving_and_stays_within_its_price() -> None:
    slow = make_candidate("slow", prefill_s_per_token=3 * RATE, idle_s=1e9)
    warm = make_candidate("warm", hit_tokens=1000, shared_prefix_tokens=1000)
    assert choose([slow, warm], 2000, DEFAULTS).engine_id == "warm"
    cold = make_candidate("cold")
    assert choose([slow, cold], 20_000, DEFAULTS).engine_id == "cold"  # 5 s dearer


@pytest.mark.parametrize(("shared_tokens", "reason"), [(200, "probe"), (201, "cheapest")])
def test_a_prompt_is_cold_up_to_a_tenth_of_it(shared_tokens: int, reason: str) -> None:
    slow = make_candidate("slow", prefill_s_per_token=2 * RATE, idle_s=1e9)
    warm = make_candidate("warm", shared_prefix_tokens=shared_tokens)
    assert choose([slow, warm], 2000, DEFAULTS).reason == reason


def test_an_engine_loaded_by_others_is_not_probed() -> None:
    busy = make_candidate("busy", queue_s=0.9, idle_s=1e9)
    assert choose([busy, make_candidate("free")], 2000, DEFAULTS).engine_id == "free"


def test_a_prompt_of_unknown_length_costs_its_wait() -> None:
    engines = [make_candidate("busy", queue_s=0.9), make_candidate("free")]
    choice = choose(engines, 0, DEFAULTS)
    assert (choice.engine_id, choice.uncached_tokens) == ("free", 1)


def test_no_candidates_is_an_error_and_one_needs_no_cost() -> None:
    with pytest.raises(ValueError, match="no engine"):
        choose([], 100, DEFAULTS)
    assert choose(fleet(1, queue_s=100.0), 100, DEFAULTS).reason == "only"


@pytest.mark.parametrize(
    "bad",
    [
        {"eviction_premium": -0.1},
        {"eviction_premium": 5.0},
        {"delay": -0.1},
        {"delay": float("inf")},
        {"delay": float("nan")},
        {"beta": 1.5},
        {"beta": -0.1},
        {"bounded_load_factor": 1.0},
    ],
)
def test_settings_that_void_the_cost_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PolicySettings(**bad)


def test_placement_request_takes_its_keys_from_the_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement_request(100, [1, 2, 3]).prefix_key == 3
    monkeypatch.setattr("kvatlas.router.placement.candidate.PREFIX_BLOCKS", 2)
    keys = placement_request(100, [1, 2, 3])
    assert keys == placement_request(100, [9, 2, 3])
    assert placement_request(10, [], fallback_key=5).prompt_key == 5


def candidates_of(num: int) -> st.SearchStrategy[list[Candidate]]:
    one = st.builds(
        make_candidate,
        engine_id=st.uuids().map(str),
        hit_tokens=st.integers(0, 20_000),
        shared_prefix_tokens=st.integers(0, 20_000),
        cpu_tokens=st.integers(0, 5000),
        storage_tokens=st.integers(0, 5000),
        queue_s=st.floats(0, 50),
        running=st.integers(0, 200),
        waiting=st.integers(0, 50),
        room_s=st.sampled_from([0.0, 0.0, 20.0]),
        idle_s=st.floats(0, 100),
        prefill_s_per_token=st.floats(1e-5, 1e-3),
        decode_interference_s=st.floats(0, 0.01),
        late_s=st.floats(0, 10),
    )
    return st.lists(one, min_size=1, max_size=num, unique_by=lambda c: c.engine_id)


@settings(max_examples=examples(200))
@given(
    engines=candidates_of(8),
    prompt_tokens=st.integers(1, 20_000),
    delay=st.floats(0, 4),
    key=st.integers(0, 2**64 - 1),
)
def test_no_choice_is_dearer_than_a_tie_or_a_probe(
    engines: list[Candidate], prompt_tokens: int, delay: float, key: int
) -> None:
    knobs = PolicySettings(delay=delay)
    choice = choose(engines, prompt_tokens, knobs, prompt_key=key)
    cheapest = min(c.total_s for c in choice.costs)
    slack = PROBE_COST_MAX_S if choice.reason == "probe" else TIE_S
    assert choice.cost.total_s <= cheapest + slack + 1e-9
    for index, one in enumerate(choice.costs):
        parts_s = one.queue_s + one.prefill_s + one.load_s + one.decode_s - one.credit_s + one.delay_s
        assert choice.scored.totals[index] == pytest.approx(parts_s + one.spread_s)
    assert all(1 <= c.uncached_tokens <= prompt_tokens for c in choice.costs)
    assert choose(engines[::-1], prompt_tokens, knobs, prompt_key=key).engine_id == choice.engine_id


@settings(max_examples=examples(60))
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20_000),  # prompt tokens
            st.integers(0, 7),  # engine that holds a shared prefix of it
            st.floats(0, 1),  # share held
            st.floats(0, 1),  # share of that which is an exact hit
            st.floats(0, 0.5),  # seconds until it arrives
        ),
        max_size=120,
    ),
    delay=st.floats(0, 4),
    running=st.integers(0, 20),
)
def test_queues_never_drift_apart_by_more_than_a_prompt_is_worth(
    requests: list[tuple[int, int, float, float, float]], delay: float, running: int
) -> None:
    """Engines of one rate, whatever the prompts and whichever engine claims to hold them.

    A queue is lengthened only while the prompt saves as much there, that is at most its prefill and what this
    delays, and the prompt adds at most its prefill; draining brings queues together.
    """
    knobs = PolicySettings(delay=delay)
    longest = 20_000 * RATE
    bound = (1 + max(knobs.eviction_premium, delay * running)) * longest + TIE_S + longest
    queues = [0.0] * 8
    for prompt_tokens, holder, share, exact_share, wait_s in requests:
        queues = [max(0.0, queue - wait_s) for queue in queues]
        engines = [
            make_candidate(f"e{i}", queue_s=queue, running=running, prefill_s_per_token=RATE)
            for i, queue in enumerate(queues)
        ]
        shared_prefix = int(share * prompt_tokens)
        engines[holder] = changed(
            engines[holder], shared_prefix_tokens=shared_prefix, hit_tokens=int(shared_prefix * exact_share)
        )
        choice = choose(engines, prompt_tokens, knobs, prompt_key=prompt_tokens)
        queues[choice.index] += choice.uncached_tokens * RATE
        assert max(queues) - min(queues) <= bound + 1e-9


TIMES = st.floats(0, 30)


def test_tokens_that_are_computed_again_count_for_a_service_level() -> None:
    replayed = make_candidate("e", hit_tokens=7000, prefill_s_per_token=RATE)
    replayed.hit.replay_tokens = 128
    assert cost(replayed, 8000, DEFAULTS).first_token_s == pytest.approx(RATE * 1128)
