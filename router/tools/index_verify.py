"""``kvatlas index verify``: what the shared index says, against what the engines' feeds say now.

Follows every engine of a scope itself (its events from the first one on, by replay), builds residency from
that, and compares block by block. The index lags behind the feeds by a write, so a difference counts only if
it stays: it is looked at again until it is gone or the time is up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np
from redis.exceptions import RedisError

from publisher.events import BlockHash
from router.feeds.base import FeedState
from router.feeds.subscriber import Feed
from router.fleet.identity import EngineAddress
from router.index.base import Plane, Words
from router.index.learn.layout import ModelFacts
from router.index.memory import MemoryIndex
from router.index.model import FleetResidency
from router.replication.codec import ScopeKeys
from router.replication.leases import Lease, Leases, MemberRecord, decode_members
from router.replication.reader import SharedEngine, SharedReader
from router.replication.redis.client import Client
from router.replication.redis.connection import unavailable
from router.replication.registry import Registry, Scope, ScopeView

# Reads a shared index from outside: its scopes, lease holders, and every block key.
#
# For tools and tests only: it walks all keys (SCAN), which the router never does.


_SCAN_COUNT = 5000
_GLOB = re.compile(rb"([\\*?\[\]])")
_TIMEOUT_S = 10.0


class ScopeSnapshot(NamedTuple):
    """One model's registry, leases and replicas, read one after the other."""

    model: str
    view: ScopeView
    leases: dict[str, Lease]
    replicas: dict[str, MemberRecord]

    @property
    def addresses(self) -> dict[str, EngineAddress]:
        """The engines' addresses, as the replicas report them."""
        return {e.engine_id: e for record in self.replicas.values() for e in record.wants}


async def models_of(client: Client) -> list[str]:
    """The models that have a scope in the client's namespace."""
    namespace = client.settings.namespace.encode()
    pattern = re.compile(re.escape(namespace) + rb":\{(.*)\}:scope")
    found = set()
    async for keys in scan(client, namespace + b":{", b"}:scope"):
        found |= {unquote(match[1].decode()) for key in keys if (match := pattern.fullmatch(key))}
    return sorted(found)


async def read_scope(client: Client, model: str) -> ScopeSnapshot | None:
    """Everything but the blocks; None where there is no such scope."""
    view = await Registry(client, model).fetch()
    if view is None:
        return None
    leases = await Leases(client, model, "").holders()
    records = decode_members(
        await client.command("HGETALL", ScopeKeys(client.settings.namespace, model).replicas)
    )
    return ScopeSnapshot(model, view, leases, {name: s for name, s in records.items() if s is not None})


async def scan(client: Client, head: bytes, tail: bytes = b"") -> AsyncIterator[list[bytes]]:
    """All keys that start with ``head`` and end in ``tail``, a page at a time.

    A key may come twice. Raises ``IndexUnavailable``.
    """
    glob = _GLOB.sub(rb"\\\1", head) + b"*" + _GLOB.sub(rb"\\\1", tail)
    for master in client.masters():
        cursor = 0
        while True:
            query = ("SCAN", cursor, "MATCH", glob, "COUNT", _SCAN_COUNT)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    cursor, keys = await master.execute_command(*query)
            except (RedisError, OSError) as error:
                raise unavailable(error) from error
            yield keys
            if not cursor:
                break


async def block_hashes(client: Client, keys: ScopeKeys, scope: Scope) -> Words:
    """The hash of every block that has a key in this scope, in no order."""
    found: list[bytes] = []
    for partition in range(scope.partitions):
        prefix = keys.prefix(scope.epoch, partition, scope.partitions)
        async for page in scan(client, prefix):
            found += [key[-8:] for key in page if len(key) == len(prefix) + 8]
    return np.unique(np.frombuffer(b"".join(found), "<u8").astype(np.uint64))


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
