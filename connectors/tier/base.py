"""Interface of a tier: blocks held outside the GPU and their keys, seen from the scheduler half.

A block key is in one of four states: absent, being stored, held, being loaded (held and pinned). ``held``
reports held keys only. Every begun store or load is ended exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvatlas.publisher.pool.retention_order import RetentionHint

_GROUP_BYTES = 4


def block_key(block_hash: bytes, group_idx: int) -> bytes:
    """Key of the block with this hash in this group. OverflowError unless 0 <= group_idx < 2**32.

    Block keys name one block of one KV cache group outside the GPU.

    A key is the engine's full block hash followed by the model's group index, 4 bytes big-endian. The hash is
    chained over the whole prefix, so a key names a block's content within one engine configuration. Stores
    that several engines share prepend a namespace (``kvatlas.connectors.store.base``). Keys are compared as
    bytes and never truncated; the 64-bit hashes of KV events are for the router only.
    """
    return block_hash + group_idx.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Split a key into full block hash and group index. ValueError if it is too short."""
    if len(key) <= _GROUP_BYTES:
        raise ValueError(f"not a block key: {len(key)} bytes, need a hash and {_GROUP_BYTES} bytes of group")
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def block_hashes_of(keys: Iterable[bytes]) -> list[bytes]:
    return [key[:-_GROUP_BYTES] for key in keys]


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Keys that became loadable or were removed since the last call, in order."""

    changes: tuple[tuple[bool, bytes], ...]
    """(True: stored, False: removed; key)."""


class Tier(Protocol):
    """A tier. Only the scheduler half calls it, on the engine core's thread. No call blocks."""

    medium: str
    """As in KV events: ``CPU`` or ``STORAGE``."""

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes] | None:
        """The keys that can be loaded now. None: not known yet, call again in the next step."""

    def begin_store(self, chain: Sequence[bytes], lineage: Sequence[bytes] = ()) -> list[tuple[bytes, int]]:
        """Reserve slots for the keys that are neither held nor being stored, as far as there is room.

        ``chain``: keys of one request in prompt order; a policy may use their dependence on one another.
        ``lineage``: the request's block hashes from its first token, one per hash block, at least up to the
        last of ``chain``; a policy finds each key's prefix there. It is read during the call only.
        """

    def end_store(self, key: bytes, *, ok: bool) -> None: ...

    def begin_load(self, keys: Sequence[bytes]) -> list[int] | None:
        """Pin these keys and return their slots; None, with nothing pinned, if one is no longer held."""

    def end_load(self, key: bytes, *, ok: bool) -> None:
        """Unpin. ``ok=False``: the value is bad; it is dropped and not held until it is stored again."""

    def forget_request(self, request_id: str) -> None:
        """Drop the state that ``held`` keeps for an ended request."""

    def retain(self, keys: Sequence[bytes], hint: RetentionHint) -> None:
        """Apply a router's hint to those of a request's keys that have slots; others are ignored.

        Call it after ``begin_store`` or ``begin_load``, with keys in prompt order.
        """

    def take_changes(self) -> TierChanges: ...

    def reset(self) -> bool:
        """Drop everything that is not in transfer. True: nothing is left."""

    def busy(self) -> bool:
        """Whether transfers run that need further steps to finish."""


@dataclass(frozen=True)
class StoreTierSettings:
    """Cache times and bounds of the scheduler half over a shared store.

    ``kvatlas.connectors.shared_store`` lists those that a user may set.
    """

    lookup_deadline_s: float = 0.05
    """How long one query may take; keys without an answer by then count as absent."""
    held_for_s: float = 5.0
    """How long an answer "held" is cached: another engine's eviction is seen after that."""
    absent_for_s: float = 1.0
    """How long an answer "absent" is cached: another engine's store is seen after that."""
    stored_for_s: float = 60.0
    """How long a present block is not stored again, unless a lookup finds it missing: saves needless
    copies."""
    away_for_s: float = 1.0
    """How long a store that did not answer is not queried again."""
    quarantine_s: float = 60.0
    """How long a key whose load failed counts as absent, unless it is stored again."""
    answers_max: int = 200_000
    questions_max: int = 256
    stores_max: int = 4096
    """Most blocks being stored; beyond it, blocks are not stored."""
