"""Blocks held in host memory by slot: which key has which slot, and who is reading or writing it.

The scheduler's half only keeps this account; the bytes are moved by the worker's half, which knows slots. A
slot is free, being written, or holds one key's value, and what is pinned or being written never gives way.
What is dropped while it is being read or written keeps its slot until the last reader or the writer is done,
and is not held meanwhile. What always holds: a slot has at most one key, and ``TierChanges`` replayed gives
what is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.tier.base import TierChanges
from connectors.tier.eviction import EvictionPolicy


@dataclass(slots=True)
class TierCounters:
    """Keys, since the start."""

    loads: int = 0
    """Pinned for loading."""
    stores: int = 0
    """Became held."""
    evictions: int = 0
    """Held, and gave way to others."""
    dropped_for_room: int = 0
    """Not stored: everything held was in use."""
    failed_stores: int = 0
    failed_loads: int = 0
    """Loads of a key that ended badly; its value was dropped at the first."""


@dataclass(slots=True)
class _Entry:
    slot: int
    storing: bool = True
    pins: int = 0
    condemned: bool = False
    """Not to be held (any more): a bad value, or one from before a reset."""


class HostTier:
    """``connectors.tier.base.Tier`` over ``slots`` rows of host memory. Not thread-safe: one owner.

    ``begin_load``, ``end_load`` and ``end_store`` raise RuntimeError for a key that is in no such state: an
    account that went wrong must not go on giving slots away.
    """

    medium = "CPU"

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        if slots < 1:
            raise ValueError(f"a host tier needs at least one slot, not {slots}: give it more host memory")
        self.slots = slots
        self.counters = TierCounters()
        self._policy = policy
        self._entries: dict[bytes, _Entry] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._evictable = 0
        self._changes: list[tuple[bool, bytes]] = []

    def shrink(self, slots: int) -> None:
        """Use only the first ``slots``. RuntimeError: something is held already."""
        if self._entries or not 1 <= slots <= self.slots:
            raise RuntimeError(
                f"{slots} of {self.slots} rows are to be used, {len(self._entries)} are in use"
            )
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def held_keys(self) -> int:
        """How many keys could be loaded now."""
        return sum(self._is_held(entry) for entry in self._entries.values())

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes]:
        entries = self._entries
        return frozenset(key for key in keys if (e := entries.get(key)) is not None and self._is_held(e))

    def begin_store(self, chain: Sequence[bytes], lineage: Sequence[bytes] = ()) -> list[tuple[bytes, int]]:
        self._policy.begin_chain(chain, lineage)
        wanted = [key for key in dict.fromkeys(chain) if key not in self._entries]
        if len(wanted) > len(self._free):
            self._make_room(len(wanted), frozenset(chain))
        taken = wanted[: len(self._free)]
        self.counters.dropped_for_room += len(wanted) - len(taken)
        reserved = [(key, self._free.pop()) for key in taken]
        for key, slot in reserved:
            self._entries[key] = _Entry(slot)
        self._policy.end_chain(taken)
        return reserved

    def end_store(self, key: bytes, *, ok: bool) -> None:
        entry = self._entries.get(key)
        if entry is None or not entry.storing:
            raise RuntimeError(f"end of a store that was not begun: {key.hex()}")
        entry.storing = False
        if not ok:
            self.counters.failed_stores += 1
        if entry.condemned or not ok:
            if not entry.condemned:
                self._policy.remove(key)
            self._release(key, entry)
            return
        self.counters.stores += 1
        self._evictable += 1
        self._changes.append((True, key))

    def begin_load(self, keys: Sequence[bytes]) -> list[int] | None:
        entries = [self._entries.get(key) for key in keys]
        slots = [entry.slot for entry in entries if entry is not None and self._is_held(entry)]
        if len(slots) != len(keys):
            return None
        for entry in entries:
            if entry is not None:
                self._evictable -= entry.pins == 0
                entry.pins += 1
        self._policy.use(keys)
        self.counters.loads += len(keys)
        return slots

    def end_load(self, key: bytes, *, ok: bool) -> None:
        entry = self._entries.get(key)
        if entry is None or not entry.pins:
            raise RuntimeError(f"end of a load that was not begun: {key.hex()}")
        if not ok:
            self.counters.failed_loads += 1
            self._condemn(key, entry)
        entry.pins -= 1
        if entry.pins:
            return
        if entry.condemned:
            self._release(key, entry)
        else:
            self._evictable += 1

    def forget_request(self, request_id: str) -> None:
        """Nothing to do: answers are never remembered."""

    def take_changes(self) -> TierChanges:
        """To be called after every step: changes are kept until then."""
        changes = TierChanges(tuple(self._changes))
        self._changes.clear()
        return changes

    def reset(self) -> bool:
        """Nothing that is here, or under way, will be held again. True: no slot is in use any more."""
        for key, entry in list(self._entries.items()):
            self._condemn(key, entry)
            if not entry.storing and not entry.pins:
                self._evictable -= 1
                self._release(key, entry)
        return not self._entries

    def busy(self) -> bool:
        return len(self._entries) > self._evictable

    def check_integrity(self) -> None:
        """Raise RuntimeError where the account contradicts itself. For tests."""
        used = [entry.slot for entry in self._entries.values()]
        if sorted([*used, *self._free]) != list(range(self.slots)):
            raise RuntimeError("slots are lost, or given twice")
        idle = [e for e in self._entries.values() if not e.storing and not e.pins]
        if len(idle) != self._evictable:
            raise RuntimeError(f"{len(idle)} keys could give way, {self._evictable} were counted")
        if any(entry.condemned for entry in idle):
            raise RuntimeError("a dropped key keeps its slot though nobody uses it")
        if any(entry.storing and entry.pins for entry in self._entries.values()):
            raise RuntimeError("a key is loaded while it is being stored")

    def _is_held(self, entry: _Entry) -> bool:
        return not entry.storing and not entry.condemned

    def _make_room(self, slots: int, asked: frozenset[bytes]) -> None:
        """Let others go until so many slots are free, or nothing else may."""
        entries = self._entries

        def spared(key: bytes) -> bool:
            entry = entries[key]
            return entry.storing or entry.pins > 0 or key in asked

        missing = min(slots - len(self._free), self._evictable)
        for victim in self._policy.victims(missing, spared):
            self._evictable -= 1
            self.counters.evictions += 1
            self._changes.append((False, victim))
            self._free.append(entries.pop(victim).slot)

    def _condemn(self, key: bytes, entry: _Entry) -> None:
        if entry.condemned:
            return
        if not entry.storing:
            self._changes.append((False, key))
        entry.condemned = True
        self._policy.remove(key)

    def _release(self, key: bytes, entry: _Entry) -> None:
        del self._entries[key]
        self._free.append(entry.slot)
