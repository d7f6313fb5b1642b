"""Blocks as files in one directory, shared by the engines of a machine (/dev/shm, a disk) or of many (NFS).

A value is written to a temporary file and renamed, so a reader sees all of it or nothing, without locks.
Files are spread over 256 folders. A thread keeps the total size below the limit: it removes the least
recently used files by modification time, which reading renews. One process sweeps at a time. Temporary files
left by a crash are removed by age.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.connectors.settings import ConfigError, Options
from kvatlas.connectors.store.base import Counters, Deadline, StoreUnavailable

log = logging.getLogger(__name__)

# Bound on a key: its hexadecimal digits and the suffix of a temporary file fit a file name.
KEY_BYTES_MAX = 100
_SUFFIX = ".kv"
_TEMPORARY = ".tmp-"
# Share of the cap that a sweep leaves, so that not every new file begins another.
_SWEEP_TO = 0.9
_ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class FileSettings:
    """``touch_after_s``: a use renews a file's time only if it is at least this old, to limit the work."""

    path: Path
    max_bytes: int
    sweep_every_s: float = 10.0
    leftovers_after_s: float = 300.0
    touch_after_s: float = 30.0

    @classmethod
    def parse(cls, options: Options) -> FileSettings:
        path = Path(options.text("path"))
        if not path.is_absolute():
            raise ConfigError(
                options.key("path"), str(path), "give an absolute path: processes start elsewhere"
            )
        return cls(
            path=path,
            max_bytes=options.size("max_bytes", "64GiB"),
            sweep_every_s=options.number("sweep_every_s", cls.sweep_every_s, low=0.1, high=3600),
            leftovers_after_s=options.number("leftovers_after_s", cls.leftovers_after_s, low=10, high=86400),
            touch_after_s=options.number("touch_after_s", cls.touch_after_s, low=0, high=3600),
        )


class FileStore:
    """A ``BlockStore`` in a directory. ``sweeps``: whether this one enforces the limit (a reader need
    not)."""

    def __init__(self, settings: FileSettings, *, sweeps: bool = True, name: str = "file") -> None:
        """StoreUnavailable if the directory cannot be created or written to."""
        self.name = name
        self._settings = settings
        self._counters = Counters()
        self._serial = itertools.count()
        self._writer = f"{_TEMPORARY}{socket.gethostname()[:40]}-{os.getpid()}-{id(self):x}"
        self._unswept_bytes = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        try:
            settings.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for shard in range(256):
                (settings.path / f"{shard:02x}").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"{settings.path}: {error.strerror}") from error
        self._thread: threading.Thread | None = None
        if sweeps:
            self._thread = threading.Thread(
                target=self._sweep_forever, name="kvatlas-file-sweep", daemon=True
            )
            self._thread.start()

    def register_buffer(self, buffer: memoryview) -> None:
        """Nothing to do: any memory can be read into and written from."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; renews existing files, which are likely to be read next."""
        deadline = Deadline(deadline_s)
        found = []
        for key in keys:
            self._in_time(deadline)
            path = self._path(key)
            try:
                self._renew(path, os.stat(path))
                found.append(True)
            except FileNotFoundError:
                found.append(False)
            except OSError as error:
                raise StoreUnavailable(str(error)) from error
        return found

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Write missing files; replace files of another length."""
        deadline = Deadline(deadline_s)
        return [self._put_one(key, value) for key, value in items if self._in_time(deadline)]

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        deadline = Deadline(deadline_s)
        return [self._get_one(key, buffer) for key, buffer in items if self._in_time(deadline)]

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        for key in keys:
            self._in_time(deadline)
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreUnavailable(str(error)) from error

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def sweep(self) -> int | None:
        """Remove leftovers, and files until the limit holds. Returns bytes left; None if another one
        sweeps."""
        lock = os.open(self._settings.path / ".sweep.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            self._unswept_bytes = 0
            return self._sweep_locked()
        finally:
            os.close(lock)

    def _in_time(self, deadline: Deadline) -> bool:
        if deadline.passed():
            self._counters.add("timeout")
            raise StoreUnavailable(f"{self._settings.path}: the deadline passed")
        return True

    def _path(self, key: bytes) -> str:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
        return f"{self._settings.path}/{zlib.crc32(key) & 255:02x}/{key.hex()}{_SUFFIX}"

    def _renew(self, path: str, found: os.stat_result) -> None:
        if time.time() - found.st_mtime >= self._settings.touch_after_s:
            # Swept in the meantime, or another user's file: the answer stays valid.
            with contextlib.suppress(OSError):
                os.utime(path)

    def _put_one(self, key: bytes, value: memoryview) -> bool:
        path = self._path(key)
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if found.st_size == value.nbytes:
                self._renew(path, found)
                return True
        temporary = f"{os.path.dirname(path)}/{self._writer}-{next(self._serial)}"
        try:
            _write(temporary, value)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if error.errno in _ROOM_ERRORS:
                self._counters.add("full")
                self._wake.set()
                return False
            raise StoreUnavailable(str(error)) from error
        self._unswept_bytes += value.nbytes
        if self._unswept_bytes > self._settings.max_bytes // 20:
            self._wake.set()
        return True

    def _get_one(self, key: bytes, buffer: memoryview) -> bool:
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._counters.add("absent")
            return False
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        try:
            found = os.fstat(file)
            if found.st_size != buffer.nbytes or not _read(file, buffer.cast("B")):
                self._counters.add("length")
                return False
            self._renew(path, found)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error
        finally:
            os.close(file)
        return True

    def _sweep_forever(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._settings.sweep_every_s)
            if self._closing.is_set():
                return
            self._wake.clear()
            try:
                self.sweep()
            except OSError as error:
                self._counters.add("sweep_failed")
                log.warning("could not remove expired files in %s: %s", self._settings.path, error)

    def _sweep_locked(self) -> int:
        stale = time.time() - self._settings.leftovers_after_s
        files: list[tuple[float, int, str]] = []
        for shard in range(256):
            with (
                contextlib.suppress(FileNotFoundError),
                os.scandir(self._settings.path / f"{shard:02x}") as entries,
            ):
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(_SUFFIX):
                            files.append((found.st_mtime, found.st_size, entry.path))
                        elif entry.name.startswith(_TEMPORARY) and found.st_mtime < stale:
                            os.unlink(entry.path)
                            self._counters.add("leftovers")
        total = sum(size for _, size, _ in files)
        if total <= self._settings.max_bytes:
            return total
        for _, size, path in sorted(files):
            if total <= self._settings.max_bytes * _SWEEP_TO:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                self._counters.add("evicted")
            total -= size
        return total


def _write(path: str, value: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = value.cast("B")
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def _read(file: int, buffer: memoryview) -> bool:
    """Fill the buffer. False if the file is too short."""
    while buffer:
        count = os.readv(file, [buffer])
        if not count:
            return False
        buffer = buffer[count:]
    return True
