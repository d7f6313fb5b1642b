"""Which blocks a hit of a given length rests on, class by class: the hit rules of ``index.rules.hits`` read
backwards, for one engine and one boundary.

Always true, where EAGLE windows do not make the order of the search matter: a boundary is valid for a class
if and only if every need of the class is met there.
"""

from __future__ import annotations

import msgspec

from publisher.groups import Family, SpecClass
from router.index.learn.layout import CacheLayout


class Need(msgspec.Struct, frozen=True):
    """One block of each group of a class. Any of the prefixes that end at ``ends`` (tokens) will do; there is
    more than one only where a hit may end inside a block."""

    ends: tuple[int, ...]
    block_size: int

    @property
    def block(self) -> int:
        """Number of the block in its group's table."""
        return (self.ends[0] - 1) // self.block_size


def needs(layout: CacheLayout, spec_class: SpecClass, boundary: int, num_tokens: int) -> list[Need]:
    """What ``spec_class`` must hold for a hit of ``boundary`` tokens, in the order of the tokens."""
    size, unit = spec_class.block_size, layout.hash_block_size
    eagle = int(spec_class.spec.is_eagle and not layout.lookahead)
    inside = size > layout.alignment
    match spec_class.family:
        case Family.FULL if inside:
            return _full_inside(boundary + eagle * unit, size, unit, (num_tokens - 1) // unit * unit)
        case Family.FULL:
            return _blocks(0, boundary + eagle * size, size)
        case Family.WINDOW:
            end = boundary + eagle * size
            window = spec_class.spec.sliding_window or 0
            count = max(1, -(-(window - 1) // size) + eagle)
            return _blocks(max(0, end - count * size), end, size)
        case Family.CHUNKED:
            chunk = spec_class.spec.attention_chunk_size or size
            return _blocks(boundary // chunk * chunk, boundary, size)
        case _:
            return [Need((boundary,), size)]


def _blocks(start: int, end: int, size: int) -> list[Need]:
    return [Need((block_end,), size) for block_end in range(start + size, end + 1, size)]


def _full_inside(end: int, size: int, unit: int, limit: int) -> list[Need]:
    """Whole blocks before ``end``, and of the block it lies in that part or any longer one."""
    whole = end // size * size
    found = _blocks(0, whole, size)
    if end > whole:
        last = max(end, min(whole + size, limit))
        found.append(Need(tuple(range(end, last + 1, unit)), size))
    return found
