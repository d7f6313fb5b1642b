"""Parts of which the chunks of a store consist: one object per rank of the engines that write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Parts of a chunk: engines of 64 GPUs and more share heads or layers.
PARTS_MAX = 1024


class Parts(NamedTuple):
    """Parts of which chunks consist."""

    most: int = 1
    """Most parts of a chunk."""
    of_group: Mapping[int, int] = {}
    """Group -> its parts, as bits, where not all ``most`` are needed."""

    def are_whole(self, group_idx: int, held: int) -> bool:
        """Whether these parts (a bit for each part, medium after medium) make a chunk of this group."""
        needed = self.of_group.get(group_idx, (1 << self.most) - 1)
        return (held | held >> self.most) & needed == needed
