"""The access log: one JSON line per answered request, for what-if runs (``kvatlas simulate``). No text.

A line is a request in the workload format (``timestamp`` in ms, ``input_length``, ``output_length``,
``hash_ids``) with what the router expected and what came of it. The event loop only puts a record into a
queue; a thread of its own hashes, writes and turns the file over.

Always true: a request is never delayed or failed by its log; what is queued and what lies on the disk is
bounded; every request that is not written is counted, by reason.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import msgspec
import structlog

from publisher.block_hash import PromptExtras
from router.observe.prefix_ids import prefix_ids, read_key

_log = structlog.get_logger()
WRITE_EVERY_S = 0.2
COMPLAIN_EVERY_S = 60.0
CLOSE_S_MAX = 5.0
_PIECE_BYTES = 1 << 18
_TAIL_BYTES = 1 << 16


class AccessLogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A line for every request, for ``kvatlas simulate``: token counts and prefix hashes, no text.

    At most two files: ``path``, and the older ``path`` with ``.1`` appended. Every router needs a ``path`` of
    its own; files of routers with the same ``key_file`` can be read as one. Of several workers each writes
    its own files, from the second on with ``.worker1``, ``.worker2`` and so on appended to ``path``.
    """

    path: str = ""
    """File to append to; empty: no access log."""
    bytes_max: int = 256 << 20
    """Size of both files together; a line takes 200 bytes and 17 more per 512 tokens of its prompt."""
    key_file: str = ""
    """File with the secret of the prefix hashes, made if missing; empty: `path` with `.key` appended."""
    queue_len_max: int = 8192
    """Most requests waiting to be written; further ones are dropped and counted."""
    queue_tokens_max: int = 8 << 20
    """Most prompt tokens waiting to be written; further requests are dropped and counted."""


class AccessLogStats(msgspec.Struct):
    """Counters for metrics."""

    written: int = 0
    """Lines written."""
    dropped: dict[str, int] = msgspec.field(
        default_factory=lambda: {"queue_full": 0, "tokens_unknown": 0, "not_writable": 0}
    )
    """Requests without a line: too many waited; the router did not see their tokens; the disk refused."""
    rotations: int = 0
    """Times the file reached its size and a new one was begun."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. Seconds on the wall clock and tokens; None where nobody told."""

    arrived_s: float
    model: str
    engine_id: str
    tokens: array[int]
    extras: PromptExtras
    streams: bool
    output_tokens: int | None
    predicted_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    queue_s: float


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it is written. ``output_reported`` False: ``output_length`` is 0 because nobody told."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    model: str
    engine: str
    stream: bool
    output_reported: bool
    predicted_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    queue_s: float


class AccessLog:
    """Writes from ``start`` to ``close``; ``add`` may be called at any time, from one thread."""

    def __init__(self, settings: AccessLogSettings) -> None:
        self.stats = AccessLogStats()
        self._settings = settings
        self._path = Path(settings.path)
        self._key_path = Path(settings.key_file or f"{settings.path}.key")
        self._key = b""
        self.beside: list[Path] = []
        """Logs of sibling workers, which are read back with this one."""
        self._queue: deque[Access] = deque()
        self._tokens_in = 0  # put into the queue so far: written by the event loop's thread alone
        self._tokens_out = 0  # taken out so far: by the writer's thread alone
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: FileIO | None = None
        self._complain_after_s = 0.0
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Begin to write."""
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end; a disk that hangs is not waited for longer than ``CLOSE_S_MAX``."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S_MAX)
            self._thread = None

    def add(self, access: Access) -> None:
        """Have a line written, soon. Never waits."""
        waiting = self._tokens_in - self._tokens_out
        if (
            len(self._queue) >= self._settings.queue_len_max
            or waiting + _weight(access) > self._settings.queue_tokens_max
        ):
            self.stats.dropped["queue_full"] += 1
            return
        self._tokens_in += _weight(access)
        self._queue.append(access)

    def skip(self) -> None:
        """A request whose tokens the router did not see, or which had several prompts."""
        self.stats.dropped["tokens_unknown"] += 1

    def read_back(self) -> Iterator[bytes]:
        """What is in the files now, the older one first, whole lines, piece by piece. Reads from the disk."""
        for path in [file for log in (self._path, *self.beside) for file in (Path(f"{log}.1"), log)]:
            try:
                with path.open("rb") as file:
                    left = os.fstat(file.fileno()).st_size
                    while left > 0 and (piece := file.read(min(_PIECE_BYTES, left))):
                        left -= len(piece)
                        yield piece
            except FileNotFoundError:
                continue

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(WRITE_EVERY_S)  # looked at first: what came before it is written
            try:
                self._write_all()
            except OSError as error:
                self._shut()
                self._complain(error)
        self._shut()
        while self._queue:
            self._tokens_out += _weight(self._queue.popleft())
            self.stats.dropped["not_writable"] += 1

    def _write_all(self) -> None:
        """Write what waits. Raises ``OSError``, and the lines it had taken out are counted as dropped."""
        while self._queue:
            access = self._queue.popleft()
            self._tokens_out += _weight(access)
            try:
                self._write(access)
            except OSError:
                self.stats.dropped["not_writable"] += 1
                raise
            self.stats.written += 1

    def _write(self, access: Access) -> None:
        if not self._key:
            self._key = read_key(self._key_path)
        line = self._encoder.encode(self._line(access)) + b"\n"
        if self._file is None:
            self._file = _open_whole(self._path)
        size = self._file.tell()
        if size and size + len(line) > self._settings.bytes_max // 2:
            self._shut()
            self._path.replace(f"{self._path}.1")
            self.stats.rotations += 1
            self._file, size = _open_whole(self._path), 0
        if self._file.write(line) != len(line):
            self._file.truncate(size)  # half a line would spoil the next one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _line(self, access: Access) -> AccessLine:
        return AccessLine(
            timestamp=round(1000 * access.arrived_s, 3),
            input_length=len(access.tokens),
            output_length=access.output_tokens or 0,
            hash_ids=prefix_ids(access.tokens, access.model, access.extras, self._key),
            model=access.model,
            engine=access.engine_id,
            stream=access.streams,
            output_reported=access.output_tokens is not None,
            predicted_tokens=access.predicted_tokens,
            cached_tokens=access.cached_tokens,
            ttft_s=None if access.ttft_s is None else round(access.ttft_s, 6),
            duration_s=round(access.duration_s, 6),
            queue_s=round(access.queue_s, 6),
        )

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        if time.monotonic() >= self._complain_after_s:
            self._complain_after_s = time.monotonic() + COMPLAIN_EVERY_S
            _log.warning("access log not written", path=str(self._path), problem=str(error))


def _weight(access: Access) -> int:
    """Its size in tokens, of four bytes each: clients choose their cache salts."""
    extras = access.extras
    names = (access.model, extras.cache_salt or "", *(item.identifier for item in extras.multimodal))
    return len(access.tokens) + sum(map(len, names))


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_whole(path: Path) -> FileIO:
    """Open to append, without the half line that a crash may have left."""
    file = FileIO(path, "a+", opener=_for_its_owner)
    end = size = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(end)
    return file
