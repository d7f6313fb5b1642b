"""Generated workloads: the same draw for the same seed, and the shape their names promise."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from router.observe.history import UNIT_TOKENS
from router.simulate.requests import continued
from router.simulate.workload import GENERATORS, agents, chat, documents, shared, tenants


@pytest.mark.parametrize("name", GENERATORS)
def test_a_draw_is_repeatable_and_well_formed(name: str) -> None:
    drawn = GENERATORS[name](300, 100.0, 7)
    assert drawn == GENERATORS[name](300, 100.0, 7)
    assert drawn != GENERATORS[name](300, 100.0, 8)
    assert len(drawn) == 300
    times = [one.at_s for one in drawn]
    assert times == sorted(times)
    assert times[0] >= 0
    for one in drawn:
        assert len(one.ids) == -(-one.input_tokens // one.unit_tokens)
        assert one.output_tokens >= 1


def test_chats_share_one_system_prompt_and_go_on() -> None:
    requests = continued(chat(500, 500.0, 1))
    assert len({one.ids[0] for one in requests}) == 1
    sessions = Counter(one.session for one in requests)
    assert max(sessions.values()) > 1
    seconds = Counter(one.ids[1] for one in requests if len(one.ids) > 1)
    assert len(seconds) > 0.5 * len(sessions), "beyond the system prompt every session has its own"


def test_tenants_share_long_prompts_and_some_come_more_often() -> None:
    drawn = tenants(2000, 600.0, 1)
    heads = Counter(one.ids[0] for one in drawn)
    assert 50 < len(heads) <= 150
    counts = [count for _, count in heads.most_common()]
    assert counts[0] > 5 * counts[len(counts) // 2]
    assert min(one.input_tokens for one in drawn) > 1500


def test_agents_fan_out_into_siblings_of_one_context() -> None:
    def siblings(drawn: list[tuple[float, tuple[int, ...]]]) -> int:
        """Requests within two seconds of another with the same context of whole units."""
        near = 0
        for (at_s, ids), (before_s, before) in zip(drawn[1:], drawn[:-1], strict=True):
            near += ids == before and at_s - before_s < 2.0
        return near

    def by_context(name: str) -> list[tuple[float, tuple[int, ...]]]:
        drawn = (agents if name == "agents" else tenants)(1500, 4000.0, 2)
        pairs = [
            (one.at_s, (one.session or 0, *one.ids[: one.input_tokens // UNIT_TOKENS - 1])) for one in drawn
        ]
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))

    assert siblings(by_context("agents")) > 100
    assert siblings(by_context("tenants")) < 20


def test_documents_are_private_and_six_turns_long() -> None:
    requests = continued(documents(5000, 1000.0, 1))
    sessions = Counter(one.session for one in requests)
    assert (len(requests), len(sessions), set(sessions.values())) == (192 * 6, 192, {6})
    assert len({one.ids[0] for one in requests}) == 192
    assert statistics.fmean(one.input_tokens for one in requests) == 50_688
    assert sum(one.follows is not None for one in requests) == 192 * 5


def test_shared_prompts_come_in_bursts_and_their_questions_are_their_own() -> None:
    drawn = shared(4000, 1000.0, 1)
    heads = Counter(one.ids[:375] for one in drawn)
    assert len(heads) == 150
    assert len({one.ids[375] for one in drawn}) == len(drawn)
    gaps = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(drawn)]
    assert 1.7 < statistics.stdev(gaps) / statistics.fmean(gaps) < 2.3
    assert 950 < statistics.fmean(one.output_tokens for one in drawn) < 1050
