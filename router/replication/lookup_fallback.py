"""Lookups in the shared index: one round trip per prompt, and a fallback for every failure.

Engines that this replica follows are predicted from its own memory, which is ahead of the index by the
duration of a write; all others from the index. Invariants: a lookup raises nothing and waits no longer than
its deadline; an engine without a live writer is marked stale; if no prediction is possible the hit is
``unknown`` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Protocol

import msgspec
import structlog

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.base import Rows
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.model import HashedPrompt
from kvatlas.router.index.offloaded import shared_part
from kvatlas.router.index.places import is_shared
from kvatlas.router.index.query_plan import EngineHit, EngineQuery, Mode, query_hits
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, PeerSnapshot
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.proxy.breaker import Breaker, BreakerSettings
from kvatlas.router.replication.load_gossip import LOAD_INTERVAL_S, SILENCE_S, LoadGossip
from kvatlas.router.replication.reader import SharedReader, SharedRows
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import IndexRefused
from kvatlas.router.replication.scope_cache import SharedEngine

_log = structlog.get_logger()
# Modes in which other replicas can predict.
_PREDICTED = frozenset({"native", "learned"})
_TRUSTED = frozenset({FeedState.READY, FeedState.DEGRADED})


class LookupStats(msgspec.Struct):
    """Counters for metrics."""

    lookups: Annotated[int, "kvatlas_shared_index_lookups_total"] = 0
    """Look-ups that the shared index answered; with ``share = "load"`` reads of others' load and prompts."""
    fallbacks: Annotated[dict[str, int], "kvatlas_shared_index_fallbacks_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Look-ups that it did not answer in time, by reason: those requests were placed without it. With
    ``share = "load"`` reads: requests were placed without others' load until the next one."""
    retries: Annotated[int, "kvatlas_shared_index_retries_total"] = 0
    """Look-ups done again because an engine's hash scheme had just become known."""
    stale_engines: Annotated[int, "kvatlas_shared_index_stale_engines_total"] = 0
    """Answers for an engine whose writer was silent or not caught up."""


class Ownership(Protocol):
    """The engines this replica follows (implemented by ``LeaseManager``)."""

    others_alive: bool

    def follows(self, engine_id: str) -> bool:
        """Whether its feed runs here."""

    def holds_exclusively(self, engine_id: str) -> bool:
        """Whether its feed runs here and no other replica can be following it."""


class IndexLookup:
    """View of the shared index for placement (``SharedView``).

    ``reader`` returns the reader; it is called in the event loop.
    """

    def __init__(
        self,
        reader: Callable[[], SharedReader],
        own: Ownership,
        load_gossip: LoadGossip,
        *,
        receive_inflight: Callable[[Sequence[bytes]], None] = lambda inflight: None,
        clock: Callable[[], float],
    ) -> None:
        self.stats = LookupStats()
        # Why the last lookup failed; "" if it did not.
        self.problem = ""
        self.breaker = Breaker(BreakerSettings(open_s_max=5.0))
        self._reader = reader
        self._own = own
        self._load_gossip = load_gossip
        self._receive_inflight = receive_inflight
        self._clock = clock
        self.own_rows: Callable[[str, Sequence[BlockHash]], Rows] = _no_rows
        """Rows of a model's index here: stores with feeds of their own are followed by each replica."""
        self._models: dict[str, str] = {}
        self._load: Mapping[str, OthersLoad] = {}
        self._load_s = -math.inf

    def assign(self, engine_id: str, model: str) -> None:
        self._models[engine_id] = model

    def remove(self, engine_id: str) -> None:
        """Forget an engine that left the fleet."""
        self._models.pop(engine_id, None)

    def model_of(self, engine_id: str) -> str | None:
        return self._models.get(engine_id)

    def known(self, engine_id: str) -> SharedEngine | None:
        """Return an engine's description as of the last lookup; sends nothing."""
        model = self._models.get(engine_id)
        return None if model is None else self._reader().engines(model).get(engine_id)

    def scheme(self, engine_id: str) -> HashScheme | None:
        known = self.known(engine_id)
        return None if known is None else known.scheme

    def layout(self, engine_id: str) -> CacheLayout | None:
        known = self.known(engine_id)
        return None if known is None else known.layout

    def feed_state(self, engine_id: str) -> str | None:
        known = self.known(engine_id)
        if known is None:
            return None
        return str(FeedState.STALE) if known.stale else known.feed_state

    async def look(
        self, prompt: HashedPrompt | None, engines: Mapping[str, str], *, detail: bool = False
    ) -> PeerSnapshot:
        """Look up the prompt on the engines of other replicas; never raises."""
        remote = {e: model for e, model in engines.items() if not self._own.holds_exclusively(e)}
        if not remote and not self._own.others_alive:
            return NO_PEER_SNAPSHOT
        if not self.breaker.allows(self._clock()):
            return self._fallback("circuit", remote)
        self.breaker.begin(self._clock())
        hits: dict[str, EngineHit] = {}
        load: dict[str, bytes] = {}
        stores: dict[str, dict[HashScheme, Rows]] = {}
        try:
            for model in dict.fromkeys(engines.values()):
                ids = [e for e, its in remote.items() if its == model]
                found = await self._look_up(model, prompt, ids, hits, stores, detail=detail)
                load |= found.load
        except IndexUnavailable as error:
            self.breaker.record(False, self._clock())
            return self._fallback(error.reason, remote)
        except IndexRefused:
            self.breaker.record(False, self._clock())
            return self._fallback("refused", remote)
        except Exception:  # noqa: BLE001  # no request may fail because of the index
            _log.exception("shared index look-up failed")
            self.breaker.record(False, self._clock())
            return self._fallback("fault", remote)
        self.breaker.record(True, self._clock())
        self.problem = ""
        self.stats.lookups += 1
        self._load, self._load_s = self._load_gossip.others(load, self._clock()), self._clock()
        return PeerSnapshot(hits, self._load, stores)

    def last_load(self) -> Mapping[str, OthersLoad] | None:
        """Return other replicas' load as of the last lookup; None if that is too long ago."""
        if not self._own.others_alive:
            return {}
        return self._load if self._clock() - self._load_s <= SILENCE_S else None

    async def refresh(self) -> None:
        """Read the registry of every model, without a prompt; never raises."""
        await self.look(None, dict(self._models))

    async def receive(self, model: str, wait_s: float) -> PeerSnapshot:
        """Receive the others' load, and prompts in flight since the last call, where no blocks are shared.

        Waits up to ``wait_s`` for prompts; never raises.
        """
        if not self._own.others_alive:
            return NO_PEER_SNAPSHOT
        now = self._clock()
        # Each replica writes its load as rarely; to add up those of many takes longer than to read prompts.
        with_load = now - self._load_s >= LOAD_INTERVAL_S
        try:
            load, inflight = await self._reader().peers(model, with_load=with_load, wait_s=wait_s)
        except IndexUnavailable as error:
            return self._fallback(error.reason, {})
        self._receive_inflight(inflight)
        if with_load:
            self._load, self._load_s = self._load_gossip.others(load, self._clock()), now
        self.problem = ""
        self.stats.lookups += 1
        return PeerSnapshot(load=self._load)

    def _fallback(self, reason: str, remote: Mapping[str, str]) -> PeerSnapshot:
        """Return the result without the index: engines followed here are known from memory, the others
        ``unknown``.
        """
        self.stats.fallbacks[reason] = self.stats.fallbacks.get(reason, 0) + 1
        self.problem = reason
        why = f"the shared index did not answer ({reason})"
        lost = [engine_id for engine_id in remote if not self._own.follows(engine_id)]
        hits = {e: EngineHit("unknown", why_unknown=why) for e in lost}
        return PeerSnapshot(hits, load=None, problem=reason)

    async def _look_up(
        self,
        model: str,
        prompt: HashedPrompt | None,
        ids: list[str],
        hits: dict[str, EngineHit],
        stores: dict[str, dict[HashScheme, Rows]],
        *,
        detail: bool,
    ) -> SharedRows:
        """Add the hits of ``ids`` to ``hits`` and rows of shared stores to ``stores``."""
        # The lookup is repeated if an engine turns out to have a new hash scheme.
        reader = self._reader()
        schemes = _schemes(reader.engines(model), ids)
        while True:
            asked: list[BlockHash] = []
            spans: dict[HashScheme, tuple[int, int]] = {}
            for scheme in schemes if prompt is not None else ():
                hashes = prompt.hashes(scheme) if prompt is not None else ()
                spans[scheme] = len(asked), len(asked) + len(hashes)
                asked += hashes
            found = await reader.lookup(asked, model)
            # At once: what follows may fail, and they are read only once.
            if found.inflight:
                self._receive_inflight(found.inflight)
            new_schemes = _schemes(found.engines, ids)
            if prompt is None or new_schemes <= schemes:
                break
            self.stats.retries += 1
            schemes |= new_schemes
        if prompt is not None:
            hits |= self._hits(found, model, prompt, ids, spans, detail=detail)
            if any(is_shared(plane.medium) for plane, _ in found.rows.columns):
                stores[model] = {scheme: shared_part(_span(found.rows, *at)) for scheme, at in spans.items()}
        return found

    def _hits(
        self,
        found: SharedRows,
        model: str,
        prompt: HashedPrompt,
        ids: list[str],
        spans: Mapping[HashScheme, tuple[int, int]],
        *,
        detail: bool,
    ) -> dict[str, EngineHit]:
        hits: dict[str, EngineHit] = {}
        queries: dict[HashScheme, list[EngineQuery]] = {}
        for engine_id in ids:
            known = found.engines.get(engine_id)
            query = _query(engine_id, known)
            if isinstance(query, EngineHit):
                hits[engine_id] = query
            else:
                queries.setdefault(query.scheme, []).append(query)
        for scheme, alike in queries.items():
            rows = _span(found.rows, *spans[scheme])
            if any(query.stores for query in alike):
                own = shared_part(self.own_rows(model, prompt.hashes(scheme)))
                rows = Rows(rows.num_hashes, rows.columns | own.columns)
            hits |= query_hits(rows, prompt.num_tokens, alike, detail=detail)
        for engine_id in [query.engine_id for alike in queries.values() for query in alike]:
            if not _trusted(found.engines[engine_id]):
                self.stats.stale_engines += 1
                hits[engine_id] = msgspec.structs.replace(hits[engine_id], stale=True)
        return hits


def _no_rows(model: str, hashes: Sequence[BlockHash]) -> Rows:
    return Rows(len(hashes), {})


def _span(rows: Rows, start: int, end: int) -> Rows:
    """Return the rows of one scheme's hashes."""
    return Rows(end - start, {key: column[start:end] for key, column in rows.columns.items()})


def _trusted(known: SharedEngine) -> bool:
    """Whether the index is kept up to date for this engine now."""
    return not known.stale and known.feed_state in _TRUSTED


def _schemes(engines: Mapping[str, SharedEngine], ids: list[str]) -> set[HashScheme]:
    found = (engines.get(engine_id) for engine_id in ids)
    return {e.scheme for e in found if e is not None and e.scheme is not None and e.mode in _PREDICTED}


def _query(engine_id: str, known: SharedEngine | None) -> EngineQuery | EngineHit:
    """Return the query of an engine, or an ``unknown`` hit with the reason."""
    if known is None:
        return EngineHit("unknown", why_unknown="no replica follows this engine yet")
    if known.scheme is None or known.layout is None:
        if _trusted(known) and known.mode == "empty":
            return EngineHit("native")
        return EngineHit("unknown", why_unknown=known.why_unknown or "nothing is known about this engine yet")
    if known.layout.missing_facts:
        why = f"configure {', '.join(known.layout.missing_facts)} for this model"
        return EngineHit("unknown", why_unknown=why)
    mode: Mode = "learned" if known.mode == "learned" else "native"
    return EngineQuery(engine_id, known.scheme, known.layout, known.slot, stores=known.stores, mode=mode)
