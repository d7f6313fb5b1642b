"""SGLang's rules for windows and Mamba states: what of its pages has them. The wheel's own cache is compared
with them in tests/publisher/test_sglang_events.py."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.publisher.events import BlockHash
from kvatlas.router.fleet.statement import PartPools
from kvatlas.router.placement.radix_parts import (
    PAGES_MAX,
    SENT_MAX,
    RadixParts,
    SentPrompt,
    States,
    TreePool,
    Windows,
    parts_spec,
)

PAGE = 16
TREE = TreePool(PAGE, 1000)
OTHER = BlockHash(7)


def run(start: int, count: int) -> list[BlockHash]:
    """Hashes of ``count`` pages of a prompt of its own."""
    return [BlockHash(start * 1000 + n) for n in range(count)]


def tokens(hashes: list[BlockHash], more: int = 5) -> int:
    return len(hashes) * PAGE + more


def serve(
    parts: RadixParts, hashes: list[BlockHash], *, more: int = 5, answer: list[BlockHash] | None = None
) -> int:
    """One request, its events, and its answer's pages; returns its hit in pages."""
    sent = parts.sent(hashes, tokens(hashes, more))
    assert sent is not None
    if sent.full < len(hashes):
        parts.stored(hashes[sent.full :], hashes[sent.full - 1] if sent.full else None)
    parts.started(sent)
    if answer:
        parts.stored(answer, hashes[-1])
    parts.ended(sent, PAGE * len(answer or []) + 1, computed=True)
    assert not parts.check_integrity()
    return sent.hit


def test_a_state_is_found_where_an_insertion_ended() -> None:
    parts = States(TREE, 20, 3)
    first = run(1, 8)
    assert serve(parts, first, answer=run(2, 2)) == 0
    assert serve(parts, [*first, *run(2, 2), *run(3, 4)]) == 10, "the next turn"
    assert serve(parts, [*first[:6], *run(4, 2)]) == 0, "another prompt with the same beginning"
    assert serve(parts, [*first[:6], *run(5, 2)]) == 6, "for which a state was kept then"


def test_states_of_another_step_are_not_assumed() -> None:
    parts = States(TREE, 20, 3)
    for start in (1, 2, 3):
        serve(parts, run(start, 8))
    assert parts.step == 8
    serve(parts, [*run(1, 7), *run(9, 9)])
    assert serve(parts, [*run(1, 7), *run(10, 9)]) == 0, "no step ends within the common part"


def test_the_least_recently_used_state_makes_room_and_those_in_use_do_not() -> None:
    parts = States(TREE, 5, 3)
    first, second, third = run(1, 4), run(2, 4), run(3, 4)
    for prompt in (first, second):
        serve(parts, prompt)
    held = parts.sent([*first, *run(4, 1)], tokens(first, PAGE + 1))
    assert held is not None
    assert held.hit == 4
    serve(parts, third)
    found = [parts.find([*prompt, OTHER], tokens(prompt, PAGE + 1)) for prompt in (first, second, third)]
    assert found == [(4, 4), (0, 4), (4, 4)], "of the second one its pages stay"


def test_a_window_is_whole_or_nothing() -> None:
    parts = Windows(TREE, 100, 3 * PAGE)
    prompt = run(1, 12)
    serve(parts, prompt)
    assert parts.held == 3, "the last window only"
    assert serve(parts, [*prompt, *run(2, 2)]) == 12
    assert serve(parts, [*prompt[:10], *run(3, 9)]) == 0, "its window is not whole"
    assert parts.find([*prompt[:10], OTHER], tokens(prompt[:10], PAGE)) == (0, 10)
    assert serve(parts, [*run(1, 12), *run(2, 2), *run(4, 3)]) == 14


def test_windows_that_were_computed_again_are_held_again() -> None:
    parts = Windows(TREE, 100, 3 * PAGE)
    prompt = run(1, 12)
    serve(parts, prompt)
    assert serve(parts, prompt[:8]) == 0
    assert serve(parts, prompt[:8], more=1) == 8, "no event told"


def test_room_for_windows_is_made_by_those_used_least_recently() -> None:
    parts = Windows(TREE, 22, 3 * PAGE)
    first, second = run(1, 6), run(2, 6)
    serve(parts, first)
    serve(parts, second)
    serve(parts, [*first, *run(3, 1)])
    serve(parts, run(4, 16))
    assert parts.find([*second, OTHER], tokens(second, PAGE)) == (0, 6)
    assert parts.find([*first, OTHER], tokens(first, PAGE))[0] == 6


def test_pages_removed_for_their_windows_were_the_last_of_them() -> None:
    """A leaf goes with all its pages, of which an event tells; what was used before it went silently."""
    parts = Windows(TREE, 30, 2 * PAGE)
    inner = run(1, 4)
    serve(parts, inner)
    serve(parts, [*inner, *run(2, 8)])
    serve(parts, [*run(3, 4)])
    parts.removed(run(3, 4)[2:])
    assert parts.find([*inner, OTHER], tokens(inner, PAGE)) == (0, 4)
    for pages, waiting in ((16, 0), (24, 10)):
        full = Windows(TreePool(PAGE, pages), 30, 2 * PAGE)
        serve(full, inner)
        serve(full, [*inner, *run(2, 8)])
        serve(full, [*run(3, 4)])
        if waiting:
            full.sent(run(9, waiting), tokens(run(9, waiting)))
        full.removed(run(3, 4)[2:])
        assert full.find([*inner, OTHER], tokens(inner, PAGE))[0] == 4, "its pages made room"


def test_chunks_leave_their_windows_and_states() -> None:
    """A prompt is inserted after each chunk, also where the pages are there already."""
    states, windows = (
        States(TreePool(PAGE, 1000, 4 * PAGE), 40, 1),
        Windows(TreePool(PAGE, 1000, 4 * PAGE), 100, 2 * PAGE),
    )
    serve(states, run(1, 3))
    for start in (4, 8):
        states.stored(run(2, 12)[start - 4 : start], run(2, 12)[start - 5] if start > 4 else None)
    assert serve(states, run(2, 12)) == 8
    for parts in (states, windows):
        sent = parts.sent(run(7, 10), 10 * PAGE + 3)
        assert sent is not None
        for start, end in ((0, 4), (4, 8), (8, 10)):
            parts.stored(run(7, 10)[start:end], run(7, 10)[start - 1] if start else None)
        parts.ended(sent, 1, computed=True)
        assert parts.find([*run(7, 8), OTHER, OTHER], 10 * PAGE) == (8, 8)


def test_pages_behind_unknown_ones_are_left_out_and_a_clear_forgets_all() -> None:
    parts = States(TREE, 20, 1)
    parts.stored(run(1, 4), OTHER)
    assert parts.find(run(1, 4), 1000) == (0, 0)
    serve(parts, run(2, 4))
    sent = parts.sent(run(2, 4), 70)
    parts.clear()
    assert parts.find(run(2, 4), 1000) == (0, 0)
    assert sent is not None
    parts.started(sent)
    parts.ended(sent, 3, computed=True)
    assert not parts.check_integrity()


def test_prompts_and_pages_are_bounded() -> None:
    parts = States(TreePool(1, PAGES_MAX), 20, 1)
    assert all(parts.sent([BlockHash(n)], 2) for n in range(SENT_MAX))
    assert parts.sent([OTHER], 2) is None
    parts.stored(list(map(BlockHash, range(PAGES_MAX + 1))), None)
    assert parts.find([BlockHash(0)], 2) == (0, 0)


@pytest.mark.parametrize(
    ("pools", "page", "window", "kind"),
    [
        (PartPools(16_000, window_tokens=4000), 16, 1023, Windows),
        (PartPools(16_000, states=30, request_states=3), 16, 0, States),
        (PartPools(16_000, window_tokens=4000), 16, 0, None),
        (PartPools(PAGES_MAX * 2, states=30), 1, 0, None),
        (PartPools(16_000, states=30), 0, 0, None),
        (None, 16, 1023, None),
    ],
)
def test_pools_that_can_be_followed(
    pools: PartPools | None, page: int, window: int, kind: type | None
) -> None:
    spec = parts_spec(pools, page, window)
    assert (None if spec is None else type(spec.make())) is kind


@given(st.randoms(use_true_random=False), st.sampled_from(["windows", "states"]), st.integers(4, 40))
def test_any_events_and_requests_keep_its_books(rng: random.Random, part: str, room: int) -> None:
    """Also those that no engine sends: hits end within the pages of full attention, and room is kept."""
    pool = TreePool(PAGE, 60, rng.choice((0, 3 * PAGE)))
    parts: RadixParts = Windows(pool, room, 3 * PAGE - 1) if part == "windows" else States(pool, room, 2)
    live: list[SentPrompt] = []
    for _ in range(60):
        path = [0]
        for _ in range(rng.randint(1, 9)):
            path.append(path[-1] * 3 + rng.randint(1, 2))
        hashes = list(map(BlockHash, path[1:]))
        match rng.randrange(5):
            case 0:
                start = rng.randrange(len(hashes))
                parts.stored(hashes[start:], hashes[start - 1] if start else None)
            case 1:
                parts.removed(hashes[rng.randrange(len(hashes)) :])
            case 2:
                if (sent := parts.sent(hashes, tokens(hashes, rng.randrange(PAGE)))) is not None:
                    live.append(sent)
            case 3 if live:
                parts.started(rng.choice(live))
            case 4 if live:
                sent = live.pop(rng.randrange(len(live)))
                parts.ended(sent, rng.choice((None, 1, 40)), computed=rng.random() < 0.8)
        found, full = parts.find(hashes, tokens(hashes))
        assert found <= full <= len(hashes)
        assert not parts.check_integrity()
    for sent in live:
        parts.ended(sent, 1, computed=False)
    nodes = {id(node): node for node in parts._where.values()}.values()
    assert not any(node.locks for node in nodes), "what no request uses is free"
