"""Runs the demo: engines in a separate process, the router (or several) and the load in this one; with a
gateway, an Envoy forwards the requests and the routers are its endpoint pickers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
import uvloop
from rich.console import Console
from rich.live import Live

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR, EngineSettings
from kvatlas.router.app import Router
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress, Role
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.addresses import port_fault
from kvatlas.router.http.server import ListenError
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.observe.receipts import Receipt
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.replication.index_url import SettingsError, redacted
from kvatlas.router.replication.registry import IndexRefused
from kvatlas.router.replication.service import check_index
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.server_lifecycle import RouterServer, make_server
from kvatlas.router.services.epp.settings import EppSettings
from kvatlas.router.simulation.demo.baseline import RoundRobinBaseline
from kvatlas.router.simulation.demo.engines import engine_process
from kvatlas.router.simulation.demo.gateway import find_envoy, free_port, gateway_process
from kvatlas.router.simulation.demo.load import ANSWER_TOKENS, ChatLoad, ChatOutcome
from kvatlas.router.simulation.demo.store import store_process
from kvatlas.router.simulation.demo.table import LegCounts, Tally, live_table
from kvatlas.router.tools.ops_client import output_console

KvConnector = Literal["nixl", "mooncake", "offloading"]
# Setting of a prefill engine, and setting of the router.
_PORTS = {
    "mooncake": ("bootstrap_port", "mooncake_bootstrap_port"),
    "offloading": ("side_channel_port", "offloading_port"),
}


def apart(
    engine: EngineSettings, count: int, connector: KvConnector | None
) -> tuple[list[EngineSettings], PdSettings]:
    """Return the settings of several engines like this one, and their connector for the router; None: engines
    without roles.

    Roles of the demo's engines with disaggregated prefill, and the transfer of blocks between them.

    As with pods, the router knows one port for all bootstrap servers of Mooncake, and one for all side
    channels of offloading. So prefill engines of these kinds have addresses of their own on this machine:
    127.0.0.1, 127.0.0.2 and so on, which Linux routes to the loopback interface.
    """
    if connector is None:
        return [engine] * count, PdSettings()
    prefills = max(1, count // 3)
    roles: list[Role] = ["prefill" if number < prefills else "decode" for number in range(count)]
    engines = [msgspec.structs.replace(engine, role=role, kv_connector=connector) for role in roles]
    if connector == "nixl":
        return engines, PdSettings()
    port = free_port()
    theirs, ours = _PORTS[connector]
    for number in range(prefills):
        own = {"host": f"127.0.0.{number + 1}", theirs: port}
        engines[number] = msgspec.structs.replace(engines[number], **own)
    return engines, msgspec.structs.replace(PdSettings(connector=connector), **{ours: port})


# About 6,700 prompt tokens per second: slow enough that a hit shows in the time to first token.
ENGINE = EngineSettings(
    groups="gptoss-like",
    num_blocks=1500,
    prefill_s_per_token=1.5e-4,
    decode_s_per_token=0.015,
    max_num_batched_tokens=2048,
)
_NO_PD = PdSettings()
_USERS_PER_ENGINE = 8
# With disaggregated prefill: if no response is being generated, prompts are best computed on the decode
# engine.
_LONG_ANSWER_TOKENS = (40, 120)
_READY_S_MAX = 30.0
_REFRESH_S = 0.5
# Longer than for a router alone: routers, load and round robin share one thread here.
_LOOKUP_S = 0.05


def run_demo(
    *,
    seconds: float,
    engines: int,
    port: int,
    as_json: bool,
    keep: bool,
    replicas: int = 1,
    pd: KvConnector | None = None,
    index: IndexSettings | None = None,
    gateway: bool = False,
) -> int:
    """Run the demo. Returns 0 if every request was answered, 130 if a signal ended it early.

    Several ``replicas`` share ``index``; without one, a server is started for them. With ``pd`` a third of
    the engines prefill for the others, with this connector. Raises ``ConfigError`` for invalid arguments.
    """
    if not 1 <= engines <= 64:
        raise ConfigError(f"--engines: {engines} is not 1 to 64")
    if fault := port_fault(port):
        raise ConfigError(f"--port: {fault}")
    if not 0 < seconds <= 86_400:
        raise ConfigError(f"--seconds: {seconds} is not above 0 and at most 86400")
    if not 1 <= replicas <= 16:
        raise ConfigError(f"--replicas: {replicas} is not 1 to 16")
    if pd and engines < 2:
        raise ConfigError(f"--pd: needs at least 2 engines, one for each role; --engines is {engines}")
    if pd and gateway:
        raise ConfigError("--pd: a gateway carries each request to one engine; leave out --gateway")
    envoy = find_envoy() if gateway else ""
    configure_logging("error", "console")
    with ExitStack() as stack:
        index = index or IndexSettings()
        if index.is_shared:
            _check_store(index)
        elif replicas > 1:
            index = IndexSettings(url=stack.enter_context(store_process()))
        settings, routed = apart(ENGINE, engines, pd)
        urls = stack.enter_context(engine_process(settings))
        fleet = tuple(EngineAddress(url, role=each.role) for url, each in zip(urls, settings, strict=True))
        pickers = [free_port() for _ in range(replicas)] if gateway else [0] * replicas
        configs = [
            _config(fleet, port if n == 1 and not gateway else 0, index, f"demo-{n}", picker, routed)
            for n, picker in enumerate(pickers, 1)
        ]
        before = ""
        if gateway:
            before = stack.enter_context(gateway_process(envoy, urls, pickers, port))
        summary = uvloop.run(_run(configs, before, seconds=seconds, as_json=as_json, keep=keep))
    if summary is None:
        return 130
    return 1 if summary["errors"] or not summary["requests"] else 0


def _check_store(index: IndexSettings) -> None:
    """Check the shared index: if it is unusable, the demo cannot show it. Raises ``ConfigError``."""
    try:
        problem = asyncio.run(check_index(index))
    except (IndexRefused, SettingsError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"--index {redacted(index.url)}: {problem}")


class _Demo:
    """Counters kept while the load runs."""

    def __init__(self, routers: Sequence[Router], engines: int) -> None:
        self.routers = routers
        self.ours = Tally()
        self.per_engine: dict[str, Tally] = {}
        self.legs = LegCounts() if routers[0].fleet.has_roles else None
        self.baseline = RoundRobinBaseline(engines, ENGINE)
        self.started_s = time.monotonic()
        self._outcomes: deque[ChatOutcome] = deque()
        for router in routers:
            router.accounts.receipts.listener = self._receipt

    def done(self, outcome: ChatOutcome) -> None:
        """Record an ended request."""
        self._outcomes.append(outcome)
        if outcome.error:
            self.ours.errors += 1
        else:
            self.ours.add(outcome.prompt_tokens, outcome.cached_tokens, outcome.ttft_s)

    def _receipt(self, receipt: Receipt) -> None:
        tally = self.per_engine.setdefault(receipt.engine_id, Tally())
        tally.add(receipt.prompt_tokens or 0, receipt.actual_tokens or 0, receipt.ttft_s)
        if self.legs is not None:
            self.legs.add(receipt)

    async def drain(self) -> None:
        """Pass finished requests to the baseline."""
        while self._outcomes:
            # Removed last: ``watch`` may be cancelled meanwhile, and the rest is passed on after it.
            await self.baseline.add(self._outcomes[0])
            self._outcomes.popleft()

    async def watch(self, live: Live | None) -> None:
        """Keep the table and the baseline up to date until cancelled."""
        while True:
            await self.drain()
            elapsed_s = time.monotonic() - self.started_s
            self.baseline.advance(max(0.0, elapsed_s - 5.0))  # requests are known when they end
            if live is not None:
                live.update(self.picture())
            await asyncio.sleep(_REFRESH_S)

    def picture(self) -> Any:
        elapsed_s = time.monotonic() - self.started_s
        baseline = self.baseline.tally()
        return live_table(self.routers, self.per_engine, self.legs, self.ours, baseline, elapsed_s)

    def summary(self) -> dict[str, Any]:
        """Return the final figures (docs: README, "Try it")."""
        sums = [engine.receipts.outcomes for router in self.routers for engine in router.fleet]
        compared = sum(one.get(outcome, 0) for one in sums for outcome in ("exact", "over", "under"))
        return {
            **self.ours.as_json(),
            "predicted_exact": sum(one.get("exact", 0) for one in sums),
            "predicted_total": compared,
            "baseline": {"policy": "round-robin", **self.baseline.tally().as_json()},
            **({} if self.legs is None else {"apart": self.legs.as_json()}),
        }


async def _run(
    configs: Sequence[Config], gateway_url: str, *, seconds: float, as_json: bool, keep: bool
) -> dict[str, Any] | None:
    """Run the demo; returns the summary, or None if a signal came before the load ended."""
    routers = [Router(config) for config in configs]
    servers = [make_server(router) for router in routers]
    serving = [asyncio.create_task(server.serve()) for server in servers]
    showing = asyncio.create_task(
        _show(routers, servers, gateway_url, seconds=seconds, as_json=as_json, keep=keep)
    )
    try:
        await asyncio.wait({*serving, showing}, return_when=asyncio.FIRST_COMPLETED)
        if any(task.done() for task in serving):
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        elif keep and showing.exception() is None:
            await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for server in servers:
            server.drain()
        await asyncio.wait(serving)
    try:
        for task in serving:
            task.result()
    except ListenError as error:
        raise ConfigError(f"--port: {error}") from None
    return None if showing.cancelled() else showing.result()


async def _show(
    routers: Sequence[Router],
    servers: Sequence[RouterServer],
    gateway_url: str,
    *,
    seconds: float,
    as_json: bool,
    keep: bool,
) -> dict[str, Any]:
    """Run the load, display it, and return the summary."""
    console = output_console()
    for router, server in zip(routers, servers, strict=True):
        await _ready(router, server)
    engines = len(routers[0].fleet)
    demo = _Demo(routers, engines)
    urls = [gateway_url] if gateway_url else [server.base_url for server in servers]
    ops_url = routers[0].ops.base_url or urls[0]
    if gateway_url and not as_json:
        console.print(f"Envoy at {gateway_url} forwards the requests and asks kvatlas for their engines")
    if not as_json:
        console.print(f"In a browser: {ops_url}/kvatlas/")
    users = _USERS_PER_ENGINE * engines
    answers = ANSWER_TOKENS if demo.legs is None else _LONG_ANSWER_TOKENS
    load = ChatLoad(urls, ENGINE.model, users=users, seed=7, on_done=demo.done, answer_tokens=answers)
    if as_json or not console.is_terminal:
        await _with_watch(demo, load, seconds, None)
    else:
        with Live(console=console, refresh_per_second=4) as live:
            await _with_watch(demo, load, seconds, live)
            live.update(demo.picture())
    summary = demo.summary()
    if as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    else:
        _say(console, demo, urls[0], ops_url, keep=keep)
    return summary


async def _with_watch(demo: _Demo, load: ChatLoad, seconds: float, live: Live | None) -> None:
    watching = asyncio.create_task(demo.watch(live))
    try:
        await load.run(seconds)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await demo.drain()
    demo.baseline.finish()


async def _ready(router: Router, server: RouterServer) -> None:
    """Wait until the router is ready for traffic."""
    deadline = time.monotonic() + _READY_S_MAX
    while not (server.started and router.readiness().ready):
        if time.monotonic() > deadline:
            raise ConfigError(f"the router did not become ready: {router.readiness().reason}")
        await asyncio.sleep(0.05)


def _config(
    fleet: tuple[EngineAddress, ...],
    port: int,
    index: IndexSettings,
    replica: str,
    picker_port: int = 0,
    pd: PdSettings = _NO_PD,
) -> Config:
    epp = (
        EppSettings(listen=f"127.0.0.1:{picker_port}", tls=False, fallbacks=1)
        if picker_port
        else EppSettings()
    )
    return Config(
        server=ServerConfig(port=port, ops_port=0, expose_decision=True),
        engines=fleet,
        pd=pd,
        models={ANY_MODEL: ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR))},
        fleet=FleetSettings(gauge_interval_s=0.5),
        epp=epp,
        index=msgspec.structs.replace(index, replica=replica, lookup_timeout_s=_LOOKUP_S),
    )


def _say(console: Console, demo: _Demo, base_url: str, ops_url: str, *, keep: bool) -> None:
    if not console.is_terminal:
        console.print(demo.picture())
    if keep:
        console.print(f"\nStill serving at {base_url} (Ctrl-C ends it). Try:")
        console.print(f"  curl {ops_url}/kvatlas/engines")
        body = '{"model": "kvatlas-demo", "messages": [{"role": "user", "content": "hello"}]}'
        for url in (f"{base_url}/v1/chat/completions", f"{ops_url}/kvatlas/explain"):
            console.print(f"  curl {url} -H 'content-type: application/json' -d '{body}'")
