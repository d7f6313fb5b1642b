"""``kvatlas index verify``: what the shared index says, against what the engines' feeds say now.

Follows every engine of a scope itself (its events from the first one on, by replay), builds residency from
that, and compares block by block. The index lags behind the feeds by a write, so a difference counts only if
it stays: it is looked at again until it is gone or the time is up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import msgspec
import numpy as np

from publisher.events import BlockHash
from router.feeds.base import FeedState
from router.feeds.subscriber import Feed
from router.fleet.identity import EngineAddress
from router.index.base import Plane, Words
from router.index.learn.layout import ModelFacts
from router.index.model import FleetResidency
from router.index.store.memory import MemoryIndex
from router.replication.reader import SharedReader
from router.replication.redis.client import Client
from router.replication.schema.keys import ScopeKeys
from router.replication.schema.registry import Registry
from router.replication.scope_cache import SharedEngine
from router.tools.index.scan import ScopeSnapshot, block_hashes

_LOOKUP_S = 10.0
_PAGE = 20_000
_AGAIN_S = 0.1
Pairs = set[tuple[Plane, int]]
_Difference = tuple[Pairs, Pairs]
"""(Wrong, missing) pairs of one engine."""
_KNOWN = frozenset({FeedState.READY, FeedState.DEGRADED})


class EngineDiff(msgspec.Struct):
    """One engine: (plane, block) pairs."""

    engine: str
    feed: str
    """State of this tool's own feed; differences mean something only if it is ``ready``."""
    holder: str = ""
    stale: bool = True
    resident: int = 0
    """Pairs the engine holds, by its feed."""
    wrong: int = 0
    """Pairs the index shows and the engine does not hold: hits would be predicted too long."""
    missing: int = 0
    """Pairs the engine holds and the index does not show: hits would be predicted too short."""

    gone: bool = False
    """No replica wants or writes it: what is left of it is shown to nobody and runs out."""

    @property
    def exact(self) -> bool:
        return self.gone or (
            self.feed == FeedState.READY and not self.stale and not (self.wrong or self.missing)
        )


class Verifier:
    """Follows the engines of one scope for as long as its context lasts."""

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
        """Engines in the index whose event addresses nobody knows."""
        held = {engine_id for engine_id, lease in self._leases.items() if lease.held}
        return [EngineDiff(e, "unknown", gone=e not in held) for e in self._unknown]

    async def compare(self, settle_s: float) -> list[EngineDiff]:
        """Differences that stay; returns as soon as there are none, else after ``settle_s``."""
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
        """The differences that were there before too, and all of now."""
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
        """What the engine holds, by its feed."""
        planes = self._memory.planes(engine_id)
        blocks = self._memory.blocks_of(engine_id)
        bits = self._memory.held_in(engine_id, planes, [BlockHash(value) for value in blocks.tolist()])
        pairs: Pairs = set()
        for number, plane in enumerate(planes):
            there = (bits >> np.uint64(number)) & np.uint64(1) != 0
            pairs.update((plane, value) for value in blocks[there].tolist())
        return pairs


async def shown_pairs(client: Client, reader: SharedReader, model: str) -> dict[str, Pairs]:
    """What a scope shows of each engine: (plane, block) pairs. Raises ``IndexUnavailable``."""
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
