"""Who a bearer token belongs to, by a file that may be replaced while the router runs.

Always true: every comparison takes the same time whatever was sent and whichever entry it fits; a file that
is of no use when it changes leaves the tokens as they were, and says so.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import structlog

from router.http.reasons import reason_of
from router.http.watched_file import WatchedFile

_log = structlog.get_logger()
_LENGTH_MIN = 16
_TOKENS_MAX = 64
_FILE_BYTES_MAX = 64 * 1024
UNNAMED = "admin"
"""The name of a token that stands alone."""


class AdminFileError(ValueError):
    """A file of tokens or certificates that cannot be used; the message names the key."""


class TokenFile:
    """``key`` is the setting that names it. Raises ``AdminFileError`` for a file of no use at the start."""

    def __init__(self, path: Path, key: str = "admin.token_file") -> None:
        self._watched = WatchedFile(path)
        self._key = key
        self._digests = read_tokens(path, key)

    def who(self, token: bytes) -> str | None:
        """The name a token belongs to; None for nobody's."""
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
    """(digest, name) of every token. Raises ``AdminFileError`` naming the line; never shows a token."""
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise AdminFileError(f"{key}: {path}: {reason_of(error)}") from None
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
