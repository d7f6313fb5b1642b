"""One engine: who it is, and everything that is known of it or under way there.

Identity, addresses, models and state are the fleet's (``EngineStatus``); here they meet the engine's parts:
what it holds (``residency``, or a ``shadow`` where it publishes no events), its ``feed``, what it has to do
(``load``), how fast it is (``rates``), whether it is well (``breaker``), and how predictions did
(``receipts``). A room below is given its own part, never the whole. The composition root makes engines;
``close`` is the only way out. What no single engine can own is in ``Accounts``; what other replicas know is
asked through ``SharedView``: a look raises nothing and waits no longer than its deadline, and what it could
not learn is ``unknown``, never a guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, Protocol

import msgspec
import structlog

from publisher.block_hash import HashScheme
from router.admission.admission_queue import AdmissionQueue
from router.feeds.base import FeedState, FeedStats
from router.feeds.position import expected_hit
from router.fleet.identity import EngineAddress, EngineId
from router.fleet.status import EngineStatus, ResponseHolders
from router.index.base import PoolListener, Rows
from router.index.learn.layout import CacheLayout
from router.index.model import HashedPrompt, Residency
from router.index.query_plan import EngineHit
from router.observe.history import HotPrefixes
from router.observe.receipts import EngineReceipts, ReceiptLog, SloStats
from router.placement.affinity import AffinityMap, Shadow, ShadowPrompt, ShadowSpec, ShadowStats
from router.placement.candidate import Candidate, Confidence, Hit
from router.placement.inflight import InflightPrefixes
from router.placement.load.account import LoadAccount, LoadStats
from router.placement.load.evictions import EvictionForecast
from router.placement.load.others import NO_OTHERS, OthersLoad
from router.placement.load.rates import FleetRates
from router.placement.wait import AdmissionStats
from router.prompts.prompt import Prompt
from router.proxy.attempt import Attempt
from router.proxy.breaker import Breaker

# The order in engines that schedule by priority (vLLM: ``--scheduling-policy priority``): lower goes first.
#
#     priority = class + milliseconds of arrival + engine_priority * milliseconds of uncached work
#
# The class comes first: negative values for ``high``, from 0 for ``normal``, from ``BAND_MS`` for ``low``,
# so that no request passes one of a class above. Within a class a prompt waits for those that come up to
# ``engine_priority`` times its own work later, and for no others: nothing starves.
#
# Routers share engines, so arrival counts from one moment of the wall clock. A router whose clock is a
# second ahead loses a second to the others.
#
# vLLM reads a header (``ENGINE_PRIORITY``) before the body's ``priority``
# (vllm/entrypoints/generate/base/serving.py ``_get_priority``, 0.32 and 0.33): bodies stay as they came.


BAND_MS: Final = 1 << 42
"""Values of one class: 139 years of milliseconds. The three together fit the 53 bits of a JSON number."""
_EPOCH_S: Final = 1_767_225_600
"""2026-01-01 UTC."""
_NORMAL: Final = 1


class EngineOrder(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in its engine's order, but for its work there."""

    now: float
    """Arrival, in the router's monotonic seconds."""
    weight: float
    """What a second of uncached work counts, in seconds of arrival."""
    band: int = 0
    """Class: -1 is high, 0 normal, 1 low."""

    def rank_s(self, work_s: float) -> float:
        """Key in this router's accounts, for ``work_s`` of uncached work; lower goes first."""
        return self.band * (BAND_MS / 1000) + self.now + self.weight * work_s

    def priority(self, work_s: float, wall_s: float | None = None) -> int:
        """Value for the engine; ``wall_s``: Unix time of the arrival, now by default."""
        since_s = (time.time() if wall_s is None else wall_s) - _EPOCH_S + self.weight * work_s
        return self.band * BAND_MS + min(BAND_MS - 1, max(0, round(1000 * since_s)))


def order_of(priority_class: int, now: float, weight: float) -> EngineOrder | None:
    """Order of a request of this class (``QueueTicketRequest.priority``); None if the setting is off."""
    return EngineOrder(now, weight, priority_class - _NORMAL) if weight else None


_log = structlog.get_logger()
_CONFIDENCE: dict[str, Confidence] = {
    "native": "exact",
    "learned": "learned",
    "assumed": "assumed",
    "shadow": "shadow",
}
_NO_SCHEME = HashScheme()
_READY = FeedState.READY
_EVENTS_DUE_TOKENS = 4096
"""Prompt tokens that fill a block of every group, where the block sizes are not known yet."""


class PeerSnapshot(msgspec.Struct, frozen=True):
    """What one look told for one prompt."""

    hits: Mapping[str, EngineHit] = {}
    """Engines that another replica follows; those followed here are for the caller to predict."""
    load: Mapping[str, OthersLoad] | None = {}
    """What the other replicas have in flight, by engine; None: that is not known."""
    stores: Mapping[str, Mapping[HashScheme, Rows]] = {}
    """What other replicas were told of stores that engines share, by model and hash scheme: for predicting
    the engines followed here (``router.index.offload_rules.shared_part``)."""
    problem: str = ""
    """Why the shared index could not be asked; "" where it answered."""


NO_PEER_SNAPSHOT = PeerSnapshot()


class SharedView(Protocol):
    """One index of many replicas, as a planner sees it."""

    def scheme(self, engine_id: str) -> HashScheme | None:
        """The hash scheme of an engine that another replica follows, as last heard."""

    def layout(self, engine_id: str) -> CacheLayout | None:
        """The cache layout of an engine that another replica follows, as last heard."""

    def feed_state(self, engine_id: str) -> str | None:
        """State of the feed at the replica that follows the engine; None where nobody is known to."""

    async def look(
        self, prompt: HashedPrompt | None, engines: Mapping[str, str], *, detail: bool = False
    ) -> PeerSnapshot:
        """Ask the shared index about ``engines`` (id -> model); ``prompt`` None: about their load only.

        ``detail``: hits by spec class too.
        """


class Accounts:
    """What the router remembers of its own requests across engines: the medians and counters of all of them,
    the prompts in flight and the text affinity, which are searched for all engines at once.

    One per router. ``now`` is the router's clock in monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.rates = FleetRates()
        self.load_stats = LoadStats()
        self.admission_stats = AdmissionStats()
        self.inflight = InflightPrefixes()
        self.affinity = AffinityMap()
        self.hot = HotPrefixes()
        self.responses = ResponseHolders()
        self.shadow_stats = ShadowStats()
        self.receipts = ReceiptLog()
        self.slo_stats = SloStats()
        self.room: AdmissionQueue | None = None
        """Where requests wait for engines; None where they do not."""

        self.integrity_problems = 0
        """Contradictions found so far, where they are looked for (``server.check_every``)."""

    def leave(self, engine_id: EngineId) -> None:
        """The engine left the fleet."""
        self.inflight.forget(engine_id)
        self.affinity.forget(engine_id)
        self.responses.forget(engine_id)


class PromptView(msgspec.Struct, gc=False):
    """One prompt as all engines are asked about it: what is searched for all of them at once, by engine id.

    ``held`` is what the index says, ``common`` and ``coming`` what the prompt shares with prompts in flight
    (or, of a text without tokens, with what went there lately), in tokens; ``others`` the load by other
    replicas, None where it is not known; ``shadows`` the prompt as shadows look for it.
    """

    tokens: int
    held: Mapping[str, EngineHit] = {}
    common: Mapping[str, int] = {}
    coming: Mapping[str, int] = {}
    others: Mapping[str, OthersLoad] | None = {}
    shadows: ShadowPrompt | None = None
    order: EngineOrder | None = None
    """Its place in the engines' own order, where they have one."""
    prompt: Prompt | None = None
    """The prompt itself; None where its tokens are not known."""
    hits: dict[tuple[int, int, int], Hit] = msgspec.field(default_factory=dict)
    """Those worked out so far, by what is held (its id), common and coming."""


class Engine(EngineStatus):
    """See the module. ``leaving`` are told when it closes, each once, the engine being whole until then."""

    __slots__ = (
        *("_accounts", "_elsewhere", "_events_due", "_leaving"),
        *("breaker", "closed", "evictions", "feed", "load", "rates", "receipts", "residency"),
        *("rests_until", "shadow", "takes_order", "waiting"),
    )

    def __init__(
        self,
        address: EngineAddress,
        accounts: Accounts,
        *,
        fleet_changed: Callable[[], None] = lambda: None,
        elsewhere: SharedView | None = None,
        leaving: tuple[Callable[[Engine], None], ...] = (),
        events_due: Callable[[EngineId, float], None] = lambda engine_id, since: None,
    ) -> None:
        super().__init__(address, fleet_changed=fleet_changed)
        self.breaker = Breaker()
        self.rates = accounts.rates.engine()
        self.load = LoadAccount(self.rates, stats=accounts.load_stats)
        self.evictions = EvictionForecast()
        """Forecast of evictions from its pool for prompts in flight."""
        self.receipts = EngineReceipts()
        self.residency: Residency | None = None
        """What it holds, by its events; None before its model is known."""
        self.shadow: Shadow | None = None
        """What it probably holds; only of an engine without events."""
        self.feed: FeedStats | None = None
        """Of the feed that runs here; None where none does."""
        self.rests_until = 0.0
        """It is not asked to compute prompts for others before, since it handed nothing over."""
        self._accounts = accounts
        self._elsewhere = elsewhere
        self._leaving = leaving
        self._events_due = events_due
        self.waiting: dict[Attempt, Callable[[], object]] = {}
        """Requests without a first byte that other engines can be asked for, and how to end their wait."""
        self.takes_order = True
        """It has not refused a request for its priority."""
        self.closed = False
        """It has left the fleet: nothing more is to be kept of it."""

    @property
    def unusable_events(self) -> int:
        """How many of its latest events in a row, or messages, could not be used; 0 where its events can."""
        if self.residency is None:
            return 0
        count = self.residency.writer.unusable_events
        if self.feed is not None and not self.feed.events:
            count += sum(self.feed.malformed_frames.values())
        return count

    def close(self) -> None:
        """It left the fleet. What a placement that is still open there says goes nowhere."""
        self.closed = True
        self.rates.close()
        self._accounts.leave(self.engine_id)
        for leave in self._leaving:
            try:
                leave(self)
            except Exception:  # noqa: BLE001  # one part's fault must not keep the others in
                _log.exception("engine not left", engine=self.engine_id)
        self.residency = self.shadow = self.feed = None

    @property
    def overdue(self) -> bool:
        """Implement ``EngineStatus``."""
        return self.breaker.overdue(self._accounts.now())

    def abandon(self, elsewhere: Callable[[str | None], bool], *, lost: bool = False) -> None:
        """It went down: what waits for a first byte is given to another engine, where ``elsewhere`` says that
        there is one for the model. ``lost``: only what waits in vain by its breaker."""
        if not lost:
            self.takes_order = True  # it may come back with another scheduling policy
        now = self._accounts.now()
        for attempt, cancel in list(self.waiting.items()):
            if lost and not self.breaker.lost(attempt.asked_s, now, expected_s=attempt.expected_s):
                continue
            if elsewhere(attempt.request.model):
                del self.waiting[attempt]
                attempt.abandoned = True
                cancel()

    def reset(self, *, cleared: bool = False) -> None:
        """What it was thought to hold by our own requests is gone; ``cleared``: all of its GPU cache is."""
        if cleared and self.residency is not None:
            self.residency.writer.clear()
        if self.shadow is not None:
            self.shadow.reset()
        self._accounts.inflight.forget(self.engine_id)

    def computed(self, tokens: int, since: float) -> None:
        """Its answer shows that it computed so many tokens of a prompt since then (clock seconds): where they
        fill blocks, the feed that follows it here has to hear of them."""
        if self.feed is None:
            return
        layout = self.layout
        if tokens >= (_EVENTS_DUE_TOKENS if layout is None else 2 * _longest_block(layout)):
            self._events_due(self.engine_id, since)

    def learn_from(self, residency: Residency | None, *, shadow: ShadowSpec | None) -> None:
        """What it holds is kept there from now on (None: nowhere yet). ``shadow``: it publishes no events, so
        a shadow of this kind stands in for them, or the one that it has already."""
        self.residency = residency
        if residency is None:
            self.evictions.clear()
        else:
            pool = self.evictions
            residency.writer.pool = PoolListener(pool.stored, pool.removed, pool.clear)
        if shadow is None:
            self.shadow = None
        elif self.shadow is None:
            self.shadow = Shadow(shadow, self._accounts.shadow_stats)
        self._fleet_changed()

    @property
    def feed_state(self) -> str:
        """State of its feed, here or at another replica; ``none`` where it publishes nothing."""
        if self.feed is not None:
            return str(self.feed.state)
        told = None if self._elsewhere is None else self._elsewhere.feed_state(self.engine_id)
        return told or "none"

    @property
    def lasting_scheme(self) -> HashScheme | None:
        """``scheme``, where it stays until the fleet or what is known here of its hashes changes."""
        scheme = None if self.residency is None else self.residency.writer.scheme
        return self.scheme if scheme is None and self._elsewhere is None else scheme

    @property
    def scheme(self) -> HashScheme:
        """The scheme whose hashes stand for prompts in flight there."""
        scheme = None if self.residency is None else self.residency.writer.scheme
        if scheme is None and self._elsewhere is not None:
            scheme = self._elsewhere.scheme(self.engine_id)
        if scheme is None:
            scheme = _NO_SCHEME if self.shadow is None else self.shadow.spec.scheme
        return scheme

    @property
    def layout(self) -> CacheLayout | None:
        """How its cache is laid out, as far as that is known here or elsewhere."""
        layout = None if self.residency is None else self.residency.writer.layout
        if layout is None and self._elsewhere is not None:
            layout = self._elsewhere.layout(self.engine_id)
        return layout

    def hit(self, asked: PromptView) -> Hit:
        """What this engine has of a prompt, discounted by what its feed has missed."""
        name = self.engine_id
        held, common, coming = asked.held.get(name), asked.common.get(name, 0), asked.coming.get(name, 0)
        if held is None:
            if self.shadow is None or asked.shadows is None:
                return Hit(trunk_tokens=common, common_tokens=common)
            tokens, trunk = self.shadow.lookup(asked.shadows)
            held = EngineHit("shadow", tokens, trunk_tokens=trunk)
        return self._discounted(held, common, coming)

    def _discounted(self, held: EngineHit, common: int, coming: int) -> Hit:
        feed = self.feed
        unconfirmed = feed is not None and feed.unconfirmed and held.mode != "shadow"
        if held.mode == "unknown" or held.stale or unconfirmed:
            # Empty, but what a prompt in flight there will leave cannot be told before the layout is known.
            empty = held.mode == "unknown" and not common and self._known_empty
            # A stale trunk is nothing to count on, but a better bet than elsewhere.
            trunk = max(held.trunk_tokens if held.mode != "unknown" else 0, common)
            return Hit(0, 0, 0, trunk, coming, "exact" if empty else "none", common, held)
        gpu, cpu, storage = held.hit_tokens, held.cpu_tokens, held.storage_tokens
        confidence: Confidence = _CONFIDENCE[held.mode]
        if held.mode != "shadow" and (feed is None or feed.state is not FeedState.READY):
            gpu, cpu, storage = _expected(held, feed)
            if self.feed_state != FeedState.READY:
                confidence = "degraded"
        # Plain comparisons, as in ``Hit``.
        trunk, whole = held.trunk_tokens, gpu + cpu + storage
        trunk = common if trunk < common else trunk  # noqa: FURB136
        trunk = whole if trunk < whole else trunk  # noqa: FURB136
        replay = held.replay_tokens
        if coming <= replay:
            coming = 0  # the engine would compute all of it again
        return Hit(gpu, cpu, storage, trunk, coming, confidence, common, held, replay_tokens=replay)

    def after_evictions(self, hit: Hit, asked: PromptView) -> Hit:
        """Lower a hit by what this engine will evict for prompts in flight before it looks up this one."""
        prompt = None if asked.prompt is None else asked.prompt.behind(self.frontend)
        held = hit.held
        gpu, coming, soon = hit.gpu_tokens, hit.coming_tokens, hit.soon_tokens
        if prompt is None or held is None or held.mode != "native" or hit.whole_tokens > soon:
            return hit  # not of known blocks; or what the GPU loses may be loaded
        scheme = self.scheme
        unit = scheme.hash_block_size
        if unit != self.evictions.block_size:
            return hit
        hashes = prompt.hashes(scheme)
        left = self.evictions.at_lookup(hashes, asked.tokens, gpu // unit, coming // unit) * unit
        if left >= soon:
            return hit
        if left <= hit.replay_tokens:
            left = 0  # the engine would compute all of it again
        lowered = Hit(min(gpu, left), 0, 0, hit.trunk_tokens, min(coming, left), hit.confidence)
        lowered.common_tokens, lowered.held, lowered.evicted_tokens = hit.common_tokens, held, soon - left
        lowered.replay_tokens = hit.replay_tokens
        return lowered

    @property
    def _known_empty(self) -> bool:
        """Its history is known and it never stored a block: it cannot hit (unless chunk starts do)."""
        if self.feed is None or self.feed.state is not FeedState.READY or self.residency is None:
            return False
        writer = self.residency.writer
        return writer.layout is None and not writer.facts.has_chunks


def candidates(engines: Iterable[Engine], asked: PromptView, now: float) -> list[Candidate]:
    """These engines for one prompt, in order: what each has of it, how much it has to do, how fast it is."""
    # One loop and locals: this runs once per engine and request.
    told, others = asked.others, None if asked.others is None else NO_OTHERS
    tokens, order = asked.tokens, asked.order
    held_by, common, coming, hits = asked.held.get, asked.common.get, asked.coming.get, asked.hits
    found: list[Candidate] = []
    for engine in engines:
        name, feed = engine.engine_id, engine.feed
        held = held_by(name)
        if held is None or feed is None or feed.state is not _READY or held.mode == "unknown":
            hit = engine.hit(asked)
        else:  # engines that hold and share as much, and missed nothing, have the same
            key = id(held), common(name, 0), coming(name, 0)
            known = hits.get(key)
            hit = known if known is not None else hits.setdefault(key, engine.hit(asked))
            if engine.evictions.crowded and hit.soon_tokens:
                hit = engine.after_evictions(hit, asked)
        rate, interference_s = engine.rates.at(now)
        if told:
            others = told.get(name, NO_OTHERS)
        load = engine.load
        queue_s, running, waiting, idle_s, late_s, recent_s = load.ahead(now, others, rate)
        candidate = Candidate(
            name, hit, queue_s, running, waiting, idle_s, rate, interference_s, late_s, recent_s
        )
        behind_pages = 0
        if order is not None and waiting and engine.takes_order:
            work_s = rate * (tokens - hit.whole_tokens)
            behind_s, behind_pages = load.behind(order.rank_s(work_s), rate)
            candidate.queue_s = max(0.0, queue_s - behind_s)
        if tokens > load.pages.surely_fits_tokens:
            candidate.room_s = load.pages.wait_s(tokens, behind_pages)
            candidate.pool_share = load.pages.share(tokens)
        found.append(candidate)
    return found


@lru_cache(maxsize=256)
def _longest_block(layout: CacheLayout) -> int:
    return max([spec_class.block_size for spec_class in layout.classes])


def _expected(held: EngineHit, feed: FeedStats | None) -> tuple[int, int, int]:
    """What to expect of a hit on GPU, CPU and STORAGE while the feed does not know everything."""
    gpu = expected_hit(held.hit_tokens, held.alignment, feed)
    if not held.cpu_tokens and not held.storage_tokens:
        return gpu, 0, 0
    near = expected_hit(held.hit_tokens + held.cpu_tokens, held.alignment, feed)
    return gpu, near - gpu, expected_hit(held.offloaded_tokens, held.alignment, feed) - near
