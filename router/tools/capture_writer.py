"""Writes a capture in a thread of its own, so that compression and disks never hold up the sockets.

A bounded queue lies between: what does not fit is counted, never waited for. Lines go out in pieces of up to
``_PIECE_BYTES``, each a complete gzip member, so that a file is readable to the last member whatever happens
to the process. The fuller the queue, the less is compressed: files grow where frames would be lost.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import IO

import msgspec

from router.tools.capture import CaptureError, encode_line, is_capture_name
from router.tools.capture_redact import redact

QUEUE_BYTES_MAX = 256 << 20

_PIECE_BYTES = 1 << 20
_FLUSH_S = 1.0
"""Longest a line waits for others to share its gzip member."""
_FRAME_OVERHEAD_BYTES = 400
"""What a queued frame costs besides its payload; also bounds the queue for empty payloads."""

_Frame = tuple[str, float, str, int, bytes]


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
        self._queue: deque[_Frame] = deque()
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

    def put(self, source: str, recv_ts: float, topic: str, seq: int, payload: bytes) -> bool:
        """Queue one frame; False where it had to be left out."""
        size = len(payload) + _FRAME_OVERHEAD_BYTES
        with self._changed:
            if self.stats.full:
                return False
            if self.stats.failure or self._closing or self._queued_bytes + size > self._queue_bytes_max:
                self.stats.overflowed_frames += 1
                return False
            self._queue.append((source, recv_ts, topic, seq, payload))
            self._queued_bytes += size
            if len(self._queue) == 1 or self._queued_bytes - size < _PIECE_BYTES <= self._queued_bytes:
                self._changed.notify()
        return True

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

    def _take(self) -> list[_Frame] | None:
        """The frames of the next piece: a full one, or what came within ``_FLUSH_S``; None at the end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            until = time.monotonic() + _FLUSH_S
            while not self._closing and self._queued_bytes < _PIECE_BYTES:
                left_s = until - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            if not self._queue or self.stats.full:
                return None
            frames, size = [], 0
            while self._queue and size < _PIECE_BYTES:
                frame = self._queue.popleft()
                frames.append(frame)
                size += len(frame[4]) + _FRAME_OVERHEAD_BYTES
            self._queued_bytes -= size
            return frames

    def _write(self, frames: list[_Frame]) -> None:
        data = self._compressed(b"".join([self._line(frame) for frame in frames]))
        limit = self._total_bytes_max
        if limit is not None and self._rotate_bytes is None and sum(self._sizes) + len(data) > limit:
            self.stats.full = True
            return
        if (
            self._rotate_bytes is not None
            and self._sizes[-1]
            and self._sizes[-1] + len(data) > self._rotate_bytes
        ):
            self._file.close()
            self._file = self._next_file()
        self._file.write(data)
        self._file.flush()
        self._sizes[-1] += len(data)
        self.stats.bytes_written += len(data)
        self.stats.frames += len(frames)
        while limit is not None and len(self.pieces) > 1 and sum(self._sizes) > limit:
            self._sizes.popleft()
            self.pieces.popleft().unlink(missing_ok=True)
            self.stats.deleted_files += 1

    def _line(self, frame: _Frame) -> bytes:
        source, recv_ts, topic, seq, payload = frame
        if self._redacted:
            kept = redact(payload)
            self.stats.unredactable_frames += kept is None
            payload = kept or b""
        return encode_line(source, recv_ts, topic, seq, payload)

    def _compressed(self, lines: bytes) -> bytes:
        if self._path.suffix != ".gz":
            return lines
        full = self._queued_bytes / self._queue_bytes_max
        level = 6 if full < 1 / 32 else 1 if full < 1 / 4 else 0
        packer = zlib.compressobj(level, zlib.DEFLATED, 31)
        return packer.compress(lines) + packer.flush()

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
