"""Servers that hold the index: one master, Sentinel's master, or the masters of a Cluster with their slots.

redis-py queries and parses. Its Cluster client is not used: it follows redirections and updates its view of
the Cluster within a command, while the index must know which run of which server a reply came from.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from router.replication.redis.connection import (
    IndexUnavailable,
    PipelinedConnection,
    Reply,
    ServerError,
    pack,
    unavailable,
)
from router.replication.settings import Target

Address = tuple[str, int]


class SlotRange(NamedTuple):
    """Slots ``first`` to ``last`` are served by ``master``."""

    first: int
    last: int
    master: Address


class Topology(NamedTuple):
    """The masters in use; one range for one server, none before any was found."""

    clustered: bool
    ranges: tuple[SlotRange, ...]

    @property
    def masters(self) -> list[Address]:
        return list(dict.fromkeys(part.master for part in self.ranges))

    def master_of(self, key: bytes) -> Address | None:
        """Return the master of a key's slot."""
        if len(self.ranges) == 1:
            return self.ranges[0].master
        slot = key_slot(key)
        return next((part.master for part in self.ranges if part.first <= slot <= part.last), None)


def single(address: Address) -> Topology:
    """Topology of a single server."""
    return Topology(False, (SlotRange(0, SLOTS - 1, address),))


async def cluster_topology(node: Redis, asked: Address) -> Topology:
    """Read the Cluster's topology from one of its nodes. Raises ``IndexUnavailable`` if slots are not
    served.
    """
    ranges = sorted(
        SlotRange(first, last, ((master[0] or b"").decode() or asked[0], int(master[1])))
        for first, last, master, *_ in await node.execute_command("CLUSTER SLOTS")
    )
    covered = sum(part.last - part.first + 1 for part in ranges)
    if covered != SLOTS:
        raise IndexUnavailable("CLUSTERDOWN", f"{SLOTS - covered} slots are not served")
    return Topology(True, tuple(ranges))


async def sentinel_master(target: Target, arguments: dict[str, Any]) -> Address:
    """Return the address of the master that the Sentinels name. Raises ``IndexUnavailable``."""
    own = arguments | {"username": None, "password": None, "db": 0}
    sentinel = Sentinel([])
    sentinel.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **own)) for host, port in target.addresses
    ]
    try:
        host, port = await sentinel.discover_master(target.service)
    except MasterNotFoundError as error:
        asked = ", ".join(f"{host}:{port}" for host, port in target.addresses)
        down = " : " in str(error)
        detail = "at least one does not answer" if down else "all answer"
        why = f"no master named {target.service!r} at the Sentinels {asked} ({detail})"
        raise IndexUnavailable("sentinel", why) from error
    finally:
        await sentinel.aclose()
    return str(host), int(port)


# One master: single commands by redis-py's client of it, batches of scripts by the pipelined connection.
#
# Always true: a command ends by its deadline, and none is repeated but a script that the server did not
# know.


class Script:
    """A Lua script: its source, and its digest at the server."""

    __slots__ = ("sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One call of a script; its keys have one hash tag."""

    script: Script
    keys: Sequence[bytes]
    args: Sequence[bytes | str | int]


class Master:
    """Connections to one master: single commands by redis-py's client, script batches by the pipelined
    connection.

    A command ends by its deadline, and none is repeated except a script that the server did not know.
    ``timeout_s`` bounds every command; ``on_error`` receives every error.
    """

    def __init__(
        self,
        pool: BlockingConnectionPool,
        pipelined: PipelinedConnection,
        timeout_s: float,
        on_error: Callable[[IndexUnavailable], None],
    ) -> None:
        self.redis = Redis.from_pool(pool)
        self.pipelined = pipelined
        self._timeout_s = timeout_s
        self._on_error = on_error
        # Digests of the scripts known to the server.
        self._loaded: set[str] = set()

    async def command(self, *args: bytes | str | int) -> Reply:
        """Run a command and return the reply as parsed by redis-py. Raises ``IndexUnavailable``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.redis.execute_command(*args)
        except (RedisError, OSError) as error:
            raise self._problem(error) from error

    async def run(self, call: ScriptCall) -> Reply:
        """Run one script. Raises ``IndexUnavailable``."""
        try:
            return await self.command(*self._words(call))
        except ServerError as error:
            if error.reason != "NOSCRIPT":
                raise
        self._loaded.discard(call.script.sha)
        return await self.command(*self._words(call))

    async def batch(self, calls: Sequence[ScriptCall]) -> list[Reply]:
        """Run scripts in order, pipelined.

        Returns for each its reply, or the ``IndexUnavailable`` with the reason (``NOSCRIPT``: call again).
        """
        payload = b"".join(pack(*self._words(call)) for call in calls)
        try:
            replies = await self.pipelined.ask(payload, len(calls), self._timeout_s)
        except IndexUnavailable as error:
            return [error] * len(calls)
        for number, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                problem = self._problem(reply)
                replies[number] = problem
                if problem.reason == "NOSCRIPT":
                    self._loaded.discard(calls[number].script.sha)
        return replies

    async def close(self) -> None:
        """Close every connection to it."""
        self.pipelined.abort()
        with suppress(RedisError, OSError):
            await self.redis.aclose()

    def _problem(self, error: RedisError | OSError) -> IndexUnavailable:
        problem = unavailable(error)
        self._on_error(problem)
        return problem

    def _words(self, call: ScriptCall) -> tuple[bytes | str | int, ...]:
        """Build the command for a script; its source is sent only if the server may not have it yet."""
        known = call.script.sha in self._loaded
        self._loaded.add(call.script.sha)
        verb, body = ("EVALSHA", call.script.sha) if known else ("EVAL", call.script.source)
        return (verb, body, len(call.keys), *call.keys, *call.args)
