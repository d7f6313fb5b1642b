"""Compares the shared index with what each engine really holds, by following its events for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
import numpy as np

from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.base import Plane, Words
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineQuery
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.reader import SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.registry import Registry
from kvatlas.router.replication.scope_cache import SharedEngine
from kvatlas.router.tools.index_reader import ScopeSnapshot, block_hashes

_LOOKUP_S = 10.0
_PAGE = 20_000
_AGAIN_S = 0.1
Pairs = set[tuple[Plane, int]]
# (Wrong, missing) pairs of one engine.
_Difference = tuple[Pairs, Pairs]
_KNOWN = frozenset({FeedState.READY, FeedState.DEGRADED})


class EngineDiff(msgspec.Struct):
    """Comparison of one engine, in (plane, block) pairs."""

    engine: str
    feed: str
    """State of this tool's own feed; differences are meaningful only if it is ``ready``."""
    holder: str = ""
    stale: bool = True
    resident: int = 0
    """Pairs the engine holds according to its feed."""
    wrong: int = 0
    """Pairs in the index that the engine does not hold: predicted hits are too long."""
    missing: int = 0
    """Pairs the engine holds that are not in the index: predicted hits are too short."""

    gone: bool = False
    """No replica follows or writes it: its remaining blocks are not used and expire."""

    @property
    def exact(self) -> bool:
        return self.gone or (
            self.feed == FeedState.READY and not self.stale and not (self.wrong or self.missing)
        )


class Verifier:
    """Follows the engines of one scope while its context is open."""

    def __init__(
        self, client: Client, snapshot: ScopeSnapshot, addresses: Mapping[str, EngineAddress]
    ) -> None:
        self._unknown = sorted(set(snapshot.view.slots) - set(addresses))
        self._leases = snapshot.leases
        self._client = client
        self._model = snapshot.model
        self._memory = MemoryIndex()
        self._residency = FleetResidency(ModelFacts(), self._memory)
        self._reader = SharedReader(client)
        self._feeds = [
            Feed(e.engine_id, e.events, e.replay, e.topic, self._residency)
            for e in addresses.values()
            if e.events is not None
        ]
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Verifier:
        self._running = [asyncio.create_task(feed.run()) for feed in self._feeds]
        return self

    async def __aexit__(self, *_: object) -> None:
        for feed in self._feeds:
            feed.close()
        await asyncio.gather(*self._running, return_exceptions=True)

    def others(self) -> list[EngineDiff]:
        """Return the engines in the index with unknown event addresses."""
        held = {engine_id for engine_id, lease in self._leases.items() if lease.held}
        return [EngineDiff(e, "unknown", gone=e not in held) for e in self._unknown]

    async def compare(self, settle_s: float) -> list[EngineDiff]:
        """Return the persistent differences: as soon as there are none, otherwise after ``settle_s``."""
        end = time.monotonic() + settle_s
        found: list[EngineDiff] = []
        before: dict[str, _Difference] = {}
        while True:
            if all(feed.state in _KNOWN for feed in self._feeds):
                found, before = await self._compare_once(before)
            if (found and all(diff.exact for diff in found)) or time.monotonic() > end:
                return found or [EngineDiff(feed.engine_id, str(feed.state)) for feed in self._feeds]
            await asyncio.sleep(_AGAIN_S)

    async def _compare_once(
        self, before: Mapping[str, _Difference]
    ) -> tuple[list[EngineDiff], dict[str, _Difference]]:
        """Return the differences also found before, and all current ones."""
        await self._reader.lookup((), self._model, timeout_s=_LOOKUP_S)
        engines = self._reader.engines(self._model)
        shown = await shown_pairs(self._client, self._reader, self._model)
        diffs, now = [], {}
        for feed in self._feeds:
            engine_id = feed.engine_id
            held = self._held(engine_id)
            seen = shown.get(engine_id, set())
            wrong, missing = seen - held, held - seen
            now[engine_id] = wrong, missing
            old_wrong, old_missing = before.get(engine_id, (wrong, missing))
            known: SharedEngine | None = engines.get(engine_id)
            diffs.append(
                EngineDiff(
                    engine_id,
                    str(feed.state),
                    "" if known is None else known.holder,
                    known is None or known.stale,
                    len(held),
                    len(wrong & old_wrong),
                    len(missing & old_missing),
                )
            )
        return diffs, now

    def _held(self, engine_id: str) -> Pairs:
        """Return the pairs the engine holds according to its feed."""
        planes = self._memory.planes(engine_id)
        blocks = self._memory.blocks_of(engine_id)
        states = [BlockHash(value) for value in blocks.tolist()]
        query = self._residency.residency(engine_id).query()
        if isinstance(query, EngineQuery) and query.learned is not None:
            _, names, states = query.learned.named(states)
            blocks = np.array(names, np.uint64)
        bits = self._memory.held_in(engine_id, planes, states)
        pairs: Pairs = set()
        for number, plane in enumerate(planes):
            there = (bits >> np.uint64(number)) & np.uint64(1) != 0
            pairs.update((plane, value) for value in blocks[there].tolist())
        return pairs


async def shown_pairs(client: Client, reader: SharedReader, model: str) -> dict[str, Pairs]:
    """Return the (plane, block) pairs of each engine in a scope. Raises ``IndexUnavailable``."""
    view = await Registry(client, model).fetch()
    if view is None:
        return {}
    keys = ScopeKeys(client.settings.namespace, model)
    hashes = await block_hashes(client, keys, view.scope)
    shown: dict[str, Pairs] = {}
    for start in range(0, len(hashes), _PAGE):
        page: Words = hashes[start : start + _PAGE]
        asked = [BlockHash(value) for value in page.tolist()]
        found = await reader.lookup(asked, model, timeout_s=_LOOKUP_S)
        for engine_id, engine in found.engines.items():
            pairs = shown.setdefault(engine_id, set())
            for (plane, word), column in found.rows.columns.items():
                if word == engine.slot.word:
                    there = (column >> np.uint64(engine.slot.bit)) & np.uint64(1) != 0
                    pairs.update((plane, value) for value in page[there].tolist())
    return shown
