"""Which two engines, or which one: the least cost wins, on any fleet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import Candidate, PolicySettings
from kvatlas.router.placement.cost import Choice, choose, score
from kvatlas.router.placement.pair_plan import PairPlan, Side, fits, plan
from tests.router.placement.candidates import make_candidate

POLICY = PolicySettings()
PD = PdSettings()
TOKENS = 8000
"""A second of prefill at the rate that candidates have by default."""


def side(name: str, *, version: str | None = "0.32.0", lacks: int | None = None, **fields: Any) -> Side:
    candidate = make_candidate(name, **fields)
    return Side(candidate, version, TOKENS - candidate.hit.soon_tokens if lacks is None else lacks)


def planned(
    decode: Sequence[Side], prefill: Sequence[Side], pd: PdSettings = PD, left_s: float = math.inf
) -> PairPlan:
    def pick(among: Sequence[Candidate]) -> Choice:
        return choose(among, TOKENS, POLICY, prompt_key=7)

    return plan(decode, prefill, TOKENS, 7, pick=pick, policy=POLICY, pd=pd, left_s=left_s)


def partner(found: PairPlan) -> str | None:
    return None if found.partner is None else found.partner.choice.engine_id


def test_an_idle_decode_engine_computes_for_itself() -> None:
    found = planned([side("d")], [side("p")])
    assert (partner(found), found.why) == (None, "local")


def test_sequences_that_would_be_held_up_send_the_prompt_elsewhere() -> None:
    found = planned([side("d", running=4)], [side("p")])
    assert (partner(found), found.why) == ("p", "")
    assert found.remote_s is not None
    assert found.remote_s < found.local_s


def test_sequences_at_the_prefill_engine_are_held_up_too() -> None:
    """One that does both decodes as well: where more of them run there, the prompt stays."""
    decode = [side("d", running=2)]
    idle, held_up = (planned(decode, [side("p", running=count)]) for count in (0, 3))
    assert (partner(idle), partner(held_up)) == ("p", None)
    assert idle.remote_s is not None
    assert held_up.remote_s is not None
    prefill_s = held_up.cost.prefill_s
    # The policy chooses the prefill engine by its own cost.
    prices = 3 * POLICY.delay - POLICY.eviction_premium
    assert held_up.remote_s - idle.remote_s == pytest.approx(
        (3 * PD.decode_delay_weight + prices) * prefill_s
    )


def test_answers_count_in_the_weight_and_prompts_that_wait_in_the_price_of_delays() -> None:
    pd = msgspec.structs.replace(PD, decode_delay_weight=2.0)
    for running in (0, 1, 9):
        plain, waiting = (
            planned([side("d", running=running, waiting=count), side("e")], [], pd) for count in (0, 3)
        )
        only = planned([side("d", running=running)], [], pd)
        prefill_s = only.cost.prefill_s
        assert only.local_s == pytest.approx((1 + POLICY.eviction_premium + 2 * running) * prefill_s)
        assert (plain.decode, waiting.decode) == (1, 1) if running else (0, 1)
    three = planned([side("d", running=5, waiting=3)], [], pd)
    # In the mean of the fleet, and at the engine itself.
    assert three.local_s == pytest.approx((1 + 2 * 3 * POLICY.delay + 2 * 5) * three.cost.prefill_s)


def test_without_a_weight_running_sequences_do_not_count() -> None:
    pd = msgspec.structs.replace(PD, decode_delay_weight=0.0)
    assert partner(planned([side("d", running=4)], [side("p")], pd)) is None


def test_a_hit_at_the_prefill_engine_is_worth_a_transfer() -> None:
    assert partner(planned([side("d")], [side("p", hit_tokens=7000, shared_prefix_tokens=7000)])) == "p"


def test_a_queue_at_the_prefill_engine_is_not() -> None:
    found = planned([side("d", running=1)], [side("p", queue_s=5.0)])
    assert (partner(found), found.why) == (None, "local")


def test_below_the_floor_nothing_is_sent() -> None:
    held = {"hit_tokens": TOKENS - 200, "shared_prefix_tokens": TOKENS - 200}
    found = planned([side("d", running=50, **held)], [side("p")])
    assert (partner(found), found.why, found.remote_s) == (None, "short", None)


@pytest.mark.parametrize(("mine", "theirs"), [("0.32.0", "0.33.0"), (None, "0.32.0"), (None, None)])
def test_engines_of_other_or_unknown_versions_are_not_paired(mine: str | None, theirs: str | None) -> None:
    decode, prefill = [side("d", version=mine, running=9)], [side("p", version=theirs)]
    assert planned(decode, prefill).why == "version"
    assert partner(planned(decode, prefill, msgspec.structs.replace(PD, mix_versions=True))) == "p"


def test_of_two_versions_each_finds_its_own() -> None:
    decode = [side("d32", running=9), side("d33", version="0.33.0", running=8)]
    found = planned(decode, [side("p32", queue_s=9.0), side("p33", version="0.33.0")])
    assert (found.decode, partner(found)) == (1, "p33")


def test_an_engine_for_both_is_not_paired_with_itself() -> None:
    one, other = side("a", running=9), side("b", running=9, queue_s=0.5)
    found = planned([one, other], [one, other])
    assert partner(found) in {"a", "b", None}
    assert found.partner is None or partner(found) != ("a", "b")[found.decode]


def test_a_plan_in_time_goes_before_a_cheaper_one_that_is_late() -> None:
    """The hit at the prefill engine makes the pair cheap, the transfer makes it late."""
    pd = msgspec.structs.replace(PD, transfer_s_per_token=1.1 / TOKENS)
    decode, prefill = [side("d", running=3)], [side("p", hit_tokens=7000, shared_prefix_tokens=7000)]
    free, in_time, late = (planned(decode, prefill, pd, left_s=left_s) for left_s in (math.inf, 1.1, 0.5))
    assert partner(free) == "p"
    assert free.first_token_s == pytest.approx(0.125 + pd.leg_overhead_s + 1.1)
    assert (partner(in_time), in_time.why) == (None, "local")
    assert in_time.first_token_s == pytest.approx(1.0)
    assert partner(late) == "p", "neither is in time: the cost decides"


def test_a_prefill_engine_predicted_to_be_late_is_skipped_while_another_one_is_not() -> None:
    decode = [side("d", running=9)]
    prefill = [
        msgspec.structs.replace(side("near", hit_tokens=7900, shared_prefix_tokens=7900), margin_s=2.0),
        side("far", hit_tokens=1000, shared_prefix_tokens=1000),
    ]
    pd = msgspec.structs.replace(PD, transfer_s_per_token=0.0)
    found = [partner(planned(decode, prefill, pd, left_s)) for left_s in (math.inf, 2.03, 2.015, 1.5, 0.5)]
    assert found == ["near", "near", "far", "far", "near"], "0.0125 s of prefill, and the leg's own 0.01 s"


def test_a_plan_that_only_the_margin_makes_late_goes_before_a_cheaper_hopeless_one() -> None:
    pd = msgspec.structs.replace(PD, transfer_s_per_token=1.1 / TOKENS)
    decode = [msgspec.structs.replace(side("d", running=3), margin_s=9.0)]
    prefill = [side("p", hit_tokens=7000, shared_prefix_tokens=7000)]
    found = [planned(decode, prefill, pd, left_s=left_s) for left_s in (1.1, 0.5)]
    assert [partner(one) for one in found] == [None, "p"]
    assert [(one.first_token_s, one.margin_s) for one in found] == [
        (pytest.approx(1.0), 9.0),
        (pytest.approx(0.125 + pd.leg_overhead_s + 1.1), 9.0),
    ]


_SIDES = st.builds(
    lambda hit, queue_s, running, version, lacks: (hit, queue_s, running, version, lacks),
    st.integers(0, TOKENS - 1),
    st.floats(0, 5),
    st.integers(0, 20),
    st.sampled_from(["0.31.0", "0.32.0", None]),
    st.integers(0, TOKENS),
)


def _made(prefix: str, drawn: list[tuple[int, float, int, str | None, int]]) -> list[Side]:
    return [
        side(
            f"{prefix}{i}",
            hit_tokens=hit,
            shared_prefix_tokens=hit,
            queue_s=queue_s,
            running=running,
            version=version,
            lacks=lacks,
        )
        for i, (hit, queue_s, running, version, lacks) in enumerate(drawn)
    ]


@given(st.lists(_SIDES, min_size=1, max_size=4), st.lists(_SIDES, max_size=4))
def test_no_pair_and_no_engine_alone_is_cheaper_than_what_is_chosen(
    decode_drawn: list[Any], prefill_drawn: list[Any]
) -> None:
    """Against every engine alone, and every decode engine with the prefill engine that the policy takes."""
    decode, prefill = _made("d", decode_drawn), _made("p", prefill_drawn)
    found = planned(decode, prefill)
    scored = score([one.candidate for one in decode], TOKENS, POLICY, answers=False)

    def delay_s(one: Side, prefill_s: float) -> float:
        return PD.decode_delay_weight * one.candidate.running * prefill_s

    costs = [scored.cost(at) for at in range(len(decode))]
    alone = [cost.total_s + delay_s(one, cost.prefill_s) for one, cost in zip(decode, costs, strict=True)]
    pairs = []
    for one, cost in zip(decode, costs, strict=True):
        others = [other for other in prefill if fits(one.version, other.version, PD)]
        if one.lacks < PD.min_remote_tokens or not others:
            continue
        choice = choose([other.candidate for other in others], TOKENS, POLICY, prompt_key=7)
        there = choice.cost.total_s + delay_s(others[choice.index], choice.cost.prefill_s)
        transfer_s = PD.leg_overhead_s + PD.transfer_s_per_token * one.lacks
        pairs.append(there + transfer_s + cost.queue_s + cost.decode_s)
    assert found.local_s == pytest.approx(min(alone))
    assert found.remote_s == (pytest.approx(min(pairs)) if pairs else None)
    if found.partner is None:
        assert found.remote_s is None or found.local_s <= found.remote_s
        assert (found.remote_s is None) == (not pairs)
    else:
        assert found.remote_s is not None
        assert found.remote_s < found.local_s
        assert found.partner.sides[found.partner.choice.index].version == decode[found.decode].version
