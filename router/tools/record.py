"""``kvatlas record``: resolve sources, record until stopped, print a summary."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from rich.console import Console
from rich.live import Live
from rich.table import Table
from zmq.utils.monitor import parse_monitor_message

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.load import parse_engine
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.position import RequestReplay
from kvatlas.router.feeds.sockets import MessageReader, live_socket
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.statement import SERVER_INFO, event_sources, server_info_statement, sglang_engines
from kvatlas.router.tools.capture import CaptureLine, CaptureWriter
from kvatlas.router.tools.event_order import CaptureOrder, RecordStats
from kvatlas.router.tools.ops_client import ask, make_table, output_console, stop_signals
from kvatlas.router.tools.trace_verification import RecordingError

# Records raw frames of live feeds, in order, into a ``CaptureWriter``. One ``SourceRecorder`` per engine
# subscribes first, requests the history from the replay socket, and continues with the live stream without a
# gap (``CaptureOrder``). Frames that are unavailable are counted. Nothing is decoded here, and frames are
# passed on in batches.


_END_SEQ = b"\xff" * 8
_SEQ_MAX = (1 << 63) - 1
# Messages ZMQ buffers for us: memory is cheaper than a lost frame.
_RECEIVE_QUEUE_MAX = 100_000
# Messages read before yielding to the event loop: about two milliseconds (measured).
_TURN_MESSAGES = 256
# Seconds to sleep after a batch that emptied the socket: waking up for every few messages costs more than
# processing them.
_PAUSE_S = 0.002

# Thread switch interval in seconds while recording. With Python's default of 5 ms the writer thread, which
# requests the GIL several times per piece, falls behind at half the frame rate (measured).
_SWITCH_S = 0.0005


class FrameSink(Protocol):
    """Destination of recorded frames."""

    def put(self, frames: list[CaptureLine]) -> int:
        """Queue frames in order. Returns how many were accepted; the rest are dropped."""


class RecordSource(msgspec.Struct, frozen=True):
    """One stream to record; ``source`` is its name in the capture."""

    source: str
    events: str
    replay: str | None = None
    topic: str = ""


class SourceRecorder:
    """Records one source until ``finish`` is called. ``wall`` returns seconds since the epoch."""

    def __init__(
        self,
        source: RecordSource,
        sink: FrameSink,
        *,
        settings: FeedSettings | None = None,
        wall: Callable[[], float] = time.time,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.stats = RecordStats(source.source)
        self._source = source
        self._sink = sink
        self._settings = settings or FeedSettings(receive_queue_max=_RECEIVE_QUEUE_MAX)
        self._wall = wall
        self._context = context or zmq.Context.instance()
        self._order = CaptureOrder(self.stats, has_replay=source.replay is not None)
        self._topic_frame, self._topic = b"", ""
        self._live: MessageReader | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._fetched: RequestReplay | None = None
        self._finishing = asyncio.Event()

    async def run(self) -> None:
        """Record until ``finish`` is called. Raises ``zmq.ZMQError`` for an invalid endpoint."""
        with contextlib.ExitStack() as stack:
            live = live_socket(self._context, self._source.topic, self._settings)
            self._live = reader = stack.enter_context(MessageReader(live))
            monitor = stack.enter_context(MessageReader(reader.socket.get_monitor_socket()))
            stack.callback(reader.socket.disable_monitor)
            reader.socket.connect(self._source.events)
            self._forward()
            tasks = [
                asyncio.create_task(self._read(reader)),
                asyncio.create_task(self._watch(monitor)),
                asyncio.create_task(self._finishing.wait()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            while self._turn(reader):
                pass
            await self._settle()
            for error in ended:
                if isinstance(error, Exception):
                    raise error

    def finish(self) -> None:
        """Make ``run`` record what has arrived and return."""
        self._finishing.set()

    async def _settle(self) -> None:
        """Write the held frames once the last response is complete; frames still missing are lost."""
        while not self._order.settled:
            if self._fetching is not None:
                await asyncio.wait([self._fetching])
            else:
                self._order.abandon()
                self._forward()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    async def _read(self, reader: MessageReader) -> None:
        while True:
            taken = self._turn(reader)
            if not taken:
                await reader.wait()
            elif taken < _TURN_MESSAGES:
                await reader.rest(_PAUSE_S)
            else:
                await asyncio.sleep(0)

    def _turn(self, reader: MessageReader) -> int:
        """Read and pass on up to ``_TURN_MESSAGES`` available messages; returns their number."""
        messages = reader.take_many(_TURN_MESSAGES)
        order, now = self._order, self._wall()
        for message in messages:
            frame = self._frame(message, now)
            if frame is not None:
                order.live(frame)
        if messages:
            self._forward()
        return len(messages)

    async def _watch(self, monitor: MessageReader) -> None:
        while True:
            while (message := monitor.take()) is not None:
                if parse_monitor_message(message)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.stats.connected = True
            await monitor.wait()

    def _frame(self, message: list[bytes], now: float) -> CaptureLine | None:
        """Convert ``[topic, seq, payload]`` to a frame; None, and counted, if malformed."""
        if len(message) == 3:
            topic, seq_frame, payload = message
            seq = int.from_bytes(seq_frame[:8], "big")
            whole = len(seq_frame) in {8, 24} and seq <= _SEQ_MAX
            if whole and len(payload) <= self._settings.payload_bytes_max:
                if topic != self._topic_frame:
                    self._topic_frame, self._topic = topic, topic.decode(errors="replace")
                return CaptureLine(self._source.source, now, self._topic, seq, payload)
        self.stats.malformed += 1
        return None

    def _forward(self) -> None:
        """Pass on the frames that are in order, and fetch missing ones."""
        frames, stats = self._order.take(), self.stats
        if frames and (taken := self._sink.put(frames)):
            stats.frames += taken
            stats.last_seq = frames[taken - 1].seq
            if stats.first_seq is None:
                stats.first_seq = frames[0].seq
        request = self._order.request
        if self._fetching is None:
            if request is not None and self._source.replay is not None:
                self._fetched = request
                self._fetching = asyncio.create_task(self._fetch(self._source.replay, request))
        elif request is not self._fetched and self._fetching is not asyncio.current_task():
            self._fetching.cancel()

    async def _fetch(self, endpoint: str, request: RequestReplay) -> None:
        try:
            await self._replay(endpoint, request)
        except (TimeoutError, zmq.ZMQError):
            self.stats.replay_failures += 1
            if request is self._order.request:
                self._order.abandon()
        finally:
            self._fetching = None
            self._order.response_ended(request)
            self._forward()

    async def _replay(self, endpoint: str, request: RequestReplay) -> None:
        """Read the response of the replay socket. Raises ``TimeoutError`` if it falls silent."""
        with MessageReader(self._context.socket(zmq.DEALER)) as reader:
            reader.socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
            reader.socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
            reader.socket.connect(endpoint)
            reader.socket.send_multipart([b"", request.from_seq.to_bytes(8, "big")], zmq.NOBLOCK)
            while True:
                messages = reader.take_many(_TURN_MESSAGES)
                if not messages:
                    async with asyncio.timeout(self._settings.replay_timeout_s):
                        await reader.wait()
                    continue
                if not self._order.holds and self._live is not None:
                    self._turn(self._live)
                going_on = self._take_replayed(request, messages)
                self._forward()
                if not going_on:
                    return
                await asyncio.sleep(0)

    def _take_replayed(self, request: RequestReplay, messages: list[list[bytes]]) -> bool:
        """Process messages of the response; False at its end, or once the rest of it is useless."""
        now = self._wall()
        for message in messages:
            body = message[1:] if message and message[0] == b"" else message
            if len(body) in {2, 3} and body[-2] == _END_SEQ:
                return False
            if len(body) == 2:
                body = [self._source.topic.encode(), *body]  # older publishers omit the topic
            frame = self._frame(body, now)
            if frame is not None and not self._order.replayed(request, frame):
                return False
        return True


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten the thread switch interval, so that the writer thread gets the GIL soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def record(
    recorders: Sequence[SourceRecorder],
    *,
    stop: asyncio.Event,
    seconds: float | None,
    ended: Callable[[], bool],
) -> None:
    """Run all recorders until ``stop`` is set, ``seconds`` have passed, or ``ended`` says writing has."""
    loop = asyncio.get_running_loop()
    deadline = float("inf") if seconds is None else loop.time() + seconds
    with _short_switch_interval():
        async with asyncio.TaskGroup() as tasks:
            for recorder in recorders:
                tasks.create_task(recorder.run())
            while not ended() and not stop.is_set() and loop.time() < deadline:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(0.25, max(0.0, deadline - loop.time()))):
                        await stop.wait()
            for recorder in recorders:
                recorder.finish()


_ASK_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20
_OPTIONS = {"events", "replay", "topic", "source"}


class RecordOptions(msgspec.Struct, frozen=True):
    """Options of a recording."""

    path: Path
    seconds: float | None = None
    rotate_mb: float | None = None
    max_mb: float | None = None
    redact: bool = False


def run_record(engines: Sequence[str], options: RecordOptions, *, as_json: bool) -> int:
    """Returns 0 if all was recorded, 1 if frames were lost or an engine unreachable, 2 for bad input."""
    try:
        sources = resolve(engines)
        _check(options)
        writer = CaptureWriter(
            options.path,
            rotate_bytes=None if options.rotate_mb is None else int(options.rotate_mb * (1 << 20)),
            total_bytes_max=None if options.max_mb is None else int(options.max_mb * (1 << 20)),
            redacted=options.redact,
        )
    except (RecordingError, ConfigError) as error:
        print(f"kvatlas record: {error}", file=sys.stderr)
        return 2
    recorders = [SourceRecorder(source, writer) for source in sources]
    problem = ""
    try:
        asyncio.run(_record(recorders, writer, options, quiet=as_json))
    except* zmq.ZMQError as group:
        problem = str(group.exceptions[0])
    finally:
        writer.close()
    if problem:
        print(f"kvatlas record: invalid address to record from: {problem}", file=sys.stderr)
        return 2
    summary = _summary(recorders, writer)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        output_console().print(_table([recorder.stats for recorder in recorders], writer))
        print(_describe(writer, options))
    return 0 if summary["complete"] else 1


def resolve(engines: Sequence[str]) -> list[RecordSource]:
    """Resolve ``--engine`` to streams. Raises ``ConfigError`` for an invalid one, or one without events."""
    sources: list[RecordSource] = []
    for text in engines:
        if text.partition("=")[0] in _OPTIONS:
            sources.append(_parse_stream(text))
        else:
            found = _with_events(parse_engine(text))
            sources += [RecordSource(e.engine_id, e.events or "", e.replay, e.topic) for e in found]
    if not sources:
        raise ConfigError("no engine: give --engine URL or --engine events=tcp://..[,replay=tcp://..]")
    names = [source.source for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--engine: {name} is named twice")
    return sources


def _parse_stream(text: str) -> RecordSource:
    """Parse ``events=tcp://..[,replay=..][,topic=..][,source=NAME]``: a stream without an HTTP server."""
    values: dict[str, str] = {}
    for option in text.split(","):
        name, separator, value = option.partition("=")
        if name not in _OPTIONS or not separator:
            known = ", ".join(sorted(_OPTIONS))
            raise ConfigError(f"--engine {text!r}: {option!r} is not one of {known} with =VALUE")
        values[name] = value
    if "events" not in values:
        raise ConfigError(f"--engine {text!r}: events= is missing")
    for name in ("events", "replay"):
        if name in values and not values[name].startswith(("tcp://", "ipc://")):
            raise ConfigError(f"--engine {text!r}: {name}={values[name]!r} is not a tcp:// or ipc:// address")
    source = values.pop("source", values["events"])
    return RecordSource(source, **values)


def _with_events(engine: EngineAddress) -> list[EngineAddress]:
    """Return the engine with its event endpoints, read from the server if not given."""
    if engine.events is not None:
        return [engine]
    url, info = f"{engine.base_url}/kv_event_sources", f"{engine.base_url}{SERVER_INFO}"
    hint = "give events=tcp://.. too"
    try:
        status, body = _get(url)
        if status == 200:
            found = event_sources(engine.base_url, body)
        else:
            stated = server_info_statement(_get(info)[1])
            if stated is None or stated.kind != "sglang":
                raise OSError(f"{url}: status {status}")
            found = sglang_engines(engine.base_url, stated.event_ports)
    except OSError as error:
        raise ConfigError(f"{error}; {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; {hint}") from None
    wanted = [e for e in found if engine.dp_rank is None or (e.dp_rank or 0) == engine.dp_rank]
    if not wanted:
        raise ConfigError(f"{url}: this engine publishes no events")
    return wanted


def _get(url: str) -> tuple[int, bytes]:
    return ask(url, timeout_s=_ASK_TIMEOUT_S, bytes_max=_ANSWER_BYTES_MAX)


def _check(options: RecordOptions) -> None:
    for name, value in (
        ("--seconds", options.seconds),
        ("--rotate-mb", options.rotate_mb),
        ("--max-mb", options.max_mb),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}: {value} is not a number above 0")


async def _record(
    recorders: Sequence[SourceRecorder], writer: CaptureWriter, options: RecordOptions, *, quiet: bool
) -> None:
    stop, console = asyncio.Event(), Console(stderr=True)
    with stop_signals(stop.set):
        recording = asyncio.ensure_future(
            record(recorders, stop=stop, seconds=options.seconds, ended=lambda: writer.ended)
        )
        if not quiet and console.is_terminal:
            with Live(console=console, transient=True, auto_refresh=False) as live:
                while not recording.done():
                    await asyncio.wait([recording], timeout=0.5)
                    live.update(_table([recorder.stats for recorder in recorders], writer), refresh=True)
        await recording


def _summary(recorders: Sequence[SourceRecorder], writer: CaptureWriter) -> dict[str, Any]:
    """Build the summary.

    ``complete``: every engine was reached, and nothing is missing since its first frame.
    """
    stats = [recorder.stats for recorder in recorders]
    written = writer.stats
    clean = not written.overflowed_frames and not written.failure and not written.unredactable_frames
    fed = all(s.connected and not s.lost_frames and not s.malformed for s in stats)
    return {
        "complete": clean and fed,
        "files": [str(path) for path in writer.pieces],
        "writer": msgspec.to_builtins(written),
        "sources": [msgspec.to_builtins(s) for s in stats],
    }


def _table(stats: Sequence[RecordStats], writer: CaptureWriter) -> Table:
    title = f"recording {writer.stats.bytes_written / (1 << 20):,.1f} MB"
    columns = (">reached", ">frames", ">history", ">seqs", ">gaps", ">lost", ">restarts", ">malformed")
    table = make_table("engine", *columns, title=title, gap=1, min_width=15)
    for s in stats:
        seqs = "" if s.first_seq is None else f"{s.first_seq}..{s.last_seq}"
        counts = [str(n) for n in (s.gaps, s.lost_frames, s.restarts, s.malformed)]
        reached = "yes" if s.connected else "no"
        style = "red" if s.lost_frames or s.malformed or not s.connected else ""
        table.add_row(s.source, reached, f"{s.frames:,}", f"{s.history_frames:,}", seqs, *counts, style=style)
    return table


def _describe(writer: CaptureWriter, options: RecordOptions) -> str:
    stats = writer.stats
    parts = [f"{stats.frames:,} frames in {', '.join(str(path) for path in writer.pieces)}"]
    if stats.deleted_files:
        parts.append(f"{stats.deleted_files} older files deleted to stay below --max-mb")
    if stats.full:
        parts.append("stopped at --max-mb")
    if stats.overflowed_frames:
        parts.append(f"LOST {stats.overflowed_frames:,} frames: the disk or the processor could not keep up")
    if stats.failure:
        parts.append(f"WRITING FAILED: {stats.failure}")
    if stats.unredactable_frames:
        parts.append(
            f"{stats.unredactable_frames:,} frames written without payload: they could not be redacted"
        )
    if options.redact:
        parts.append(
            "token ids are zeros: the hash scheme cannot be detected from this capture (--hash-scheme)"
        )
    return "\n".join(parts)
