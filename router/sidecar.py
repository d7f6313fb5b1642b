"""The sidecar as one ASGI application: a proxy in front of one decode engine, with other engines for prefill.

Health, metrics and readiness are on the ops port. On the public port ``/health`` and ``/metrics`` are the
engine's: routers poll it through the sidecar.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvatlas import __version__
from kvatlas.router.admission.gate import sidecar_secret
from kvatlas.router.admission.key_file import KeyFileError
from kvatlas.router.api.admin_auth import AdminFileError
from kvatlas.router.api.app import OpsPort, ops_authenticator
from kvatlas.router.api.asgi import json_answer
from kvatlas.router.api.metrics_page import ReloadStats, build_info, of_requests, page_steps
from kvatlas.router.api.metrics_tables import of_each, of_stats
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import Config
from kvatlas.router.fleet.engines import DesiredState, endpoint_of
from kvatlas.router.fleet.poller import EngineCalls, hold_engine_tls
from kvatlas.router.fleet.sources import FleetSources
from kvatlas.router.http.server import lifespan
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.http.sockets import Certificates, TlsError, split_address
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.observe.traces import Traces, TracesNotInstalledError
from kvatlas.router.observe.usage import UsageLog
from kvatlas.router.openai.errors import no_ready_engine
from kvatlas.router.openai.members import TooManyStepsError, run_cooperatively
from kvatlas.router.openai.request import PROMPT_APIS, InboundRequest, Usage
from kvatlas.router.pd.bodies import SplitBody, split_body
from kvatlas.router.pd.handoff import DisaggState
from kvatlas.router.pd.settings import (
    KV_SOURCE,
    PREFILLERS,
    PdStats,
    Prefilled,
    SidecarHints,
    prefilled_field,
    read_endpoints,
    read_hints,
)
from kvatlas.router.pd.transfer import KvSource
from kvatlas.router.proxy.app import ProxyApp
from kvatlas.router.proxy.attempt import Attempt, Fields
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.headers import OBSERVED
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.serve import configure_logging, share_the_interpreter, tame_garbage_collection
from kvatlas.router.server_lifecycle import (
    Decided,
    Reloads,
    RouterServer,
    configure,
    decide,
    hold_back,
    run_server,
    server_ends_within_s,
    server_of,
    try_usage_record,
)
from kvatlas.router.services.sources import configured_sources

# Allowed prefill engines: any other address is refused.
#
# Pure. A header names the address, and a client may have written it: without this rule a client could make
# the sidecar send requests to any address inside the cluster.


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Pattern(msgspec.Struct, frozen=True):
    """``HOST:PORT`` or ``NETWORK:PORT``."""

    name: str
    """Lower case; "" for a network."""
    network: _Network | None
    port: int

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a pattern. Raises ``ValueError``."""
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
    """``patterns`` of the configuration, and ``listed``: endpoints from sources of engines. Raises
    ``ValueError`` for an invalid pattern."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.listed: frozenset[str] = frozenset()
        self.configure(patterns)

    def configure(self, patterns: Iterable[str]) -> None:
        """Replace the patterns. Raises like the class."""
        self._patterns = tuple(Pattern.parse(text) for text in patterns)

    def __contains__(self, endpoint: str) -> bool:
        if endpoint in self.listed:
            return True
        host, _, port = endpoint.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        return any(pattern.allows(bare, int(port)) for pattern in self._patterns)


# Placement of a request at the sidecar: always on the engine beside it, after a prefill on the engine that
# the request names, if it is allowed.
#
# Both requests use the code of ``kvatlas.router.proxy.disaggregated``, with the same invariants. The picker
# learns the outcome of the prefill from the response head (``kvatlas.router.pd.settings``).


_PREFILLERS_MAX = 1024
_FORGETS = 0.9


class SidecarPlacer:
    """Implements ``Placer``. ``engine``: base URL of the engine beside it; ``scheme``: that of prefill
    engines; ``secret``: under which pickers sign retention hints."""

    def __init__(
        self,
        engine: str,
        allowed: Allowed,
        *,
        scheme: str,
        stats: PdStats,
        clock: Callable[[], float],
        p2p_port: int,
        secret: Callable[[], bytes] | None = None,
    ) -> None:
        self._secret = secret
        self.p2p_port = p2p_port
        """Port of the ``p2p`` tiers of engines to pull from."""
        self._engine = engine
        self._allowed = allowed
        self._scheme = scheme
        self._stats = stats
        self._clock = clock
        self._breaker = Breaker()
        self._prefillers: OrderedDict[str, _Prefiller] = OrderedDict()
        """Most recently used last."""

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> Attempt:
        """Implement ``Placer``."""
        if self._engine in exclude:
            raise no_ready_engine("The engine beside this sidecar did not answer; retry shortly.")
        named = read_endpoints(request.headers)
        found, why = self._find(request, named, exclude, disagg)
        hints, body = self._hints(request), None
        if found is not None:
            body, why = await self._read(request)
        if body is None or found is None:
            if why:
                self._stats.count(self._stats.aggregated, why)
            # Before the attempt, which would never end if this were cancelled.
            source = await self._kv_source(request) if not exclude and disagg is None else None
            attempt = self._alone(request)
            attempt.retention, attempt.kv_source = hints.own, source
            return attempt
        helper = _Helper(found, f"{self._scheme}://{found}", self._known(found), request, now=self._clock)
        place = named.index(found)
        answerer = _Answerer(self._engine, self._breaker, request, self._clock, body, helper, place)
        answerer.retention, helper.retention = hints
        return answerer

    def base_url(self, engine_id: str) -> str | None:
        """Implement ``WatchedFleet``."""
        if engine_id == self._engine:
            return engine_id
        return f"{self._scheme}://{engine_id}" if engine_id in self._prefillers else None

    def leaves(self, engine_id: str) -> bool:
        """Implement ``WatchedFleet``: nothing tells a sidecar."""
        return False

    def _hints(self, request: InboundRequest) -> SidecarHints:
        """Return the retention hints of the picker, and none that a client wrote."""
        if request.method != "POST" or request.path not in PROMPT_APIS:
            return SidecarHints()
        found = read_hints(request.headers, None if self._secret is None else self._secret())
        self._stats.hints_refused += found is None
        return SidecarHints() if found is None else found

    def _alone(self, request: InboundRequest) -> Attempt:
        attempt = Attempt(self._engine, self._engine, self._breaker, request, now=self._clock)
        if any(name == PREFILLERS for name, _ in request.headers):
            attempt.client_headers = (prefilled_field(Prefilled(None, None)),)
        return attempt

    async def _kv_source(self, request: InboundRequest) -> KvSource | None:
        """Return the engine that the request names to pull from, if it is allowed."""
        # A gateway may forward a client's own field, so only allowed engines are named to the engine: its
        # control connection has no authentication.
        named = read_endpoints(request.headers, KV_SOURCE)[:1]
        if not named or request.method != "POST" or request.path not in PROMPT_APIS:
            return None
        if named[0] not in self._allowed:
            self._stats.kv_sources_refused += 1
            return None
        body, _ = await self._read(request)
        return None if body is None else KvSource(body, split_address(named[0])[0], self.p2p_port)

    def _find(
        self, request: InboundRequest, named: list[str], exclude: frozenset[str], disagg: DisaggState | None
    ) -> tuple[str | None, str]:
        """Return the prefill engine, or None and the reason; "": the request has no prompt."""
        if request.method != "POST" or request.path not in PROMPT_APIS:
            return None, ""
        if disagg is not None and not disagg.may_split:
            return None, "retried"
        if not named:
            return None, "local"
        may = [endpoint for endpoint in named if endpoint in self._allowed]
        if not may:
            self._stats.prefillers_refused += 1
            return None, "not_allowed"
        now = self._clock()
        able = (e for e in may if e not in exclude and self._known(e).breaker.allows(now, request.client))
        return next(able, None), "no_prefill_engine"

    async def _read(self, request: InboundRequest) -> tuple[SplitBody | None, str]:
        try:
            body = await run_cooperatively(split_body(request.path, request.body))
        except TooManyStepsError:
            return None, "body"
        return (None, body.whole) if body.whole else (body, "")

    def _known(self, endpoint: str) -> _Prefiller:
        known = self._prefillers.pop(endpoint, None) or _Prefiller()
        self._prefillers[endpoint] = known
        if len(self._prefillers) > _PREFILLERS_MAX:
            self._prefillers.popitem(last=False)
        return known


class _Prefiller:
    """State of one prefill engine."""

    __slots__ = ("breaker", "s_per_byte")

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.s_per_byte = 0.0
        """Seconds from a request to its answer per byte of its body: the slowest recent value."""

    def answered(self, seconds: float, body_bytes: int) -> None:
        self.s_per_byte = max(seconds / max(1, body_bytes), _FORGETS * self.s_per_byte)


class _Helper(Attempt):
    """The prefill. ``cached_tokens`` is None until the engine has reported it."""

    __slots__ = ("_prefiller", "cached_tokens")

    def __init__(
        self,
        engine: str,
        base_url: str,
        prefiller: _Prefiller,
        request: InboundRequest,
        *,
        now: Callable[[], float],
    ) -> None:
        self.cached_tokens: int | None = None
        self._prefiller = prefiller
        expected_s = prefiller.s_per_byte * len(request.body)
        super().__init__(engine, base_url, prefiller.breaker, request, now=now, expected_s=expected_s)

    def _begun(self, now: float) -> None:
        self._prefiller.answered(now - self.asked_s, len(self.request.body))

    def _ended(self, usage: Usage | None, failed: str) -> None:
        self.cached_tokens = None if usage is None else usage.cached_tokens


class _Answerer(Attempt):
    """The decode attempt: its request names the blocks to fetch."""

    __slots__ = ("_helper", "_place")

    def __init__(
        self,
        engine: str,
        breaker: Breaker,
        request: InboundRequest,
        clock: Callable[[], float],
        body: SplitBody,
        helper: _Helper,
        place: int,
    ) -> None:
        super().__init__(engine, engine, breaker, request, now=clock, later=True)
        self.body = body
        self.prefill = self._helper = helper
        self._place = place

    @property
    def answer_headers(self) -> Fields:
        """Implement ``Attempt``."""
        # The prompt has been computed by then, except perhaps if both requests were sent at once.
        return (prefilled_field(Prefilled(self._place, self._helper.cached_tokens)),)


class Sidecar:
    """The ASGI application. Raises ``ConfigError`` if no prefill engine is allowed, ``KeyFileError`` for an
    unusable secret."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        own = config.sidecar
        self.config = config
        self.allowed = usable(config)
        self.works: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Further coroutines to run in the background."""
        self.reloads: ReloadStats | None = None
        self.on_listen: Callable[[ListenSettings], None] = lambda listen: None
        self.pd_stats = PdStats()
        self.listen_stats = ListenStats()
        self.draining: Callable[[], bool] = lambda: False
        self._engine = own.engine.rstrip("/")
        self._roster = DesiredState(engines_max=config.fleet.engines_max)
        self._sources = FleetSources((), configured_sources(config.fleet), self._roster, changed=self._list)
        self.certificates = Certificates()
        tls = hold_engine_tls(self.certificates, config.fleet.tls)
        self._calls = EngineCalls(
            {},
            tls,
            health_timeout_s=config.fleet.poll_timeout_s,
        )
        self._traces = Traces(config.traces) if config.traces.endpoint else None
        requests = RequestTracker(
            clock, here=lambda _: True, log=config.server.log_requests, traces=self._traces
        )
        self.usage = UsageLog(config.usage, config.traces) if config.usage.path else None
        if self.usage is not None:
            requests.on_end = self.usage.add
        placer = SidecarPlacer(
            self._engine,
            self.allowed,
            scheme="https" if own.prefill_tls else "http",
            stats=self.pd_stats,
            clock=clock,
            p2p_port=config.pd.offloading_port,
            secret=sidecar_secret(own.secret_file, self.pd_stats, clock),
        )
        self._placer = placer
        self.proxy = ProxyApp(
            placer,
            _passing(config.proxy),
            clock=clock,
            requests=requests,
            tls=tls,
            pd=config.pd,
            pd_stats=self.pd_stats,
            watched=placer,
        )
        server = config.server
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        insight = Starlette(routes=routes)
        insight.router.redirect_slashes = False
        self.ops = OpsPort(
            insight,
            host=server.ops_host,
            port=server.ops_listens_on,
            names=server.ops_names,
            authenticator=ops_authenticator(
                config.ops_tokens, per_minute=config.admin.requests_per_minute, clock=clock
            ),
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI 3."""
        if scope["type"] == "lifespan":
            await lifespan(self.running(), receive, send)
        else:
            await self.proxy(scope, receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all background work for the duration of the context."""
        async with self._calls.open(), self.ops.listening(), asyncio.TaskGroup() as tasks:
            begun = [self._sources.run(), self.certificates.watch(), *(work() for work in self.works)]
            works = [tasks.create_task(work) for work in begun]
            if self.usage is not None:
                self.usage.start()
            try:
                yield
            finally:
                for work in works:
                    work.cancel()
                if self.usage is not None:
                    await asyncio.to_thread(self.usage.close)
                if self._traces is not None:
                    await asyncio.to_thread(self._traces.close)
                self.proxy.close()

    async def take(self, config: Config) -> None:
        """Apply a changed configuration, which is ``usable``: everything that ``LIVE`` names."""
        before, self.config = self.config, config
        self.allowed.configure(config.sidecar.prefills)
        self._placer.p2p_port = config.pd.offloading_port
        self.proxy.configure(_passing(config.proxy), config.pd, None, claims=False)
        self.proxy.requests.log = config.server.log_requests
        if config.listen != before.listen:
            self.on_listen(config.listen)

    def _list(self) -> None:
        engines = self._roster.wanted().engines
        named = [engine for engine in engines if engine.prefills or engine.role is None]
        self.allowed.listed = frozenset(endpoint_of(engine.base_url) for engine in named)

    async def _health(self, request: Request) -> Response:
        return json_answer({"status": "ok", "version": __version__})

    async def _ready(self, request: Request) -> Response:
        """Whether its engine answers; it also serves without prefill engines."""
        if self.draining():
            return json_answer({"ready": False, "reason": "draining"}, 503)
        if not await self._calls.healthy(self._engine):
            return json_answer({"ready": False, "reason": f"{self._engine}/health does not return 200"}, 503)
        return json_answer({"ready": True, "reason": ""})

    async def _metrics(self, request: Request) -> Response:
        return Response(await run_cooperatively(page_steps(self._families())), media_type=CONTENT_TYPE_LATEST)

    def _families(self) -> Iterator[Metric]:
        yield from ProcessCollector(registry=None).collect()
        yield from build_info()
        yield from of_requests(self.proxy.requests)
        yield from of_stats(self.proxy.stats)
        yield from of_stats(self.listen_stats, "listen")
        yield from of_stats(self.pd_stats)
        yield from of_each("source", self._sources.stats)
        if self.reloads is not None:
            yield from of_stats(self.reloads)
        if self._traces is not None:
            yield from of_stats(self._traces.stats)
        if self.usage is not None:
            yield from of_stats(self.usage.stats)
            yield from of_stats(self.usage.export_stats)


def _passing(proxy: ProxySettings) -> ProxySettings:
    """Settings with which routers poll the engine through the sidecar."""
    return msgspec.structs.replace(proxy, passed_paths=proxy.passed_paths | OBSERVED)


def usable(config: Config) -> Allowed:
    """Return the allowed prefill engines. Raises ``ConfigError`` if there are none."""
    own = config.sidecar
    if not own.prefills and not config.fleet.discovers:
        raise ConfigError(
            "sidecar.prefills: no prefill engine is allowed; give HOST:PORT or NETWORK:PORT, or a "
            "source of engines (fleet.kubernetes.selector, fleet.dns.names or fleet.file.path)"
        )
    try:
        return Allowed(own.prefills)
    except ValueError as error:
        raise ConfigError(f"sidecar.prefills: {error}") from None


# ``kvatlas sidecar``: from a checked configuration to a listening process, until SIGTERM.


_log = structlog.get_logger()


def check(config: Config) -> tuple[Sidecar, RouterServer]:
    """Build every part that can fail before listening. Raises ``ConfigError`` naming the key."""
    try_usage_record(config)
    try:
        sidecar = Sidecar(config)
        return sidecar, make_server(sidecar)
    except (AdminFileError, KeyFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None


def make_server(sidecar: Sidecar) -> RouterServer:
    """Make the server of this sidecar; it is not started yet."""
    server = server_of(sidecar, sidecar.config, sidecar.certificates, sidecar.listen_stats)
    sidecar.draining = lambda: server.draining
    sidecar.on_listen = lambda listen: configure(server, listen)
    return server


def reloads_of(sidecar: Sidecar, load: Callable[[], Config]) -> Reloads:
    """Make and install the reloads of a sidecar."""

    def judge(running: Config) -> Decided:
        return decide(running, load, usable)

    renew = sidecar.certificates.reload_changed
    made = Reloads(lambda: sidecar.config, judge, sidecar.take, renew, on_log=configure_logging)
    sidecar.reloads = made.stats
    sidecar.works.append(made.run)
    return made


def tend(config: Config, load: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. ``load`` reads the configuration again."""
    hold_back()
    configure_logging(config.server.log_level, config.server.log_format)
    sidecar, server = check(config)
    reloads_of(sidecar, load)
    tame_garbage_collection()
    share_the_interpreter()
    _log.info("kvatlas sidecar starts", version=__version__, engine=config.sidecar.engine)
    return run_server(server, lambda: server_ends_within_s(sidecar.config.listen))
