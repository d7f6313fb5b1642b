"""Client of the index servers: redis-py's client of each, and one pipelined connection for frequent requests.

``Client`` finds the masters (one server, Sentinel's master, or every master of a Cluster), reconnects with
back-off in a separate task, and routes commands by key. Invariants: a command ends by its deadline; none is
ever repeated, as only callers know what is safe. ``identity`` names the servers by their run ids and the
slots they serve. It differs after any restart or failover, which shows writers and readers that their data
may be lost: a restarted server may lack the last removals.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.replication.index_url import SettingsError, Target, parse_url
from kvatlas.router.replication.master import Master, Script, ScriptCall
from kvatlas.router.replication.redis_connection import (
    IndexUnavailable,
    PipelinedConnection,
    Reply,
    unavailable,
)
from kvatlas.router.replication.settings import SharedSettings
from kvatlas.router.replication.topology import Address, Topology, cluster_topology, sentinel_master, single


class TlsConnection(SSLConnection):
    """TLS with a given context.

    redis-py's own context from file names trusts the system's certificate authorities too.
    """

    def __init__(self, *, tls: ssl.SSLContext, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ssl_context.context = tls


def connection_arguments(target: Target, connect_timeout_s: float) -> dict[str, Any]:
    """Return redis-py's connection arguments except host and port. Raises ``SettingsError`` for unreadable
    TLS files."""
    # No retries and no timeouts of single reads, as every call has a deadline.
    arguments: dict[str, Any] = {
        "connection_class": Connection,
        "db": target.db,
        "username": target.username,
        "password": target.password,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
    }
    if target.tls:
        arguments |= {"connection_class": TlsConnection, "tls": _tls_context(target)}
    return arguments


def _tls_context(target: Target) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=target.ca)
        if target.cert or target.key:
            context.load_cert_chain(target.cert or "", target.key)
    except OSError as error:
        raise SettingsError(f"index TLS files: {error}; give PEM files") from error
    return context


_LOG = structlog.get_logger()
_BACKOFF_S, _BACKOFF_S_MAX = 0.05, 1.0
# Seconds between two queries of Sentinel, or of a Cluster named as one, for its masters without a failure.
_LOOK_AGAIN_S = 5.0
# A connection whose oldest request has waited this long, in seconds, is replaced.
_STALLED_S = 5.0
# Maximum number of command connections per master; further commands wait for one until their deadline.
_CONNECTIONS_MAX = 16
# Errors that mean that the servers differ from those known to this client.
_CHANGED = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN"})


class Client:
    """Connections of one user.

    Raises ``SettingsError`` for unreadable TLS files; does not connect before ``start``.
    """

    # A reader and a writer have one client each, so that no lookup waits behind a batch.
    def __init__(self, settings: SharedSettings) -> None:
        self.settings = settings
        self._target = parse_url(settings.url)
        self._arguments = connection_arguments(self._target, settings.connect_timeout_s)
        self._topology = Topology(False, ())
        self._masters: dict[Address, Master] = {}
        self._identity: str | None = None
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._look_again_s = _LOOK_AGAIN_S if self._target.kind != "server" else None
        self.last_error = ""

    async def start(self, wait_s: float = 0.0) -> bool:
        """Begin to connect; True if everything is connected within ``wait_s``."""
        if self._task is None:
            self._task = asyncio.create_task(self._maintain())
        try:
            async with asyncio.timeout(max(wait_s, 1e-3)):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for address in list(self._masters):
            await self._drop(address)
        self._identity = None
        await asyncio.sleep(0)

    @property
    def cluster(self) -> bool:
        """Whether the servers form a Cluster; valid once connected."""
        return self._topology.clustered

    @property
    def identity(self) -> str:
        """Identity of the current run of these servers.

        Raises ``IndexUnavailable`` while any is not connected.
        """
        if self._identity is None:
            raise IndexUnavailable("connection", self.last_error)
        return self._identity

    def masters(self) -> list[Redis]:
        """redis-py's client of every master; raises ``IndexUnavailable`` while any is missing."""
        return [self._connected(address).redis for address in self._topology.masters]

    def pipelined(self, key: bytes) -> PipelinedConnection:
        """The pipelined connection to a key's master. Raises ``IndexUnavailable`` while there is none."""
        pipelined = self._master(key).pipelined
        if pipelined.waited_s > _STALLED_S:
            pipelined.abort()
        return pipelined

    async def command(self, *args: bytes | str | int, key: bytes | None = None) -> Reply:
        """Run one command, routed by ``key`` or else by its first argument.

        Returns the reply as parsed by redis-py (``HGETALL`` gives a dictionary). Raises ``IndexUnavailable``.
        """
        where = key if key is not None else args[1]
        if not isinstance(where, bytes):
            raise TypeError(f"{args[0]!r}: a command is routed by a key in bytes")
        return await self._master(where).command(*args)

    async def run(self, script: Script, keys: Sequence[bytes], *args: bytes | str | int) -> Reply:
        """Run one script on the master of its keys and return its reply. Raises ``IndexUnavailable``."""
        return await self._master(keys[0]).run(ScriptCall(script, keys, args))

    async def batch(self, calls: Sequence[ScriptCall]) -> list[Reply]:
        """Run scripts in order, pipelined to all their masters concurrently.

        Returns for each call its reply, or the ``IndexUnavailable`` with the reason (``NOSCRIPT``: call
        again).
        """
        parts: dict[Master, list[int]] = {}
        replies: list[Reply] = [None] * len(calls)
        for number, call in enumerate(calls):
            try:
                parts.setdefault(self._master(call.keys[0]), []).append(number)
            except IndexUnavailable as error:
                replies[number] = error
        answers = await asyncio.gather(
            *(master.batch([calls[number] for number in part]) for master, part in parts.items())
        )
        for part, answer in zip(parts.values(), answers, strict=True):
            for number, reply in zip(part, answer, strict=True):
                replies[number] = reply
        return replies

    def checked(self, reply: Reply) -> Reply:
        """Return the reply to a pipelined command. Raises ``ServerError`` if it is an error."""
        if isinstance(reply, ResponseError):
            error = unavailable(reply)
            self._notice(error)
            raise error
        return reply

    def _notice(self, error: IndexUnavailable) -> None:
        """Check the servers again if an error shows that they have changed."""
        # No longer a master: find the current one.
        if error.reason == "READONLY":
            for master in self._masters.values():
                master.pipelined.abort()
        if error.reason in _CHANGED:
            self.refresh()

    def _master(self, key: bytes) -> Master:
        address = self._topology.master_of(key)
        if address is None:
            raise IndexUnavailable("connection", self.last_error or "not connected yet")
        return self._connected(address)

    def _connected(self, address: Address) -> Master:
        master = self._masters.get(address)
        if master is None or not master.pipelined.is_open:
            self._wake.set()
            raise IndexUnavailable("connection", self.last_error or "not connected")
        return master

    def refresh(self) -> None:
        """Check the topology again soon."""
        self._identity = None
        self._wake.set()

    # -- the task that keeps everything connected ------------------------------------------------------

    async def _maintain(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            pause = _BACKOFF_S
            while True:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self.settings.connect_timeout_s * 4):
                        await self._connect_all(tasks)
                except (RedisError, OSError, IndexUnavailable, SettingsError, ValueError) as error:
                    await self._not_reachable(error, pause)
                    pause = min(2 * pause, _BACKOFF_S_MAX)
                    continue
                if self.last_error:
                    _LOG.info("shared index reachable again", index=self._target.where)
                self.last_error, pause = "", _BACKOFF_S
                self._ready.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._look_again_s):
                        await self._wake.wait()

    async def _not_reachable(self, error: Exception, pause_s: float) -> None:
        problem = unavailable(error) if isinstance(error, RedisError | OSError) else error
        shown = describe_error(problem)
        if not self.last_error:
            _LOG.warning("shared index not reachable", index=self._target.where, error=shown)
        self.last_error = shown
        self._ready.clear()
        await asyncio.sleep(pause_s)

    async def _connect_all(self, tasks: asyncio.TaskGroup) -> None:
        """Find the masters and connect to the missing ones. Existing connections stay."""
        topology = await self._find_masters(tasks)
        for address in [a for a in self._masters if a not in topology.masters]:
            await self._drop(address)
        self._topology = topology
        failure: Exception | None = None
        for address in sorted(topology.masters):
            try:
                await self._connect(address, tasks)
            except (RedisError, OSError, IndexUnavailable) as error:
                # The others may still serve their part.
                failure = error
        if failure is not None:
            raise failure
        if not all(master.pipelined.is_open for master in self._masters.values()):
            raise IndexUnavailable("connection", "lost")
        lives = (f"{p.first}-{p.last}={self._masters[p.master].pipelined.run_id}" for p in topology.ranges)
        self._identity = hashlib.blake2b(",".join(lives).encode(), digest_size=8).hexdigest()

    async def _find_masters(self, tasks: asyncio.TaskGroup) -> Topology:
        if self._target.kind == "sentinel":
            return single(await sentinel_master(self._target, self._arguments))
        failure: Exception = IndexUnavailable("connection", "no address")
        known = [address for address, master in self._masters.items() if master.pipelined.is_open]
        for address in dict.fromkeys((*known, *self._target.addresses)):
            try:
                master = await self._connect(address, tasks)
                if not master.pipelined.clustered:
                    return single(address)
                return await cluster_topology(master.redis, address)
            except (RedisError, OSError, IndexUnavailable) as error:
                failure = error
        raise failure

    async def _connect(self, address: Address, tasks: asyncio.TaskGroup) -> Master:
        master = self._masters.get(address)
        if master is not None and master.pipelined.is_open:
            return master
        await self._drop(address)
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS_MAX,
            timeout=self.settings.write_timeout_s,
            host=address[0],
            port=address[1],
            **self._arguments,
        )
        pipelined = PipelinedConnection(pool.make_connection(), self._lost)
        async with asyncio.timeout(self.settings.connect_timeout_s):
            await pipelined.open(tasks)
        # This may be a different server from before.
        self._identity = None
        master = self._masters[address] = Master(pool, pipelined, self.settings.write_timeout_s, self._notice)
        return master

    async def _drop(self, address: Address) -> None:
        master = self._masters.pop(address, None)
        if master is not None:
            await master.close()

    def _lost(self) -> None:
        """Handle the end of a connection, if it is one of those in use."""
        if not all(master.pipelined.is_open for master in self._masters.values()):
            self.refresh()
