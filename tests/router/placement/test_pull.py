"""Pulling a prefix from another engine's host memory: when it is chosen, and what is never promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.candidate import Candidate, PolicySettings
from router.placement.cost import Choice, choose
from router.placement.pull import PullLinks, PullSources, with_pull
from tests.router.placement.candidates import make_candidate

RATE = 1 / 8000
PROMPT = 40_000
LINK = 1e-6
KNOBS = PolicySettings()


def holder(queue_s: float, held: int = 36_000) -> list[Candidate]:
    """An engine that holds a long prefix, with a queue, and one that is free and holds nothing."""
    return [
        make_candidate(
            "holder", hit_tokens=held, shared_prefix_tokens=held, queue_s=queue_s, prefill_s_per_token=RATE
        ),
        make_candidate("free", prefill_s_per_token=RATE),
    ]


def pulled(candidates: list[Candidate], held: list[int], **more: float) -> Choice:
    busy = [0.0] * len(candidates)
    return with_pull(choose(candidates, PROMPT, KNOBS), PullSources(held, busy, LINK, **more))


def test_a_prefix_is_pulled_where_its_holder_is_busy() -> None:
    choice = pulled(holder(9.0), [36_000, 0])
    assert (choice.engine_id, choice.reason, choice.uncached_tokens) == ("free", "pull", 4000)
    assert choice.pull is not None
    assert (choice.pull.source_id, choice.pull.tokens, choice.pull.end) == ("holder", 36_000, 36_000)
    assert choice.pull.link_s == pytest.approx(0.036)
    assert choice.cost.prefill_s == pytest.approx(0.5)
    assert choice.cost.load_s == pytest.approx(0.036 + KNOBS.load_s_per_token * 36_000)


def test_nobody_pulls_what_is_served_sooner_where_it_is() -> None:
    assert pulled(holder(0.01), [36_000, 0]).engine_id == "holder"
    assert pulled(holder(0.01), [36_000, 0]).pull is None
    assert pulled(holder(9.0), [36_000, 0], latency_s=10.0).pull is None


def test_host_memory_that_holds_nothing_is_no_source() -> None:
    assert pulled(holder(9.0), [0, 0]).pull is None


def test_a_pair_that_is_not_allowed_does_not_pull() -> None:
    candidates = holder(9.0)
    sources = PullSources([36_000, 0], [0.0, 0.0], LINK, allowed=lambda target, source: False)
    assert with_pull(choose(candidates, PROMPT, KNOBS), sources).pull is None


def test_an_engine_that_replays_a_window_does_not_pull() -> None:
    candidates = holder(9.0)
    candidates[1].hit.replay_tokens = 128
    assert pulled(candidates, [36_000, 0]).pull is None


def test_a_busy_link_waits_and_is_free_again() -> None:
    links = PullLinks()
    choice = pulled(holder(9.0), [36_000, 0])
    assert choice.pull is not None
    links.charge("free", choice.pull, 5.0)
    assert links.busy_s("free", 5.0) == links.busy_s("holder", 5.0) == pytest.approx(choice.pull.link_s)
    assert links.busy_s("free", 6.0) == links.busy_s("other", 5.0) == 0.0


_CANDIDATE = st.builds(
    lambda held, more, queue_s, running: (held, min(held + more, PROMPT), queue_s, running),
    st.integers(0, PROMPT),
    st.integers(0, 5000),
    st.floats(0, 20),
    st.integers(0, 20),
)


@given(st.lists(_CANDIDATE, min_size=1, max_size=6), st.data())
def test_a_pull_is_cheaper_than_every_engine_and_promises_what_its_source_holds(
    drawn: list[tuple[int, int, float, int]], data: st.DataObject
) -> None:
    candidates = [
        make_candidate(
            f"e{n}",
            hit_tokens=held,
            shared_prefix_tokens=shared_prefix,
            queue_s=queue_s,
            running=running,
            prefill_s_per_token=RATE,
        )
        for n, (held, shared_prefix, queue_s, running) in enumerate(drawn)
    ]
    held = data.draw(st.lists(st.integers(0, PROMPT), min_size=len(drawn), max_size=len(drawn)))
    busy = data.draw(st.lists(st.floats(0, 3), min_size=len(drawn), max_size=len(drawn)))
    before = choose(candidates, PROMPT, KNOBS)
    choice = with_pull(before, PullSources(held, busy, LINK))
    if choice.pull is None:
        assert choice is before
        return
    pull, target, source = choice.pull, candidates[choice.index], candidates[choice.pull.source]
    assert choice.reason == "pull"
    assert pull.source != choice.index
    assert pull.end <= min(held[pull.source], PROMPT - 1)
    assert 0 < pull.tokens == pull.end - min(target.hit.whole_tokens, PROMPT - 1)
    assert choice.uncached_tokens == PROMPT - pull.end
    assert choice.cost.total_s < min(before.scored.totals)
    assert pull.link_s < max(source.queue_s, source.room_s), "else it is served sooner at its source"
