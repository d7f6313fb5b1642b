"""Writes a capture in a thread of its own, so that compression and disks never hold up the sockets.

A bounded queue lies between: what does not fit is counted, never waited for. Lines go out in pieces of some
megabytes, each encoded in one call and a complete gzip member, so that a file is readable to the last member
whatever happens to the process. The fuller the queue, the less is compressed: files grow where frames would
be lost.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from router.tools.capture.file import CaptureError, CaptureLine, encode_lines, is_capture_name
from router.tools.capture.redact import redact

QUEUE_BYTES_MAX = 256 << 20

_PIECE_BYTES_MIN, _PIECE_BYTES_MAX = 64 << 10, 4 << 20
"""Payload of a piece. Large ones make the writer ask less often for the interpreter's lock."""
_LEVELS = ((1 / 64, 4), (1 / 8, 1), (1.0, 0))
"""How full the queue may be, and how hard is compressed then. Of a capture of vLLM's events 4 leaves
12 % and takes half the time of 6, 1 leaves 14 % and takes two thirds of that; 0 takes almost none."""
_LINES_AT_ONCE = 64
"""Encoded and compressed in one call: few enough that their buffers are used again, not mapped anew."""
_FLUSH_S = 1.0
"""Longest a line waits for others to share its gzip member."""
_FRAME_OVERHEAD_BYTES = 400
"""What a queued frame costs besides its payload; also bounds the queue for empty payloads."""


class WriterStats(msgspec.Struct):
    """Plain counters; bytes are as they lie on disk."""

    frames: int = 0
    bytes_written: int = 0
    files: int = 0
    deleted_files: int = 0
    overflowed_frames: int = 0
    """Did not fit into the queue, or came after the writing had failed."""
    unredactable_frames: int = 0
    """Could not be redacted: written without their payload."""
    full: bool = False
    """``total_bytes_max`` was reached, nothing more is written."""
    failure: str = ""


class CaptureWriter:
    """Writes ``path``, or with ``rotate_bytes`` pieces of about that size named after it.

    Beyond ``total_bytes_max`` a rotated capture loses its oldest piece, any other ends (``stats.full``).
    Raises ``CaptureError`` for a file that cannot be made or is there already. ``put`` is for one thread;
    ``close`` must be called.
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
            raise CaptureError(f"{path}: the name of a capture ends in .jsonl or .jsonl.gz")
        self.stats = WriterStats()
        self.pieces: deque[Path] = deque()
        """Files written and not deleted, oldest first."""
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
        """Nothing more will be written: full, or failed."""
        return self.stats.full or bool(self.stats.failure)

    def put(self, frames: list[CaptureLine]) -> int:
        """Queue frames, in order; returns how many. Those after them had to be left out, and are counted."""
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
        """How many of the first frames there is room for, and their bytes."""
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
        """Write what is queued and close the file; a second call does nothing."""
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
        """The frames of the next piece: a full one, or what came within ``_FLUSH_S``; None at the end."""
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
        """The bytes of a piece: lines, or one gzip member."""
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
            raise CaptureError(f"{path}: exists already; a capture is never overwritten") from None
        except OSError as error:
            raise CaptureError(f"{path}: cannot be written: {error.strerror}") from None
        self.stats.files += 1
        self.pieces.append(path)
        self._sizes.append(0)
        return opened
