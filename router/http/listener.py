"""Capacity of one listener, and its log of refused requests.

``Capacity`` counts connections, also by client address, and the bytes of request bodies. A connection beyond
the limit is *probe-only*: it may request ``PROBE_PATHS`` and nothing else, so that probes and scrapes are
answered regardless of the number of other connections. There are few of them; a new one replaces the oldest.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from typing import Protocol

from kvatlas.router.http.settings import ListenSettings

# Paths that a probe-only connection may request.
PROBE_PATHS = frozenset({"/health", "/metrics", "/ready", "/version"})
_PROBE_ONLY_MAX = 64
# Connections that one address may have regardless of its share.
_CLIENT_SHARE_MIN = 64


class ProbeOnlyConnection(Protocol):
    """A connection beyond the capacity."""

    def abort(self) -> None:
        """Close at once."""


class Capacity:
    """Connections and body bytes of one server, and their limits; used from the event loop only."""

    def __init__(self, settings: ListenSettings) -> None:
        self.configure(settings)
        self._connections = 0
        self._by_client: Counter[str] = Counter()
        self._probe_only: OrderedDict[ProbeOnlyConnection, None] = OrderedDict()
        self.body_bytes = 0

    def configure(self, settings: ListenSettings) -> None:
        """Set the limits for new connections and bodies."""
        self._connections_max = settings.connections_max
        self._client_max = max(_CLIENT_SHARE_MIN, int(settings.connections_max * settings.client_share_max))
        self._bodies_max = settings.bodies_bytes_max

    def add_connection(self, client: str) -> bool:
        """Count a connection of this address (``client_key``). False: the limit is reached."""
        if self._connections >= self._connections_max:
            return False
        if client and self._by_client[client] >= self._client_max:
            return False
        self._connections += 1
        self._by_client[client] += 1
        return True

    def remove_connection(self, client: str) -> None:
        """Remove a counted connection."""
        self._connections -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def add_probe_only(self, connection: ProbeOnlyConnection) -> None:
        """Add a probe-only connection; close the oldest one if there are too many."""
        self._probe_only[connection] = None
        if len(self._probe_only) > _PROBE_ONLY_MAX:
            oldest, _ = self._probe_only.popitem(last=False)
            oldest.abort()

    def remove_probe_only(self, connection: ProbeOnlyConnection) -> None:
        """Remove a closed probe-only connection."""
        self._probe_only.pop(connection, None)

    def reserve_body(self, size: int) -> bool:
        """Count body bytes until ``release_body``. False: the limit is reached."""
        if self.body_bytes + size > self._bodies_max:
            return False
        self.body_bytes += size
        return True

    def release_body(self, size: int) -> None:
        """Subtract body bytes that are no longer buffered."""
        self.body_bytes -= size


def client_key(peer: object) -> str:
    """Return the client of an address: IPv4 address, /64 of an IPv6 address, empty if unknown."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
