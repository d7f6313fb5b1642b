"""Basics of sockets and TLS for servers and clients: addresses, file descriptors, errors, deadlines,
certificates.

Addresses are checked by their syntax alone; nothing is resolved.

A context exists as long as its listener or client. A renewed certificate is loaded into it, so that new
handshakes use it and open connections continue. Invariants: unusable files at the start are an error that
names the setting; later they are logged and change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import resource
import socket
import ssl
import stat
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_NUMERIC = re.compile(r"[0-9.]+")
_NAME_LENGTH_MAX = 253


def is_host(text: str) -> bool:
    """Return whether this is an IP address (IPv6 without brackets) or a host name (RFC 1123, ``_`` too)."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        looks_numeric = _NUMERIC.fullmatch(text) is not None  # 300.1.1.1 is no name
        return len(text) <= _NAME_LENGTH_MAX and not looks_numeric and _NAME.fullmatch(text) is not None
    return True


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Split ``HOST:PORT``, with IPv6 addresses in brackets. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if default_port is not None and (not colon or text.endswith("]")):
        host, port = text, str(default_port)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    bracketed = bare != host
    if not is_host(bare) or (":" in bare) != bracketed:
        raise ValueError(f"{text!r}: expected HOST:PORT")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text!r}: expected HOST:PORT with a port from 0 to 65535")
    return bare, int(port)


def base_url_fault(url: str, *schemes: str) -> str:
    """Return the fault of a server's base URL with its remedy; "" where it can be used."""
    # A path before ``/v1`` is allowed, for servers behind a proxy.
    expected = "expected " + " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # An invalid port, or an open bracket.
        return expected
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        return expected
    if not is_host(parts.hostname) or parts.username is not None or any(c.isspace() for c in url):
        return expected
    pieces = parts.path.split("/")
    if "v1" in pieces:
        rest = "/".join(pieces[pieces.index("v1") :])
        return f"{expected}; leave out /{rest}, requests bring their own path"
    if parts.query or parts.fragment:
        return f"{expected}; leave out what follows the path"
    return ""


# TCP keepalive: a peer without power, or a connection that a middlebox forgot, is noticed within a minute.
# The system's default is two hours, and a quarter of an hour for bytes that were sent and not acknowledged.


KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 3
_DEAD_S = KEEPALIVE_IDLE_S + KEEPALIVE_COUNT * KEEPALIVE_INTERVAL_S
# By name: not every system has all of them.
_KEEPALIVE = {
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
    "TCP_KEEPCNT": KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": 1000 * _DEAD_S,
}


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the system probe a TCP connection that is silent; a Unix socket needs none."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # A connection may be lost before it is set up here.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


# File descriptors: every connection needs one, and a process has a limited number.
#
# The soft limit is raised as needed; a limit that is too low is logged at the start. Running out is a failure
# of this process, never of an engine.


_log = structlog.get_logger()
# The client's, and the engine's during a request.
_DESCRIPTORS_PER_CONNECTION = 2
# Event streams, polls, log files, listening sockets.
_OTHER_DESCRIPTORS = 256
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})
_LOG_INTERVAL_S = 10.0
_LAST_DESCRIPTORS = 16
_REMEDY = "raise the limit (ulimit -n, LimitNOFILE= of a systemd unit, ulimits of a container)"


def descriptors_needed(connections_max: int) -> int:
    """Return the file descriptors for this number of client connections."""
    return connections_max * _DESCRIPTORS_PER_CONNECTION + _OTHER_DESCRIPTORS


def raise_descriptor_limit(connections_max: int, *, default: int = 0) -> int:
    """Raise the soft limit for this number of client connections; return how many are possible then.

    Fewer are logged as a warning, unless ``connections_max`` is the ``default`` and at least half of it is
    possible.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_needed(connections_max)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    held = max(1, (soft - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION)
    unasked = connections_max == default and 2 * held >= default
    (_log.debug if unasked else _log.warning)(
        "fewer connections than listen.connections_max: file descriptors are limited",
        connections_max=connections_max,
        held=held,
        limit=soft,
        descriptors_needed=wanted,
        remedy=_REMEDY,
    )
    return held


def is_last_descriptor(sock: socket.socket) -> bool:
    """Return whether this socket has one of the last file descriptors; log it at most every 10 s.

    The system assigns the lowest free number.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or sock.fileno() < soft - _LAST_DESCRIPTORS:
        return False
    _log_shortage(soft)
    return True


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether file descriptors have run out; log it at most every 10 s."""
    if getattr(error, "errno", None) not in _EXHAUSTED:
        return False
    _log_shortage(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return True


def _log_shortage(limit: int) -> None:
    now = time.monotonic()
    if now >= _LastLog.next_at:
        _LastLog.next_at = now + _LOG_INTERVAL_S
        _log.error("out of file descriptors", limit=limit, remedy=_REMEDY)


class _LastLog:
    next_at = 0.0


# Errors in words, for logs and for people: no name of a Python class, no address that the caller knows.


_NUMBER = re.compile(r"\[Errno (\d+)\]")
_TEXT_LENGTH_MAX = 300
_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection closed"),
    (TimeoutError, "no answer in time"),
    (socket.gaierror, "host name not known"),
    (msgspec.ValidationError, "JSON of another form"),
    (msgspec.DecodeError, "not JSON"),
    (RecursionError, "nested too deeply"),
    (MemoryError, "not enough memory"),
)
_DETAILED = (msgspec.ValidationError,)


class NotConnectedError(OSError):
    """No connection to a server; ``problem`` is the reason in words, ``errno`` that of the cause."""

    def __init__(self, errno: int | None, problem: str) -> None:
        super().__init__(problem)
        self.errno = errno
        self.problem = problem


def warn_if_public(path: Path, setting: str) -> None:
    """Log a warning for a secret that every user of this machine can read. It is used nevertheless: mounted
    secrets of containers often have such a mode, and no other user is there."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mode & stat.S_IROTH:
            _log.warning(
                "secret can be read by every user of this machine",
                setting=setting,
                file=str(path),
                remedy=f"chmod 600 {path}",
            )


def describe_error(error: BaseException) -> str:
    """Describe an error on one line."""
    text = _error_text(error)
    return " ".join(text.split())[:_TEXT_LENGTH_MAX]


def _error_text(error: BaseException) -> str:
    if isinstance(error, NotConnectedError):
        return error.problem
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'reason', None) or error.strerror}"
    for kind, words in _TEXTS:
        if isinstance(error, kind):
            return f"{words} ({error})" if kind in _DETAILED else words
    if isinstance(error, OSError):
        return _os_error_text(error)
    return _detail(error)


def _detail(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not {error.encoding.upper()}"
    if isinstance(error, KeyError):
        return f"there is no {error}"
    return str(error) or "failed without a reason"


def _os_error_text(error: OSError) -> str:
    """Describe an ``OSError``, also one of several attempts (IPv4 and IPv6) with the same number."""
    numbers = {int(number) for number in _NUMBER.findall(str(error))}
    if error.errno is not None:
        numbers.add(error.errno)
    if numbers == {errno.ECONNREFUSED}:
        return "connection refused"
    if len(numbers) == 1:
        (number,) = numbers
        return os.strerror(number)[:1].lower() + os.strerror(number)[1:]
    return error.strerror or str(error) or "failed without a reason"


# Deadlines: one timer for all connections.
#
# Starting and cancelling a timer per request and per chunk costs more than the chunk. Connections only set
# their ``deadline``; the sweeper checks all of them once per tick and calls ``expire`` after it. A time-out
# is at most one tick late. The timer runs only while there are connections. If a tick is late by more than a
# tick, the loop was busy, and all deadlines are put off by as much: a connection that is made takes several
# turns of the loop, so a busy router would blame engines and clients for its own delay.


NEVER = float("inf")


class HasDeadline(Protocol):
    """An object with a deadline on the sweeper's clock."""

    deadline: float

    def expire(self) -> None:
        """Handle the passed deadline: set another one, or discard this from the sweeper."""


class Sweeper:
    """Checks the deadlines of connections, in the order they came; used from the event loop only."""

    def __init__(self, clock: Callable[[], float], tick_s: float) -> None:
        self._clock = clock
        self.tick_s = tick_s
        self._watched: dict[HasDeadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def add(self, item: HasDeadline) -> None:
        """Check its deadline until ``discard``."""
        self._watched[item] = None
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self.tick_s
        self._timer = loop.call_later(self.tick_s, self._sweep)

    def discard(self, item: HasDeadline) -> None:
        """Stop checking it; unknown items are ignored."""
        self._watched.pop(item, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        late_s = asyncio.get_running_loop().time() - self._due_s
        self._start_timer()
        if late_s > self.tick_s:
            for item in self._watched:
                item.deadline += late_s
        now = self._clock()
        for item in [item for item in self._watched if item.deadline <= now]:
            item.expire()


def sweep_interval_s(*timeouts_s: float) -> float:
    """Return a tenth of the shortest time-out, between 10 ms and 0.5 s."""
    return min(0.5, max(0.01, min(timeouts_s) / 10))


# Detects changed or replaced files by their metadata.


_Stamp = tuple[int, int, int] | None


class WatchedFile:
    """Checks a file at most every ``every_s`` seconds; 0: at each call. ``clock`` is monotonic seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = lambda: 0.0, every_s: float = 0.0) -> None:
        self.path = path
        self._clock = clock
        self._every_s = every_s
        self._checked_s = clock()
        self._stamp = _stamp(path)

    def changed(self) -> bool:
        """Return whether the file or its contents changed since the last call that returned True."""
        if self._every_s:
            now = self._clock()
            if now - self._checked_s < self._every_s:
                return False
            self._checked_s = now
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True


def _stamp(path: Path) -> _Stamp:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


_CHECK_INTERVAL_S = 5.0


class TlsError(ValueError):
    """Unusable certificate or key; the message names the setting."""


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files. ``ca``: the authorities that verify the other side."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @property
    def given(self) -> bool:
        """Whether any file is set."""
        return self != TlsFiles()


def check_tls_files(cert: str | None, key: str | None, ca: str | None) -> None:
    """Check that a listener's files are complete. Raises ``ValueError`` naming the setting."""
    if (cert is None) != (key is None):
        raise ValueError("tls_cert_file: a certificate and its key go together; give tls_key_file too")
    if ca is not None and cert is None:
        raise ValueError("client_ca_file: needs tls_cert_file and tls_key_file")


def server_context(files: TlsFiles, setting: str) -> ssl.SSLContext:
    """Create the context of a listener; with ``ca`` clients must have a certificate of it.

    Raises ``TlsError``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_files(context, files, setting)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles, setting: str) -> ssl.SSLContext:
    """Create the context of connections to servers, which ``ca`` or else the system's authorities verify.

    Raises ``TlsError``.
    """
    if not files.given:
        return _system_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is None:
        context.load_default_certs()
    _load_files(context, files, setting)
    return context


@lru_cache(maxsize=1)
def _system_context() -> ssl.SSLContext:
    """Create the shared context with the system's authorities, which take 20 ms to read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    _load_files(context, TlsFiles(), "")
    return context


def _load_files(context: ssl.SSLContext, files: TlsFiles, setting: str) -> None:
    """Load the files into a context. Raises ``TlsError``."""
    # Authorities that violate RFC 5280 are accepted, as before Python 3.13, which is strict by default.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except OSError as error:  # ssl.SSLError is one
        given = ", ".join(path for path in (files.cert, files.key, files.ca) if path is not None)
        odd = isinstance(error, ssl.SSLError)
        why = f"no PEM files that fit together: {error}" if odd else describe_error(error)
        raise TlsError(f"{setting}: {given}: {why}") from None


class _Renewed(msgspec.Struct, eq=False):
    """A context and its files."""

    context: ssl.SSLContext
    files: TlsFiles
    setting: str
    watched: list[WatchedFile]
    problem: str = ""
    """Why the current files could not be loaded; tried again at every check."""


class Certificates:
    """Contexts of one process whose files may change."""

    def __init__(self) -> None:
        self._contexts: list[_Renewed] = []

    def add(self, context: ssl.SSLContext, files: TlsFiles, setting: str) -> ssl.SSLContext:
        """Reload this context when its files change; ``setting`` is for the log."""
        paths = (path for path in (files.cert, files.key, files.ca) if path is not None)
        self._contexts.append(_Renewed(context, files, setting, [WatchedFile(Path(path)) for path in paths]))
        return context

    def reload_changed(self) -> None:
        """Load changed files. A new authority is added; a removed one is trusted until the next start."""
        # OpenSSL replaces a certificate before it finds that the key does not match, and drops the old key.
        # So the files are loaded into another context first.
        for entry in self._contexts:
            if (
                not sum(file.changed() for file in entry.watched) and not entry.problem
            ):  # not any(): each file must be checked
                continue
            before, entry.problem = entry.problem, ""
            try:
                for context in (ssl.SSLContext(entry.context.protocol), entry.context):
                    _load_files(context, entry.files, entry.setting)
                _log.info("certificate renewed", key=entry.setting)
            except TlsError as error:
                entry.problem = str(error)
                if entry.problem != before:
                    _log.warning("certificate not renewed, the old one stays", problem=entry.problem)

    async def watch(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self.reload_changed()
