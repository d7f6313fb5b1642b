"""Blocks as values of a Redis or Valkey server: simple to run, about 1 GB/s, for tests and small fleets.

The server evicts (``maxmemory`` with ``allkeys-lru``); ``exists`` renews a key. A few connections are pooled;
each call sends pipelines of at most 8 MiB. A connection is closed after any error, and the next call makes a
new one; ``kvatlas.connectors.store.open`` limits the attempts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from redis.exceptions import OutOfMemoryError, RedisError

from kvatlas.connectors.settings import ConfigError, Options
from kvatlas.connectors.store.base import Counters, Deadline, StoreUnavailable
from kvatlas.connectors.store.redis_link import Command, RedisAddress, RedisLink, Reply

log = logging.getLogger(__name__)

PIPELINE_BYTES_MAX = 8 << 20
PIPELINE_COMMANDS_MAX = 1024
# Servers' default limit (``proto-max-bulk-len``, 512 MiB), minus room for the command.
VALUE_BYTES_MAX = 512 * 1000 * 1000

Item = TypeVar("Item")


@dataclass(frozen=True)
class RedisSettings:
    """``ttl_s``: seconds after which values expire unless renewed; 0: evicted only when memory is full."""

    address: RedisAddress = field(default_factory=RedisAddress)
    connections: int = 4
    prefix: str = "kvatlas:"
    ttl_s: int = 0

    @classmethod
    def parse(cls, options: Options) -> RedisSettings:
        """Parse options; passwords come from files only. ConfigError for invalid values."""
        address = _address(options)
        try:
            address.tls_context()
        except OSError as error:
            raise ConfigError(
                options.key("ca_file"), str(address.ca_file), f"give PEM files: {error}"
            ) from error
        return cls(
            address=address,
            connections=options.whole("connections", cls.connections, low=1, high=64),
            prefix=options.text("prefix", cls.prefix),
            ttl_s=options.whole("ttl_s", cls.ttl_s, low=0, high=10**9),
        )


def _address(options: Options) -> RedisAddress:
    url = options.text("url")
    remedy = "give redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH?db=DB"
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        db_text = (
            parse_qs(parts.query).get("db", [""])[0] if parts.scheme == "unix" else parts.path.strip("/")
        )
        db = int(db_text or 0)
    except ValueError as error:
        raise ConfigError(options.key("url"), _without_login(url), remedy) from error
    if parts.password or parts.username:
        raise ConfigError(
            options.key("url"),
            _without_login(url),
            "give username and password_file as settings of their own",
        )
    if parts.scheme not in {"redis", "rediss", "unix"} or (parts.scheme == "unix" and not parts.path):
        raise ConfigError(options.key("url"), url, remedy)
    return RedisAddress(
        host=parts.hostname or "127.0.0.1",
        port=port,
        unix_path=unquote(parts.path) if parts.scheme == "unix" else "",
        db=db,
        username=options.text("username", ""),
        password_file=options.file("password_file"),
        tls=parts.scheme == "rediss",
        ca_file=options.file("ca_file"),
        cert_file=options.file("cert_file"),
        key_file=options.file("key_file"),
    )


def _without_login(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class RedisStore:
    """A ``BlockStore`` on one server. The first call connects."""

    def __init__(self, settings: RedisSettings, *, name: str = "redis") -> None:
        self.name = name
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._counters = Counters()
        self._idle: queue.LifoQueue[RedisLink | None] = queue.LifoQueue()
        for _ in range(settings.connections):
            self._idle.put(None)
        self._closed = threading.Event()

    def register_buffer(self, buffer: memoryview) -> None:
        """Nothing to do: sockets write from any memory, and received values are copied."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; existing keys become the most recently used."""
        deadline = Deadline(deadline_s)
        found: list[bool] = []
        with self._link(deadline) as link:
            for batch in _batches(keys, lambda _: 0):
                replies = self._run(link, [(b"TOUCH", self._prefix + key) for key in batch], deadline)
                found += [reply == 1 for reply in replies]
        return found

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        deadline = Deadline(deadline_s)
        done: list[bool] = []
        lasts = [b"EX", b"%d" % self._settings.ttl_s] if self._settings.ttl_s else []
        with self._link(deadline) as link:
            for batch in _batches(items, lambda item: item[1].nbytes):
                fits = [value.nbytes <= VALUE_BYTES_MAX for _, value in batch]
                if not all(fits):
                    self._counters.add("too_large", fits.count(False))
                commands: list[Command] = [
                    (b"SET", self._prefix + key, value.cast("B"), *lasts)
                    for (key, value), fit in zip(batch, fits, strict=True)
                    if fit
                ]
                replies = iter(self._run(link, commands, deadline))
                done += [fit and next(replies) == b"OK" for fit in fits]
        return done

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        deadline = Deadline(deadline_s)
        done: list[bool] = []
        with self._link(deadline) as link:
            for batch in _batches(items, lambda item: item[1].nbytes):
                values = self._run(link, [(b"GET", self._prefix + key) for key, _ in batch], deadline)
                done += [self._take(value, buffer) for value, (_, buffer) in zip(values, batch, strict=True)]
        return done

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        with self._link(deadline) as link:
            for batch in _batches(keys, lambda _: 0):
                self._run(link, [(b"UNLINK", self._prefix + key) for key in batch], deadline)

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._closed.set()
        while True:
            try:
                link = self._idle.get_nowait()
            except queue.Empty:
                return
            if link is not None:
                link.close()

    @contextmanager
    def _link(self, deadline: Deadline) -> Iterator[RedisLink]:
        """Use a pooled connection for one call; makes one if none is free."""
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")
        try:
            link = self._idle.get(timeout=max(deadline.left_s(), 0.0))
        except queue.Empty:
            self._counters.add("no_connection")
            raise StoreUnavailable("every connection was in use until the deadline") from None
        sound = False
        try:
            if link is None:
                link = RedisLink(self._settings.address, deadline)
                self._counters.add("connected")
            yield link
            sound = True
        finally:
            if link is not None and (not sound or self._closed.is_set()):
                link.close()
                link = None
            self._idle.put(link)

    def _run(self, link: RedisLink, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Replies in order; a refused command gives its error, which is counted."""
        replies = link.run(commands, deadline)
        for reply in replies:
            if isinstance(reply, RedisError):
                self._refused(reply)
        return replies

    def _take(self, value: Reply, buffer: memoryview) -> bool:
        if value is None:
            self._counters.add("absent")
        if not isinstance(value, bytes):
            return False
        if len(value) != buffer.nbytes:
            self._counters.add("length")
            return False
        buffer.cast("B")[:] = value
        return True

    def _refused(self, error: RedisError) -> None:
        if isinstance(error, OutOfMemoryError):
            self._counters.add("full")
            return
        if not self.counters().get("refused"):
            log.warning("%s refuses a command: %s", self._settings.address, error)
        self._counters.add("refused")


def _batches(items: Sequence[Item], size_bytes: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """Cut into runs that fit a pipeline; a single item may be larger."""
    start = total = 0
    for at, item in enumerate(items):
        size = size_bytes(item)
        if at > start and (total + size > PIPELINE_BYTES_MAX or at - start >= PIPELINE_COMMANDS_MAX):
            yield items[start:at]
            start, total = at, 0
        total += size
    if start < len(items):
        yield items[start:]
