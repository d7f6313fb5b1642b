"""Hit rules where rows come in few runs: the prompt's blocks in stretches that the same engines hold.

Prompts share long prefixes, so a look-up of hundreds of blocks has a handful of different rows. Where every
class has the block size of the hashes, hits can only end where a run ends: inside one, a boundary is valid
wherever the one before it is. So one step per run does, in whole numbers, what ``hits.py`` does with arrays,
which is asked for the rest: EAGLE, blocks of several sizes, chunks, states, many runs. Both give the same
(tests/router/index/rules/test_runs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.index.base import Plane, Runs

Ends = list[tuple[int, int]]
"""Tokens, and the engines (as bits of a word) whose prefix ends there; without those that have none."""


class RunClass(NamedTuple):
    """A spec class of blocks of the hash block's size: its planes, and how many blocks before a boundary must
    be there (0: all of them)."""

    planes: tuple[Plane, ...]
    needed: int


def run_ends(
    runs: Runs, classes: Sequence[RunClass], boundaries: int, unit: int, word: int
) -> tuple[Ends, Ends]:
    """Where the hits and the full-attention prefixes of the 64 engines of ``word`` end, longest first.

    Boundaries 1..``boundaries`` are ``unit`` tokens apart.
    """
    full = [_presence(runs, c, word) for c in classes if not c.needed]
    windows = [(_presence(runs, c, word), c.needed) for c in classes if c.needed]
    trunks = _trunks(full, runs.starts, boundaries)
    ends = [*runs.starts[1:], boundaries]
    hits: Ends = []
    trunk_ends: Ends = []
    found = reached = 0
    for number in range(len(trunks) - 1, -1, -1):
        end = ends[number] if ends[number] < boundaries else boundaries  # noqa: FURB136
        trunk = trunks[number]
        if trunk & ~reached:
            trunk_ends.append((end * unit, trunk & ~reached))
            reached |= trunk
        valid = trunk & ~found
        for held, needed in windows:
            at = number
            while valid:
                valid &= held[at]
                if runs.starts[at] <= end - needed or not at:
                    break
                at -= 1
        if valid:
            hits.append((end * unit, valid))
            found |= valid
            if found == trunks[0]:
                break
    return hits, trunk_ends if full else hits


def _trunks(full: list[list[int]], starts: list[int], boundaries: int) -> list[int]:
    """Per run, up to the last one in which a hit can end: the engines that hold everything up to its end."""
    trunks: list[int] = []
    trunk = (1 << 64) - 1
    for number, start in enumerate(starts):
        for held in full:
            trunk &= held[number]
        if not trunk or start >= boundaries:
            break
        trunks.append(trunk)
    return trunks


def _presence(runs: Runs, its: RunClass, word: int) -> list[int]:
    """Per run: the engines that hold it in every group of the class."""
    held: list[int] | None = None
    for plane in its.planes:
        column = runs.columns.get((plane, word))
        if column is None:
            return [0] * len(runs.starts)
        here = [row[column] for row in runs.rows]
        held = here if held is None or held == here else [a & b for a, b in zip(held, here, strict=True)]
    return held or []
