"""``kvatlas verify``: verify traces and print a table with a progress bar, or JSON lines.

With ``--index`` the events are written to a shared index over one connection, and each probe is predicted
from what another connection reads there, as by a replica for an engine that another replica follows. Each run
uses a namespace of its own that expires soon, so that a fleet on the same server is not affected.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.index.base import Plane
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.index.query_plan import EngineQuery
from kvatlas.router.replication.descriptions import engine_facts
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.leases import Leases
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.lookup_fallback import IndexLookup
from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.reader import SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import Registry
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.tools.index import connect
from kvatlas.router.tools.index_reader import block_hashes
from kvatlas.router.tools.ops_client import make_table, output_console
from kvatlas.router.tools.trace_file import RecordingError, TraceLine, read_trace, trace_facts, trace_files
from kvatlas.router.tools.trace_verification import (
    RECORDED,
    ProbePrompt,
    TraceResult,
    apply_line,
    detected,
    learn_trace,
    total,
    verify_trace,
)

_PATIENCE_S = 10.0
_LEASE_S, _TTL_S = 900.0, 1800.0


@asynccontextmanager
async def _connections(url: str) -> AsyncIterator[tuple[Client, Client]]:
    """Yield a writing and a reading connection. Raises ``IndexUnavailable``."""
    settings = IndexSettings(  # long time-outs: nothing here is timed
        url=url,
        namespace=f"verify-{secrets.token_hex(6)}",
        lease_s=_LEASE_S,
        block_ttl_s=_TTL_S,
        lookup_timeout_s=_PATIENCE_S,
        write_timeout_s=_PATIENCE_S,
        connect_timeout_s=_PATIENCE_S,
    )
    async with AsyncExitStack() as stack:
        writing, reading = Client(settings), Client(settings)
        for client in (writing, reading):
            stack.push_async_callback(client.close)
            await connect(client)
        yield writing, reading


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

    def detected(self) -> dict[str, Any]:
        return detected(self._fleet.engine(RECORDED))

    async def _write(self) -> None:
        engine, query = self._fleet.engine(RECORDED), self._fleet.residency(RECORDED).query()
        learned = query.learned if isinstance(query, EngineQuery) else None
        self._mirror.describe(RECORDED, engine_facts(engine, query, FeedState.READY, 0), learned)
        await self._mirror.flush()


class _FollowsNone:
    """Ownership of a replica that follows no engine
    (``kvatlas.router.replication.lookup_fallback.Ownership``)."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    def holds_exclusively(self, engine_id: str) -> bool:
        return False


async def _verify_shared(clients: tuple[Client, Client], path: Path, model: str) -> TraceResult:
    """Verify one trace in a scope of its own. Raises ``RecordingError`` or ``IndexUnavailable``."""
    play = _Play(clients[0], path, model)
    await play.begin()
    result, reader = TraceResult(path.name, ""), SharedReader(clients[1])
    gossip = LoadGossip("reader", lambda _: {}, started=0)
    lookup = IndexLookup(lambda: reader, _FollowsNone(), gossip, clock=time.monotonic)
    for number, line in read_trace(path):
        if line.header is not None:
            result.family = line.header.family
        elif line.state is not None:
            await play.advance(number)
            result.states += 1
            held = await _held(clients[1], reader, model, len(line.state.keys))
            result.states_exact += held == line.state.keys
        elif line.probe is not None and line.hit_tokens is not None:
            await play.advance(number)
            result.detected = play.detected()
            look = await lookup.look(ProbePrompt.from_probe(line.probe), {RECORDED: model})
            if look.problem:
                raise IndexUnavailable(look.problem, f"at {path}:{number}")
            result.add(look.hits[RECORDED].hit_tokens, line.hit_tokens)
    return result


async def _held(client: Client, reader: SharedReader, model: str, groups: int) -> list[int]:
    """Return the number of distinct blocks the index shows in each group, on the GPU."""
    view = await Registry(client, model).fetch()
    if view is None:
        return []
    hashes = await block_hashes(client, ScopeKeys(client.settings.namespace, model), view.scope)
    found = await reader.lookup([BlockHash(value) for value in hashes.tolist()], model)
    slot = found.engines[RECORDED].slot
    columns = [found.rows.plane(Plane("GPU", group), slot.word) for group in range(groups)]
    return [int(np.count_nonzero((column >> np.uint64(slot.bit)) & np.uint64(1))) for column in columns]


# Count columns, each with its minimal width; a cold run has one more.
_NUMBERS = {"probes": 6, "exact": 6, "over": 4, "under": 5, "tokens": 9, "error": 5}
_WIDE = 120


def run_verify(
    paths: list[Path], *, as_json: bool, index: IndexSettings | None = None, cold: bool = False
) -> int:
    """Return 0 if every prediction for every trace is exact, 1 if not, 2 for an unreadable trace.

    With a shared ``index`` the events are written to it, and predictions come from what is read there. A
    ``cold`` run predicts each probe only from the events before it.
    """
    if not paths:
        print("kvatlas verify: give at least one trace file or folder", file=sys.stderr)
        return 2
    if cold and index is not None and index.is_shared:
        print("kvatlas verify: --cold runs in one process; leave --index out", file=sys.stderr)
        return 2
    try:
        files = trace_files(paths)
        with _verifier(index, cold=cold) as verify_one:
            results = _json_lines(files, verify_one) if as_json else _with_progress(files, verify_one)
    except (RecordingError, IndexUnavailable) as error:
        print(f"kvatlas verify: {error}", file=sys.stderr)
        return 2
    if not as_json:
        console = output_console()
        console.print(_table(results, narrow=console.width < _WIDE, cold=cold))
    return 0 if all(result.all_exact for result in results) else 1


@contextmanager
def _verifier(index: IndexSettings | None, *, cold: bool) -> Iterator[Callable[[Path], TraceResult]]:
    """Yield the function that verifies one trace: from memory, or through a shared index."""
    if index is None or not index.is_shared:
        yield partial(verify_trace, cold=cold)
        return
    with asyncio.Runner() as runner:
        connections, numbers = _connections(index.url), count(1)
        clients = runner.run(connections.__aenter__())
        try:
            yield lambda path: runner.run(_verify_shared(clients, path, f"trace-{next(numbers)}"))
        finally:
            runner.run(connections.__aexit__(None, None, None))


def _json_lines(files: list[Path], verify_one: Callable[[Path], TraceResult]) -> list[TraceResult]:
    results = []
    for path in files:
        results.append(verify_one(path))
        print(msgspec.json.encode(results[-1]).decode(), flush=True)
    summed = msgspec.to_builtins(total(results))
    kept = {name: value for name, value in summed.items() if name not in {"trace", "family", "detected"}}
    print(msgspec.json.encode({"total": {"traces": len(files), **kept}}).decode())
    return results


def _with_progress(files: list[Path], verify_one: Callable[[Path], TraceResult]) -> list[TraceResult]:
    results = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=len(files))
        for path in files:
            results.append(verify_one(path))
            progress.advance(task)
    return results


def _table(results: list[TraceResult], *, narrow: bool, cold: bool = False) -> Table:
    """Table of the results; on a narrow terminal long names are truncated so that all counts fit."""
    numbers = _NUMBERS | ({"unknown": 7} if cold else {})
    title, columns = "predicted hits against recorded truth", [f">{name}" for name in numbers]
    table = make_table("<trace", "<scheme", *columns, title=title, gap=1, box=SIMPLE_HEAD, pad_edge=False)
    for column, width in zip(table.columns, (22, 11, *numbers.values()), strict=True):
        if column.justify == "right":
            column.min_width = width
        elif narrow:
            column.max_width = width
    for result in (*results, total(results)):
        counts = (result.probes, result.exact, result.over, result.under)
        tokens = (result.truth_tokens, result.abs_error_tokens, *([result.unknown] if cold else []))
        style = "bold" if result.trace == "total" else "" if result.all_exact else "red"
        table.add_row(result.trace, _scheme(result), *[f"{n:,}" for n in (*counts, *tokens)], style=style)
    return table


def _scheme(result: TraceResult) -> str:
    if result.detected is None:
        return ""
    scheme = result.detected["scheme"]
    return result.detected["mode"] if scheme is None else f"{scheme['algo']}/{scheme['hash_block_size']}"
