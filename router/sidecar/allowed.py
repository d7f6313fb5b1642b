"""Which engines a request may name to compute its prompt: any other address is never asked.

Pure. A header names the address, and a client may have written it: without this rule it could send requests
from inside the cluster to anywhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Pattern(msgspec.Struct, frozen=True):
    """``HOST:PORT`` or ``NETWORK:PORT``."""

    name: str
    """Lower case; "" where there is a network."""
    network: _Network | None
    port: int

    @classmethod
    def of(cls, text: str) -> Pattern:
        """Raises ``ValueError``."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r}: expected HOST:PORT or NETWORK:PORT, e.g. 10.4.0.0/16:8000")
        bare = host.removeprefix("[").removesuffix("]")
        try:
            return cls("", ipaddress.ip_network(bare), int(port))
        except ValueError as error:
            if "/" in host or ":" in host:
                raise ValueError(f"{text!r}: {error}") from None
            return cls(host.lower(), None, int(port))

    def allows(self, host: str, port: int) -> bool:
        """``host`` without brackets."""
        if port != self.port:
            return False
        if self.network is None:
            return host.lower() == self.name
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address in self.network


class Allowed:
    """``patterns`` of the configuration, and ``listed``: endpoints that sources of engines name. Raises
    ``ValueError`` for a pattern that is none."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.listed: frozenset[str] = frozenset()
        self.configure(patterns)

    def configure(self, patterns: Iterable[str]) -> None:
        """From now on these. Raises as the class does."""
        self._patterns = tuple(Pattern.of(text) for text in patterns)

    def __contains__(self, endpoint: str) -> bool:
        if endpoint in self.listed:
            return True
        host, _, port = endpoint.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        return any(pattern.allows(bare, int(port)) for pattern in self._patterns)
