"""The members of a body are found as a parser finds them, and no body holds the loop, whatever is in it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.openai import members as members_module
from kvatlas.router.openai.apis import CHAT
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.members import (
    MalformedError,
    Scan,
    TooManyStepsError,
    at_once,
    has_any,
    joined,
    run_cooperatively,
    with_value,
)
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.proxy.screen import Rules, screen
from tests.support.examples import examples
from tests.support.loop_pauses import PAUSE_S_MAX, TRIES, slowness
from tests.support.worst_bodies import worst_bodies

LOOK_S_MAX = 1.0
TEXT = st.text(st.sampled_from('ab"\\{}[]:,\n \u00e9\U0001f600'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(400))
@given(st.lists(st.tuples(TEXT, JSON), max_size=6), st.integers(2, 12), st.booleans(), st.booleans())
def test_members_are_those_that_a_parser_finds(
    pairs: list[tuple[str, Any]], slice_bytes: int, ascii_only: bool, spaced: bool
) -> None:
    said = [
        (key, json.dumps(value, ensure_ascii=ascii_only, indent=1 if spaced else None))
        for key, value in pairs
    ]
    texts = [f"{json.dumps(key, ensure_ascii=ascii_only)}: {value}" for key, value in said]
    body = ("{ " + " ,\n".join(texts) + "}").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members_module, "_SLICE", slice_bytes)
        scan = Scan(body)
        start = scan.start()
        assert start is not None
        found = [member for member in scan.members(start) if member is not None]
    assert [(m.name.decode(), body[m.value : m.end].decode()) for m in found] == said


@settings(max_examples=examples(200))
@given(st.text('ab"\\{}[]:, \n', max_size=30))
def test_unreadable_bodies_are_malformed_or_left_to_the_parser(text: str) -> None:
    scan = Scan(b'{"a":' + text.encode())
    try:
        for _ in scan.members(0):
            pass
    except (MalformedError, TooManyStepsError):
        pass


PASSES: dict[str, Callable[[bytes], Generator[None, None, object]]] = {
    "screened": lambda body: screen(body, Rules(report_mode="refuse")),
    "renamed": lambda body: with_value(body, b"model", "other"),
    "split": lambda body: split_body(CHAT, body),
    "prefill": lambda body: at_once(split_body(CHAT, body)).prefill(b"{}"),
}


@pytest.mark.parametrize(
    ("look", "size"),
    [
        ("screened", 160 << 10),
        pytest.param("screened", 60 << 20, marks=pytest.mark.long),
        *(pytest.param(look, 4 << 20, marks=pytest.mark.long) for look in PASSES if look != "screened"),
    ],
)
def test_no_body_holds_the_loop_or_takes_more_than_a_second(look: str, size: int) -> None:
    """In the thread's own CPU time: that of a machine on which nothing else runs."""
    for name, body in worst_bodies(size).items():
        for tried in range(TRIES):
            try:
                took, longest = _times(PASSES[look](body))
            except TooManyStepsError:
                break
            if longest < PAUSE_S_MAX and took < LOOK_S_MAX:
                break
            slower = slowness()
            if longest / slower < PAUSE_S_MAX and took / slower < LOOK_S_MAX:
                break
            assert tried + 1 < TRIES, (name, took, longest, slower)


def _times(steps: Generator[None, None, object]) -> tuple[float, float]:
    """CPU seconds of all steps, and of the longest one."""
    took = longest = 0.0
    going = True
    while going:
        before = time.thread_time()
        try:
            next(steps)
        except (StopIteration, TooManyStepsError, ApiError):
            going = False
        step = time.thread_time() - before
        took, longest = took + step, max(longest, step)
    return took, longest


async def test_many_bodies_hold_the_loop_no_longer_than_one() -> None:
    """In each turn of the loop one of them goes on; and each gets its turn."""
    made: list[int] = []

    def walk(name: int) -> Generator[None, None, int]:
        for _ in range(10):
            made.append(name)
            yield
        return name

    walks = [asyncio.ensure_future(run_cooperatively(walk(name))) for name in range(20)]
    await asyncio.sleep(0)
    assert sorted(made) == list(range(20))  # each begins immediately: most need no second step
    while not all(task.done() for task in walks):
        before = len(made)
        await asyncio.sleep(0)
        assert len(made) - before <= 1
    assert [task.result() for task in walks] == list(range(20))
    second = made[20:40]
    assert len(set(second)) == 20


async def test_a_cancelled_walk_leaves_its_turn_to_the_others() -> None:
    def walk() -> Generator[None, None, int]:
        yield
        yield
        return 1

    walks = [asyncio.ensure_future(run_cooperatively(walk())) for _ in range(5)]
    await asyncio.sleep(0)
    walks[0].cancel()
    walks[2].cancel()
    await asyncio.gather(*walks, return_exceptions=True)
    assert [task.cancelled() for task in walks] == [True, False, True, False, False]


def test_a_hint_is_found_across_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "_HINT_WINDOW_BYTES", 7)
    for pad in range(20):
        assert at_once(has_any(b"x" * pad + b"needle" + b"y" * 20, (b"other", b"needle")))
    assert not at_once(has_any(b"needl" * 20, (b"needle",)))


def test_pieces_are_joined_whatever_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [b"a" * 10, memoryview(b"b" * 25), b"", b"c"]
    small = at_once(joined(pieces))
    monkeypatch.setattr(members_module, "_COPIED_BYTES", 4)
    steps = joined(pieces)
    assert sum(1 for _ in steps) >= 7
    assert at_once(joined(pieces)) == small == b"a" * 10 + b"b" * 25 + b"c"
