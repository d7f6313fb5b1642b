"""Prompt prefixes by the isolation groups that sent them: the price of cache isolation.

A prefix is a keyless hash of model, adapter and tokens, without the salt, at every ``STEP_TOKENS`` tokens
up to ``STEPS_MAX`` of them, then at each doubling. Only operators see counts made of it. Each prompt takes
the same steps, known or not, so its time reveals nothing. Invariants: at most ``PREFIXES_MAX``
prefixes, the least recently sent one is dropped first, with ``GROUPS_MAX`` groups each.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated

import msgspec
import xxhash

STEP_TOKENS = 256
STEPS_MAX = 16
PREFIXES_MAX = 1 << 16
GROUPS_MAX = 8
_ENCODER = msgspec.msgpack.Encoder()


class GroupPrefixStats(msgspec.Struct):
    """Counters for metrics."""

    dropped: Annotated[int, "kvatlas_isolation_prefixes_dropped_total"] = 0
    """Prefixes no longer compared between isolation groups, since the router keeps a bounded number."""


class GroupPrefixes:
    """Prefixes of the prompts that one router placed while caches are isolated."""

    def __init__(self) -> None:
        self.stats = GroupPrefixStats()
        self._groups: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def add(self, group: str, model: str, adapter: str, tokens: array[int]) -> tuple[int, int]:
        """Add a prompt. Returns the tokens of its longest prefix that this group sent before, and of the
        longest that another group sent."""
        own = other = start = 0
        state, view = xxhash.xxh3_64(_ENCODER.encode([model, adapter])), memoryview(tokens)
        for end in _prefix_ends(len(tokens)):
            state.update(view[start:end])
            start, key = end, state.intdigest()
            groups = self._groups.get(key, ())
            if group in groups:
                own = end
                groups = tuple(one for one in groups if one != group)
            if groups:
                other = end
            self._groups[key] = (*groups[-GROUPS_MAX + 1 :], group)
            self._groups.move_to_end(key)
        while len(self._groups) > PREFIXES_MAX:
            self._groups.popitem(last=False)
            self.stats.dropped += 1
        return own, other


def _prefix_ends(num_tokens: int) -> Iterator[int]:
    end = STEP_TOKENS
    while end <= num_tokens:
        yield end
        end = end + STEP_TOKENS if end < STEPS_MAX * STEP_TOKENS else 2 * end
