"""Engine lifecycle: start and stop following each engine's cache. The one listener of the fleet's poller.

An engine that comes up gets a feed (here or on the replica that holds the lease), or a shadow if it publishes
no events; one that leaves is forgotten. Invariant: an engine is followed for one model at one address; state
of an earlier model or address is dropped before it is followed again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from kvatlas.publisher.events import BlockHash
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.feeds.base import FeedStats
from kvatlas.router.feeds.manager import FeedControl, FeedManager
from kvatlas.router.feeds.residency_audit import ResidencyAudit
from kvatlas.router.feeds.sglang_load import LoadReading, LoadSockets
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.feeds.stores import StoreFeeds
from kvatlas.router.fleet.engines import NOT_READY, EngineAddress, EngineKind
from kvatlas.router.fleet.statement import EVENTS_OPTION, EngineStatement, load_source
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts
from kvatlas.router.index.model import Residency
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.placement.eligible import NO_LENGTH, EligibleEngines, Length
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.radix_parts import parts_spec
from kvatlas.router.placement.shadow import PoolEvidence, estimated_spec
from kvatlas.router.prompts.adapter_paths import AdapterPaths
from kvatlas.router.prompts.model_config import ModelConfigFile
from kvatlas.router.prompts.settings import ModelPrompts
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.moves import LAST_S
from kvatlas.router.proxy.settings import ProxySettings

# It imports redis-py, which a router without a shared index does not need.
if TYPE_CHECKING:
    from kvatlas.router.replication.shared_blocks import SharedIndex

_log = structlog.get_logger()

# Interval between checks of engines at which requests wait.
_WATCH_S = 1.0
# No engine starts twice within this, as far as only its events tell.
_RESTART_S_MIN = 60.0
# Facts that a model's file may supply if they are not configured.
_OF_FILE = ("attention_chunk_size", "kinds", "windows")
_OF_PROMPTS = ("tokenizer", *(set(ModelPrompts.__struct_fields__) & set(ModelConfig.__struct_fields__)))


class EngineLifecycle:
    """Implements ``FleetListener``. ``leaving`` are also notified of each engine that leaves."""

    def __init__(
        self,
        config: Config,
        accounts: Accounts,
        shared: SharedIndex | None,
        *,
        clock: Callable[[], float],
        leaving: tuple[Callable[[Engine], None], ...],
    ) -> None:
        self._config = config
        self._accounts = accounts
        self._shared = shared
        self._clock = clock
        self._leaving = leaving
        self._adapters = AdapterPaths(config.adapters())
        self._adapters_left: set[str] = set()
        """Base models of engines with adapters that have just left."""
        self._files: dict[str, ModelConfigFile] = {}
        """By served model: its own ``config.json``."""
        self._kinds: dict[str, tuple[str, ...]] = {}
        """By served model: kinds of its groups from that file, if the events show as many groups but name no
        kinds."""
        self._layouts: dict[str, CacheLayout] = {}
        """By served model: the layout last compared with the file."""
        self.stores = StoreFeeds(
            config.stores,
            config.feeds,
            scheme_of=lambda model: self.scopes.scope(model).known_scheme,
            clock=clock,
        )
        self.scopes = ModelIndexes(
            self._facts,
            None if shared is None else shared.index_of,
            applied=self._applied,
            made=self.stores.attach,
        )
        self.feeds = FeedManager(self.scopes, clock=clock, settings=config.feeds, on_change=self._feed_is)
        self._control: FeedControl = self.feeds
        if shared is not None:
            shared.attach(self.feeds, self.scopes)
            self._control = shared
        self.fleet: Fleet[Engine] = Fleet(config.engines, self._make_engine)
        self._eligible = EligibleEngines(self.fleet, accounts)
        self.loads = LoadSockets(self._load_read, clock=clock)
        self._audit = ResidencyAudit(self.fleet, self.scopes, self.feeds, clock=clock)
        self._tasks: asyncio.TaskGroup | None = None

    def begin(self, tasks: asyncio.TaskGroup) -> list[Coroutine[Any, Any, None]]:
        """Run feeds in ``tasks`` from now on. Returns coroutines to run beside them."""
        self._tasks = tasks
        self.stores.begin(tasks)
        return [self._audit.detect(), self._audit.audit_all(), self._watch_waiting()]

    def end(self) -> None:
        """Stop every feed; none starts until the next ``begin``."""
        self._control.stop_all()
        self.loads.stop_all()
        self.stores.end()
        self._tasks = None

    def _applied(self, engine_id: str) -> None:
        # Resolved late: sharing may replace it.
        self._accounts.inflight.applied(engine_id)

    def is_stored(self, engine_id: str, block: BlockHash) -> bool:
        """Whether the engine's events have shown that it stored this block, or will never show it here."""
        engine = self.fleet.get(engine_id)
        if engine is None or not engine.publishes_events or engine.residency is None:
            return True
        if self._shared is not None and not self._shared.lease_manager.follows(engine_id):
            # The replica that follows it writes them to the index.
            return False
        if engine.residency.writer.learned is not None:
            # Its hashes are not those of prompts in flight.
            return True
        return engine.residency.holds(block)

    def engine_up(self, engine: Engine) -> None:
        """Implement ``FleetListener``."""
        base, address = engine.base_model, engine.engine
        if base is None or self._tasks is None:
            return
        self._learn_adapters(engine, base)
        if engine.probe is not None and engine.probe.model != base:
            engine.forget_probe()
        # new, moved, or another model: follow it from the start.
        if not self._control.follows(address, base):
            self._control.stop(engine.engine_id)
            self.scopes.remove(engine.engine_id)
        shadow = None if engine.publishes_events else self._config.model(base).shadow_spec()
        if shadow is not None and engine.shadow is None:
            _log.warning(
                f"estimate: start the engine with {EVENTS_OPTION[engine.kind]}", engine=engine.engine_id
            )
        residency = self.scopes.assign(engine.engine_id, base)
        self._find_stores(engine, residency, base)
        engine.learn_from(residency, shadow=shadow)
        self._learn_setup(engine)
        if engine.publishes_events and not self._control.follows(address, base):
            self._control.follow(address, base, self._tasks)

    def engine_down(self, engine: Engine) -> None:
        """Implement ``FleetListener``."""
        # Without events the state of its cache is unknown now: start over.
        engine.reset()
        engine.forget_probe()
        self._abandon(engine)
        if not engine.silent:
            self.feeds.suspect(engine.engine_id)

    def _abandon(self, engine: Engine, *, lost: bool = False) -> None:
        """Move requests that wait for its first byte to other engines, where one may answer them: an engine
        that is removed while it computes is better than none."""
        engine.abandon(self._elsewhere(engine), lost=lost)

    def _elsewhere(self, engine: Engine, *, continues: bool = False) -> Callable[[Attempt], bool]:
        """Return whether another engine may answer a request of this one, or go on with its stream."""
        now, without = self._clock(), frozenset((engine.engine_id,))

        def elsewhere(attempt: Attempt) -> bool:
            request, work = attempt.request, attempt.work
            tokens = work.prompt_tokens + 1 if work.known and work.prompts == 1 else 0
            length = Length(tokens, tokens) if tokens else NO_LENGTH
            try:
                found = self._eligible.engines(request, without, length)
            except ApiError:
                return False
            return any(
                other.up
                and other.breaker.allows(now)
                and other.context_tokens(request.model) >= tokens
                and (other.says_ids or not continues)
                for other in found
            )

        return elsewhere

    async def _watch_waiting(self) -> None:
        """Check waiting requests regularly: breakers and feeds do not notify."""
        while True:
            looked_s = self._clock()
            await asyncio.sleep(_WATCH_S)
            for engine in self.fleet:
                if engine.waiting:
                    self._abandon(engine, lost=True)
                self._watch_streams(engine, self._config.proxy)
                if engine.feed is not None and engine.feed.restarts != engine.seen_restarts:
                    self._feed_restarted(engine, engine.feed.restarts, looked_s)

    def _watch_streams(self, engine: Engine, proxy: ProxySettings) -> None:
        """End what goes on from other engines: this one stalls, or is drained and ends soon."""
        left_s = self._left_s(engine, proxy)
        if engine.waiting and left_s <= LAST_S:
            engine.abandon(self._elsewhere(engine), drained=True)
        if not engine.answering or not proxy.continue_streams:
            return
        if proxy.stall_s:
            engine.end_stalled(self._clock() - proxy.stall_s)
        if left_s < math.inf:
            engine.move_streams(self._elsewhere(engine, continues=True), left_s)

    def _left_s(self, engine: Engine, proxy: ProxySettings) -> float:
        """Seconds until the streams of a drained engine must have ended or left; infinite: none must."""
        if engine.held in ("", NOT_READY):
            engine.drained_s = None
            return math.inf
        now = self._clock()
        if engine.drained_s is None:
            engine.drained_s = now
        left_s = math.inf if engine.ends_s is None else engine.ends_s - self._accounts.wall()
        if proxy.move_drained_s:
            left_s = min(left_s, engine.drained_s + proxy.move_drained_s - now)
        return left_s

    def moves(self, engine: Engine) -> int:
        """Return how many streams of a drained engine are to go on from others, as predicted now."""
        proxy = self._config.proxy
        left_s = self._left_s(engine, proxy)
        if left_s == math.inf or not proxy.continue_streams:
            return 0
        return sum(map(self._elsewhere(engine, continues=True), engine.streams_leaving(left_s)))

    def _feed_restarted(self, engine: Engine, restarts: int, looked_s: float) -> None:
        """Handle a feed whose events are those of a new process. Where metrics tell when processes started,
        they decide: two engines that publish at one address look like one that restarts all the time."""
        engine.seen_restarts = restarts
        now = self._clock()
        if engine.started is None and now - engine.restart_s >= _RESTART_S_MIN:
            engine.restart_s = now
            engine.forget_probe()
            engine.end_older(looked_s)

    def engine_restarted(self, engine: Engine) -> None:
        """Implement ``FleetListener``."""
        engine.reset()
        engine.forget_probe()
        now = self._clock()
        # By its own clock, which may differ from ours; after the poll that the old process answered.
        age_s = self._accounts.wall() - (engine.started or math.inf)
        began_s = min(now, max(engine.polled_s, now - max(0.0, age_s)))
        # An answer that has begun cannot be asked for again: where the clocks contradict each other, only
        # those that the old process had at the last poll.
        engine.end_older(began_s, began_s if age_s > 0 else engine.polled_s)
        if engine.feed is not None and engine.feed.disconnects == engine.polled_disconnects:
            # The feed's connection is that to the old process, which was still there at the last poll.
            self.feeds.reconnect(engine.engine_id)
        self.feeds.suspect(engine.engine_id)

    def engine_asleep(self, engine: Engine, *, woke: bool) -> None:
        """Implement ``FleetListener``. Sleep empties vLLM's caches; its events say so with the next step, and
        then what was stored since."""
        if not woke or engine.clears == engine.polled_clears:
            engine.reset(cleared="all")

    def engine_load(self, engine: Engine, *, running: int, waiting: int) -> None:
        """Implement ``FleetListener``."""
        engine.polled_s = self._clock()
        engine.polled_clears = engine.clears
        engine.polled_disconnects = 0 if engine.feed is None else engine.feed.disconnects
        self._learn_setup(engine)
        layout = engine.layout
        if layout is not None and engine.base_model in self._files:
            self._compare_layout(engine.base_model, engine, layout)
        self._configure_pool(engine, layout)
        # SGLang renews its gauges after tens of steps only (``decode_log_interval``).
        if not self.loads.is_fresh(engine.engine_id):
            engine.load.report(running=running, waiting=waiting, now=self._clock(), usage=engine.kv_usage)

    def _configure_pool(self, engine: Engine, layout: CacheLayout | None) -> None:
        groups = () if layout is None else layout.groups
        engine.load.pages.configure(engine.pool_blocks or 0, groups)
        engine.evictions.configure(engine.pool_blocks or 0, groups, vllm=engine.kind == "vllm")

    def _load_read(self, engine_id: str, reading: LoadReading | None) -> None:
        """Handle a message of an engine's load socket."""
        engine, stats = self.fleet.get(engine_id), self._accounts.load_stats
        stats.socket_readings += reading is not None
        stats.socket_malformed += reading is None
        if engine is None or reading is None:
            return
        usage, info = None, engine.server_info
        if reading.max_tokens:
            usage = min(1.0, reading.used_tokens / reading.max_tokens)
        page = 0 if info is None else info.attention_block_size or 0
        if engine.pool_blocks is None and page and reading.max_tokens:
            engine.pool_blocks = reading.max_tokens // page  # an engine without metrics
            self._configure_pool(engine, engine.layout)
        engine.load.report(running=reading.running, waiting=reading.waiting, now=self._clock(), usage=usage)

    def _learn_setup(self, engine: Engine) -> None:
        """Pass on the engine's statements and the hints of its model's file."""
        self.loads.follow(engine.engine_id, load_source(engine.engine, engine.server_info), self._tasks)
        stated = [one for one in (engine.server_info, engine.stated) if one is not None]
        engine.has_unseen_caches = any(one.has_unseen_caches for one in stated)
        if engine.residency is None or engine.base_model is None:
            return
        model = engine.base_model
        configured, facts = self._config.model(model).facts(), self._facts(model)
        file, info = self._files.get(model, ModelConfigFile()), engine.server_info
        if info is not None:
            # SGLang's windows are without the token itself (``get_attention_sliding_window_size``).
            page, window = info.attention_block_size or 0, (file.sliding_window or 1) - 1
            engine.follow_parts(parts_spec(info.part_pools, page, window))
        evidence = setup_evidence(engine.kind, (engine.server_info, engine.stated), file, configured, facts)
        engine.residency.writer.learn_setup(evidence)
        if engine.shadow is not None:
            known = PoolEvidence(
                setup=evidence,
                facts=facts,
                pool_blocks=engine.pool_blocks,
                kinds=file.likely_kinds,
                window=file.sliding_window,
            )
            engine.size_shadow(estimated_spec(self._config.model(model).shadow, known))

    def _make_engine(self, address: EngineAddress, *, fleet_changed: Callable[[], None]) -> Engine:
        """Make an engine and register its cleanup. The only place where engines are made."""
        return Engine(
            address,
            self._accounts,
            fleet_changed=fleet_changed,
            elsewhere=None if self._shared is None else self._shared.lookup,
            leaving=(
                self._abandon,
                lambda engine: self._control.stop(engine.engine_id),
                lambda engine: self.scopes.remove(engine.engine_id),
                lambda engine: self._audit.forget(engine.engine_id),
                lambda engine: self.loads.stop(engine.engine_id),
                *self._leaving,
                self._forget_adapters,
            ),
            events_due=self.feeds.computed,
        )

    def _feed_is(self, engine_id: str, stats: FeedStats | None) -> None:
        """Note that a feed started, changed its state, or stopped (None)."""
        engine = self.fleet.get(engine_id)
        if engine is not None:
            engine.feed = stats

    def _learn_adapters(self, engine: Engine, base: str) -> None:
        cards = [card for card in engine.models if card.parent is not None and card.root]
        self._adapters.learn(base, {card.id: card.root or "" for card in cards})

    def _forget_adapters(self, engine: Engine) -> None:
        """Forget adapters that only the engine that left had, once for all engines that leave together."""
        if engine.base_model is None or not engine.adapters:
            return
        if not self._adapters_left:
            asyncio.get_running_loop().call_soon(self._keep_adapters)
        self._adapters_left.add(engine.base_model)

    def _keep_adapters(self) -> None:
        served = self.fleet.adapters
        for base in self._adapters_left:
            self._adapters.keep(base, served)
        self._adapters_left.clear()

    def _facts(self, model: str) -> ModelFacts:
        facts = self._config.model(model).facts()
        file = self._files.get(model, ModelConfigFile())
        facts = complete(facts, file, self._kinds.get(model, ()))
        return msgspec.structs.replace(facts, lora_paths=self._adapters.paths_of_model(model))

    def prompts_of(self, config: Config) -> dict[str, ModelPrompts]:
        """Prompt settings of each model; the adapters' paths are the dicts kept here."""
        return {
            name: msgspec.structs.replace(
                config.model(name).prompts(), lora_paths=self._adapters.named(name, configured)
            )
            for name, configured in config.adapters().items()
        }

    def tokenizer_of(self, model: str) -> tuple[str, ModelPrompts]:
        """Return the configured tokenizer of a served model and its other prompt settings."""
        configured = self._config.model(model)
        prompts = msgspec.structs.replace(configured.prompts(), lora_paths=self._adapters.own_paths(model))
        return configured.tokenizer, prompts

    def take(self, config: Config) -> None:
        """Apply a changed configuration: follow engines of models with changed facts again, and update the
        paths of adapters."""
        before, self._config = self._config, config
        if config.stores != before.stores:
            self._take_stores(config.stores)
        self._adapters.configure(config.adapters())
        served = [engine for engine in self.fleet if engine.base_model is not None]
        for engine in served:
            self._learn_adapters(engine, engine.base_model or "")
        bases = {engine.base_model or "" for engine in served}
        self._relearn({base for base in bases if _cache_facts(before, base) != _cache_facts(config, base)})

    def _take_stores(self, stores: tuple[StoreSettings, ...]) -> None:
        self.stores.take(stores, lambda model: self.scopes.scope(model).index)
        for engine in self.fleet:
            if engine.residency is not None and engine.base_model is not None:
                self._find_stores(engine, engine.residency, engine.base_model)

    def _find_stores(self, engine: Engine, residency: Residency, model: str) -> None:
        """Set the stores with feeds of their own that the engine loads from."""
        found = self.stores.of_engine(engine.engine.base_url, model)
        residency.writer.load_from(found)
        engine.load_rate = self.stores.load_rate(found)

    def learn_file(self, model: str, file: ModelConfigFile) -> None:
        """Use a served model's own ``config.json``."""
        # Configured values take precedence over it, and the events' values of a group over both.
        if self._files.get(model) == file:
            return
        before = self._facts(model)
        self._files[model] = file
        self._kinds.pop(model, None)
        self._layouts.pop(model, None)
        if self._facts(model) != before:
            self._relearn({model})
        for engine in self.fleet:
            if engine.base_model == model:
                self._learn_setup(engine)

    def _compare_layout(self, model: str, engine: Engine, layout: CacheLayout) -> None:
        """Compare a model's file with the groups that an engine's events show."""
        # Kinds that the events do not name (vLLM 0.20 and 0.21) are taken from the file once it yields the
        # same number of groups; not before, since a look-up in a window that is not there would predict too
        # much.
        if self._layouts.get(model) == layout:
            return
        self._layouts[model] = layout
        file, residency = self._files[model], self.scopes.engine(engine.engine_id)
        if residency is not None and residency.assumed_kinds:
            kinds = file.group_kinds(len(layout.groups))
            if kinds and kinds != self._kinds.get(model):
                before = self._facts(model)
                self._kinds[model] = kinds
                if self._facts(model) != before:
                    self._relearn({model})
        elif other := file.other_windows(layout.groups):
            _log.warning(
                "an engine has another sliding window than its model's config.json; the engine's is used",
                model=model,
                engine=engine.engine_id,
                window_tokens=other,
                config_json_tokens=file.sliding_window,
            )

    def _relearn(self, bases: set[str]) -> None:
        """Follow the engines of these models again, with changed facts."""
        engines = [engine for engine in self.fleet if engine.base_model in bases]
        for engine in engines:
            self._control.stop(engine.engine_id)
            engine.learn_from(None, shadow=None)
        for base in bases:
            self.scopes.relearn(base)
        for engine in engines:
            if engine.up:
                self.engine_up(engine)


def complete(facts: ModelFacts, file: ModelConfigFile, kinds: tuple[str, ...] = ()) -> ModelFacts:
    """Complete configured facts by a model's ``config.json``. ``kinds``: those of the groups, () if they must
    not be taken from the file."""
    if facts.attention_chunk_size is None:
        facts = msgspec.structs.replace(facts, attention_chunk_size=file.attention_chunk_size)
    if facts.kinds or not kinds:
        return facts
    window = file.sliding_window
    slides = (idx for idx, kind in enumerate(kinds) if kind == "sliding_window")
    windows = {} if window is None else dict.fromkeys(slides, window)
    return msgspec.structs.replace(facts, kinds=dict(enumerate(kinds)), windows=windows | facts.windows)


def setup_evidence(
    kind: EngineKind,
    statements: Iterable[EngineStatement | None],
    file: ModelConfigFile,
    configured: ModelFacts,
    facts: ModelFacts,
) -> SetupEvidence:
    """Statements of an engine in order of precedence, with hints of its model's file; ``facts`` are the
    configured ones, completed by the file."""
    return SetupEvidence(
        kind=kind,
        statements=tuple(one for one in statements if one is not None),
        drafter=file.drafter_kind,
        replay_tokens=file.replay_window or 0,
        from_file=frozenset(name for name in _OF_FILE if getattr(facts, name) != getattr(configured, name)),
    )


def _cache_facts(config: Config, model: str) -> tuple[bool, ModelConfig]:
    """All facts except prompt settings: those that the index layout depends on. Adapter paths enter
    unchanged."""
    rest = msgspec.structs.replace(config.model(model), **dict.fromkeys(_OF_PROMPTS))
    return model in config.models, rest
