"""Slots of host memory: the key in each slot, and its readers and writer.

The scheduler half keeps this state; the worker half moves the bytes and knows slots only. A slot is free,
being written, or holds one key's value. Pinned slots and slots being written are never evicted. A value
dropped while it is read or written keeps its slot until the last reader or the writer is done, and is not
held in the meantime.

Invariants: a slot has at most one key; replaying ``TierChanges`` gives the held keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.connectors.tier.base import TierChanges
from kvatlas.connectors.tier.eviction import EvictionPolicy, HintedPolicy
from kvatlas.publisher.pool.retention_order import HintCounters, RetentionHint


@dataclass(slots=True)
class TierCounters:
    """Numbers of keys since the start."""

    loads: int = 0
    """Pinned for loading."""
    stores: int = 0
    """Stored successfully."""
    evictions: int = 0
    """Evicted for others."""
    dropped_for_room: int = 0
    """Not stored because all slots were in use."""
    failed_stores: int = 0
    failed_loads: int = 0
    """Failed loads; the first one drops the value."""


@dataclass(slots=True)
class _Entry:
    slot: int
    storing: bool = True
    pins: int = 0
    condemned: bool = False
    """Not held any longer: a bad value, or one from before a reset."""


class HostTier:
    """``kvatlas.connectors.tier.base.Tier`` over ``slots`` rows of host memory. Not thread-safe: one owner.

    ``begin_load``, ``end_load`` and ``end_store`` raise RuntimeError for a key in a wrong state: an
    inconsistent tier must not assign slots.
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

    @property
    def held_keys(self) -> int:
        """Number of keys that can be loaded now."""
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
        """Nothing to do: no results are cached."""

    def retain(self, keys: Sequence[bytes], hint: RetentionHint) -> None:
        if isinstance(self._policy, HintedPolicy):
            self._policy.retain(keys, hint)

    @property
    def hint_counters(self) -> HintCounters | None:
        """Counters of retention hints; None for a policy that ignores them."""
        return self._policy.counters if isinstance(self._policy, HintedPolicy) else None

    @property
    def num_hinted(self) -> int | None:
        """Number of keys with a live hint; None for a policy that ignores hints."""
        return self._policy.num_hinted if isinstance(self._policy, HintedPolicy) else None

    def take_changes(self) -> TierChanges:
        """Take the changes since the last call; call it after every step, as they accumulate."""
        changes = TierChanges(tuple(self._changes))
        self._changes.clear()
        return changes

    def reset(self) -> bool:
        """Drop all values, including those in transfer. True: no slot is in use."""
        for key, entry in list(self._entries.items()):
            self._condemn(key, entry)
            if not entry.storing and not entry.pins:
                self._evictable -= 1
                self._release(key, entry)
        return not self._entries

    def busy(self) -> bool:
        return len(self._entries) > self._evictable

    def check_integrity(self) -> None:
        """Raise RuntimeError for an inconsistent state. For tests."""
        used = [entry.slot for entry in self._entries.values()]
        if sorted([*used, *self._free]) != list(range(self.slots)):
            raise RuntimeError("slots are lost, or given twice")
        idle = [e for e in self._entries.values() if not e.storing and not e.pins]
        if len(idle) != self._evictable:
            raise RuntimeError(f"{len(idle)} keys could give way, {self._evictable} were counted")
        if any(entry.condemned for entry in idle):
            raise RuntimeError("a dropped key keeps an unused slot")
        if any(entry.storing and entry.pins for entry in self._entries.values()):
            raise RuntimeError("a key is loaded while it is being stored")

    def _is_held(self, entry: _Entry) -> bool:
        return not entry.storing and not entry.condemned

    def _make_room(self, slots: int, chain: frozenset[bytes]) -> None:
        """Evict keys outside ``chain`` until ``slots`` slots are free or none can be evicted."""
        entries = self._entries

        def spared(key: bytes) -> bool:
            entry = entries[key]
            return entry.storing or entry.pins > 0 or key in chain

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
