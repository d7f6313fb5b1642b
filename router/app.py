"""The running router: builds every part from the configuration, and runs them together.

``Router.answer`` takes each request: its own endpoints go to ``control``, everything else to the proxy.
Its lifespan (ASGI's) runs the sources of engines, the fleet poller, one feed per engine that publishes
events, and periodic work, all in one task group, so nothing outlives the server.

``PeerSharing``: requests in flight at the other routers of the fleet, replicas on a shared index and sibling
workers, enter the same accounts as those of this one: with a shared index through the index, among workers
without one through their gossip. Invariant: no request waits for another router, only for the index, which
has deadlines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.isolation import Isolation, ids_secret
from kvatlas.router.admission.key_file import KeyFile, KeyStats
from kvatlas.router.api.admin_actions import FleetActions
from kvatlas.router.api.admin_app import AdminApi
from kvatlas.router.api.app import create_control
from kvatlas.router.api.findings import current_findings
from kvatlas.router.api.front import Front
from kvatlas.router.api.metrics_page import Sources
from kvatlas.router.api.ops_port import OpsPort, ops_authenticator
from kvatlas.router.api.readiness import Readiness, ReadinessCheck
from kvatlas.router.api.views import sample_history
from kvatlas.router.config.schema import Config
from kvatlas.router.config.unused import without_effect
from kvatlas.router.engine_lifecycle import EngineLifecycle
from kvatlas.router.fleet.engine_calls import EngineCalls, hold_engine_tls
from kvatlas.router.fleet.engines import DesiredState
from kvatlas.router.fleet.poller import FleetPoller
from kvatlas.router.fleet.salt_proof import TOLD
from kvatlas.router.fleet.shared_proofs import GossipedProofs
from kvatlas.router.fleet.sources import FleetSources
from kvatlas.router.fleet.status import Fleet, Frontend
from kvatlas.router.http.asgi import Application
from kvatlas.router.http.server import lifespan
from kvatlas.router.http.settings import ListenSettings, ListenStats
from kvatlas.router.http.tls import Certificates
from kvatlas.router.observe.cache_worth import WORTH_HALF_LIFE_S
from kvatlas.router.observe.history import HistoryLog
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.observe.traces import Traces
from kvatlas.router.observe.usage import UsageLog
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.openai.response_ids import ResponseIds
from kvatlas.router.pd.settings import PdStats
from kvatlas.router.placement.decide import Planner
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, Accounts, Engine, PeerSnapshot, SharedView
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.probing import Probes
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.prompts.tokenizer_finder import TokenizerFinder
from kvatlas.router.proxy.aliases import Aliases
from kvatlas.router.proxy.app import ProxyApp
from kvatlas.router.replication.gossip import GossipedInflight
from kvatlas.router.services.epp.server import PickerServer
from kvatlas.router.services.sources import configured_sources
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.gossip import SiblingGossip
from kvatlas.router.workers.group import WorkerGroup
from kvatlas.router.workers.merged_view import AggregateView, worker_families

if TYPE_CHECKING:
    from kvatlas.router.replication.service import SharedState
    from kvatlas.router.replication.shared_blocks import SharedIndex


class PeerSharing:
    """Call ``begin`` once fleet and keys are known; ``worker``: the router is one of several workers. Raises
    ``SettingsError`` for unusable files of the index."""

    def __init__(
        self, config: Config, accounts: Accounts, *, clock: Callable[[], float], worker: WorkerContext | None
    ) -> None:
        self._accounts = accounts
        self._clock = clock
        self._worker = worker
        self._fleet: Fleet[Engine]  # set by ``begin``
        self.blocks: SharedIndex | None = None
        """The shared index, unless replicas share their load only."""
        self.shared = self._shared_state(config)
        self.gossip: SiblingGossip | None = None
        """Among workers: carries what the shared index does not, or everything without one."""
        if self.shared is not None:
            accounts.inflight = self.shared.inflight

    def begin(self, fleet: Fleet[Engine], gate: KeyGate | None) -> None:
        """Share the load of these engines and the limits of these keys."""
        self._fleet, worker = fleet, self._worker
        if self.shared is not None and gate is not None:
            self.shared.share_limits(gate, "" if worker is None else worker.folder.name)
        if worker is not None:
            self.gossip = self._gossip_of(worker, gate)

    def _gossip_of(self, worker: WorkerContext, gate: KeyGate | None) -> SiblingGossip:
        alone = self.shared is None
        gossip = SiblingGossip(
            worker, self.own_load, clock=self._clock, whole=alone, served=self._served_elsewhere, gate=gate
        )
        if alone:
            self._accounts.inflight, self._accounts.affinity = gossip.inflight, gossip.affinity
        return gossip

    @property
    def lookup(self) -> SharedView | None:
        """The shared index as seen by decisions."""
        return None if self.blocks is None else self.blocks.lookup

    @property
    def peer_state(self) -> Callable[[], PeerSnapshot]:
        """Latest state received from other routers."""
        if (shared := self.shared) is not None:
            return lambda: shared.peers
        return (lambda: NO_PEER_SNAPSHOT) if self.gossip is None else self.gossip.peer_state

    @property
    def problem(self) -> str:
        """Why the shared index does not answer; "" if it does, or if there is none."""
        return "" if self.shared is None else self.shared.problem

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run in the background."""
        return [] if self.shared is None else [self.shared.run()]

    async def close(self) -> None:
        """Close all connections."""
        if self.shared is not None:
            await self.shared.close()

    def others(self) -> Mapping[str, OthersLoad] | None:
        """Requests in flight of all other routers, by engine; None: currently unknown."""
        if self.shared is not None:
            return self.shared.lookup.last_load()
        return {} if self.gossip is None else self.gossip.others()

    def own_load(self, now: float) -> dict[str, OthersLoad]:
        """Requests in flight of this router alone, for the others."""
        loads = ((engine.engine_id, engine.load.own(now)) for engine in self._fleet)
        return {engine_id: load for engine_id, load in loads if load is not None}

    def _served_elsewhere(self, prompt: InflightPrompt) -> None:
        """Update the shadow of an engine that has computed a prompt of another worker."""
        engine = self._fleet.get(prompt.engine_id)
        if engine is not None and engine.shadow is not None and prompt.num_blocks:
            tokens = range(prompt.num_blocks * engine.shadow.spec.scheme.hash_block_size)
            engine.shadow.served(tokens, lambda scheme: list(prompt.hashes))

    def _shared_state(self, config: Config) -> SharedState | None:
        if not config.index.is_shared:
            return None
        # redis-py comes with these.
        from kvatlas.router.replication.shared_blocks import SharedIndex
        from kvatlas.router.replication.shared_load import SharedLoad

        parts = config.index, self.own_load
        if not config.index.shares_blocks:
            return SharedLoad(*parts, served=self._served_elsewhere, clock=self._clock)
        self.blocks = SharedIndex(*parts, served=self._served_elsewhere, clock=self._clock)
        return self.blocks


class Router:
    """One router process. ``clock``: monotonic seconds; ``worker``: set if it is one of several workers."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: WorkerContext | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.accounts = Accounts(clock)
        self.usage = UsageLog(config.usage, config.traces) if config.usage.path else None
        self.peers = PeerSharing(config, self.accounts, clock=clock, worker=worker)
        self.lifecycle = EngineLifecycle(
            config,
            self.accounts,
            self.peers.blocks,
            clock=clock,
            leaving=(
                lambda engine: self.proxy.requests.forget(engine.engine_id),
                lambda engine: self.proxy.client.drop_origin(engine.engine.base_url),
            ),
        )
        self.fleet, self.scopes = self.lifecycle.fleet, self.lifecycle.scopes
        self.gate = self._open_gate()
        self.fleet.needs_salt_proofs = self.gate is not None and self.gate.isolation is not None
        self.peers.begin(self.fleet, self.gate)
        self.accounts.inflight.is_stored = self.lifecycle.is_stored
        self.listen_stats: ListenStats | None = None
        self.on_listen: Callable[[ListenSettings], None] = lambda listen: None
        """Is called with new limits of client connections."""
        self.draining: Callable[[], bool] = lambda: False
        self.poller: FleetPoller[Engine] | None = None
        self.desired = DesiredState(engines_max=_engines_max(config))
        self._began_s = clock()
        self.fleet_sources = FleetSources(
            config.engines,
            configured_sources(config.fleet, self.deletion_costs),
            self.desired,
            changed=self._assign,
        )
        self.worker_group: WorkerGroup | None = None
        if worker is not None and self.peers.gossip is not None:
            self.worker_group = WorkerGroup(
                worker,
                self.peers.gossip,
                self.desired,
                applied=self._assign,
                unsynced=self.fleet_sources.unsynced,
                body_bytes_max=config.proxy.body_bytes_max,
            )
        self.certificates = Certificates()
        self._engine_tls = hold_engine_tls(self.certificates, config.fleet.tls)
        self.calls = EngineCalls(
            config.fleet.headers(),
            self._engine_tls,
            health_timeout_s=config.prompts.engine_timeout_s,
        )
        self.works: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Further coroutines to run in the background while the router runs."""
        self._tasks: asyncio.TaskGroup | None = None
        self.reader = PromptReader(
            self.lifecycle.prompts_of(config),
            config.prompts,
            self.calls.post,
            engine_url=self._engine_url,
            frontends=self.fleet.frontends,
            is_adapter=self.fleet.is_adapter,
            clock=clock,
            records=lambda stats: None if worker is None else worker.shared_records(stats),
        )
        self.finder = TokenizerFinder(
            self.fleet,
            self.reader,
            config.prompts,
            self.calls.ask,
            setting_of=self.lifecycle.tokenizer_of,
            file_found=self.lifecycle.learn_file,
            clock=clock,
        )
        self.traces = Traces(config.traces) if config.traces.endpoint else None
        self.aliases = Aliases.from_shares(config.alias_shares())
        self.planner, self.proxy = self._assemble()
        self.probes = self._open_probes() if config.fleet.probe else None
        self._readiness_check = ReadinessCheck(
            self.fleet,
            unsynced=self.fleet_sources.unsynced,
            index_problem=lambda: self.peers.problem,
            follows_all=self.peers.blocks is None,
            clock=clock,
            warm_up_s_max=config.fleet.warm_up_s_max,
        )
        self.admin = self._open_admin()
        self.picker = self._open_picker()
        self.sources = Sources(
            self.fleet,
            self.scopes,
            self.accounts,
            self.proxy.stats,
            self.reader.stats,
            lambda: self.listen_stats,
            self.proxy.requests,
            HistoryLog(clock()),
            self.peers.shared,
            self.fleet_sources,
            None if self.admin is None else self.admin.stats,
            self.gate,
            self.aliases,
            None if self.traces is None else self.traces.stats,
            epp=None if self.picker is None else self.picker.stats,
            usage=self.usage,
            pd=self.planner.pd_stats,
            pulls=self.planner.pulls,
            stores=self.lifecycle.stores,
            probes=None if self.probes is None else self.probes.stats,
            tokenizers=lambda: self.reader.tokenizers({**self.config.models, **self.finder.origins()}),
            tokenizer_origins=self.finder.origins,
            others=self.peers.others,
            unused=lambda: without_effect(self.config),
        )
        self._view: AggregateView | None = None
        if worker is not None and self.worker_group is not None:
            gossip = self.worker_group.gossip
            self.sources.more = lambda: worker_families(
                worker.slot, gossip.stats, gossip.delays, self.listen_stats
            )
            self._view = self.worker_group.view(self.sources)
        door = ops_authenticator(config.ops_tokens, per_minute=config.admin.requests_per_minute, clock=clock)
        self.ops = OpsPort(
            self._answer_ops,
            host=config.server.ops_host,
            port=config.server.ops_listens_on if self.leads else None,
            authenticator=door,
            names=config.server.ops_names,
            sock=None if worker is None else worker.ops,
            at="" if worker is None else worker.ops_at,
        )
        self._ops_here = config.server.ops_port == "public"
        self._front = Front(
            self.proxy.answer,
            create_control(self.sources, readiness=self.readiness, refusal=self.ops.refusal),
            self._answer_ops,
            admin=self.admin,
            gate=self.gate,
            cors=config.cors,
            ops_here=self._ops_here,
            to_lead=self._to_lead,
        )
        self.answer = self._front.answer
        """Answer one ``ClientRequest``."""

    def _answer_ops(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """ASGI 3: the application of the ops port."""
        return self._ops_app(scope, receive, send)

    @cached_property
    def _ops_app(self) -> Application:
        # With FastAPI it takes 15 MB and 0.4 s of CPU: only the worker that serves it loads it.
        from kvatlas.router.api.ops_app import create_ops

        return create_ops(
            self.planner,
            self.sources,
            readiness=self.readiness,
            body_bytes_max=self.config.proxy.body_bytes_max,
            view=self._view,
        )

    def load_ops(self) -> None:
        """Load the applications of the ops port and of the admin API if this process serves them."""
        if self.leads and (self._ops_here or self.ops.server is not None):
            _ = self._ops_app
        if self.leads and self.admin is not None:
            _ = self.admin.app

    def _assemble(self) -> tuple[Planner, ProxyApp]:
        pd_stats = PdStats()
        planner = Planner(
            fleet=self.fleet,
            scopes=self.scopes,
            reader=self.reader,
            accounts=self.accounts,
            settings=self.config.policy,
            expose_decision=self.config.server.expose_decision,
            check_every=self.config.server.check_every,
            shared=self.peers.lookup,
            peer_state=self.peers.peer_state,
            queue=self.config.queue,
            pd=self.config.pd,
            pd_stats=pd_stats,
            pull=self.config.pull,
        )
        requests = RequestTracker(
            self.clock,
            here=self.fleet.__contains__,
            log=self.config.server.log_requests,
            traces=self.traces,
            sessions=self.accounts.sessions,
            books=self.accounts.books,
        )
        if self.usage is not None:
            requests.on_end = self.usage.add
        proxy = ProxyApp(
            planner,
            self.config.proxy,
            clock=self.clock,
            requests=requests,
            gate=self.gate,
            aliases=self.aliases,
            tls=self._engine_tls,
            claims=planner.reads_claims,
            targets=self.config.policy.targets,
            responses=ResponseIds() if self.gate is None else ResponseIds(self.gate.secrets),
            pd=self.config.pd,
            pd_stats=pd_stats,
            watched=self.fleet,
            silence_s=self.config.listen.keepalive_comment_s,
        )
        if isinstance(inflight := self.accounts.inflight, GossipedInflight) and proxy.deaths is not None:
            inflight.died, proxy.deaths.publish = proxy.deaths.learn, inflight.publish_death
        return planner, proxy

    def _open_probes(self) -> Probes:
        probes = Probes(
            self.fleet,
            self.scopes,
            self.reader,
            self.accounts,
            self.planner.pulls,
            self.config.fleet,
            send=self.calls.send,
            shared=self.peers.lookup,
            leads=lambda: self.leads_fleet,
            ordered=lambda: self.config.policy.engine_priority > 0,
        )
        if isinstance(inflight := self.accounts.inflight, GossipedInflight):
            probes.publish = inflight.publish_probe
        return probes

    def _hear_probe(self, engine_id: str, told: bytes) -> None:
        """Take in what another router found out about an engine."""
        if told.startswith(TOLD):
            if self.poller is not None and isinstance(self.poller.shared_proofs, GossipedProofs):
                self.poller.shared_proofs.hear(engine_id, told)
        elif self.probes is not None:
            self.probes.learn(engine_id, told)

    def _open_gate(self) -> KeyGate | None:
        """Read the keys. Raises ``KeyFileError`` for an unusable key file."""
        keys = self.config.keys
        if keys.file is None:
            return None
        fields = [(name.encode(), value.encode()) for name, value in self.config.fleet.headers().items()]
        file = KeyFile(Path(keys.file), clock=self.clock)
        stats = KeyStats()
        return KeyGate(
            file,
            clock=self.clock,
            forward=keys.forward,
            engine_priorities=keys.engine_priorities and not self.config.policy.engine_priority,
            engine_fields=fields,
            stats=stats,
            isolation=None if keys.isolate == "off" else Isolation(keys, stats, clock=self.clock),
            secret=ids_secret(keys, stats, self.clock),
        )

    def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        """ASGI's lifespan, all that this is asked for by the server."""
        return lifespan(self.running(), receive, send)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all background work for the duration of the context."""
        self.load_ops()
        async with (
            self.calls.open() as client,
            self.ops.listening(),
            nullcontext() if self.admin is None else self.admin.listening(),
            self._in_worker_group(),
            nullcontext() if self.picker is None else self.picker.listening(),
            asyncio.TaskGroup() as tasks,
        ):
            self._tasks = tasks
            works = self.lifecycle.begin(tasks)
            poller = self.poller = FleetPoller(self.fleet, self.lifecycle, self.config.fleet, client)
            if isinstance(inflight := self.accounts.inflight, GossipedInflight):
                poller.shared_proofs = GossipedProofs(
                    inflight.publish_probe, poller.salt_proof, lambda: self.leads_fleet
                )
                inflight.probed = self._hear_probe
            if self.peers.shared is not None:
                poller.shared_proofs = self.peers.shared.salt_proofs
            poller.versions = self.config.pull.enabled
            poller.versions_once = self.config.proxy.continue_streams
            self._assign()
            works += [poller.run(), self.fleet_sources.run()]
            works += [self.certificates.watch(), self._expire_inflight(), self._keep_history()]
            works.append(self.finder.run())
            if self.probes is not None:
                works.append(self.probes.run())
            works += [work() for work in self.works]
            works += self.peers.works()
            if self.config.prompts.renderers:
                works.append(self.reader.renderers.watch(self.calls.healthy))
            background = [tasks.create_task(work) for work in works]
            if self.usage is not None:
                self.usage.start()
            if self.worker_group is not None and self.worker_group.worker.life:
                # The sibling workers serve meanwhile. A replacement that accepted connections before it knows
                # an engine would refuse requests that they can answer; until then connections wait in the
                # backlog of its socket.
                await poller.first_polls(self.config.fleet.poll_timeout_s)
            try:
                yield
            finally:
                if self.picker is not None:
                    await self.picker.drained()
                for task in background:
                    task.cancel()
                await self.peers.close()
                self.lifecycle.end()
                if self.usage is not None:
                    await asyncio.to_thread(self.usage.close)
                if self.traces is not None:
                    await asyncio.to_thread(self.traces.close)
                self.proxy.close()
                self.reader.close()
                self._tasks = self.poller = None

    async def _expire_inflight(self) -> None:
        """Expire prompts whose grace period is over, also while no requests arrive."""
        inflight = self.accounts.inflight
        while True:
            await asyncio.sleep(inflight.settings.grace_s)
            inflight.expire(self.clock())

    async def _keep_history(self) -> None:
        while True:
            wait_s = sample_history(self.sources)
            await run_cooperatively(current_findings(self.sources))
            await asyncio.sleep(wait_s)

    def _in_worker_group(self) -> AbstractAsyncContextManager[None]:
        if self.worker_group is None or self._view is None:
            return nullcontext()
        return self.worker_group.working(self._view, self._front.answer_whole)

    @property
    def leads(self) -> bool:
        """Whether this process answers for all workers, or is the only one."""
        return self.worker_group is None or self.worker_group.leads

    @property
    def leads_fleet(self) -> bool:
        """Whether this process acts for all replicas and workers: Redis has its lease, or else it leads its
        workers."""
        first = min((engine.engine_id for engine in self.fleet if engine.publishes_events), default=None)
        leads = None if self.peers.shared is None else self.peers.shared.leads(first)
        return self.leads if leads is None else leads

    def _to_lead(self) -> Application | None:
        """Return the application that forwards to the leading worker; None: it is this one."""
        return None if self.worker_group is None or self.leads else self.worker_group.calls.to_lead

    def discard(self) -> None:
        """Close a router that was made only to check the configuration."""
        if self.traces is not None:
            self.traces.close()
        self.reader.close()

    def readiness(self) -> Readiness:
        """Return the readiness for traffic."""
        return self._readiness_check.check(draining=self.draining())

    def retire(self) -> None:
        """Hand over to other replicas what they can take; called when the server drains."""
        if self.picker is not None:
            self.picker.drain()
        if self.peers.shared is not None and self._tasks is not None:
            self._tasks.create_task(self.peers.shared.release_leases())

    def deletion_costs(self) -> dict[str, int]:
        """Return the cost of losing each server: the worth of its caches in ms of prefill per minute, -1 if
        it is drained. Empty unless this process is the one that writes them.

        Only one of several replicas writes, since each counts the worth by its own requests.
        """
        now = self.clock()
        # Before, the worth is that of the router's first minutes, and lower than the one written earlier.
        if not self.leads_fleet or now - self._began_s < WORTH_HALF_LIFE_S:
            return {}
        costs: dict[str, int] = {}
        for engine in self.fleet:
            if engine.up:
                url = engine.engine.base_url
                worth_ms = round(1000 * engine.receipts.worth.per_minute(now))
                costs[url] = -1 if engine.held or costs.get(url) == -1 else costs.get(url, 0) + worth_ms
        return costs

    def _assign(self) -> None:
        """Update the fleet from the desired state."""
        if self.poller is not None:
            self.poller.assign(self.desired.wanted())

    def _open_picker(self) -> PickerServer | None:
        """Make the endpoint picker, if configured. Raises ``TlsError`` for unusable files."""
        config = self.config
        if not config.epp.listen:
            return None
        return PickerServer(
            # Made below.
            lambda request: self.answer(request),  # noqa: PLW0108
            config.epp,
            proxy=config.proxy,
            listen=config.listen,
            certificates=self.certificates,
            clock=self.clock,
            readiness=lambda: self.readiness().ready,
            synced=lambda: not self.fleet_sources.unsynced(),
        )

    def _open_admin(self) -> AdminApi | None:
        if not self.config.admin.enabled:
            return None
        actions = FleetActions(
            self.desired,
            self.fleet,
            self.clock,
            sources=lambda: self.fleet_sources.stats,
            apply=self._assign,
            moves=self.lifecycle.moves,
            wall=self.accounts.wall,
            others=self.peers.others,
        )
        worker = None if self.worker_group is None else self.worker_group.worker
        return AdminApi(
            self.config.admin,
            actions,
            clock=self.clock,
            certificates=self.certificates,
            port=self.leads,
            sock=None if worker is None else worker.admin,
            settled=None if self.worker_group is None else self.worker_group.decisions.changed,
        )

    def _engine_url(self, model: str | None, frontend: Frontend) -> str | None:
        """Return the URL of the least loaded engine of this model with this frontend, so that tokenizing does
        not load one engine for the whole fleet."""
        now = self.clock()
        serving = (engine for engine in self.fleet.ready(model) if engine.frontend == frontend)
        ready = [engine for engine in serving if engine.breaker.allows(now)]
        loads = [(engine.load.current(now), engine.engine.base_url) for engine in ready]
        return min(loads, key=lambda pair: (pair[0].waiting, pair[0].running), default=(None, None))[1]

    def take(self, config: Config) -> None:
        """Apply a changed configuration."""
        before, self.config = self.config, config
        self.lifecycle.take(config)
        if config.models != before.models:
            self.finder.forget()
        if config.engines != before.engines:
            self.desired.engines_max = _engines_max(config)
            self.fleet_sources.set_static(config.engines)
            self._assign()


def _engines_max(config: Config) -> int:
    return max(config.fleet.engines_max, len(config.engines))
