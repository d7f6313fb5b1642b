"""What all client connections of one server hold together, and who may have how much of it.

``Capacity`` counts connections, by client address too, and the bytes of request bodies. Where it is full a
connection is a *spare*: it may ask for the server's health and nothing else, so that a probe or a scrape is
answered however many connections others hold. There are few spares; the newest takes the oldest one's place.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from typing import Protocol

from router.http.server.settings import ListenSettings

PROBE_PATHS = frozenset({"/health", "/metrics", "/ready", "/version"})
"""What a spare connection may ask for."""
_SPARES_MAX = 64
_CLIENT_SHARE_MIN = 64
"""Connections that one address may hold, however small its share is."""


class Spare(Protocol):
    """A connection without a place."""

    def abort(self) -> None:
        """Close it at once."""


class Capacity:
    """Used from the event loop only."""

    def __init__(self, settings: ListenSettings) -> None:
        self.configure(settings)
        self._connections = 0
        self._by_client: Counter[str] = Counter()
        self._spares: OrderedDict[Spare, None] = OrderedDict()
        self.body_bytes = 0

    def configure(self, settings: ListenSettings) -> None:
        """Other bounds, for who comes from now on."""
        self._connections_max = settings.connections_max
        self._client_max = max(_CLIENT_SHARE_MIN, int(settings.connections_max * settings.client_share_max))
        self._bodies_max = settings.bodies_bytes_max

    def enter(self, client: str) -> bool:
        """A connection from this address (``client_of``) takes its place; False: there is none."""
        if self._connections >= self._connections_max:
            return False
        if client and self._by_client[client] >= self._client_max:
            return False
        self._connections += 1
        self._by_client[client] += 1
        return True

    def leave(self, client: str) -> None:
        """Its place is free."""
        self._connections -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def add_spare(self, spare: Spare) -> None:
        """The oldest one goes where there are too many."""
        self._spares[spare] = None
        if len(self._spares) > _SPARES_MAX:
            oldest, _ = self._spares.popitem(last=False)
            oldest.abort()

    def drop_spare(self, spare: Spare) -> None:
        """It is closed."""
        self._spares.pop(spare, None)

    def take(self, size: int) -> bool:
        """These bytes of a body are held from now on, until ``give``; False: they would be too many."""
        if self.body_bytes + size > self._bodies_max:
            return False
        self.body_bytes += size
        return True

    def give(self, size: int) -> None:
        """They are held no more."""
        self.body_bytes -= size


def client_of(peer: object) -> str:
    """Whose connection it is: an IPv4 address, the /64 of an IPv6 address, empty where nothing tells."""
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
