"""``kvatlas verify --index``: recorded truth through a shared index, written by one process, read by another.

A process of its own (``trace_writer``) replays the events into the index; this one predicts every probe from
what it reads there, as a replica does for an engine that another one follows. Each run uses a namespace of
its own, which soon expires, so that a fleet on the same server notices nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from publisher.events import BlockHash
from router.index.base import Plane
from router.replication.gossip.load import LoadGossip
from router.replication.lookup import IndexLookup
from router.replication.reader import SharedReader
from router.replication.redis.client import Client
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema.keys import ScopeKeys
from router.replication.schema.registry import Registry
from router.replication.settings import IndexSettings
from router.tools.index.scan import block_hashes
from router.tools.verify.run import RECORDED, ProbePrompt, TraceResult
from router.tools.verify.trace_writer import CONNECT_S, Order, Reply, trace_settings
from router.tools.verify.traces import TraceError, read_trace


class _Nothing:
    """Follows no engine itself (``router.replication.lookup.Ownership``)."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    def holds_exclusively(self, engine_id: str) -> bool:
        return False


class SharedVerifier:
    """Both processes, for as long as the context lasts. Raises ``IndexUnavailable``."""

    def __init__(self, index: IndexSettings) -> None:
        self._settings = trace_settings(index.url, f"verify-{secrets.token_hex(6)}")
        self._runner = asyncio.Runner()
        self._client: Client = Client(self._settings)
        self._traces = 0
        self._writer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SharedVerifier:
        command = [sys.executable, "-m", "router.tools.verify.trace_writer"]
        self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        self._tell(Order(url=self._settings.url, namespace=self._settings.namespace))
        if not self._runner.run(self._client.start(CONNECT_S)):
            raise IndexUnavailable("connection", self._client.last_error or "no connection in time")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._writer is not None and self._writer.stdin is not None and self._writer.stdout is not None:
            self._writer.stdin.close()
            self._writer.wait()
            self._writer.stdout.close()
        self._runner.run(self._client.close())
        self._runner.close()

    def verify_trace(self, path: Path) -> TraceResult:
        """One trace in a scope of its own. Raises ``TraceError`` or ``IndexUnavailable``."""
        self._traces += 1
        model = f"trace-{self._traces}"
        self._tell(Order(trace=str(path), model=model))
        return self._runner.run(self._verify(path, model))

    async def _verify(self, path: Path, model: str) -> TraceResult:
        result = TraceResult(path.name, "")
        exchange = LoadGossip("reader", lambda _: {}, started=0)
        reader = SharedReader(self._client)
        lookup = IndexLookup(lambda: reader, _Nothing(), exchange, clock=time.monotonic)
        for number, line in read_trace(path):
            if line.header is not None:
                result.family = line.header.family
            elif line.state is not None:
                self._tell(Order(line=number))
                result.states += 1
                result.states_exact += (
                    await self._held(reader, model, len(line.state.keys)) == line.state.keys
                )
            elif line.probe is not None and line.hit_tokens is not None:
                reply = self._tell(Order(line=number))
                result.detected = msgspec.json.decode(reply.detected)
                look = await lookup.look(ProbePrompt.of(line.probe), {RECORDED: model})
                if look.problem:
                    raise IndexUnavailable(look.problem, f"at {path}:{number}")
                result.add(look.hits[RECORDED].hit_tokens, line.hit_tokens)
        return result

    async def _held(self, reader: SharedReader, model: str, groups: int) -> list[int]:
        """Distinct blocks the index shows in each group, on the GPU."""
        view = await Registry(self._client, model).fetch()
        if view is None:
            return []
        hashes = await block_hashes(self._client, ScopeKeys(self._settings.namespace, model), view.scope)
        found = await reader.lookup([BlockHash(value) for value in hashes.tolist()], model)
        engine = found.engines[RECORDED]
        held = []
        for group in range(groups):
            column = found.rows.plane(Plane("GPU", group), engine.slot.word)
            held.append(int(np.count_nonzero((column >> np.uint64(engine.slot.bit)) & np.uint64(1))))
        return held

    def _tell(self, order: Order) -> Reply:
        """Have the writer carry out an order. Raises ``TraceError`` or ``IndexUnavailable``."""
        writer = self._writer
        if writer is None or writer.stdin is None or writer.stdout is None:
            raise AssertionError("entered before")
        writer.stdin.write(msgspec.json.encode(order) + b"\n")
        writer.stdin.flush()
        line = writer.stdout.readline()
        if not line:
            raise IndexUnavailable("writer", "the writing process ended; its error is above")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.problem:
            raise (
                TraceError(reply.problem)
                if reply.is_trace_fault
                else IndexUnavailable("writer", reply.problem)
            )
        return reply
