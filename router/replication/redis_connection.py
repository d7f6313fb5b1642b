"""A pipelined connection to an index server: many requests share it, and each gets its own replies.

TLS, login and parsing are those of redis-py's ``Connection``; this adds the queue of waiting requests.
redis-py's client lends a connection to one request at a time and closes it when that times out: under load,
one connection for each concurrent lookup and a handshake for each late reply (measured: decision 004).
Invariants: late replies are read and dropped in order, so none ever answers another request; the number of
waiting requests is bounded; a lost connection fails all waiting requests.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import hiredis
from redis.asyncio.connection import Connection
from redis.exceptions import AskError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvatlas.router.http.error_texts import describe_error


class IndexUnavailable(Exception):  # noqa: N818  # a state to be lived with
    """The shared index cannot answer now. ``reason`` is one or two short words, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail.removeprefix(f'{reason}: ')}" if detail else reason)
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
    if refused := _CONNECTING.match(str(error)):
        number, where = refused.groups()
        return IndexUnavailable("connection", f"{where}: {describe_error(OSError(int(number), ''))}")
    return IndexUnavailable("connection", str(error) or describe_error(error))


# redis-py's words for an ``OSError`` of a socket; TLS has the number 1, and its own words.
_CONNECTING = re.compile(r"Error (\d\d+) connecting to (\S+)\.(?: |$)")


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
