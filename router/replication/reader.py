"""Reads residency from the shared index: one round trip per lookup, and only current entries.

A lookup requests the blocks, then the version of the registry, from all servers concerned at once. The
registry is cached and fetched again when its version differs, before anything is decoded; so a forgotten
engine is absent from every lookup that began after it was forgotten, and a code or generation is decoded with
a registry at least as new as the value. Leases and the server's clock are read twice per renewal: an engine
whose lease has expired is ``stale``. Invariant: if the servers are not those the registry was written to
(restarted, failed over), every engine is stale until its writer has written everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.publisher.events import BlockHash
from kvatlas.router.index.base import Rows, Words
from kvatlas.router.replication.keys import ScopeKeys, as_words, mget, partition_of
from kvatlas.router.replication.leases import parse_leases
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import (
    IndexUnavailable,
    PipelinedConnection,
    Reply,
    pack,
    within,
)
from kvatlas.router.replication.registry import ScopeView, parse_view
from kvatlas.router.replication.scope_cache import ScopeCache, SharedEngine

# ``index.lookup_timeout_s`` is for this many blocks (docs/redis.md); longer prompts get more in proportion.
_BLOCKS_PER_TIMEOUT = 1000
_ATTEMPTS = 3
# Stream entries read with one lookup; the rest follows with the next.
_INFLIGHT_MAX = 512
# Seconds that replicas which only share load wait for it: no request waits for that.
_PEERS_TIMEOUT_S = 0.5


class SharedRows(NamedTuple):
    """Result of one lookup."""

    rows: Rows
    engines: Mapping[str, SharedEngine]
    load: Mapping[str, bytes]
    """Load reported by each replica (``ScopeKeys.load``), undecoded."""
    inflight: Sequence[bytes] = ()
    """New entries of the stream of prompts in flight (``ScopeKeys.inflight``), undecoded."""


class ReaderStats(msgspec.Struct):
    """Counters since start."""

    lookups: int = 0
    fetches: int = 0
    """Number of changes of the registry, each of which costs a second round trip."""
    failures: dict[str, int] = msgspec.field(default_factory=dict)


class _Answer(NamedTuple):
    """Result of one round trip."""

    values: list[bytes | None]
    order: npt.NDArray[np.intp] | None
    """Positions of the values' hashes in the request; None: the same order."""
    version: tuple[bytes | None, bytes | None]
    load: dict[str, bytes]


class _RoundTrip:
    """Commands for several servers, sent concurrently; replies in the order of ``add``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests: dict[PipelinedConnection, list[bytes]] = {}
        self._sources: list[tuple[PipelinedConnection, int]] = []

    def add(self, key: bytes, command: bytes) -> None:
        connection = self._client.pipelined(key)
        commands = self._requests.setdefault(connection, [])
        self._sources.append((connection, len(commands)))
        commands.append(command)

    async def replies(self, deadline: float) -> Iterator[Reply]:
        """Send the commands and return the replies.

        Raises ``IndexUnavailable``, also for an error among the replies.
        """
        sent = [
            (connection, await connection.send(b"".join(commands), len(commands), deadline - _now()))
            for connection, commands in self._requests.items()
        ]
        answers = {connection: await within(future, deadline - _now()) for connection, future in sent}
        return (self._client.checked(answers[connection][number]) for connection, number in self._sources)


class SharedReader:
    """Lookups over one dedicated client, so that no lookup waits behind a write."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.counters = ReaderStats()
        self._caches: dict[str, ScopeCache] = {}

    def engines(self, model: str) -> Mapping[str, SharedEngine]:
        """Return the engines as of the last lookup of this model, with ``stale`` as of now; sends nothing."""
        return self._cache_of(model).engines_at(_now())

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str, *, timeout_s: float | None = None
    ) -> SharedRows:
        """Look up the engines that hold each block.

        ``timeout_s`` overrides the setting ``lookup_timeout_s``. Raises ``IndexUnavailable``, at the deadline
        at the latest, and ``IndexRefused`` for another schema.
        """
        self.counters.lookups += 1
        scale = max(1.0, len(hashes) / _BLOCKS_PER_TIMEOUT)
        deadline = _now() + (timeout_s or self.client.settings.lookup_timeout_s * scale)
        try:
            return await self._lookup(hashes, self._cache_of(model), deadline)
        except IndexUnavailable as error:
            self.counters.failures[error.reason] = self.counters.failures.get(error.reason, 0) + 1
            raise

    async def peers(
        self, model: str, *, with_load: bool, wait_s: float
    ) -> tuple[Mapping[str, bytes], Sequence[bytes]]:
        """Read the load of each replica (if ``with_load``) and new prompts in flight, undecoded.

        Waits up to ``wait_s`` for prompts. One call at a time. Raises ``IndexUnavailable``.
        """
        cache, round_trip = self._cache_of(model), _RoundTrip(self.client)
        after, load = cache.inflight_position, {}
        if with_load:
            round_trip.add(cache.keys.load, pack("HGETALL", cache.keys.load))
        round_trip.add(cache.keys.inflight, _inflight_query(cache, after, wait_s))
        replies = await round_trip.replies(_now() + wait_s + _PEERS_TIMEOUT_S)
        if with_load:
            load = _load_fields(next(replies))
        _keep_inflight(cache, after, next(replies))
        inflight, cache.unread = cache.unread, []
        return load, inflight

    async def _lookup(self, hashes: Sequence[BlockHash], cache: ScopeCache, deadline: float) -> SharedRows:
        words, is_hash = as_words(hashes)
        for _ in range(_ATTEMPTS):
            identity, asked = self.client.identity, cache.view
            answer = await self._ask(cache, words, deadline)
            if answer.version != cache.version or None in answer.version or identity != cache.identity:
                await self._fetch(cache, deadline)
            # A concurrent lookup may have fetched a registry that the blocks were not requested by.
            if not _same_epoch(asked, cache.view):
                continue
            rows = _in_order(cache.decoder.rows(answer.values), answer.order)
            if is_hash is not None:
                columns = {
                    key: np.where(is_hash, column, np.uint64(0)) for key, column in rows.columns.items()
                }
                rows = Rows(rows.num_hashes, columns)
            inflight, cache.unread = cache.unread, []
            return SharedRows(rows, cache.engines_at(_now()), answer.load, inflight)
        raise IndexUnavailable("changing", "the registry was recreated several times")

    def _cache_of(self, model: str) -> ScopeCache:
        found = self._caches.get(model)
        if found is None:
            found = self._caches[model] = ScopeCache(ScopeKeys(self.client.settings.namespace, model))
        return found

    async def _ask(self, cache: ScopeCache, words: Words, deadline: float) -> _Answer:
        """Request the blocks, then the version and the load, and the leases if due."""
        keys, round_trip, after = cache.keys, _RoundTrip(self.client), cache.inflight_position
        order, queries = self._queries(cache, words)
        for prefix, query in queries:
            round_trip.add(prefix, query)
        round_trip.add(keys.scope, pack("HMGET", keys.scope, "epoch", "v"))
        round_trip.add(keys.load, pack("HGETALL", keys.load))
        round_trip.add(keys.inflight, _inflight_query(cache, after))
        with_leases = _now() - cache.leases_at >= self.client.settings.renewal_s / 2
        if with_leases:
            round_trip.add(keys.leases, pack("HGETALL", keys.leases))
            round_trip.add(keys.leases, pack("TIME"))
        replies = await round_trip.replies(deadline)
        values: list[bytes | None] = []
        for _ in queries:
            values += next(replies)
        epoch, version = next(replies)
        load = _load_fields(next(replies))
        _keep_inflight(cache, after, next(replies))
        if with_leases:
            cache.update_leases(parse_leases(_fields(next(replies)), next(replies)), _now())
        return _Answer(values or [None] * len(words), order, (epoch, version), load)

    def _queries(
        self, cache: ScopeCache, words: Words
    ) -> tuple[npt.NDArray[np.intp] | None, list[tuple[bytes, bytes]]]:
        """Return (positions of the hashes in the order of the queries, one MGET per partition with its
        prefix).
        """
        if cache.view is None or not len(words):
            return None, []
        epoch, partitions = cache.view.scope.epoch, cache.view.scope.partitions
        if partitions == 1:
            prefix = cache.keys.prefix(epoch, 0, 1)
            return None, [(prefix, mget(prefix, words))]
        numbers = partition_of(words, partitions)
        order = np.argsort(numbers, kind="stable")
        queries = []
        for partition in range(partitions):
            mine = words[numbers == partition]
            if len(mine):
                prefix = cache.keys.prefix(epoch, partition, partitions)
                queries.append((prefix, mget(prefix, mine)))
        return order, queries

    async def _fetch(self, cache: ScopeCache, deadline: float) -> None:
        """Fetch the registry, with the identity of the servers it came from."""
        self.counters.fetches += 1
        identity, round_trip = self.client.identity, _RoundTrip(self.client)
        round_trip.add(cache.keys.scope, pack("HGETALL", cache.keys.scope))
        (reply,) = await round_trip.replies(deadline)
        cache.update(parse_view(_fields(reply)), identity)


def _fields(flat: Reply) -> dict[bytes, bytes]:
    """Parse a hash from the reply to HGETALL."""
    it = iter(flat)
    return dict(zip(it, it, strict=True))


def _load_fields(flat: Reply) -> dict[str, bytes]:
    return {name.decode(errors="replace"): value for name, value in _fields(flat).items()}


def _now() -> float:
    return asyncio.get_running_loop().time()


def _inflight_query(cache: ScopeCache, after: bytes | None, wait_s: float = 0.0) -> bytes:
    """Query only the stream's end the first time; afterwards the entries since the last one read, waiting up
    to ``wait_s`` for the first."""
    if after is None:
        return pack("XREVRANGE", cache.keys.inflight, "+", "-", "COUNT", 1)
    waiting = ("BLOCK", int(1000 * wait_s)) if wait_s else ()
    return pack("XREAD", "COUNT", _INFLIGHT_MAX, *waiting, "STREAMS", cache.keys.inflight, after)


def _keep_inflight(cache: ScopeCache, after: bytes | None, reply: Reply) -> None:
    """Keep the entries in the reply to the query ``after`` a position, but for those that concurrent look-ups
    have read, until a look-up returns them. Those that are too many are read again later."""
    read = cache.inflight_position
    if after is None:
        if read is None:
            cache.inflight_position = reply[0][0] if reply else b"0-0"
        return
    if len(cache.unread) >= _INFLIGHT_MAX:
        return
    entries = reply[0][1] if reply else []
    if read != after and read is not None:
        entries = [entry for entry in entries if _stream_id(entry[0]) > _stream_id(read)]
    if entries:
        cache.inflight_position = entries[-1][0]
    cache.unread += [fields[1] for _, fields in entries]


def _stream_id(entry_id: bytes) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number)


def _same_epoch(asked: ScopeView | None, now: ScopeView | None) -> bool:
    """Whether the values that were read belong to this registry's epoch."""
    if now is None:
        return True
    return asked is not None and asked.scope.epoch == now.scope.epoch


def _in_order(rows: Rows, order: npt.NDArray[np.intp] | None) -> Rows:
    if order is None or not rows.columns:
        return rows
    columns = {}
    for key, words in rows.columns.items():
        columns[key] = np.empty_like(words)
        columns[key][order] = words
    return Rows(rows.num_hashes, columns)
