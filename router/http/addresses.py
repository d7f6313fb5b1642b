"""Hosts, ports and base URLs of settings and flags, checked by their syntax alone: nothing is resolved."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

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


def port_fault(port: int, lowest: int = 0) -> str:
    """Return what is wrong with the number of a port; "" if nothing. 0 is a port that the system chooses."""
    return "" if lowest <= port < 1 << 16 else f"{port} is not a port number, {lowest} to 65535"


def split_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``, with IPv6 addresses in brackets. Raises ``ValueError``."""
    host, _, port = text.rpartition(":")
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
