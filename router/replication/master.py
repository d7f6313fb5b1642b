"""One master: single commands by redis-py's client of it, batches of scripts by the pipelined connection.

Invariants: a command ends by its deadline, and none is repeated but a script that the server did not
know.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from kvatlas.router.replication.redis_connection import (
    IndexUnavailable,
    PipelinedConnection,
    Reply,
    ServerError,
    pack,
    unavailable,
)


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
