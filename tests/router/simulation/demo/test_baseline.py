"""The demo's round robin: the same chats on engines of a virtual clock."""

from __future__ import annotations

from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.simulation.demo.baseline import RoundRobinBaseline
from kvatlas.router.simulation.demo.load import ChatOutcome
from tests.support.waiting import run

SETTINGS = EngineSettings(prefill_s_per_token=0.001, decode_s_per_token=0.01)
LONG, SHORT = "a long story about a small engine " * 20, "a short one"


def asked(*texts_at: tuple[str, float]) -> RoundRobinBaseline:
    """Two engines that get these in turn, in the order of their times."""
    fleet = RoundRobinBaseline(2, SETTINGS)
    for text, at_s in texts_at:
        chat = ChatOutcome([{"role": "user", "content": text}], max_tokens=3, at_s=at_s)
        run(fleet.add(chat))
    return fleet


def test_requests_go_in_turn_and_first_tokens_take_the_time_of_their_prefill() -> None:
    fleet = asked((LONG, 9.0), (SHORT, 3.0), (LONG, 5.0), (LONG, 1.0))
    fleet.advance(4.0)
    assert fleet.tally().requests == 2, "those that arrived"
    fleet.finish()
    tally = fleet.tally()
    cold, short, again, other = (round(1000 * ttft_s) for ttft_s in tally.ttfts_s)
    assert cold == other == 150, "each engine computes the long prompt once"
    assert tally.hit_tokens == cold - again == 144
    assert tally.prompt_tokens == 3 * cold + short


def test_it_does_not_matter_how_often_it_is_advanced() -> None:
    found = []
    for pauses in (1, 50):
        fleet = asked((LONG, 0.0), (LONG, 0.0), (LONG, 0.1), (SHORT, 0.15), (SHORT, 0.2))
        for pause in range(pauses):
            fleet.advance(pause / pauses)
        fleet.finish()
        found.append(fleet.tally())
    assert found[0].requests == 5
    assert found[0] == found[1]
