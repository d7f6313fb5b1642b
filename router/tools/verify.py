"""``kvatlas verify``: verify traces and print a table with a progress bar, or JSON lines.

Run as a program, it is the writing process of ``kvatlas verify --index``, which replays traces into a shared
index on command. It reads one JSON object per line from its standard input and answers each with one line:
``{"url", "namespace"}`` first; then ``{"trace", "model"}`` (play the trace once to learn, then restart it)
and ``{"line"}`` (apply every event up to this line and write it). It exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from publisher.events import BlockHash
from router.feeds.base import FeedState
from router.index.base import Plane
from router.index.model import FleetResidency
from router.replication.codec import ScopeKeys
from router.replication.gossip import LoadGossip
from router.replication.leases import Leases
from router.replication.lookup_fallback import IndexLookup
from router.replication.mirror import MirroredIndex, engine_facts
from router.replication.reader import SharedReader
from router.replication.redis_client import Client
from router.replication.redis_connection import IndexUnavailable
from router.replication.registry import Registry
from router.replication.settings import IndexSettings
from router.tools.index import block_hashes
from router.tools.ops_client import make_table, output_console
from router.tools.trace_verification import (
    RECORDED,
    ProbePrompt,
    TraceError,
    TraceLine,
    TraceResult,
    apply_line,
    detected,
    learn_trace,
    read_trace,
    total,
    trace_facts,
    trace_files,
    verify_trace,
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


# ``kvatlas verify --index``: verification through a shared index, written by one process and read by another.
# A separate process replays the events into the index; this one predicts every probe from what it reads
# there, like a replica for an engine that another replica follows. Each run uses a separate namespace that
# expires soon, so that a fleet on the same server is not affected.


class _FollowsNone:
    """Ownership of a replica that follows no engine (``router.replication.lookup_fallback.Ownership``)."""

    others_alive = True

    def follows(self, engine_id: str) -> bool:
        return False

    def holds_exclusively(self, engine_id: str) -> bool:
        return False


class SharedVerifier:
    """Both processes, while the context is open. Raises ``IndexUnavailable``."""

    def __init__(self, index: IndexSettings) -> None:
        self._settings = trace_settings(index.url, f"verify-{secrets.token_hex(6)}")
        self._runner = asyncio.Runner()
        self._client: Client = Client(self._settings)
        self._traces = 0
        self._writer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SharedVerifier:
        command = [sys.executable, "-m", "router.tools.verify"]
        self._writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        self._send(WriterCommand(url=self._settings.url, namespace=self._settings.namespace))
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
        """Verify one trace in a scope of its own. Raises ``TraceError`` or ``IndexUnavailable``."""
        self._traces += 1
        model = f"trace-{self._traces}"
        self._send(WriterCommand(trace=str(path), model=model))
        return self._runner.run(self._verify(path, model))

    async def _verify(self, path: Path, model: str) -> TraceResult:
        result = TraceResult(path.name, "")
        exchange = LoadGossip("reader", lambda _: {}, started=0)
        reader = SharedReader(self._client)
        lookup = IndexLookup(lambda: reader, _FollowsNone(), exchange, clock=time.monotonic)
        for number, line in read_trace(path):
            if line.header is not None:
                result.family = line.header.family
            elif line.state is not None:
                self._send(WriterCommand(line=number))
                result.states += 1
                result.states_exact += (
                    await self._held(reader, model, len(line.state.keys)) == line.state.keys
                )
            elif line.probe is not None and line.hit_tokens is not None:
                reply = self._send(WriterCommand(line=number))
                result.detected = msgspec.json.decode(reply.detected)
                look = await lookup.look(ProbePrompt.from_probe(line.probe), {RECORDED: model})
                if look.problem:
                    raise IndexUnavailable(look.problem, f"at {path}:{number}")
                result.add(look.hits[RECORDED].hit_tokens, line.hit_tokens)
        return result

    async def _held(self, reader: SharedReader, model: str, groups: int) -> list[int]:
        """Number of distinct blocks the index shows in each group, on the GPU."""
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

    def _send(self, command: WriterCommand) -> Reply:
        """Send a command to the writer and return its reply. Raises ``TraceError`` or
        ``IndexUnavailable``.
        """
        writer = self._writer
        if writer is None or writer.stdin is None or writer.stdout is None:
            raise AssertionError("used outside its context")
        writer.stdin.write(msgspec.json.encode(command) + b"\n")
        writer.stdin.flush()
        line = writer.stdout.readline()
        if not line:
            raise IndexUnavailable("writer", "the writing process ended; its error message is above")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.problem:
            raise (
                TraceError(reply.problem)
                if reply.is_trace_fault
                else IndexUnavailable("writer", reply.problem)
            )
        return reply


# Count columns, each with its minimal width; a cold run has one more.
_NUMBERS = {"probes": 6, "exact": 6, "over": 4, "under": 5, "tokens": 9, "error": 5}
_WIDE = 120


def run_verify(
    paths: list[Path], *, as_json: bool, index: IndexSettings | None = None, cold: bool = False
) -> int:
    """Return 0 if every prediction for every trace is exact, 1 if not, 2 for an unreadable trace.

    With a shared ``index`` another process writes the events to it, and this one predicts from it. A ``cold``
    run predicts each probe only from the events before it.
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
    except (TraceError, IndexUnavailable) as error:
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
    else:
        with SharedVerifier(index) as verifier:
            yield verifier.verify_trace


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


if __name__ == "__main__":
    asyncio.run(_main())
