"""Contexts and certificates of TLS.

A context exists as long as its listener or client. A renewed certificate is loaded into it, so that new
handshakes use it and open connections continue. Invariants: unusable files at the start are an error that
names the setting; later they are logged and change nothing.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import lru_cache
from pathlib import Path

import msgspec
import structlog

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.watched_file import WatchedFile

_log = structlog.get_logger()


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
