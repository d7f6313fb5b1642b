"""Connections to the index servers: a pipelined connection, and the servers that hold the index.

TLS, login and parsing are those of redis-py's ``Connection``; this adds the queue of waiting requests.
redis-py's client lends a connection to one request at a time and closes it when that times out: under load,
one connection for each concurrent lookup and a handshake for each late reply (measured: decision 004).
Invariants: late replies are read and dropped in order, so none ever answers another request; the number of
waiting requests is bounded; a lost connection fails all waiting requests.

Many concurrent lookups and block writes share the connection, and each gets its own replies.

Servers that hold the index: one master, Sentinel's master, or the masters of a Cluster with their slots.
redis-py queries and parses. Its Cluster client is not used: it follows redirections and updates its view of
the Cluster within a command, while the index must know which run of which server a reply came from.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import hiredis
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import Connection
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot
from redis.exceptions import AskError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.replication.settings import Target

# Errors of redis-py and sockets, converted to one exception.


class IndexUnavailable(Exception):  # noqa: N818  # a state to be lived with
    """The shared index cannot answer now. ``reason`` is one or two short words, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class ServerError(IndexUnavailable):
    """The server answered a command with an error; ``reason`` is its code, such as ``OOM``."""


def unavailable(error: RedisError | OSError) -> IndexUnavailable:
    """Convert an error of the client library."""
    if isinstance(error, AskError):
        return ServerError(error.status_code or "MOVED", f"slot {error.slot_id} is at {error.node_addr}")
    code = getattr(error, "status_code", None)
    if code is not None or isinstance(error, ResponseError):
        word, _, rest = str(error).partition(" ")
        return ServerError(code, str(error)) if code else ServerError(word or "ERR", rest)
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return IndexUnavailable("timeout", str(error))
    return IndexUnavailable("connection", str(error) or describe_error(error))


_WAITING_MAX = 4096
_GRACE_S = 0.0005

# bytes, int, None, a list of replies, or the server's ``ResponseError``.
Reply = Any


class _Waiter(NamedTuple):
    future: asyncio.Future[list[Reply]]
    replies: list[Reply]
    wanted: int
    since: float


class PipelinedConnection:
    """One connection with a queue of waiting requests.

    ``connection`` must have no retries and no socket timeout.
    """

    def __init__(self, connection: Connection, on_lost: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._on_lost = on_lost
        self._waiting: deque[_Waiter] = deque()
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[None] | None = None
        # Identifier of this run of the server.
        self.run_id = ""
        self.clustered = False

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Connect, log in and identify the server; a task of ``tasks`` reads replies.

        Raises ``IndexUnavailable``, also if the server is a replica.
        """
        try:
            await self._connection.send_command("INFO", "server", "replication")
            text = (await self._connection.read_response()).decode()
            facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            self.run_id = facts["run_id"]
            self.clustered = facts.get("redis_mode", facts.get("server_mode")) == "cluster"
            if facts["role"] != "master" and not self.clustered:
                raise IndexUnavailable("READONLY", "the server is a replica; name its master")
        except BaseException as error:
            await self._connection.disconnect(nowait=True)
            if isinstance(error, RedisError | OSError):
                raise unavailable(error) from error
            raise
        self._reading = tasks.create_task(self._read(), name="replies of the shared index")
        # A task that is cancelled before it began would not close the connection.
        await asyncio.sleep(0)

    @property
    def is_open(self) -> bool:
        return self._reading is not None and self._connection.is_connected

    @property
    def waited_s(self) -> float:
        """Seconds that the oldest unanswered request has waited."""
        return self._loop.time() - self._waiting[0].since if self._waiting else 0.0

    async def send(self, payload: bytes, count: int, timeout_s: float) -> asyncio.Future[list[Reply]]:
        """Write packed commands; the future gets their ``count`` replies.

        Raises ``IndexUnavailable`` if they cannot be written within ``timeout_s``.
        """
        if not self.is_open:
            raise IndexUnavailable("connection", "not connected")
        if len(self._waiting) >= _WAITING_MAX:
            raise IndexUnavailable("busy", "too many requests are waiting for the server")
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._waiting.append(_Waiter(future, [], count, self._loop.time()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection.send_packed_command(payload, check_health=False)
        except (RedisError, OSError) as error:
            # The library has closed the connection.
            _fail(future)
            raise unavailable(error) from error
        return future

    async def ask(self, payload: bytes, count: int, timeout_s: float) -> list[Reply]:
        """Send and wait for the replies. Raises ``IndexUnavailable`` (``timeout`` when the time is up)."""
        return await within(await self.send(payload, count, timeout_s), timeout_s)

    def abort(self) -> None:
        """Close immediately; all waiting requests fail."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self) -> None:
        """Deliver each reply to the waiting request, until the connection ends."""
        try:
            while True:
                try:
                    reply = await self._connection.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    reply = error
                self._take(reply)
        except (RedisError, OSError):
            pass
        finally:
            self._reading = None
            while self._waiting:
                _fail(self._waiting.popleft().future)
            self._on_lost()
            await self._connection.disconnect(nowait=True)

    def _take(self, reply: Reply) -> None:
        if not self._waiting:
            raise InvalidResponse("a reply without a request")
        waiter = self._waiting[0]
        waiter.replies.append(reply)
        if len(waiter.replies) == waiter.wanted:
            self._waiting.popleft()
            if not waiter.future.done():
                waiter.future.set_result(waiter.replies)


def _fail(future: asyncio.Future[list[Reply]]) -> None:
    """Fail a request on a lost connection; the exception is marked as retrieved, so that asyncio does not
    log it.
    """
    if not future.done():
        future.set_exception(IndexUnavailable("connection", "lost"))
        future.exception()


async def within(future: asyncio.Future[list[Reply]], timeout_s: float) -> list[Reply]:
    """Return the future's result, or raise ``IndexUnavailable('timeout')``; cheaper than
    ``asyncio.wait_for``.
    """
    if future.done():
        return future.result()
    timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), _expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def _expire(future: asyncio.Future[list[Reply]], *, again: bool = True) -> None:
    """Wait a short time more first: the reply may be unread in the socket of a busy process."""
    if future.done():
        return
    if again:
        future.get_loop().call_later(_GRACE_S, lambda: _expire(future, again=False))
        return
    future.set_exception(IndexUnavailable("timeout"))


def pack(*args: bytes | str | int) -> bytes:
    """Encode one command in the wire format."""
    return bytes(hiredis.pack_command(args))  # type: ignore[arg-type]  # its stub means tuple[..., ...]


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
        if len(self.ranges) == 1:
            return self.ranges[0].master
        slot = key_slot(key)
        return next((part.master for part in self.ranges if part.first <= slot <= part.last), None)


def single(address: Address) -> Topology:
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
# Invariants: a command ends by its deadline, and none is repeated but a script that the server did not
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
        self._closed = False

    async def command(self, *args: bytes | str | int) -> Reply:
        """Run a command and return the reply as parsed by redis-py. Raises ``IndexUnavailable``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.redis.execute_command(*args)
        except (RedisError, OSError) as error:
            raise self._problem(error) from error
        finally:
            if self._closed:
                # redis-py does not close a connection that is being made.
                await self.close()

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
        self._closed = True
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
