"""The writing process of ``kvatlas verify --index``: replays traces into a shared index on command.

Reads one JSON object per line from its standard input and answers each with one line: ``{"url",
"namespace"}`` first; then ``{"trace", "model"}`` (play the trace once to learn, then restart it) and
``{"line"}`` (apply every event up to this line and write it). Exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from router.feeds.base import FeedState
from router.index.model import FleetResidency
from router.replication.leases import Leases
from router.replication.mirror import MirroredIndex, engine_facts
from router.replication.redis.client import Client
from router.replication.redis.connection import IndexUnavailable
from router.replication.settings import IndexSettings
from router.tools.trace_verification import (
    RECORDED,
    TraceError,
    TraceLine,
    apply_line,
    detected,
    learn_trace,
    read_trace,
    trace_facts,
)

CONNECT_S = 5.0
_LEASE_S, _TTL_S = 900.0, 1800.0


class WriterCommand(msgspec.Struct, omit_defaults=True):
    """A command: one line of input."""

    url: str = ""
    namespace: str = ""
    trace: str = ""
    model: str = ""
    line: int | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """One line of output. ``problem`` is the reason why the command failed."""

    problem: str = ""
    is_trace_fault: bool = False
    detected: msgspec.Raw = msgspec.Raw(b"null")


def trace_settings(url: str, namespace: str) -> IndexSettings:
    """Settings for both sides: long timeouts, since nothing here is timed, and a short block lifetime."""
    return IndexSettings(
        url=url, namespace=namespace, lease_s=_LEASE_S, block_ttl_s=_TTL_S, lookup_timeout_s=CONNECT_S
    )


class _Play:
    """One trace being written into the index."""

    def __init__(self, client: Client, path: Path, model: str) -> None:
        self._path = path
        self._mirror = MirroredIndex(client, model)
        self._leases = Leases(client, model, "writer")
        self._fleet = FleetResidency(trace_facts(path), self._mirror)
        self._rest: Iterator[tuple[int, TraceLine]] = iter(())

    async def begin(self) -> None:
        """Learn from the whole trace, then start with nothing resident."""
        token = await self._leases.acquire(RECORDED)
        if token is None:
            raise IndexUnavailable("lease", "held by another replica")
        self._fleet.engine(RECORDED)
        await self._mirror.take_over(RECORDED, token)
        learn_trace(self._fleet, self._path)
        self._rest = read_trace(self._path)
        await self._write()

    async def advance(self, until: int) -> None:
        """Apply the events of every line up to this one, which must not have been passed before."""
        for number, line in self._rest:
            if line.events is not None:
                apply_line(self._fleet, self._path, number, line)
            if number >= until:
                break
        await self._write()

    def detected(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(detected(self._fleet.engine(RECORDED))))

    async def _write(self) -> None:
        engine, query = self._fleet.engine(RECORDED), self._fleet.residency(RECORDED).query()
        self._mirror.describe(RECORDED, engine_facts(engine, query, FeedState.READY, 0))
        await self._mirror.flush()


async def _main() -> None:
    commands = msgspec.json.Decoder(WriterCommand)
    client: Client | None = None
    play: _Play | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, reply = commands.decode(line), Reply()
        try:
            if command.url:
                client = Client(trace_settings(command.url, command.namespace))
                if not await client.start(CONNECT_S):
                    reply.problem = client.last_error or "no connection in time"
            elif command.trace and client is not None:
                play = _Play(client, Path(command.trace), command.model)
                await play.begin()
            elif command.line is not None and play is not None:
                await play.advance(command.line)
                reply.detected = play.detected()
        except (IndexUnavailable, TraceError) as error:
            reply.problem, reply.is_trace_fault = str(error), isinstance(error, TraceError)
        print(msgspec.json.encode(reply).decode(), flush=True)
    if client is not None:
        await client.close()


if __name__ == "__main__":
    asyncio.run(_main())
