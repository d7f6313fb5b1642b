"""Reads residency from the shared index: one round trip per look-up; only entries that are certainly current.

A look-up asks for the blocks, then for the version of the books, on every server it needs, all at once. The
books are kept from look-up to look-up and fetched again when the version differs, before anything is decoded;
so a forgotten engine is gone from every look-up that began after it was forgotten, and a code or generation
is read by books at least as new as the value it stands in. Leases and the server's clock come along
twice per renewal: an engine whose lease has run out is ``stale``.
Always true: servers other than those the books were written to (restarted, failed over) make every engine
stale, until its writer has written everything again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from publisher.events import BlockHash
from router.index.base import Rows, Words
from router.replication.leases.leases import parse_leases
from router.replication.redis.client import Client
from router.replication.redis.connection import PipelinedConnection, Reply, pack, within
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema.keys import ScopeKeys, as_words, mget, partition_of
from router.replication.schema.registry import ScopeView, parse_view
from router.replication.scope_cache import ScopeCache, SharedEngine

__all__ = ["ReaderStats", "SharedEngine", "SharedReader", "SharedRows"]

_BLOCKS_PER_TIMEOUT = 1000
_ATTEMPTS = 3
_FLIGHTS_MAX = 512


class SharedRows(NamedTuple):
    """The answer to one look-up."""

    rows: Rows
    engines: Mapping[str, SharedEngine]
    load: Mapping[str, bytes]
    """What each replica wrote of its load (``ScopeKeys.load``), undecoded."""
    flights: Sequence[bytes] = ()
    """What is new in the stream of flights (``ScopeKeys.flights``) since the look-up before, undecoded."""


class ReaderStats(msgspec.Struct):
    """Counters since start."""

    lookups: int = 0
    fetches: int = 0
    """Times the books had changed, which costs a second round trip."""
    failures: dict[str, int] = msgspec.field(default_factory=dict)


class _Answer(NamedTuple):
    """What one round trip brought."""

    values: list[bytes | None]
    order: npt.NDArray[np.intp] | None
    """Positions of the values' hashes in the question; None: as asked."""
    stamp: tuple[bytes | None, bytes | None]
    load: dict[str, bytes]
    flights: list[bytes]


class _Trip:
    """Commands for several servers, sent to all of them at once; replies in the order of ``add``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests: dict[PipelinedConnection, list[bytes]] = {}
        self._places: list[tuple[PipelinedConnection, int]] = []

    def add(self, key: bytes, command: bytes) -> None:
        connection = self._client.pipelined(key)
        commands = self._requests.setdefault(connection, [])
        self._places.append((connection, len(commands)))
        commands.append(command)

    async def replies(self, deadline: float) -> Iterator[Reply]:
        """Raises ``IndexUnavailable``, for an error among the replies too."""
        sent = [
            (connection, await connection.send(b"".join(commands), len(commands), deadline - _now()))
            for connection, commands in self._requests.items()
        ]
        came = {connection: await within(future, deadline - _now()) for connection, future in sent}
        return (self._client.checked(came[connection][number]) for connection, number in self._places)


class SharedReader:
    """Look-ups over one client, which nobody should write with at the same time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.counters = ReaderStats()
        self._books: dict[str, ScopeCache] = {}

    def engines(self, model: str) -> Mapping[str, SharedEngine]:
        """The engines as of the last look-up of this model, stale or not as of now; asks nobody."""
        return self._books_of(model).engines_at(_now())

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str, *, timeout_s: float | None = None
    ) -> SharedRows:
        """Who holds each block. Raises ``IndexUnavailable``, at the deadline at the latest.

        ``timeout_s`` replaces the setting ``lookup_timeout_s``. Raises ``IndexRefused`` for another schema.
        """
        self.counters.lookups += 1
        patience = max(1.0, len(hashes) / _BLOCKS_PER_TIMEOUT)
        deadline = _now() + (timeout_s or self.client.settings.lookup_timeout_s * patience)
        try:
            return await self._lookup(hashes, self._books_of(model), deadline)
        except IndexUnavailable as error:
            self.counters.failures[error.reason] = self.counters.failures.get(error.reason, 0) + 1
            raise

    async def _lookup(self, hashes: Sequence[BlockHash], books: ScopeCache, deadline: float) -> SharedRows:
        words, real = as_words(hashes)
        flights: list[bytes] = []
        for _ in range(_ATTEMPTS):
            identity, asked = self.client.identity, books.view
            answer = await self._ask(books, words, deadline)
            flights += answer.flights
            if answer.stamp != books.stamp or None in answer.stamp or identity != books.identity:
                await self._fetch(books, deadline)
                if not _same_keys(asked, books.view):
                    continue
            rows = _in_order(books.decoder.rows(answer.values), answer.order)
            if real is not None:
                columns = {key: np.where(real, column, np.uint64(0)) for key, column in rows.columns.items()}
                rows = Rows(rows.num_hashes, columns)
            return SharedRows(rows, books.engines_at(_now()), answer.load, flights)
        raise IndexUnavailable("changing", "the scope was begun anew again and again")

    def _books_of(self, model: str) -> ScopeCache:
        found = self._books.get(model)
        if found is None:
            found = self._books[model] = ScopeCache(ScopeKeys(self.client.settings.namespace, model))
        return found

    async def _ask(self, books: ScopeCache, words: Words, deadline: float) -> _Answer:
        """The blocks, then the version and the load, and now and then the leases."""
        keys, trip = books.keys, _Trip(self.client)
        order, queries = self._queries(books, words)
        for prefix, query in queries:
            trip.add(prefix, query)
        trip.add(keys.scope, pack("HMGET", keys.scope, "epoch", "v"))
        trip.add(keys.load, pack("HGETALL", keys.load))
        trip.add(keys.flights, _flights_query(books))
        with_leases = _now() - books.leases_at >= self.client.settings.renew_s / 2
        if with_leases:
            trip.add(keys.leases, pack("HGETALL", keys.leases))
            trip.add(keys.leases, pack("TIME"))
        replies = await trip.replies(deadline)
        values: list[bytes | None] = []
        for _ in queries:
            values += next(replies)
        epoch, version = next(replies)
        load = {name.decode(): told for name, told in _fields(next(replies)).items()}
        flights = _new_flights(books, next(replies))
        if with_leases:
            books.learn_leases(parse_leases(_fields(next(replies)), next(replies)), _now())
        return _Answer(values or [None] * len(words), order, (epoch, version), load, flights)

    def _queries(
        self, books: ScopeCache, words: Words
    ) -> tuple[npt.NDArray[np.intp] | None, list[tuple[bytes, bytes]]]:
        """(Positions of the hashes in the order asked for, one MGET per partition with its prefix)."""
        if books.view is None or not len(words):
            return None, []
        epoch, partitions = books.view.scope.epoch, books.view.scope.partitions
        if partitions == 1:
            prefix = books.keys.prefix(epoch, 0, 1)
            return None, [(prefix, mget(prefix, words))]
        numbers = partition_of(words, partitions)
        order = np.argsort(numbers, kind="stable")
        queries = []
        for partition in range(partitions):
            mine = words[numbers == partition]
            if len(mine):
                prefix = books.keys.prefix(epoch, partition, partitions)
                queries.append((prefix, mget(prefix, mine)))
        return order, queries

    async def _fetch(self, books: ScopeCache, deadline: float) -> None:
        """The books anew, with the identity of the servers they came from."""
        self.counters.fetches += 1
        identity, trip = self.client.identity, _Trip(self.client)
        trip.add(books.keys.scope, pack("HGETALL", books.keys.scope))
        (reply,) = await trip.replies(deadline)
        books.learn(parse_view(_fields(reply)), identity)


def _fields(flat: Reply) -> dict[bytes, bytes]:
    """A hash from the reply to HGETALL."""
    it = iter(flat)
    return dict(zip(it, it, strict=True))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _flights_query(books: ScopeCache) -> bytes:
    """At first only where the stream ends now; then what came since."""
    if books.flights_at is None:
        return pack("XREVRANGE", books.keys.flights, "+", "-", "COUNT", 1)
    return pack("XREAD", "COUNT", _FLIGHTS_MAX, "STREAMS", books.keys.flights, books.flights_at)


def _new_flights(books: ScopeCache, reply: Reply) -> list[bytes]:
    if books.flights_at is None:
        books.flights_at = reply[0][0] if reply else b"0-0"
        return []
    entries = reply[0][1] if reply else []
    if entries:
        books.flights_at = entries[-1][0]
    return [fields[1] for _, fields in entries]


def _same_keys(asked: ScopeView | None, now: ScopeView | None) -> bool:
    """Whether the values asked for are the ones these books speak of."""
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
