"""Rows are never given to two users at the same time, and keep a value until they are needed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvatlas.connectors.worker.staging_rows import RowCache
from tests.support.examples import examples

ROWS = 5
KEYS = [b"a", b"b", b"c", b"d"]


def test_the_value_read_least_recently_goes_first() -> None:
    cache = RowCache(2)
    rows = cache.take(2)
    cache.give_back(rows, [b"a", b"b"])
    assert cache.read(b"a") == rows[0]
    cache.end_read(b"a")
    assert cache.take(1) == [rows[1]]
    assert cache.read(b"b") is None
    assert cache.read(b"a") == rows[0]


def test_a_bad_value_gets_no_further_reader_and_its_row_comes_back_with_the_last_one() -> None:
    cache = RowCache(1)
    cache.give_back(cache.take(1), [b"a"])
    assert cache.read(b"a") == cache.read(b"a") == 0
    cache.end_read(b"a", keep=False)
    assert cache.read(b"a") is None
    assert cache.available == 0
    cache.end_read(b"a")
    assert cache.available == 1
    assert cache.read(b"a") is None


class Rows(RuleBasedStateMachine):
    """Contents are tracked beside: a row that is read must still hold what was written for the key."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RowCache(ROWS)
        self.content: dict[int, bytes | None] = {}
        self.writing: list[int] = []
        self.reading: list[tuple[bytes, int]] = []

    @precondition(lambda self: self.cache.available)
    @rule(count=st.integers(1, ROWS))
    def take(self, count: int) -> None:
        rows = self.cache.take(min(count, self.cache.available))
        assert not {*rows} & {*self.writing, *(row for _, row in self.reading)}
        self.content.update(dict.fromkeys(rows))
        self.writing += rows

    @precondition(lambda self: self.writing)
    @rule(key=st.sampled_from([*KEYS, None]))
    def give_back(self, key: bytes | None) -> None:
        row = self.writing.pop()
        self.content[row] = key
        self.cache.give_back([row], [key])

    @rule(key=st.sampled_from(KEYS))
    def read(self, key: bytes) -> None:
        row = self.cache.read(key)
        if row is not None:
            assert self.content[row] == key
            self.reading.append((key, row))

    @precondition(lambda self: self.reading)
    @rule(keep=st.booleans())
    def end_read(self, keep: bool) -> None:
        key, _ = self.reading.pop()
        self.cache.end_read(key, keep=keep)

    @invariant()
    def no_row_is_lost(self) -> None:
        in_use = len(self.writing) + len({row for _, row in self.reading})
        assert self.cache.available + in_use == ROWS


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=examples(60))


def test_rows_beyond_those_there_are_cannot_be_taken() -> None:
    with pytest.raises(KeyError):
        RowCache(1).take(2)
