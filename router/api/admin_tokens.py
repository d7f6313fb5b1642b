"""Bearer tokens and their names, from a file that may be replaced while the router runs.

Invariants: a comparison takes the same time for every input and every matching entry; a file that becomes
invalid leaves the tokens unchanged, and a warning is logged.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import structlog

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.secret_files import warn_if_public
from kvatlas.router.http.watched_file import WatchedFile

_log = structlog.get_logger()
_LENGTH_MIN = 16
_TOKENS_MAX = 64
_FILE_BYTES_MAX = 64 * 1024
# Name of a token without one.
UNNAMED = "admin"


class AdminFileError(ValueError):
    """An unusable file of tokens or certificates; the message names the key."""


class TokenFile:
    """Load the file; ``key`` is the setting that names it. Raises ``AdminFileError`` if it is unusable."""

    def __init__(self, path: Path, key: str = "admin.token_file") -> None:
        self._watched = WatchedFile(path)
        self._key = key
        self._digests = read_tokens(path, key)

    def who(self, token: bytes) -> str | None:
        """Return the name a token belongs to; None for an unknown token."""
        self._refresh()
        digest = hashlib.sha256(token).digest()
        found: str | None = None
        for known, name in self._digests:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._digests = read_tokens(self._watched.path, self._key)
            _log.info("admin tokens reloaded", key=self._key, tokens=len(self._digests))
        except AdminFileError as error:
            _log.warning("admin tokens not reloaded, the old ones stay valid", problem=str(error))


def read_tokens(path: Path, key: str = "admin.token_file") -> list[tuple[bytes, str]]:
    """Return each token's digest and name. Raises ``AdminFileError`` naming the line, never a token."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise AdminFileError(f"{key}: {path}: {describe_error(error)}") from None
    warn_if_public(path, key)
    found: list[tuple[bytes, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, separator, token = entry.partition(":")
        if not separator:
            name, token = UNNAMED, entry
        if len(token) < _LENGTH_MIN or not token.isprintable() or " " in token:
            raise AdminFileError(
                f"{key}: {path}, line {number}: a token is at least {_LENGTH_MIN} printable "
                "characters without spaces"
            )
        if not name or not name.isprintable() or len(name) > 64:
            raise AdminFileError(f"{key}: {path}, line {number}: expected NAME:TOKEN or TOKEN")
        found.append((hashlib.sha256(token.encode()).digest(), name))
    if not 0 < len(found) <= _TOKENS_MAX:
        raise AdminFileError(f"{key}: {path} has {len(found)} tokens; 1 to {_TOKENS_MAX} are possible")
    return found
