"""Authenticates requests to the admin API and the ops port, and limits their rate.

Invariant: nothing of a request's body is read before the sender is authenticated. Once failed logins have
used up their allowance, tokens from one address are compared one at a time, ``TURN_S`` apart: that slows
guessing, and delays a client with a valid token by a fraction of a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import structlog

from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.secret_files import warn_if_public
from kvatlas.router.http.tls import TlsFiles, check_tls_files
from kvatlas.router.http.watched_file import WatchedFile
from kvatlas.router.openai.errors import ApiError, too_often, unauthorized


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The admin API, off by default. It needs a bearer token, a client certificate (mTLS), or both if both
    are set.

    A change made here lives in this one process and ends with it. Make it at each replica; make a lasting
    change in the engine file, or with a label or annotation in Kubernetes.
    """

    enabled: bool = False
    """Whether the admin API is served. Switch it on to drain or add engines by a command."""
    token_file: str | None = None
    """File with tokens of at least 16 characters, one per line, as `NAME:TOKEN` or `TOKEN`; the name is
    logged. Read again when it changes. Set it for tools without client certificates."""
    host: str = "127.0.0.1"
    """Address of the admin API's own port. Set it for tools on another machine."""
    port: int | None = None
    """The admin API's own port (0 takes a free one). Not set: `/admin` on the router's port, with tokens
    only. Set it to keep the API off the public port."""
    tls_cert_file: str | None = None
    """Certificate chain of the admin API's own port, PEM. Set it when `host` is open to other machines."""
    tls_key_file: str | None = None
    """Private key of that certificate, PEM. Set it with `tls_cert_file`."""
    client_ca_file: str | None = None
    """Certificate authority of clients, PEM: each client must present a certificate it signed; the common
    name is logged. Set it for tools with certificates."""
    # Not a key of the configuration: config/removed.py.
    requests_per_minute: float = 60.0
    """Requests each name may make per minute, in bursts of up to a quarter of it; failed logins share one
    such allowance. Once it is used up, tokens from one address are compared only four times a second."""

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        if self.token_file is None and self.client_ca_file is None:
            raise ValueError("enabled: give token_file, or client_ca_file with port and TLS files")
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.client_ca_file)
        if self.tls_cert_file is not None and self.port is None:
            raise ValueError("tls_cert_file: TLS needs a port of its own; give port")
        if self.port is not None and not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: {self.port} is not a port number")

    @property
    def tls(self) -> TlsFiles:
        """TLS settings of the own port."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.client_ca_file)


# Bearer tokens and their names, from a file that may be replaced while the router runs.
#
# Invariants: a comparison takes the same time for every input and every matching entry; a file that becomes
# invalid leaves the tokens unchanged, and a warning is logged.


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


# Rate limits: one token bucket per name, and turns of ``TURN_S`` once it is empty.
#
# Pure and bounded; the caller has the clock.


_ROUNDING = 1e-6
TURN_S = 0.25
WAITING_MAX = 8
# Names remembered; the least recently used is evicted, and starts with a full bucket the next time.
_NAMES_MAX = 256


class RateLimit:
    """``per_minute`` requests on average, bursts of a quarter of it (at least one)."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._burst = max(1.0, per_minute / 4)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (tokens left, time)

    def used_up(self, name: str, now: float) -> bool:
        """Whether ``take`` would refuse."""
        return self._left(name, now) < 1 - _ROUNDING

    def take(self, name: str, now: float) -> int:
        """Return 0 to continue, otherwise the seconds until the next request may succeed."""
        left = self._left(name, now)
        allowed = left >= 1 - _ROUNDING
        self._buckets[name] = (max(0.0, left - 1) if allowed else left, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > _NAMES_MAX:
            self._buckets.popitem(last=False)
        return 0 if allowed else max(1, math.ceil((1 - left) / self._per_s))

    def _left(self, name: str, now: float) -> float:
        left, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + max(0.0, now - at) * self._per_s)


class Turns:
    """One turn per ``TURN_S`` for each name; at most ``WAITING_MAX`` wait for theirs."""

    def __init__(self) -> None:
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def take(self, name: str, now: float) -> float | None:
        """Take the next turn. Returns the seconds to wait for it; None if too many wait already."""
        at = max(now, self._free_at.get(name, now))
        if at - now > WAITING_MAX * TURN_S - _ROUNDING:
            return None
        self._free_at[name] = at + TURN_S
        self._free_at.move_to_end(name)
        if len(self._free_at) > _NAMES_MAX:
            self._free_at.popitem(last=False)
        return at - now


# Key of the ASGI scope for the common name of a client certificate.
PEER = "kvatlas.peer"
_FAILED = ""


class Authenticator:
    """``mutual``: connections come with a checked certificate. ``per_minute`` is for each name and for
    failed logins together; with ``unlimited`` for failed logins only. ``realm`` and ``key`` appear in error
    messages: the name of the API, and the setting that names the tokens.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        mutual: bool,
        per_minute: float,
        clock: Callable[[], float],
        realm: str = "admin",
        key: str = "admin.token_file",
        unlimited: bool = False,
    ) -> None:
        self._tokens = tokens
        self._mutual = mutual
        self._limit = RateLimit(per_minute)
        self._turns = Turns()
        self._clock = clock
        self._realm = realm
        self._key = key
        self._unlimited = unlimited

    async def admit(self, scope: Any) -> str:
        """Return the name of the authenticated client, by its request's ASGI scope. Raises ``ApiError``."""
        now = self._clock()
        if self._limit.used_up(_FAILED, now):
            wait_s = self._turns.take(_address(scope), now)
            if wait_s is None:
                raise self._too_often(1)
            await asyncio.sleep(wait_s)
        who = self._who(scope)
        if who is not None and self._unlimited:
            return who
        wait = self._limit.take(_FAILED if who is None else f"={who}", self._clock())
        if wait:
            raise self._too_often(wait)
        if who is None:
            raise unauthorized(self._realm, self._key)
        return who

    def now(self) -> float:
        """Return the clock of the rate limits, in seconds."""
        return self._clock()

    def _too_often(self, wait_s: int) -> ApiError:
        what = "requests without a valid token" if self._unlimited else "requests"
        return too_often(self._realm, what, wait_s)

    def _who(self, scope: Any) -> str | None:
        peer: str | None = scope.get(PEER) if self._mutual else None
        if self._tokens is None:
            return peer
        scheme, _, token = header_of(scope, b"authorization").partition(" ")
        who = self._tokens.who(token.strip().encode("utf-8", "replace"))
        if scheme.lower() != "bearer" or (self._mutual and peer is None):
            return None
        return who


def header_of(scope: Any, name: bytes) -> str:
    """Return a header field of the request, the first of several; "": it has none."""
    found = next((value for field, value in scope["headers"] if field == name), b"")
    return cast(bytes, found).decode("latin-1")


def _address(scope: Any) -> str:
    """Return the client's address; of IPv6 the part assigned to one customer (64 bits)."""
    host = scope["client"][0] if scope.get("client") else ""
    return ":".join(host.split(":")[:4]) if host.count(":") > 1 and "." not in host else host


# Counters of the admin API.


class AdminStats(msgspec.Struct):
    """Outcomes of requests to the admin API."""

    requests: Annotated[int, "kvatlas_admin_requests_total"] = 0
    """Authorized requests."""
    changes: Annotated[dict[str, int], "kvatlas_admin_changes_total{reason}"] = {}
    """Changes carried out, by action."""
    refused: Annotated[dict[str, int], "kvatlas_admin_refused_total{reason}"] = {}
    """Requests refused, by error code."""
