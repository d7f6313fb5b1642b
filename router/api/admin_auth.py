"""Authenticates requests to the admin API and the ops port, and limits their rate.

Invariant: nothing of a request's body is read before the sender is authenticated. Once failed logins have
used up their allowance, tokens from one address are compared one at a time, ``TURN_S`` apart: that slows
guessing, and delays a client with a valid token by a fraction of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, cast

import msgspec

from kvatlas.router.api.admin_tokens import TokenFile
from kvatlas.router.api.rate_limit import RateLimit, Turns
from kvatlas.router.http.addresses import port_fault
from kvatlas.router.http.tls import TlsFiles, check_tls_files
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
        if self.port is not None and (fault := port_fault(self.port)):
            raise ValueError(f"port: {fault}")

    @property
    def tls(self) -> TlsFiles:
        """TLS settings of the own port."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.client_ca_file)


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


class AdminStats(msgspec.Struct):
    """Outcomes of requests to the admin API."""

    requests: Annotated[int, "kvatlas_admin_requests_total"] = 0
    """Authorized requests."""
    changes: Annotated[dict[str, int], "kvatlas_admin_changes_total{reason}"] = {}
    """Changes carried out, by action."""
    refused: Annotated[dict[str, int], "kvatlas_admin_refused_total{reason}"] = {}
    """Requests refused, by error code."""
