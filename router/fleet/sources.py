"""Interface of a source of engines: it reports its complete set whenever that changes.

Invariants of a source: while it fails it reports nothing, so its last set stays; every failure is counted by
its reason, and the last one is kept as text; the size of a set is bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver
import msgspec
import structlog
from dns.rdatatype import AAAA, SRV, A, RdataType

from router.fleet.identity import EngineAddress
from router.fleet.settings import DnsSettings, FileSettings, parse_server
from router.http.sockets import base_url_fault, describe_error, split_address

PROBLEM_LENGTH_MAX = 300


class CannotStartError(Exception):
    """A source lacks what it needs; the message names the key or file, and the remedy."""


class DiscoveredEngine(msgspec.Struct, frozen=True):
    """One engine as a source sees it now."""

    engine: EngineAddress
    held: str = ""
    """Why it must get no new requests; "" if it may get them."""
    identity: str = ""
    """Identity of the process at that address, e.g. a pod's uid. If it changes, all known state is
    dropped."""


class SourceStats(msgspec.Struct):
    """State of a source, shown by metrics, ``/kvatlas/sources`` and the doctor."""

    synced: Annotated[bool, "kvatlas_source_synced"] = False
    """1 once its complete list was read."""
    engines: Annotated[int, "kvatlas_source_engines"] = 0
    """Number of engines in its current set."""
    updates: Annotated[int, "kvatlas_source_updates_total"] = 0
    """Number of times its set changed."""
    failing: Annotated[bool, "kvatlas_source_failing"] = False
    """1 while its list may be out of date."""
    errors: Annotated[dict[str, int], "kvatlas_source_errors_total{reason}"] = {}
    """Failures, by reason."""
    refused: Annotated[int, "kvatlas_source_refused_total"] = 0
    """Entries ignored because they were invalid."""
    last_error: str = ""

    def failed(self, reason: str, text: str) -> bool:
        """Count a failure. Returns whether it is new and worth a log line."""
        news = not self.failing or self.last_error != text
        self.failing = True
        self.complain(reason, text)
        return news

    def complain(self, reason: str, text: str) -> None:
        """Count a failure that does not affect the rest of the set."""
        self.errors[reason] = self.errors.get(reason, 0) + 1
        self.last_error = text[:PROBLEM_LENGTH_MAX]

    def recovered(self) -> None:
        """Record that it works (again); the last error is kept."""
        self.failing = False


Publish = Callable[[Sequence[DiscoveredEngine]], None]


class Source(Protocol):
    """Runs until cancelled. ``publish`` gets the complete set whenever it may have changed."""

    name: str
    stats: SourceStats

    async def run(self, publish: Publish) -> None: ...


# Engines in configuration files: the rules for addresses, and the list in a file.
#
# ``check_address`` defines the valid addresses of an engine, for all sources.


DRAINED = "drained in the file"


class BadListError(ValueError):
    """The content is not a list of engines; no part of it is used."""


class _Entry(EngineAddress, frozen=True, forbid_unknown_fields=True):
    drain: bool = False


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engines: list[_Entry]


def check_address(engine: EngineAddress) -> None:
    """Raise ``ValueError`` for addresses that cannot be used."""
    if fault := base_url_fault(engine.base_url, "http"):
        why = "; engines are not asked over TLS" if engine.base_url.startswith("https:") else ""
        raise ValueError(f"engine {engine.base_url!r}: {fault}{why}")
    if engine.dp_rank is not None and engine.dp_rank < 0:
        raise ValueError(f"engine {engine.base_url}: dp_rank={engine.dp_rank} is negative")
    for name in ("events", "replay", "snapshot"):
        address = getattr(engine, name)
        if address is not None and (fault := _socket_fault(address)):
            raise ValueError(f"engine {engine.base_url}: {name}={address!r} {fault}")
    if engine.replay is not None and engine.events is None:
        raise ValueError(f"engine {engine.base_url}: replay= needs events=")


def _socket_fault(address: str) -> str:
    """Return the fault of a ZMQ address to connect to; "" if there is none."""
    scheme, _, rest = address.partition("://")
    if scheme not in {"tcp", "ipc", "inproc"} or not rest:
        return "is not a tcp:// or ipc:// address"
    if scheme != "tcp":
        return ""
    if rest.startswith("*:"):
        return "is where the engine listens; give the engine's host instead of *"
    try:
        _, port = split_address(rest)
    except ValueError:
        port = 0
    return "" if port else "is not tcp://HOST:PORT"


def read_list(content: bytes, *, is_json: bool) -> list[DiscoveredEngine]:
    """Read the engines of a file with ``[[engines]]`` (or ``{"engines": [...]}``). Raises ``BadListError``.

    The key is required even without any engine: a file that is being written looks empty.
    """
    try:
        tree: Any = msgspec.json.decode(content) if is_json else tomllib.loads(content.decode())
        entries = msgspec.convert(tree, _List).engines
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadListError(f"not a list of engines: {error}") from None
    found: dict[str, DiscoveredEngine] = {}
    for entry in entries:
        fields = {name: getattr(entry, name) for name in EngineAddress.__struct_fields__}
        engine = EngineAddress(**{**fields, "base_url": entry.base_url.rstrip("/")})
        if engine.engine_id in found:
            raise BadListError(f"{engine.engine_id} is listed twice")
        try:
            check_address(engine)
        except ValueError as error:
            raise BadListError(str(error)) from None
        found[engine.engine_id] = DiscoveredEngine(engine, DRAINED if entry.drain else "")
    return list(found.values())


# Engines behind DNS names: every address of a host, or every target of an SRV record, queried with dnspython.
#
# A name is queried again when the TTL of its answer has passed, within bounds. Invariants: a failure changes
# nothing; neither does an answer without addresses until it came ``empty_answers`` times in a row; a query
# ends after ``timeout_s`` per server.


_log = structlog.get_logger()
# EDNS payload size that fits every path without fragmentation; longer answers come over TCP.
_UDP_BYTES_MAX = 1232
# Default of ``resolv.conf``, the same as the system's resolver.
_SERVERS_MAX = 3


class ResolveError(Exception):
    """No server gave a usable answer."""


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
        self._timeout_s = timeout_s
        self._resolv_conf = resolv_conf

    async def ask(self, name: str, kind: RdataType) -> dns.resolver.Answer | None:
        """Return the records of ``name``, completed by the search list; None if there are none. Raises
        ``ResolveError``."""
        try:
            resolver = self._configured()
            for candidate in candidates(name, resolver):
                try:
                    answer = await resolver.resolve(candidate, kind, raise_on_no_answer=False)
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
    """Return the names to query in turn. dnspython's own search stops at a name that exists without such
    records; the system's resolver goes on, since a wildcard of the search list must not hide the name
    itself."""
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
                pause_s = self._settings.interval_s_min * 2 ** min(failures - 1, 16)
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
        least, most = self._settings.interval_s_min, self._settings.interval_s_max
        return min(max(pause_s, least) * self._jitter.uniform(1.0, 1.1), most)

    def _apply(self, name: str, places: frozenset[tuple[str, int]], publish: Publish) -> None:
        if not places:
            self._empty[name] = self._empty.get(name, 0) + 1
            if self._empty[name] < self._settings.empty_answers:
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


# Engines from a watched file.
#
# The file is read periodically, since timestamps miss quick changes and a mounted ConfigMap is replaced
# through its directory. Invariants: content counts only after two consecutive readings returned the same
# bytes, so a file that is being written is not used; content that cannot be read or parsed changes nothing.


class FileSource:
    """Engines from a watched file; a ``Source``. ``settings.path`` is required."""

    name = "file"

    def __init__(self, settings: FileSettings) -> None:
        if settings.path is None:
            raise ValueError("fleet.file.path: not set")
        self.stats = SourceStats()
        self._path = Path(settings.path)
        self._settings = settings
        self._latest: bytes | None = None  # last content read
        self._settled: bytes | None = None  # last content evaluated, valid or not
        self._known: list[DiscoveredEngine] | None = None

    async def run(self, publish: Publish) -> None:
        """Watch the source and report its engines, until cancelled."""
        while True:
            try:
                content = await asyncio.to_thread(self._read)
            except (OSError, ValueError) as error:
                self._latest = None
                self._fail("unreadable", f"{self._path}: {describe_error(error)}")
            else:
                self._apply(content, publish)
            await asyncio.sleep(self._settings.interval_s)

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            content = file.read(self._settings.bytes_max + 1)
        if len(content) > self._settings.bytes_max:
            raise ValueError(f"over fleet.file.bytes_max = {self._settings.bytes_max}")
        return content

    def _apply(self, content: bytes, publish: Publish) -> None:
        twice, self._latest = content == self._latest or self._known is None, content
        if not twice or (content == self._settled and not self.stats.failing):
            return
        fresh, self._settled = content != self._settled, content
        try:
            discovered = read_list(content, is_json=self._path.suffix == ".json")
        except BadListError as error:
            if fresh or not self.stats.failing:
                self._fail("malformed", f"{self._path}: {error}; the engines stay as last read")
            return
        self.stats.recovered()
        if discovered != self._known:
            self._known = discovered
            self.stats.synced = True
            self.stats.updates += 1
            _log.info("engine file read", path=str(self._path), engines=len(discovered))
            publish(discovered)

    def _fail(self, reason: str, text: str) -> None:
        if self.stats.failed(reason, text):
            _log.warning("engine file not usable", problem=self.stats.last_error)
