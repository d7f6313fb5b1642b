"""A reader's copy of one model's registry, and the engines described in it. An engine is fresh only while the
lease last read has not expired by the server's clock, and only on the servers that the registry was written
to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.index.base import Slot
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.replication.codec import Decoder
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.leases import Lease
from kvatlas.router.replication.registry import EngineFacts, ScopeView


class SharedEngine(NamedTuple):
    """One engine as described by its writer."""

    engine_id: str
    slot: Slot
    generation: int
    layout: CacheLayout | None
    """Equal layouts are one object, which a lookup evaluates once."""
    scheme: HashScheme | None
    mode: str
    why_unknown: str
    feed_state: str
    missing_batches: int
    holder: str
    """Replica that writes it; empty if none does."""
    stale: bool
    """Whether no live writer keeps it up to date: its hits may be shown, but not relied on."""
    stores: frozenset[str] = frozenset()
    """Shared stores that it loads from."""


class ScopeCache:
    """One model's registry as last fetched."""

    def __init__(self, keys: ScopeKeys) -> None:
        self.keys = keys
        self.view: ScopeView | None = None
        self.decoder = Decoder(1, {}, {})
        self.identity = ""
        self.leases: dict[str, Lease] = {}
        self.leases_at = float("-inf")
        self.engines: dict[str, SharedEngine] = {}
        # Id of the last entry read from the stream of prompts in flight; None before the first read.
        self.inflight_position: bytes | None = None
        # Entries that were read and not returned yet: the look-up may have failed after that.
        self.unread: list[bytes] = []
        # Time at which the next engine becomes stale if no lease is renewed.
        self.next_expiry = 0.0
        self._layouts: dict[CacheLayout, CacheLayout] = {}

    @property
    def version(self) -> tuple[bytes | None, bytes | None]:
        return (None, None) if self.view is None else (self.view.scope.epoch, self.view.version)

    def update(self, view: ScopeView | None, identity: str) -> None:
        self.view, self.identity, self.next_expiry = view, identity, 0.0
        if view is None:
            self.decoder = Decoder(1, {}, {})
            return
        generations = {slot.number: slot.generation for slot in view.slots.values()}
        self.decoder = Decoder(view.scope.code_bytes, generations, view.patterns)

    def update_leases(self, leases: dict[str, Lease], now: float) -> None:
        self.leases, self.leases_at, self.next_expiry = leases, now, 0.0

    def engines_at(self, now: float) -> Mapping[str, SharedEngine]:
        """Return every engine that has a slot, with ``stale`` as of ``now``."""
        if now >= self.next_expiry:
            view = self.view
            self.engines = {} if view is None else {e: self._engine(view, e, now) for e in view.slots}
            ends = (lease.expires_in_s + self.leases_at for lease in self.leases.values())
            self.next_expiry = min((end for end in ends if end > now), default=float("inf"))
        return self.engines

    def _engine(self, view: ScopeView, engine_id: str, now: float) -> SharedEngine:
        slot, facts = view.slots[engine_id], view.facts.get(engine_id, EngineFacts())
        lease = self.leases.get(engine_id)
        held = lease is not None and lease.expires_in_s + self.leases_at > now
        layout = None if facts.layout is None else self._layouts.setdefault(facts.layout, facts.layout)
        return SharedEngine(
            engine_id,
            slot.slot,
            slot.generation,
            layout,
            facts.scheme,
            facts.mode,
            facts.why_unknown,
            facts.feed_state,
            facts.missing_batches,
            lease.holder if lease is not None and held else "",
            not held or view.scope.server_identity != self.identity,
            frozenset(facts.stores),
        )
