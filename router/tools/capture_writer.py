"""Writes a capture in a thread of its own, so that compression and disks never block the sockets.

A bounded queue decouples the two: frames that do not fit are counted, never waited for. Lines are written
in pieces of some megabytes, each encoded in one call and a complete gzip member, so that a file stays
readable up to its last member after a crash. The fuller the queue, the lower the compression level: files
grow before frames are lost.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from kvatlas.router.tools.redaction import redact
from kvatlas.router.tools.trace_file import RecordingError

_SUFFIXES = (".jsonl", ".jsonl.gz")


class CaptureLine(msgspec.Struct, frozen=True, gc=False):
    """One line to write; the payload is the bytes received."""

    source: str
    recv_ts: float
    topic: str
    seq: int
    payload: bytes = msgspec.field(name="payload_b64")


_JSON = msgspec.json.Encoder()


def is_capture_name(path: Path) -> bool:
    """Whether the file name has a capture's extension."""
    return path.name.endswith(_SUFFIXES)


def encode_lines(lines: Sequence[CaptureLine]) -> bytes:
    return _JSON.encode_lines(lines)


QUEUE_BYTES_MAX = 256 << 20
# Payload bytes of a piece. Larger pieces make the writer thread request the GIL less often.
_PIECE_BYTES_MIN, _PIECE_BYTES_MAX = 64 << 10, 4 << 20
# (Fill level of the queue up to which it applies, zlib level). Measured on a capture of vLLM events: level 4
# leaves 12 % of the size in half the time of level 6, level 1 leaves 14 % in two thirds of the time of level
# 4, level 0 takes almost no time.
_LEVELS = ((1 / 64, 4), (1 / 8, 1), (1.0, 0))
# Lines encoded and compressed in one call: few enough that the allocator reuses their buffers.
_LINES_AT_ONCE = 64
# Longest time in seconds a line waits for others to share its gzip member.
_FLUSH_S = 1.0
# Cost of a queued frame besides its payload; also bounds the queue for empty payloads.
_FRAME_OVERHEAD_BYTES = 400


class WriterStats(msgspec.Struct):
    """Counters of the writer; bytes are sizes on disk."""

    frames: int = 0
    bytes_written: int = 0
    files: int = 0
    deleted_files: int = 0
    overflowed_frames: int = 0
    """Frames that did not fit into the queue, or arrived after writing had failed."""
    unredactable_frames: int = 0
    """Frames that could not be redacted and are written without their payload."""
    full: bool = False
    """Whether ``total_bytes_max`` was reached: nothing more is written."""
    failure: str = ""


class CaptureWriter:
    """Writer of ``path``, or with ``rotate_bytes`` of pieces of about that size named after it.

    Beyond ``total_bytes_max`` a rotated capture deletes its oldest piece; any other capture ends
    (``stats.full``). Raises ``RecordingError`` if a file exists already or cannot be created. ``put`` may be
    called from one thread only; ``close`` must be called.
    """

    def __init__(
        self,
        path: Path,
        *,
        rotate_bytes: int | None = None,
        total_bytes_max: int | None = None,
        redacted: bool = False,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        if not is_capture_name(path):
            raise RecordingError(f"{path}: the name of a capture ends in .jsonl or .jsonl.gz")
        self.stats = WriterStats()
        # Files written and not deleted, oldest first.
        self.pieces: deque[Path] = deque()
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._total_bytes_max = total_bytes_max
        self._redacted = redacted
        self._queue_bytes_max = queue_bytes_max
        limits = [limit // 8 for limit in (rotate_bytes, total_bytes_max) if limit is not None]
        self._piece_bytes = max(_PIECE_BYTES_MIN, min([_PIECE_BYTES_MAX, *limits]))
        self._queue: deque[CaptureLine] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._sizes: deque[int] = deque()
        self._file = self._next_file()
        self._thread = threading.Thread(target=self._run, name="capture writer")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether writing has stopped: the size limit was reached, or a write failed."""
        return self.stats.full or bool(self.stats.failure)

    def put(self, frames: list[CaptureLine]) -> int:
        """Queue frames in order. Returns how many were queued; the rest are dropped and counted."""
        with self._changed:
            if self.stats.full:
                return 0
            taken, size = self._fitting(frames)
            self.stats.overflowed_frames += len(frames) - taken
            self._queue.extend(frames if taken == len(frames) else frames[:taken])
            before, self._queued_bytes = self._queued_bytes, self._queued_bytes + size
            if not before or before < self._piece_bytes <= self._queued_bytes:
                self._changed.notify()
        return taken

    def _fitting(self, frames: list[CaptureLine]) -> tuple[int, int]:
        """Return how many of the first frames fit into the queue, and their size in bytes."""
        if self.stats.failure or self._closing:
            return 0, 0
        room = self._queue_bytes_max - self._queued_bytes
        size = sum([len(frame.payload) for frame in frames]) + _FRAME_OVERHEAD_BYTES * len(frames)
        if size <= room:
            return len(frames), size
        size = 0
        for taken, frame in enumerate(frames):
            if size + len(frame.payload) + _FRAME_OVERHEAD_BYTES > room:
                return taken, size
            size += len(frame.payload) + _FRAME_OVERHEAD_BYTES
        return len(frames), size

    def close(self) -> None:
        """Write the queued frames and close the file; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (frames := self._take()) is not None:
                self._write(frames)
        except (OSError, ValueError) as error:
            self.stats.failure = f"{self.pieces[-1]}: {error}"
        finally:
            try:
                self._file.close()
            except OSError as error:
                self.stats.failure = self.stats.failure or f"{self.pieces[-1]}: {error}"
            with self._changed:
                if self.stats.failure:
                    self.stats.overflowed_frames += len(self._queue)
                self._queue.clear()

    def _take(self) -> list[CaptureLine] | None:
        """Return the next piece's frames: a full one, or those of the last ``_FLUSH_S``; None at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            until = time.monotonic() + _FLUSH_S
            while not self._closing and self._queued_bytes < self._piece_bytes:
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            if not self._queue or self.stats.full:
                return None
            frames, size = [], 0
            while self._queue and size < self._piece_bytes:
                frame = self._queue.popleft()
                frames.append(frame)
                size += len(frame.payload) + _FRAME_OVERHEAD_BYTES
            self._queued_bytes -= size
            return frames

    def _write(self, frames: list[CaptureLine]) -> None:
        if self._redacted:
            frames = [self._blanked(frame) for frame in frames]
        parts = self._encoded(frames)
        size, limit = sum(map(len, parts)), self._total_bytes_max
        if limit is not None and self._rotate_bytes is None and sum(self._sizes) + size > limit:
            self.stats.full = True
            return
        if self._rotate_bytes is not None and self._sizes[-1] and self._sizes[-1] + size > self._rotate_bytes:
            self._file.close()
            self._file = self._next_file()
        self._file.writelines(parts)
        self._file.flush()
        self._sizes[-1] += size
        self.stats.bytes_written += size
        self.stats.frames += len(frames)
        while limit is not None and len(self.pieces) > 1 and sum(self._sizes) > limit:
            self._sizes.popleft()
            self.pieces.popleft().unlink(missing_ok=True)
            self.stats.deleted_files += 1

    def _blanked(self, frame: CaptureLine) -> CaptureLine:
        kept = redact(frame.payload)
        self.stats.unredactable_frames += kept is None
        return msgspec.structs.replace(frame, payload=kept or b"")

    def _encoded(self, frames: list[CaptureLine]) -> list[bytes]:
        """Encode a piece: lines, or one gzip member."""
        slices = range(0, len(frames), _LINES_AT_ONCE)
        lines = (encode_lines(frames[start : start + _LINES_AT_ONCE]) for start in slices)
        if self._path.suffix != ".gz":
            return list(lines)
        full = self._queued_bytes / self._queue_bytes_max
        level = next(level for part, level in _LEVELS if full <= part)
        packer = zlib.compressobj(level, zlib.DEFLATED, 31)
        return [*map(packer.compress, lines), packer.flush()]

    def _next_file(self) -> IO[bytes]:
        path = self._path
        if self._rotate_bytes is not None:
            ending = ".jsonl.gz" if path.suffix == ".gz" else ".jsonl"
            path = path.with_name(f"{path.name.removesuffix(ending)}.{self.stats.files:05d}{ending}")
        try:
            opened = path.open("xb")
        except FileExistsError:
            raise RecordingError(f"{path}: exists already; a capture is never overwritten") from None
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written: {error.strerror}") from None
        self.stats.files += 1
        self.pieces.append(path)
        self._sizes.append(0)
        return opened
