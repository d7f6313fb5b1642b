"""What two states of residency differ in: two captures, or one capture at two points."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from router.index.base import Plane
from router.tools.replay.player import Player


class PlaneDiff(msgspec.Struct, frozen=True):
    """One plane of one engine, blocks as 16 hexadecimal digits; ``copies`` counts blocks held in both, but in
    different numbers of copies."""

    source: str
    medium: str
    group: int
    same: int
    only_a: list[str]
    only_b: list[str]
    copies: int

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b or self.copies)


def diff(a: Player, b: Player) -> list[PlaneDiff]:
    """Every plane that either state knows. Engines are paired by name; where each state has one, they are a
    pair whatever their names."""
    names_a, names_b = ([run.source for run in player.runs] for player in (a, b))
    pairs = [(name, name) for name in dict.fromkeys([*names_a, *names_b])]
    if len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    found = []
    for name_a, name_b in pairs:
        label = name_a if name_a == name_b else f"{name_a} / {name_b}"
        planes = {*a.ledger.seen_planes(name_a), *b.ledger.seen_planes(name_b)}
        found += [_plane(label, plane, a, name_a, b, name_b) for plane in sorted(planes)]
    return found


def _plane(label: str, plane: Plane, a: Player, name_a: str, b: Player, name_b: str) -> PlaneDiff:
    held_a, held_b = a.ledger.held(name_a, plane), b.ledger.held(name_b, plane)
    both = held_a.keys() & held_b.keys()
    return PlaneDiff(
        label,
        plane.medium,
        plane.group_idx,
        len(both),
        hex_blocks(held_a.keys() - held_b.keys()),
        hex_blocks(held_b.keys() - held_a.keys()),
        sum(held_a[block] != held_b[block] for block in both),
    )


def hex_blocks(blocks: Iterable[int]) -> list[str]:
    """Blocks as 16 hexadecimal digits, sorted."""
    return [f"{block:016x}" for block in sorted(blocks)]
