"""The sidecar as one ASGI application: what the proxy does, with one engine to answer and others to help.

Health, metrics and readiness are on the ops port, since on the public one ``/health`` and ``/metrics`` are
the engine's: routers ask it through the sidecar.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router import __version__
from router.api.app import json_answer
from router.api.metrics.families import of_each, of_stats
from router.api.metrics.page import build_info, of_requests, page_steps
from router.api.metrics.reloads import ReloadStats
from router.api.ops import OpsPort, ops_authenticator
from router.config.errors import ConfigError
from router.config.schema import Config
from router.fleet.calls import EngineCalls, hold_engine_tls
from router.fleet.desired import Roster
from router.fleet.discovery import FleetSources
from router.fleet.identity import endpoint_of
from router.http.server.lifespan import lifespan
from router.http.server.settings import ListenSettings
from router.http.server.stats import ListenStats
from router.http.tls import Certificates
from router.observe.requests import RequestTracker
from router.observe.traces import Traces
from router.observe.usage import UsageLog
from router.openai.members import at_leisure
from router.pd.stats import PdStats
from router.proxy.app import ProxyApp
from router.proxy.paths import OBSERVED
from router.proxy.settings import ProxySettings
from router.sidecar.allowed import Allowed
from router.sidecar.placer import SidecarPlacer


class Sidecar:
    """Raises ``ConfigError`` where it may ask no prefill engine at all."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        own = config.sidecar
        self.config = config
        self.allowed = usable(config)
        self.works: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else is to run in the background."""
        self.reloads: ReloadStats | None = None
        self.on_listen: Callable[[ListenSettings], None] = lambda listen: None
        self.pd_stats = PdStats()
        self.listen_stats = ListenStats()
        self.draining: Callable[[], bool] = lambda: False
        self._engine = own.engine.rstrip("/")
        self._roster = Roster(engines_max=config.fleet.engines_max)
        self._sources = FleetSources((), config.fleet, self._roster, changed=self._list)
        self.certificates = Certificates()
        tls = hold_engine_tls(self.certificates, config.fleet.tls)
        self._calls = EngineCalls(
            {},
            tls,
            answer_bytes_max=config.fleet.answer_bytes_max,
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
        )
        self.proxy = ProxyApp(
            placer,
            _passing(config.proxy),
            clock=clock,
            requests=requests,
            tls=tls,
            pd=config.pd,
            pd_stats=self.pd_stats,
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
        """Everything that works in the background, for as long as the context lasts."""
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
        """This configuration, which is ``usable``, holds from now on in all that ``LIVE`` names."""
        before, self.config = self.config, config
        self.allowed.configure(config.sidecar.prefills)
        self.proxy.configure(_passing(config.proxy), config.pd, None, claims=False)
        self.proxy.requests.log = config.server.log_requests
        if config.listen != before.listen:
            self.on_listen(config.listen)

    def _list(self) -> None:
        engines = self._roster.wanted().engines
        self.allowed.listed = frozenset(endpoint_of(e.base_url) for e in engines if e.prefills)

    async def _health(self, request: Request) -> Response:
        return json_answer({"status": "ok", "version": __version__})

    async def _ready(self, request: Request) -> Response:
        """Whether its engine answers; without prefill engines it serves all the same."""
        if self.draining():
            return json_answer({"ready": False, "reason": "draining"}, 503)
        if not await self._calls.healthy(self._engine):
            return json_answer({"ready": False, "reason": f"{self._engine}/health does not say 200"}, 503)
        return json_answer({"ready": True, "reason": ""})

    async def _metrics(self, request: Request) -> Response:
        return Response(await at_leisure(page_steps(self._families())), media_type=CONTENT_TYPE_LATEST)

    def _families(self) -> Iterator[Metric]:
        yield from ProcessCollector(registry=None).collect()
        yield from build_info()
        yield from of_requests(self.proxy.requests)
        yield from of_stats("proxy", self.proxy.stats)
        yield from of_stats("listen", self.listen_stats)
        yield from of_stats("pd", self.pd_stats)
        yield from of_each("source", "source", self._sources.stats)
        if self.reloads is not None:
            yield from of_stats("config", self.reloads)
        if self._traces is not None:
            yield from of_stats("traces", self._traces.stats)
        if self.usage is not None:
            yield from of_stats("usage", self.usage.stats)
            yield from of_stats("usage_export", self.usage.export_stats)


def _passing(proxy: ProxySettings) -> ProxySettings:
    """Routers ask the engine through the sidecar."""
    return msgspec.structs.replace(proxy, passed_paths=proxy.passed_paths | OBSERVED)


def usable(config: Config) -> Allowed:
    """Whom it may ask. Raises ``ConfigError`` where that is nobody."""
    own = config.sidecar
    if not own.prefills and not config.fleet.discovers:
        raise ConfigError(
            "sidecar.prefills: no prefill engine may be asked; give HOST:PORT or NETWORK:PORT, or a "
            "source of engines (fleet.kubernetes.selector, fleet.dns.names or fleet.file.path)"
        )
    try:
        return Allowed(own.prefills)
    except ValueError as error:
        raise ConfigError(f"sidecar.prefills: {error}") from None
