"""Hit rules where rows come in few runs: the prompt's blocks in stretches that the same engines hold.

Prompts share long prefixes, so a look-up of hundreds of blocks has a handful of different rows. Where every
class has the block size of the hashes, hits can only end where a run ends: inside one, a boundary is valid
wherever the one before it is. So one step per run does, in whole numbers, what ``hits.py`` does with arrays,
which is asked for the rest: EAGLE, blocks of several sizes, chunks, states, many runs. Both give the same
(tests/router/index/rules/test_runs.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from router.index.base import WORD_BITS, Plane, Runs

Ends = list[tuple[int, int]]
"""Tokens, and the engines (as bits of a word) whose prefix ends there, longest first; without those that have
none."""
_ALL = (1 << WORD_BITS) - 1


class RunClass(NamedTuple):
    """A spec class of blocks of the hash block's size: its planes, and how many blocks before a boundary must
    be there (0: all of them)."""

    planes: tuple[Plane, ...]
    needed: int


class RunColumns(msgspec.Struct, frozen=True, gc=False):
    """Where the words of some classes stand in the rows of an index: those of full attention, and those of
    each window with the blocks that it needs. None: nobody ever stored anything of it."""

    full: list[int] | None
    windows: list[tuple[list[int], int]] | None


def run_columns(
    classes: Sequence[RunClass], columns: Mapping[tuple[Plane, int], int], word: int
) -> RunColumns:
    """For the 64 engines of ``word``."""
    full: list[int] | None = []
    windows: list[tuple[list[int], int]] | None = []
    for planes, needed in classes:
        at = [columns[plane, word] for plane in planes if (plane, word) in columns]
        whole = len(at) == len(planes)
        if needed:
            windows = [*windows, (at, needed)] if whole and windows is not None else None
        else:
            full = full + at if whole and full is not None else None
    return RunColumns(full, windows)


def run_ends(runs: Runs, its: RunColumns, boundaries: int, unit: int) -> tuple[Ends, Ends]:
    """Where hits and full-attention prefixes end, longest first.

    Boundaries 1..``boundaries`` are ``unit`` tokens apart.
    """
    # Plain loops: this runs once per request.
    starts, rows = runs.starts, runs.rows
    full, windows = its.full, its.windows
    if full is None:
        return [], []
    trunks = _trunks(runs, full, boundaries)
    hits: Ends = []
    trunk_ends: Ends = []
    found = reached = 0
    end = boundaries if len(trunks) == len(starts) else starts[len(trunks)]
    end = end if end < boundaries else boundaries  # noqa: FURB136
    for number in range(len(trunks) - 1, -1, -1):
        trunk = trunks[number]
        if trunk != reached:  # what holds more holds less
            trunk_ends.append((end * unit, trunk ^ reached))
            reached = trunk
        valid = trunk ^ found
        for columns, needed in windows or ():
            at = number
            while valid:
                row = rows[at]
                for column in columns:
                    valid &= row[column]
                if starts[at] <= end - needed or not at:
                    break
                at -= 1
        if valid and windows is not None:
            hits.append((end * unit, valid))
            found |= valid
            if found == trunks[0]:
                break
        end = starts[number]
    return hits, trunk_ends if full else hits


def _trunks(runs: Runs, full: Sequence[int], boundaries: int) -> list[int]:
    """Per run, up to the last one in which a hit can end: the engines that hold everything up to its end."""
    trunks: list[int] = []
    trunk = _ALL
    for start, row in zip(runs.starts, runs.rows, strict=True):
        for column in full:
            trunk &= row[column]
        if not trunk or start >= boundaries:
            break
        trunks.append(trunk)
    return trunks
