"""Engines behind DNS names: every address of a host, or every target of an SRV record (dnspython).

A name is queried again when the TTL of its answer has passed, within bounds. Invariants: a failure changes
nothing; neither does an answer without addresses until it came ``EMPTY_ANSWERS`` times in a row; a query
ends after ``timeout_s`` per server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
import structlog
from dns._asyncio_backend import Backend
from dns.rdatatype import AAAA, SRV, A, RdataType

from kvatlas.router.fleet.engines import DiscoveredEngine, EngineAddress, Publish, SourceStats
from kvatlas.router.fleet.settings import DnsSettings, parse_server

_log = structlog.get_logger()
# EDNS payload size that fits every path without fragmentation; longer answers come over TCP.
_UDP_BYTES_MAX = 1232
# Default of ``resolv.conf``, the same as the system's resolver.
_SERVERS_MAX = 3
# Shortest pause between two questions; a shorter TTL is raised to this.
_PAUSE_S_MIN = 2.0
# Empty answers in a row that remove the engines: one server of several may not know a name yet.
EMPTY_ANSWERS = 3


class ResolveError(Exception):
    """No server gave a usable answer."""


class _Backend(Backend):
    """dnspython's sockets on asyncio. uvloop 0.23 leaves a UDP socket open if its creation is cancelled."""

    async def make_socket(self, af: int, socktype: int, *args: Any, **options: Any) -> Any:
        made = super().make_socket(af, socktype, *args, **options)  # type: ignore[no-untyped-call]
        if socktype != socket.SOCK_DGRAM:
            return await made
        making = asyncio.ensure_future(made)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await (await making).close()
            raise


class Found(NamedTuple):
    """Endpoints of a name and how long they are valid; ``ttl_s`` None: the answer had no TTL."""

    places: frozenset[tuple[str, int]]
    ttl_s: int | None


class Resolver:
    """Queries ``servers`` (``ADDRESS`` or ``ADDRESS:PORT``) in turn, or by default those of ``resolv.conf``,
    which is read for every query so that changes take effect."""

    def __init__(
        self, servers: Sequence[str], *, timeout_s: float, resolv_conf: str = "/etc/resolv.conf"
    ) -> None:
        self._servers = [dns.nameserver.Do53Nameserver(*parse_server(server)) for server in servers]
        self._backend = _Backend()
        self._timeout_s = timeout_s
        self._resolv_conf = resolv_conf

    async def ask(self, name: str, kind: RdataType) -> dns.resolver.Answer | None:
        """Return the records of ``name``, completed by the search list; None if there are none. Raises
        ``ResolveError``."""
        try:
            resolver = self._configured()
            for candidate in candidates(name, resolver):
                try:
                    answer = await resolver.resolve(
                        candidate, kind, raise_on_no_answer=False, backend=self._backend
                    )
                except dns.resolver.NXDOMAIN:
                    continue
                if answer.rrset is not None:
                    return answer
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise ResolveError(f"{name}: {error}") from None
        return None

    def _configured(self) -> dns.asyncresolver.Resolver:
        try:
            resolver = dns.asyncresolver.Resolver(self._resolv_conf)
        except dns.resolver.NoResolverConfiguration as error:
            if not self._servers:
                raise ResolveError(f"{self._resolv_conf}: {error}") from None
            resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = self._servers or resolver.nameservers[:_SERVERS_MAX]
        resolver.timeout = self._timeout_s
        resolver.lifetime = self._timeout_s * len(resolver.nameservers)
        resolver.use_edns(0, payload=_UDP_BYTES_MAX)
        return resolver


def candidates(name: str, resolver: dns.asyncresolver.Resolver) -> list[dns.name.Name]:
    """Return the names to query in turn."""
    # Dnspython's own search stops at a name that exists without such records; the system's resolver goes on,
    # since a wildcard of the search list must not hide the name itself.
    asked = dns.name.from_text(name, None)
    if asked.is_absolute():
        return [asked]
    completed = [asked + suffix for suffix in resolver.search or [resolver.domain]]
    absolute = asked + dns.name.root
    ndots = 1 if resolver.ndots is None else resolver.ndots
    in_turn = [absolute, *completed] if len(asked) > ndots else [*completed, absolute]
    return list(dict.fromkeys(in_turn))


class DnsSource:
    """Engines behind DNS names; a ``Source``."""

    name = "dns"

    def __init__(self, settings: DnsSettings, *, jitter: random.Random | None = None) -> None:
        self.stats = SourceStats()
        self._settings = settings
        self._jitter = jitter or random.Random()
        self._resolver = Resolver(settings.servers, timeout_s=settings.timeout_s)
        self._known: dict[str, frozenset[tuple[str, int]]] = {}
        self._empty: dict[str, int] = {}
        self._failing: set[str] = set()
        self._published: list[DiscoveredEngine] | None = None

    async def run(self, publish: Publish) -> None:
        """Watch the source and report its engines, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name in dict.fromkeys(self._settings.names):
                tasks.create_task(self._follow(name, publish), name=f"dns {name}")

    async def _follow(self, name: str, publish: Publish) -> None:
        failures = 0
        while True:
            try:
                found = await self._find(name)
            except ResolveError as error:
                failures += 1
                self._failing.add(name)
                if self.stats.failed("resolve", str(error)):
                    _log.warning("DNS name could not be resolved", name=name, problem=self.stats.last_error)
                pause_s = _PAUSE_S_MIN * 2 ** min(failures - 1, 16)
            else:
                failures = 0
                self._failing.discard(name)
                if not self._failing:
                    self.stats.recovered()
                self._apply(name, found.places, publish)
                pause_s = found.ttl_s if found.ttl_s is not None else 0.0
            await asyncio.sleep(self._within_bounds(pause_s))

    def _within_bounds(self, pause_s: float) -> float:
        """Return the pause until the next query, with jitter, so that many routers do not query together."""
        least, most = _PAUSE_S_MIN, self._settings.interval_s_max
        return min(max(pause_s, least) * self._jitter.uniform(1.0, 1.1), most)

    def _apply(self, name: str, places: frozenset[tuple[str, int]], publish: Publish) -> None:
        if not places:
            self._empty[name] = self._empty.get(name, 0) + 1
            if self._empty[name] < EMPTY_ANSWERS:
                return
        else:
            self._empty[name] = 0
        self._known[name] = places
        self.stats.synced = len(self._known) == len(set(self._settings.names))
        discovered = [
            DiscoveredEngine(self._engine(*place)) for place in sorted(set().union(*self._known.values()))
        ]
        if discovered != self._published:
            self._published = discovered
            self.stats.updates += 1
            _log.info("engines by DNS", name=name, engines=len(discovered))
            publish(discovered)

    def _engine(self, address: str, port: int) -> EngineAddress:
        host = f"[{address}]" if ":" in address else address
        events, replay = (
            None if number is None else f"tcp://{host}:{number}"
            for number in (self._settings.events_port, self._settings.replay_port)
        )
        return EngineAddress(f"http://{host}:{port}", None, events, replay)

    async def _find(self, name: str) -> Found:
        if name.startswith("_"):
            return await self._find_services(name)
        host, _, port = name.rpartition(":")
        addresses, ttl_s = await self._addresses(host)
        return Found(frozenset((address, int(port)) for address in addresses), ttl_s)

    async def _find_services(self, name: str) -> Found:
        answer = await self._resolver.ask(name, SRV)
        if answer is None:
            return Found(frozenset(), None)
        services = [service for service in answer if service.target != dns.name.root]
        lowest = min((service.priority for service in services), default=0)
        places: set[tuple[str, int]] = set()
        ttls: list[int | None] = [answer.chaining_result.minimum_ttl]
        sent_along = {rrset.name: rrset for rrset in answer.response.additional if rrset.rdtype == A}
        for service in [service for service in services if service.priority == lowest]:
            rrset = sent_along.get(service.target)
            if rrset is not None:
                addresses = [record.address for record in rrset]
                ttls.append(rrset.ttl)
            else:
                addresses, ttl_s = await self._addresses(service.target.to_text())
                ttls.append(ttl_s)
            places |= {(address, service.port) for address in addresses}
        return Found(frozenset(places), min((t for t in ttls if t is not None), default=None))

    async def _addresses(self, host: str) -> tuple[list[str], int | None]:
        """Return the IPv4 addresses, or else the IPv6 ones: a host with both must not become two engines."""
        try:
            return [str(ipaddress.ip_address(host.strip("[].")))], None
        except ValueError:
            pass
        for kind in (A, AAAA):
            answer = await self._resolver.ask(host, kind)
            if answer is not None:
                return [record.address for record in answer], answer.chaining_result.minimum_ttl
        return [], None
