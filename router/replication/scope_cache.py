"""A reader's copy of one scope's registry, and what follows from them at a moment.

Always true: an engine is not stale only while the lease last seen has not run out by the server's clock,
and only on the servers the books were written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from publisher.block_hash import HashScheme
from router.index.base import Slot
from router.index.learn.layout import CacheLayout
from router.replication.leases.leases import Lease
from router.replication.schema.codec import Decoder
from router.replication.schema.keys import ScopeKeys
from router.replication.schema.registry import EngineFacts, ScopeView


class SharedEngine(NamedTuple):
    """One engine as its writer describes it."""

    engine_id: str
    slot: Slot
    generation: int
    layout: CacheLayout | None
    """Equal layouts are one object, which a look-up evaluates once."""
    scheme: HashScheme | None
    mode: str
    why_unknown: str
    feed_state: str
    missing_batches: int
    holder: str
    """The replica that writes it; empty if none does."""
    stale: bool
    """Nobody vouches for it now: its hits may be shown, but must not be trusted."""
    stores: frozenset[str] = frozenset()
    """Shared stores that it loads from."""


class ScopeCache:
    """One scope's books as last fetched, and what follows from them."""

    def __init__(self, keys: ScopeKeys) -> None:
        self.keys = keys
        self.view: ScopeView | None = None
        self.decoder = Decoder(1, {}, {})
        self.identity = ""
        self.leases: dict[str, Lease] = {}
        self.leases_at = float("-inf")
        self.engines: dict[str, SharedEngine] = {}
        self.flights_at: bytes | None = None
        """The last entry of the stream of flights that was read; None: none was looked for yet."""
        self.changes_at = 0.0
        """When the next engine becomes stale if no lease is renewed."""
        self._layouts: dict[CacheLayout, CacheLayout] = {}

    @property
    def stamp(self) -> tuple[bytes | None, bytes | None]:
        return (None, None) if self.view is None else (self.view.scope.epoch, self.view.version)

    def learn(self, view: ScopeView | None, identity: str) -> None:
        self.view, self.identity, self.changes_at = view, identity, 0.0
        if view is None:
            self.decoder = Decoder(1, {}, {})
            return
        generations = {seat.number: seat.generation for seat in view.seats.values()}
        self.decoder = Decoder(view.scope.code_bytes, generations, view.patterns)

    def learn_leases(self, leases: dict[str, Lease], now: float) -> None:
        self.leases, self.leases_at, self.changes_at = leases, now, 0.0

    def engines_at(self, now: float) -> Mapping[str, SharedEngine]:
        """Every engine that has a seat, stale or not at this moment."""
        if now >= self.changes_at:
            view = self.view
            self.engines = {} if view is None else {e: self._engine(view, e, now) for e in view.seats}
            ends = (lease.expires_in_s + self.leases_at for lease in self.leases.values())
            self.changes_at = min((end for end in ends if end > now), default=float("inf"))
        return self.engines

    def _engine(self, view: ScopeView, engine_id: str, now: float) -> SharedEngine:
        seat, facts = view.seats[engine_id], view.facts.get(engine_id, EngineFacts())
        lease = self.leases.get(engine_id)
        held = lease is not None and lease.expires_in_s + self.leases_at > now
        layout = None if facts.layout is None else self._layouts.setdefault(facts.layout, facts.layout)
        return SharedEngine(
            engine_id,
            seat.slot,
            seat.generation,
            layout,
            facts.scheme,
            facts.mode,
            facts.why_unknown,
            facts.feed_state,
            facts.missing_batches,
            lease.holder if lease is not None and held else "",
            not held or view.scope.home != self.identity,
            frozenset(facts.stores),
        )
