"""Token ids in little room."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import msgspec

Ids: TypeAlias = "array[int]"
"""Token ids, an ``array`` of 4 bytes each."""


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """Texts tokenized one by one: all ids, and per text the number of ids before it; then the total."""

    ids: Ids
    offsets: list[int]

    def piece(self, number: int) -> Ids:
        """The ids of one text."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]]
