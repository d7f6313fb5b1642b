"""Engines behind DNS names: every address of a host, or every target of an SRV record.

Each name is asked for again when its answer's TTL has passed, within bounds. Always true: a failure, and an
answer without any address until it has come ``empty_answers`` times in a row, changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from typing import NamedTuple

import structlog

from router.fleet.identity import Engine
from router.fleet.settings import DnsSettings
from router.fleet.sources.base import Sighting, SourceStats, Tell
from router.fleet.sources.dns.message import AAAA, SRV, A, Answer, Service
from router.fleet.sources.dns.resolver import ResolveError, Resolver, Where, parse_server, read_resolv_conf

_log = structlog.get_logger()


class Found(NamedTuple):
    """Where a name leads, and for how long that is good; ``ttl_s`` None: the answer did not say."""

    places: frozenset[tuple[str, int]]
    ttl_s: int | None


class DnsSource:
    """See the module; a ``Source``."""

    name = "dns"

    def __init__(self, settings: DnsSettings, *, jitter: random.Random | None = None) -> None:
        self.stats = SourceStats()
        self._settings = settings
        self._jitter = jitter or random.Random()
        self._resolver = Resolver(_where(settings), timeout_s=settings.timeout_s)
        self._known: dict[str, frozenset[tuple[str, int]]] = {}
        self._empty: dict[str, int] = {}
        self._failing: set[str] = set()
        self._told: list[Sighting] | None = None

    async def run(self, tell: Tell) -> None:
        """See ``Source``."""
        async with asyncio.TaskGroup() as tasks:
            for name in dict.fromkeys(self._settings.names):
                tasks.create_task(self._follow(name, tell), name=f"dns {name}")

    async def _follow(self, name: str, tell: Tell) -> None:
        failures = 0
        while True:
            try:
                found = await self._find(name)
            except ResolveError as error:
                failures += 1
                self._failing.add(name)
                if self.stats.failed("resolve", str(error)):
                    _log.warning("DNS name could not be resolved", name=name, problem=self.stats.last_error)
                pause_s = self._settings.interval_s_min * 2 ** min(failures - 1, 16)
            else:
                failures = 0
                self._failing.discard(name)
                if not self._failing:
                    self.stats.recovered()
                self._heard(name, found.places, tell)
                pause_s = found.ttl_s if found.ttl_s is not None else 0.0
            await asyncio.sleep(self._within_bounds(pause_s))

    def _within_bounds(self, pause_s: float) -> float:
        """A little later than asked for, so that many routers do not ask all at once."""
        least, most = self._settings.interval_s_min, self._settings.interval_s_max
        return min(max(pause_s, least) * self._jitter.uniform(1.0, 1.1), most)

    def _heard(self, name: str, places: frozenset[tuple[str, int]], tell: Tell) -> None:
        if not places:
            self._empty[name] = self._empty.get(name, 0) + 1
            if self._empty[name] < self._settings.empty_answers:
                return
        else:
            self._empty[name] = 0
        self._known[name] = places
        self.stats.synced = len(self._known) == len(set(self._settings.names))
        sightings = [Sighting(self._engine(*place)) for place in sorted(set().union(*self._known.values()))]
        if sightings != self._told:
            self._told = sightings
            self.stats.updates += 1
            _log.info("engines by DNS", name=name, engines=len(sightings))
            tell(sightings)

    def _engine(self, address: str, port: int) -> Engine:
        host = f"[{address}]" if ":" in address else address
        events, replay = (
            None if number is None else f"tcp://{host}:{number}"
            for number in (self._settings.events_port, self._settings.replay_port)
        )
        return Engine(f"http://{host}:{port}", None, events, replay)

    async def _find(self, name: str) -> Found:
        if name.startswith("_"):
            return await self._find_services(name)
        host, _, port = name.rpartition(":")
        addresses, ttl_s = await self._addresses(host)
        return Found(frozenset((address, int(port)) for address in addresses), ttl_s)

    async def _find_services(self, name: str) -> Found:
        answer = await self._resolver.ask(name, SRV)
        services = [r.value for r in answer.records if isinstance(r.value, Service) and r.value.target]
        lowest = min((service.priority for service in services), default=0)
        places: set[tuple[str, int]] = set()
        ttls = [answer.ttl_s]
        known = {record.name for record in answer.extra if record.kind == A}
        for service in [service for service in services if service.priority == lowest]:
            if service.target in known:
                extra = [r for r in answer.extra if r.name == service.target and r.kind == A]
                addresses = [str(record.value) for record in extra]
                ttls += [record.ttl_s for record in extra]
            else:
                addresses, ttl_s = await self._addresses(f"{service.target}.")
                ttls.append(ttl_s)
            places |= {(address, service.port) for address in addresses}
        return Found(frozenset(places), min((t for t in ttls if t is not None), default=None))

    async def _addresses(self, host: str) -> tuple[list[str], int | None]:
        """IPv4 addresses, or where there is none IPv6: a host with both must not become two engines."""
        try:
            return [str(ipaddress.ip_address(host.strip("[].")))], None
        except ValueError:
            pass
        answer: Answer | None = None
        for kind in (A, AAAA):
            answer = await self._resolver.ask(host, kind)
            addresses = [str(record.value) for record in answer.records if record.kind == kind]
            if addresses:
                return addresses, answer.ttl_s
        return [], None if answer is None else answer.ttl_s


def _where(settings: DnsSettings) -> _Where:
    return _Where(settings.servers)


class _Where:
    """Whom to ask: the configured servers with the system's search list, or the system's servers."""

    def __init__(self, servers: tuple[str, ...]) -> None:
        self._servers = tuple(parse_server(server) for server in servers)

    def __call__(self) -> Where:
        if not self._servers:
            return read_resolv_conf()
        try:
            return read_resolv_conf()._replace(servers=self._servers)
        except ResolveError:
            return Where(self._servers)
