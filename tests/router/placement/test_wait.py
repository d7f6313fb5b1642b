"""Admission by predicted wait: refused where every engine would let a request wait too long, else never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.status import Fleet, ModelCard
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.openai.errors import predicted_wait
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.placement.candidate import Candidate, PolicySettings
from kvatlas.router.placement.decide import Planner
from kvatlas.router.placement.engine import Accounts, Engine, PeerSnapshot
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.saturation import SaturationGate
from kvatlas.router.placement.wait_limit import late_first_token, long_wait, predicted_wait_s
from kvatlas.router.prompts.reader import PromptReader
from tests.router.placement.candidates import make_candidate
from tests.support.examples import examples

HIGH, NORMAL, LOW = 0, 1, 2
seconds = st.floats(0, 1e9)
targets = st.floats(0.001, 1e6)
engines = st.builds(
    make_candidate,
    st.just("e"),
    queue_s=seconds,
    room_s=seconds,
    running=st.integers(0, 2),
    waiting=st.integers(0, 2),
    prefill_s_per_token=st.floats(1e-6, 1.0),
)


class AsCandidates:
    """Engines that predict what their candidates have."""

    def wait_s(self, candidate: Candidate, rank_s: float) -> float:
        requests = candidate.running or candidate.waiting
        return max(candidate.queue_s, candidate.room_s if requests else 0.0)


def wait_s(fleet: list[Candidate]) -> float:
    return predicted_wait_s(fleet, [AsCandidates()] * len(fleet))


@settings(max_examples=examples(300))
@given(st.lists(engines, min_size=1, max_size=6), targets)
def test_refused_exactly_where_every_engine_exceeds_the_target(
    fleet: list[Candidate], target_s: float
) -> None:
    each = [wait_s([one]) for one in fleet]
    long = long_wait(wait_s(fleet), target_s)
    assert (long is not None) == all(one_s > target_s for one_s in each)
    if long is not None:
        assert long.wait_s == min(each)
        excess_s = long.wait_s - long.target_s
        assert excess_s > 0
        assert long_wait(long.wait_s - excess_s * 1.000001, target_s) is None
        headers = dict(predicted_wait(long.wait_s, long.target_s).headers)
        assert excess_s - 1e-6 <= int(headers[b"retry-after"]) or headers[b"retry-after"] == b"600"
        assert 1 <= int(headers[b"retry-after"]) <= max(1.0, excess_s + 1)


@settings(max_examples=examples(200))
@given(st.lists(engines, min_size=1, max_size=5), engines, targets)
def test_another_engine_never_makes_a_refusal(
    fleet: list[Candidate], more: Candidate, target_s: float
) -> None:
    if long_wait(wait_s(fleet), target_s) is None:
        assert long_wait(wait_s([*fleet, more]), target_s) is None


@given(st.floats(0, 1e9), st.floats(1e-6, 1.0), targets)
def test_an_idle_engine_takes_every_prompt(room_s: float, rate: float, target_s: float) -> None:
    idle = make_candidate("e", room_s=room_s, prefill_s_per_token=rate)
    assert long_wait(wait_s([idle]), target_s) is None


def test_pages_count_where_they_take_longer_than_the_prompts_ahead() -> None:
    assert wait_s([make_candidate("e", queue_s=1.0, room_s=4.0, running=1)]) == 4.0
    assert wait_s([make_candidate("e", queue_s=5.0, room_s=4.0, waiting=1)]) == 5.0


def test_without_a_target_nothing_is_refused_and_a_wait_without_end_can_be_answered() -> None:
    assert long_wait(float("inf"), None) is None
    assert dict(predicted_wait(float("inf"), 1.0).headers)[b"retry-after"] == b"600"


def test_a_class_has_its_own_target_or_that_of_all() -> None:
    for kind in (QueueSettings, TenantRules):
        given_all = kind(wait_target_s=3.0, wait_target_low_s=1.0)
        assert [given_all.wait_target(one) for one in (HIGH, NORMAL, LOW)] == [3.0, 3.0, 1.0]
        assert [kind(wait_target_low_s=1.0).wait_target(one) for one in (HIGH, NORMAL, LOW)] == [
            None,
            None,
            1.0,
        ]
        assert kind(wait_target_high_s=9.0).has_wait_targets
        assert not kind().has_wait_targets


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_target_of_nothing_is_an_error_that_names_it(value: float) -> None:
    with pytest.raises(ValueError, match="wait_target_low_s"):
        QueueSettings(wait_target_low_s=value)


def test_a_prompt_too_long_for_its_target_is_refused_only_where_it_waits() -> None:
    assert late_first_token(4.0, 0.0, 1.0) is None, "an idle engine takes it"
    assert late_first_token(0.9, 0.5, 1.0) is None, "it makes it"
    refused = late_first_token(1.5, 0.7, 1.0)
    assert refused is not None
    assert refused.target_s == pytest.approx(0.2)
    assert refused.wait_s - refused.target_s == pytest.approx(0.5), "as late as it would be"
    hopeless = late_first_token(4.0, 0.5, 1.0)
    assert hopeless is not None
    assert hopeless.wait_s - hopeless.target_s == pytest.approx(0.5), "until the engine is idle"


def test_refusals_follow_the_present_errors() -> None:
    """A first token is late by chance more than early: a part of the margin is expected."""
    assert late_first_token(0.9, 0.5, 1.0, 0.4) is None
    refused = late_first_token(0.9, 0.5, 1.0, 2.0)
    assert refused is not None
    assert refused.target_s == pytest.approx(0.2)


async def test_other_routers_load_keeps_an_engine_saturated_while_it_is_fresh() -> None:
    """A decision hands the load of the others to the queue, which counts it for a second."""
    now = [100.0]
    accounts = Accounts(lambda: now[0])
    fleet: Fleet[Engine] = Fleet(
        [EngineAddress("http://e:1")], lambda address, *, fleet_changed: Engine(address, accounts)
    )
    (engine,) = fleet
    engine.models, engine.up = (ModelCard("m"),), True
    loads = {engine.engine_id: OthersLoad(running=1, tokens=1_000_000)}
    planner = Planner(
        fleet=fleet,
        scopes=ModelIndexes(lambda model: ModelFacts()),
        reader=cast("PromptReader", SimpleNamespace(read=AsyncMock(return_value=None))),
        accounts=accounts,
        settings=PolicySettings(),
        expose_decision=False,
        peer_state=lambda: PeerSnapshot(load=loads),
        queue=QueueSettings(saturation_s=1.0),
    )
    gate = planner.gate
    assert gate is not None
    assert gate._look().gap_s(("m", None, 0.0)) < 0, "it has room"
    await planner.explain(InboundRequest("POST", "/v1/chat/completions", b"", [], b"{}", "m"))
    assert gate._look().gap_s(("m", None, 0.0)) > 10.0
    now[0] += 1.1
    assert gate._look().gap_s(("m", None, 0.0)) < 0, "older statements are not believed"


def queued_fleet(now: list[float], *lengths: int) -> tuple[Fleet[Engine], SaturationGate]:
    """An engine of model ``m`` for each context length, and their queue."""
    accounts = Accounts(lambda: now[0])
    fleet: Fleet[Engine] = Fleet(
        [EngineAddress(f"http://e{at}:1") for at in range(len(lengths))],
        lambda address, *, fleet_changed: Engine(address, accounts, fleet_changed=fleet_changed),
    )
    for engine, length in zip(fleet, lengths, strict=True):
        engine.models, engine.up = (ModelCard("m", max_model_len=length),), True
    return fleet, SaturationGate(QueueSettings(saturation_s=1.0), fleet, accounts)


def test_a_prompt_waits_for_an_engine_with_room_for_its_length() -> None:
    """An idle engine that is too short for it does not release it to the saturated long one."""
    now = [100.0]
    fleet, gate = queued_fleet(now, 8_000, 128_000)
    short, long = fleet
    gate.others({long.engine_id: OthersLoad(running=1, tokens=1_000_000)})
    look = gate._look()
    assert gate._context_tokens("m", [short, long]) == 0.0
    assert gate._context_tokens("m", [long]) == 128_000
    assert look.gap_s(("m", None, 0.0)) < 0
    assert look.gap_s(("m", None, 128_000.0)) > 10.0
    assert look.gap_s(("m", None, 0.0)) < 0, "one list's answer is not another's"


def test_a_queue_whose_engines_all_left_lets_everything_go() -> None:
    fleet, gate = queued_fleet([100.0], 8_000, 8_000)
    assert gate._look().gap_s(("m", None, 0.0)) < 0
    fleet.assign(DesiredFleet(()))
    assert gate._look().gap_s(("m", None, 0.0)) == 0.0
