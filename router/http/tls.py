"""Certificates of listeners and of connections to engines, taken again when their files change.

A context lives as long as its listener or client; a renewed certificate is loaded into it, so that handshakes
from then on use it and open connections go on. Always true: unusable files at the start are an error that
names the setting; later they change nothing and are logged.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec
import structlog

from router.http.sockets import reason_of

# Tells that a file was changed or replaced, by what the file system says of it, at most once a second.


_Stamp = tuple[int, int, int] | None


class WatchedFile:
    """``every_s`` 0: looks at each call. ``clock`` is monotonic seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = lambda: 0.0, every_s: float = 0.0) -> None:
        self.path = path
        self._clock = clock
        self._every_s = every_s
        self._looked_s = clock()
        self._stamp = _stamp(path)

    def changed(self) -> bool:
        """Whether it is another file, or has other contents, than at the last change told."""
        if self._every_s:
            now = self._clock()
            if now - self._looked_s < self._every_s:
                return False
            self._looked_s = now
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


_log = structlog.get_logger()
_LOOK_EVERY_S = 5.0


class TlsError(ValueError):
    """Certificates or keys that cannot be used; the message names the setting."""


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files. ``ca``: of the authorities by which the other side is verified."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self != TlsFiles()


def check_tls_files(cert: str | None, key: str | None, ca: str | None) -> None:
    """That a listener is given what belongs together. Raises ``ValueError`` naming the setting."""
    if (cert is None) != (key is None):
        raise ValueError("tls_cert_file: a certificate and its key go together; give tls_key_file too")
    if ca is not None and cert is None:
        raise ValueError("client_ca_file: needs tls_cert_file and tls_key_file")


def server_context(files: TlsFiles, setting: str) -> ssl.SSLContext:
    """For a listener; with ``ca`` no byte is read from clients without a certificate of it. Raises
    ``TlsError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files, setting)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles, setting: str) -> ssl.SSLContext:
    """For connections to servers, which are verified by ``ca`` alone, or else by the system's authorities.
    Raises ``TlsError``."""
    if not files.given:
        return _system_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is None:
        context.load_default_certs()
    _load(context, files, setting)
    return context


@lru_cache(maxsize=1)
def _system_context() -> ssl.SSLContext:
    """With the system's authorities and nothing else: the same for all, and reading them takes 20 ms."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs()
    _load(context, TlsFiles(), "")
    return context


def _load(context: ssl.SSLContext, files: TlsFiles, setting: str) -> None:
    """Authorities made before RFC 5280's rules were checked are good too: Python 3.13 is strict by default,
    earlier ones are not."""
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        if files.cert is not None:
            context.load_cert_chain(files.cert, files.key)
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except OSError as error:  # ssl.SSLError is one
        given = ", ".join(path for path in (files.cert, files.key, files.ca) if path is not None)
        why = error if isinstance(error, ssl.SSLError) else reason_of(error)
        raise TlsError(f"{setting}: {given}: {why}") from None


class _Held(msgspec.Struct, eq=False):
    """One context, and the files that it was made of."""

    context: ssl.SSLContext
    files: TlsFiles
    setting: str
    watched: list[WatchedFile]
    problem: str = ""
    """Why what the files hold now could not be taken; it is tried again at every look."""


class Certificates:
    """All contexts of one process whose files may change."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def hold(self, context: ssl.SSLContext, files: TlsFiles, setting: str) -> ssl.SSLContext:
        """Renew this context from now on; ``setting`` is for the log."""
        paths = (path for path in (files.cert, files.key, files.ca) if path is not None)
        self._held.append(_Held(context, files, setting, [WatchedFile(Path(path)) for path in paths]))
        return context

    def renew(self) -> None:
        """Load what has changed. An authority is added to the known ones; one taken out of its file is
        believed until the next start.

        OpenSSL takes a certificate before it sees that the key is another one's, and drops the key that it
        had: so the files are tried on another context first.
        """
        for held in self._held:
            if not sum(file.changed() for file in held.watched) and not held.problem:  # each one looks
                continue
            before, held.problem = held.problem, ""
            try:
                for context in (ssl.SSLContext(held.context.protocol), held.context):
                    _load(context, held.files, held.setting)
                _log.info("certificate renewed", key=held.setting)
            except TlsError as error:
                held.problem = str(error)
                if held.problem != before:
                    _log.warning("certificate not renewed, the old one stays", problem=held.problem)

    async def watch(self) -> None:
        """Renew every few seconds; returns only by cancellation."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.renew()
