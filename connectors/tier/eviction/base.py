"""What an eviction policy is told, and what it answers.

A policy knows keys only; the tier says which of them may not go now (being stored or loaded, or just asked
for).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Spared = Callable[[bytes], bool]
"""Whether a key must stay for now."""


class EvictionPolicy(Protocol):
    """Told about every key that occupies a slot, from its reservation to its end. No call blocks."""

    def begin_chain(self, chain: Sequence[bytes], lineage: Sequence[bytes]) -> None:
        """A request stores these keys (``Tier.begin_store``); those already here are being used again."""

    def end_chain(self, added: Sequence[bytes]) -> None:
        """These of the chain got a slot, in prompt order. Follows each ``begin_chain``."""

    def use(self, keys: Sequence[bytes]) -> None:
        """These keys, all here, are loaded for one request."""

    def remove(self, key: bytes) -> None:
        """The key is gone for another reason than ``victims``."""

    def victims(self, count: int, spared: Spared) -> list[bytes]:
        """Choose up to ``count`` keys and forget them; fewer where the others that are here are spared."""
