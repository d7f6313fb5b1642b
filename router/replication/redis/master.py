"""One master: single commands by redis-py's client of it, batches of scripts by the pipelined connection.

Always true: a command ends by its deadline, and none is repeated but a script that the server did not know.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError

from router.replication.redis.connection import PipelinedConnection, Reply, pack
from router.replication.redis.errors import IndexUnavailable, ServerError, unavailable


class Script:
    """A Lua script: its source, and the digest that the server knows it by."""

    __slots__ = ("sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One call of a script; its keys are of one hash tag."""

    script: Script
    keys: Sequence[bytes]
    args: Sequence[bytes | str | int]


class Master:
    """See the module. ``timeout_s`` bounds every command; ``on_error`` is told every error."""

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
        self._loaded: set[str] = set()
        """Scripts that the server has."""

    async def command(self, *args: bytes | str | int) -> Reply:
        """The reply as redis-py parses it. Raises ``IndexUnavailable``."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.redis.execute_command(*args)
        except (RedisError, OSError) as error:
            raise self._problem(error) from error

    async def run(self, call: ScriptCall) -> Reply:
        """One script. Raises ``IndexUnavailable``."""
        try:
            return await self.command(*self._words(call))
        except ServerError as error:
            if error.reason != "NOSCRIPT":
                raise
        self._loaded.discard(call.script.sha)
        return await self.command(*self._words(call))

    async def batch(self, calls: Sequence[ScriptCall]) -> list[Reply]:
        """Scripts in order, pipelined; for each its reply, or the ``IndexUnavailable`` that says why there is
        none (``NOSCRIPT``: call again)."""
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
        """The command for a script; its source only where the server may not have it yet."""
        known = call.script.sha in self._loaded
        self._loaded.add(call.script.sha)
        verb, body = ("EVALSHA", call.script.sha) if known else ("EVAL", call.script.source)
        return (verb, body, len(call.keys), *call.keys, *call.args)
