"""URL of the shared index, parsed without redis-py, so that a router without a shared index does not import
it. ``redis://`` or ``rediss://`` (TLS) for one server or any node of a Cluster (detected from the server),
``redis+cluster://a:1,b:2`` for several start nodes, ``redis+sentinel://a:1,b:2/service`` for a master found
through Sentinel; ``rediss+...`` with TLS. User, password and database number are in their usual places;
``?ca=``, ``?cert=`` and ``?key=`` name PEM files for TLS. Neither ``repr`` nor ``str`` of anything here
shows a password.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

Kind = Literal["server", "cluster", "sentinel"]

_DEFAULT_PORT = {"server": 6379, "cluster": 6379, "sentinel": 26379}


class SettingsError(ValueError):
    """A URL or setting that cannot be used; ``str()`` names it and the reason, without secrets."""


class Target(msgspec.Struct, frozen=True):
    """A parsed URL."""

    kind: Kind
    addresses: tuple[tuple[str, int], ...]
    db: int = 0
    service: str = ""
    """Name of the master, for Sentinel."""
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def where(self) -> str:
        """Hosts and ports, for messages."""
        return ",".join(f"{host}:{port}" for host, port in self.addresses)

    def __repr__(self) -> str:
        return f"Target({self.kind} {self.where} db={self.db} tls={self.tls} user={self.username!r})"

    __str__ = __repr__


def parse_url(url: str) -> Target:
    """Parse a URL. Raises ``SettingsError`` for an unsupported form."""
    parts = urlsplit(url)
    base, _, extra = parts.scheme.partition("+")
    if base not in {"redis", "rediss", "valkey", "valkeys"} or extra not in {"", "cluster", "sentinel"}:
        raise SettingsError(f"url: scheme {parts.scheme!r}: expected redis://HOST:PORT/DB (TLS: rediss), "
                            "redis+cluster:// or redis+sentinel://")  # fmt: skip
    if not parts.netloc:
        raise SettingsError("url: no host: expected redis://HOST:PORT/DB")
    kind: Kind = "cluster" if extra == "cluster" else "sentinel" if extra == "sentinel" else "server"
    userinfo, _, hosts = parts.netloc.rpartition("@")
    name, colon, secret = userinfo.partition(":")
    service, db = _path(parts, kind)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    unknown = sorted(set(query) - {"ca", "cert", "key"})
    if unknown:
        raise SettingsError(f"url: unknown parameter {unknown[0]!r}; known: ca, cert, key")
    return Target(
        kind,
        tuple(_address(host, _DEFAULT_PORT[kind]) for host in hosts.split(",")),
        db,
        service,
        unquote(name) or None,
        unquote(secret) if colon else None,
        base in {"rediss", "valkeys"},
        query.get("ca"),
        query.get("cert"),
        query.get("key"),
    )


def _path(parts: SplitResult, kind: Kind) -> tuple[str, int]:
    """Return (Sentinel's service name, database number) of a URL's path."""
    pieces = [unquote(piece) for piece in parts.path.split("/") if piece]
    service = ""
    if kind == "sentinel":
        if not pieces:
            raise SettingsError("url: redis+sentinel:// needs the master's name: .../NAME or .../NAME/DB")
        service, pieces = pieces[0], pieces[1:]
    if len(pieces) > 1 or (pieces and not pieces[0].isdecimal()):
        raise SettingsError(f"url: {'/'.join(pieces)!r} is no database number: expected redis://HOST:PORT/DB")
    db = int(pieces[0]) if pieces else 0
    if db and kind == "cluster":
        raise SettingsError("url: a Cluster has database 0 only")
    return service, db


def _address(text: str, default_port: int) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{text}")
        port = split.port
    except ValueError as error:
        raise SettingsError(f"url: bad address: {error}") from None
    return split.hostname or "127.0.0.1", port or default_port


def redacted(url: str) -> str:
    """Return the URL with its password replaced, for display."""
    head, at, tail = url.rpartition("@")
    scheme, separator, userinfo = head.partition("://")
    if not at or ":" not in userinfo:
        return url
    return f"{scheme}{separator}{userinfo.partition(':')[0]}:***@{tail}"


def has_password(url: str) -> bool:
    """Whether a URL contains a password."""
    return redacted(url) != url
