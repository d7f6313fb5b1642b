"""One engine: its identity and its state.

Identity, addresses, models and status are the fleet's (``EngineStatus``); here they meet the engine's parts:
its cache (``residency``, or a ``shadow`` if it publishes no events), its ``feed``, its ``load``, its speed
(``rates``), its health (``breaker``), and the accuracy of its predictions (``receipts``). Lower packages get
their own part, never the whole. The composition root makes engines; ``close`` is the only way out. State that
belongs to no single engine is in ``Accounts``; state of other replicas comes through ``SharedView``: a
look-up raises nothing and waits no longer than its deadline, and missing answers are ``unknown``, never a
guess.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

import msgspec
import structlog

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import BlockHash
from kvatlas.router.admission.admission_queue import AdmissionQueue
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.feeds.position import expected_hit
from kvatlas.router.fleet.engine_probe import EngineProbe
from kvatlas.router.fleet.engines import EngineAddress, EngineId
from kvatlas.router.fleet.status import EngineStatus, Frontend
from kvatlas.router.index.base import PoolListener, Rows
from kvatlas.router.index.learn.layout import CacheLayout, retained_tokens
from kvatlas.router.index.model import HashedPrompt, Residency
from kvatlas.router.index.query_plan import EngineHit, Holders
from kvatlas.router.observe.books import Books
from kvatlas.router.observe.group_prefixes import GroupPrefixes
from kvatlas.router.observe.load_rate import LoadRate
from kvatlas.router.observe.receipt_log import ReceiptLog
from kvatlas.router.observe.receipts import EngineReceipts
from kvatlas.router.observe.requests import SessionLedger
from kvatlas.router.placement.affinity import AffinityMap
from kvatlas.router.placement.candidate import Candidate, Confidence, Cost, Hit
from kvatlas.router.placement.cost import ScoredCandidates
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.evictions import EvictionForecast, PooledPrompt
from kvatlas.router.placement.first_token import FirstTokenErrors, FirstTokenParts, SloStats
from kvatlas.router.placement.hot_prefixes import HotPrefixes
from kvatlas.router.placement.inflight import InflightPrefixes, Kept, coming_hit, kept_prefixes, kept_rule
from kvatlas.router.placement.load import LoadAccount, LoadStats
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.placement.partial_hits import PartialHits
from kvatlas.router.placement.radix_parts import PartsSpec, RadixParts, SentPrompt
from kvatlas.router.placement.rates import FleetRates
from kvatlas.router.placement.retention import RetentionHints
from kvatlas.router.placement.shadow import Shadow, ShadowPrompt, ShadowSpec, ShadowStats
from kvatlas.router.placement.wait_limit import AdmissionStats
from kvatlas.router.proxy.attempt import Answer, Attempt
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.moves import AT_ONCE_MAX, is_last, leaving
from kvatlas.router.proxy.paths import CacheReset

_log = structlog.get_logger()
_CONFIDENCE: dict[str, Confidence] = {
    "native": "exact",
    "learned": "learned",
    "assumed": "assumed",
    "shadow": "shadow",
}
_NO_SCHEME = HashScheme()
_READY = FeedState.READY
# Prompt tokens that fill a block of every group while its size is unknown.
_EVENTS_DUE_TOKENS = 4096


class PeerSnapshot(msgspec.Struct, frozen=True):
    """Other replicas' state for one prompt, from one look-up."""

    hits: Mapping[str, EngineHit] = {}
    """Hits of engines that another replica follows; those followed here are predicted by the caller."""
    load: Mapping[str, OthersLoad] | None = {}
    """Requests in flight of the other replicas, by engine; None: unknown."""
    stores: Mapping[str, Mapping[HashScheme, Rows]] = {}
    """Contents of shared stores by events that other replicas received, by model and hash scheme: to predict
    the engines followed here (``kvatlas.router.index.offloaded.shared_part``)."""
    problem: str = ""
    """Why the shared index could not be queried; "" if it answered."""


NO_PEER_SNAPSHOT = PeerSnapshot()


class SharedView(Protocol):
    """One index of many replicas, as used by a planner."""

    def scheme(self, engine_id: str) -> HashScheme | None:
        """Latest known hash scheme of an engine that another replica follows."""

    def layout(self, engine_id: str) -> CacheLayout | None:
        """Latest known cache layout of an engine that another replica follows."""

    def feed_state(self, engine_id: str) -> str | None:
        """State of the feed at the replica that follows the engine; None if no replica is known to."""

    async def look(
        self, prompt: HashedPrompt | None, engines: Mapping[str, str], *, detail: bool = False
    ) -> PeerSnapshot:
        """Query the shared index for ``engines`` (id -> model); ``prompt`` None: their load only.

        ``detail``: hits by spec class too.
        """


class EngineChanges:
    """Engines that changed, for each reader since it last looked: in anything that a decision reads of them,
    but for what the index holds."""

    __slots__ = ("_readers",)

    def __init__(self) -> None:
        self._readers: list[set[EngineId]] = []

    def follow(self) -> set[EngineId]:
        """Return a set that gets each engine that changes; its reader empties it, and ends by ``leave``."""
        changed: set[EngineId] = set()
        self._readers.append(changed)
        return changed

    def leave(self, changed: set[EngineId]) -> None:
        """End a reader's ``follow``."""
        self._readers = [one for one in self._readers if one is not changed]

    def note(self, engine_id: EngineId) -> None:
        """Note a change."""
        for changed in self._readers:
            changed.add(engine_id)

    def forget(self, engine_id: EngineId) -> None:
        """Drop an engine that left."""
        for changed in self._readers:
            changed.discard(engine_id)


class Accounts:
    """State of the router's own requests across engines: medians and counters of all engines, the prompts in
    flight, and the text affinity.

    One per router. ``now`` is the router's clock in monotonic seconds, ``wall`` the Unix time.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self.now = now
        self.wall = wall
        self.changes = EngineChanges()
        self.rates = FleetRates()
        self.load_stats = LoadStats()
        self.admission_stats = AdmissionStats()
        self.inflight = InflightPrefixes()
        self.affinity = AffinityMap()
        self.books = Books()
        self.hot_so_far = HotPrefixes()
        """Those of ``hot`` that are counted already: for entries themselves."""
        self.retention = RetentionHints()
        self.sessions = SessionLedger()
        self.group_prefixes = GroupPrefixes()
        self.shadow_stats = ShadowStats()
        self.receipts_so_far = ReceiptLog()
        """Those of ``receipts`` that are counted already."""
        self.slo_stats = SloStats()
        self.room: AdmissionQueue | None = None
        """Queue of requests that wait for engines; None without queueing."""

        self.free_until = -math.inf
        """Before this time no breaker keeps any engine out."""
        self.breaker_changes = 0
        """Changes with each change of a breaker."""
        self.integrity_problems = 0
        """Contradictions found so far (``server.check_every``)."""

    @property
    def receipts(self) -> ReceiptLog:
        """Receipts of all engines."""
        self.books.settle()
        return self.receipts_so_far

    @property
    def hot(self) -> HotPrefixes:
        """Hot prefixes of placed prompts."""
        self.books.settle()
        return self.hot_so_far

    def breaker_changed(self, free_until: float) -> None:
        """Note when a breaker must be asked again."""
        self.breaker_changes += 1
        self.free_until = min(self.free_until, free_until)

    def leave(self, engine_id: EngineId) -> None:
        """Drop an engine that left the fleet."""
        self.books.settle()
        self.inflight.forget(engine_id)
        self.affinity.forget(engine_id)
        self.sessions.forget(engine_id)
        self.changes.forget(engine_id)


class Hashed(Protocol):
    """A prompt by its hashes (``kvatlas.router.prompts.prompt.Prompt``)."""

    def behind(self, frontend: Frontend) -> Hashed | None:
        """Return the prompt of engines with this frontend; None: unknown."""

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]:
        """Return the hashes of its whole blocks."""


class PromptView(msgspec.Struct, gc=False):
    """One prompt's look-ups for all engines, by engine id.

    ``held``: the index's answer for single engines, ``alike`` for engines with equal hits, ``nothing`` for
    the others; ``common`` and ``coming``: tokens shared with prompts in flight (or, for a
    text without tokens, with texts that recently went there); ``others``: load of other replicas, None if
    unknown; ``shadows``: the prompt for look-ups in shadows.
    """

    tokens: int
    held: Mapping[str, EngineHit] = {}
    common: Mapping[str, int] = {}
    coming: Mapping[str, int] = {}
    others: Mapping[str, OthersLoad] | None = {}
    shadows: ShadowPrompt | None = None
    order: EngineOrder | None = None
    """Its place in the engines' own order, if they have one."""
    prompt: Hashed | None = None
    """The prompt; None if its tokens are unknown."""
    alike: Sequence[Holders] = ()
    nothing: Mapping[str, EngineHit] = {}


class Engine(EngineStatus):
    """One engine. ``leaving`` callbacks run once when it closes, while it is still complete."""

    __slots__ = (
        "_accounts",
        "_elsewhere",
        "_events_due",
        "_feed",
        "_leaving",
        "_parts_spec",
        "_probe",
        "_touched",
        "_unseen",
        "answering",
        "breaker",
        "closed",
        "drained_s",
        "evictions",
        "first_tokens",
        "hit_share",
        "ignores_ids",
        "life",
        "load",
        "load_rate",
        "parses",
        "parts",
        "polled_clears",
        "polled_disconnects",
        "polled_s",
        "rates",
        "receipts_so_far",
        "residency",
        "restart_s",
        "rests_until",
        "seen_restarts",
        "shadow",
        "takes_order",
        "waiting",
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
        self.rates = accounts.rates.engine(partial(getattr, self, "base_model"))
        self.load = LoadAccount(self.rates, stats=accounts.load_stats)
        self.evictions = EvictionForecast()
        """Forecast of evictions from its pool for prompts in flight."""
        self.first_tokens = FirstTokenErrors()
        self.receipts_so_far = EngineReceipts()
        """Sums over those of ``receipts`` that are counted already."""
        self.residency: Residency | None = None
        """Its cache by its events; None until its model is known."""
        # What receipts confirmed of its hits, if it has caches of which its events say nothing.
        self._unseen: PartialHits | None = None
        self.parts: RadixParts | None = None
        """Its windows or states by SGLang's rules, where they can be followed."""
        self._parts_spec: PartsSpec | None = None
        self.shadow: Shadow | None = None
        """Its assumed cache; only of an engine without events."""
        self._feed: FeedStats | None = None
        self._probe: EngineProbe | None = None
        self.hit_share = 1.0
        """Share of its predicted tokens that counts, by its probe."""
        self.load_rate: LoadRate | None = None
        """Rate of the store with a feed of its own that it loads from, if it is one."""
        self.life = 0
        """Number of its processes and outages seen here, each of which ends what was proven before."""
        self.rests_until = 0.0
        """It gets no prefill requests before this time, since it handed nothing over."""
        self.breaker.on_change = accounts.breaker_changed
        touched = partial(accounts.changes.note, self.engine_id)
        self.load.touched = self.rates.touched = self.evictions.touched = self._touched = touched
        self._accounts = accounts
        self._elsewhere = elsewhere
        self._leaving = leaving
        self._events_due = events_due
        self.waiting: dict[Attempt, Callable[[], object]] = {}
        """Requests without a first byte that may be asked again, and how to end their wait."""
        self.answering: dict[Attempt, Answer] = {}
        """Requests whose answer has begun, until their end."""
        self.ignores_ids = False
        """Its latest stored response had an id of its own."""
        self.takes_order = True
        """It has not refused a request for its priority."""
        self.parses = True
        """It has not refused to read the ids of a chat."""
        self.polled_s = -math.inf
        """Time of the last poll."""
        self.polled_clears = 0
        # Disconnects of its feed when its metrics were last read.
        self.restart_s = -math.inf
        """Time of the last restart that its feed showed."""
        self.seen_restarts = 0
        """Of its feed, those that were acted on."""
        self.polled_disconnects = 0
        """Of ``clears``, those known at the last poll."""
        self.drained_s: float | None = None
        """Since when it is drained; None: it is not."""
        self.closed = False
        """It has left the fleet: nothing more is recorded for it."""

    @property
    def feed(self) -> FeedStats | None:
        """Stats of the feed that runs here; None without one. Set again when their state has changed."""
        return self._feed

    @feed.setter
    def feed(self, feed: FeedStats | None) -> None:
        self._feed = feed
        self._touched()

    @property
    def probe(self) -> EngineProbe | None:
        """Outcome of its latest probe (``probing.py``); None: it was not probed."""
        return self._probe

    @probe.setter
    def probe(self, probe: EngineProbe | None) -> None:
        self._probe = probe
        # Where events tell a part only, receipts say what comes (``PartialHits``).
        self.hit_share = 1.0 if probe is None or self._unseen is not None else probe.hit_share
        if probe is not None:
            self.rates.model.probed(probe.timed)
        self._touched()

    def forget_probe(self) -> None:
        """Forget what was proven: another process may answer from now on."""
        self.life += 1
        self.probe = None

    @property
    def receipts(self) -> EngineReceipts:
        """Sums over its receipts."""
        self._accounts.books.settle()
        return self.receipts_so_far

    @property
    def unusable_events(self) -> int:
        """Number of its latest consecutive events, or messages, that could not be used; 0 if they can."""
        if self.residency is None:
            return 0
        count = self.residency.writer.unusable_events
        if self._feed is not None and not self._feed.events:
            count += sum(self._feed.malformed_frames.values())
        return count

    def first_token(
        self, candidate: Candidate, cost: Cost, prompt_tokens: int, order: EngineOrder | None = None
    ) -> FirstTokenParts:
        """Return the time to first token predicted for a prompt sent to it now; ``order``: the prompt's."""
        rank_s = 0.0 if order is None or not self.takes_order else order.rank_s(cost.prefill_s)
        uncached, load = cost.uncached_tokens, self.load
        work = load.asked(self._accounts.now(), uncached, prompt_tokens, candidate.running, rank_s)
        queue_s, prefill_s, engine_s = self.rates.model.seconds(work)
        pages_s, load_s = candidate.room_s - queue_s, cost.load_s
        pages_s = pages_s if pages_s > 0.0 else 0.0  # noqa: FURB136
        total_s = queue_s + pages_s + load_s + prefill_s + engine_s
        return FirstTokenParts(queue_s, pages_s, load_s, prefill_s, engine_s, total_s)

    def wait_s(self, candidate: Candidate, rank_s: float = 0.0) -> float:
        """Implement ``PredictsWait``."""
        rank_s = rank_s if self.takes_order else 0.0
        work = self.load.asked(self._accounts.now(), 1, 0, candidate.running, rank_s)
        queue_s, room_s = self.rates.model.seconds(work)[0], 0.0
        # At an engine without requests no prompt waits for pages: none would be released.
        if candidate.running or candidate.waiting:
            room_s = candidate.room_s
        return queue_s if queue_s > room_s else room_s  # noqa: FURB136

    def level_s(
        self, scored: ScoredCandidates, index: int, order: EngineOrder | None = None
    ) -> tuple[float, float]:
        """Implement ``Predicting``."""
        candidate = scored.candidates[index]
        parts = self.first_token(candidate, scored.cost(index, candidate), scored.prompt_tokens, order)
        return parts.total_s, self.first_tokens.margin_s or 0.0

    def close(self) -> None:
        """Remove it from the fleet. Later reports of its open placements have no effect."""
        self.closed = True
        self.rates.close()
        self._accounts.leave(self.engine_id)
        for leave in self._leaving:
            try:
                leave(self)
            except Exception:  # noqa: BLE001  # a failing part must not keep the others in
                _log.exception("engine not left", engine=self.engine_id)
        self.residency = self.shadow = self.feed = None

    @property
    def overdue(self) -> bool:
        """Implement ``EngineStatus``."""
        return self.breaker.overdue(self._accounts.now())

    def abandon(
        self, elsewhere: Callable[[Attempt], bool], *, lost: bool = False, drained: bool = False
    ) -> None:
        """Move requests that wait for its first byte to another engine, if ``elsewhere`` finds one for them.
        ``lost``: only those that its breaker considers lost; ``drained``: all, since it ends soon."""
        if not lost:
            # It may come back with another scheduling policy, or other endpoints.
            self.takes_order = self.parses = True
        now = self._accounts.now()
        for attempt, cancel in list(self.waiting.items()):
            request = attempt.request
            # Only one engine can continue from an earlier response, or was asked for.
            if request.pinned is not None or request.earlier_response is not None:
                continue
            if lost and not self.breaker.lost(attempt.asked_s, now, expected_s=attempt.expected_s):
                continue
            if elsewhere(attempt):
                del self.waiting[attempt]
                attempt.abandoned, attempt.died = True, not lost and self.unreachable
                attempt.drained = drained
                cancel()

    def end_older(self, than_s: float, begun_s: float | None = None) -> None:
        """End requests that were sent before the process that runs there now, which began at ``than_s``:
        nothing will come. Those that wait are placed again, here or elsewhere; answers that have begun, and
        of which nothing came since ``begun_s`` (None: ``than_s``), break off."""
        self.takes_order = self.parses = True
        for attempt, cancel in list(self.waiting.items()):
            if attempt.asked_s < than_s:
                del self.waiting[attempt]
                attempt.abandoned = attempt.blameless = attempt.died = True
                cancel()
        since_s = than_s if begun_s is None else min(than_s, begun_s)
        for attempt, answer in list(self.answering.items()):
            if attempt.asked_s < since_s and answer.lose(since_s):
                attempt.blameless = attempt.died = True

    def end_stalled(self, since_s: float) -> None:
        """End the streams that may go on elsewhere, where no answer of this engine has brought anything since
        then: it stalls, whatever it says of its health."""
        if all(answer.heard_s < since_s for answer in self.answering.values()):
            for attempt, answer in list(self.answering.items()):
                if attempt.kept is not None and not attempt.kept.check():
                    answer.lose(since_s)

    def streams_leaving(self, left_s: float) -> list[Attempt]:
        """Return the streams that are to go on elsewhere, since this engine ends in ``left_s``; the smallest
        first."""
        found = [one for one in self.answering if one.kept is not None and one.kept.movable]
        found = [found[at] for at in leaving([one.rest_s() for one in found], left_s)]
        return sorted(
            found, key=lambda one: 0 if one.kept is None else one.kept.prompt_tokens + len(one.kept.ids)
        )

    def move_streams(self, elsewhere: Callable[[Attempt], bool], left_s: float) -> None:
        """Have streams leave for other engines; ``elsewhere``: one of them may answer a request. This one
        ends in ``left_s``."""
        streams = self.streams_leaving(left_s)
        last = is_last(len(streams), left_s)
        room = AT_ONCE_MAX
        if not last:
            room -= sum([one.leaving is not None and one.leaving.warms for one in self.answering])
        for attempt in streams:
            if room <= 0:
                break
            if attempt.leave is None or not (last or attempt.leaving is None) or not elsewhere(attempt):
                continue
            room -= 1
            leaving = attempt.leaving = attempt.leaving or attempt.leave()
            (leaving.now if last else leaving.warm)()

    @property
    def clears(self) -> int:
        """Clears of its GPU cache that its events have shown."""
        return 0 if self.residency is None else self.residency.writer.clears

    def reset(self, *, cleared: CacheReset = "") -> None:
        """Drop the state derived from our own requests, and the caches that were emptied."""
        if cleared and self.residency is not None:
            self.residency.writer.clear(connector=cleared == "all")
        if self.shadow is not None:
            self.shadow.reset()
        self._accounts.inflight.forget(self.engine_id)

    def computed(self, tokens: int, since: float) -> None:
        """Note that its answer shows this many computed tokens since then (clock seconds): if they fill
        blocks, its feed must receive their events."""
        if self._feed is None:
            return
        block, layout = 0, self.layout
        if layout is not None:
            block = _longest_block(layout)
        elif self.residency is not None:  # as it states, before its first event
            facts = self.residency.writer.facts
            block = max(facts.attention_block_size or 0, facts.mamba_block_size or 0)
        if tokens >= (2 * block or _EVENTS_DUE_TOKENS):
            self._events_due(self.engine_id, since)

    def learn_from(self, residency: Residency | None, *, shadow: ShadowSpec | None) -> None:
        """Set where its cache is recorded from now on (None: not yet). ``shadow``: it publishes no events, so
        a shadow of this kind stands in, or the existing one."""
        self.residency = residency
        if residency is None:
            self._cleared()
        else:
            self._listen()
            residency.writer.session_stored = partial(self._accounts.sessions.stored, self.engine_id)
        if shadow is None:
            self.shadow = None
        elif self.shadow is None:
            self.shadow = Shadow(shadow, self._accounts.shadow_stats, _later)
        self.fleet_changed()

    def _listen(self) -> None:
        """Have the events of its pool told to the forecast, and to windows or states where it has them."""
        if self.residency is not None:
            self.residency.writer.pool = (
                PoolListener(self.evictions.stored, self.evictions.removed, self.evictions.clear)
                if self.parts is None
                else PoolListener(self._stored, self._removed, self._cleared)
            )

    def _stored(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> None:
        self.evictions.stored(hashes, parent)
        if self.parts is not None:
            self.parts.stored(hashes, parent)

    def _removed(self, hashes: Sequence[BlockHash]) -> None:
        self.evictions.removed(hashes)
        if self.parts is not None:
            self.parts.removed(hashes)

    def _cleared(self) -> None:
        self.evictions.clear()
        if self.parts is not None:
            self.parts.clear()

    def follow_parts(self, spec: PartsSpec | None) -> None:
        """Follow its windows or states by SGLang's rules; None: they cannot be."""
        if spec != self._parts_spec:
            self._parts_spec, self.parts = spec, None if spec is None else spec.make()
            self._listen()

    def prompt_started(self, pooled: PooledPrompt | None, parted: SentPrompt | None) -> None:
        """Note the first token of a prompt, by its entries in the forecast and in the rules."""
        if pooled is not None:
            self.evictions.start(pooled)
        if parted is not None and self.parts is not None:
            self.parts.started(parted)

    def prompt_ended(
        self, pooled: PooledPrompt | None, parted: SentPrompt | None, tokens: int | None, *, computed: bool
    ) -> None:
        """Note the end of a prompt's answer of ``tokens``; ``computed``: the engine answered."""
        if pooled is not None:
            self.evictions.end(pooled, tokens, computed=computed)
        if parted is not None and self.parts is not None:
            self.parts.ended(parted, tokens, computed=computed)

    def size_shadow(self, spec: ShadowSpec) -> None:
        """Give its shadow, if it has one, the size that is known now."""
        if self.shadow is not None and self.shadow.size(spec):
            self.fleet_changed()

    @property
    def has_unseen_caches(self) -> bool:
        """It has caches of which its events say nothing (SGLang: windows, Mamba states, storage)."""
        return self._unseen is not None

    @has_unseen_caches.setter
    def has_unseen_caches(self, unseen: bool) -> None:
        if unseen != self.has_unseen_caches:
            self._unseen = PartialHits() if unseen else None
            self._touched()

    def confirmed(self, hit: Hit, prompt_tokens: int, actual: int, sent: SentPrompt | None = None) -> None:
        """Learn what a report confirms of a hit that its events tell a part of only; ``sent``: the prompt by
        SGLang's rules."""
        # What prompts in flight were to leave is no hit by events.
        if self._unseen is not None and hit.held is not None and not hit.coming_tokens:
            ruled = None if sent is None or self.parts is None else sent.hit * self.parts.page_tokens
            self._unseen.add(hit.held.offloaded_tokens, prompt_tokens, actual, ruled)

    def _ruled(self, asked: PromptView, held: EngineHit) -> int | None:
        """Tokens of a prompt that it takes by SGLang's rules for windows or states; None: unknown."""
        prompt = None if asked.prompt is None else asked.prompt.behind(self.frontend)
        if self.parts is None or prompt is None or held.mode != "native":
            return None
        return self.parts.find(prompt.hashes(self.scheme), asked.tokens)[0] * self.parts.page_tokens

    def reported(self, predicted: int, actual: int) -> None:
        """Correct its shadow, if it has one, by a report on a prompt that was predicted by it."""
        if self.shadow is not None and self.shadow.reported(predicted, actual):
            self.fleet_changed()

    @property
    def feed_state(self) -> str:
        """State of its feed, here or at another replica; ``none`` if it publishes nothing."""
        if self._feed is not None:
            return str(self._feed.state)
        remote = None if self._elsewhere is None else self._elsewhere.feed_state(self.engine_id)
        return remote or "none"

    @property
    def lasting_scheme(self) -> HashScheme | None:
        """``scheme``, if it cannot change until the fleet or the known hash scheme changes."""
        scheme = None if self.residency is None else self.residency.writer.scheme
        return self.scheme if scheme is None and self._elsewhere is None else scheme

    @property
    def scheme(self) -> HashScheme:
        """Hash scheme of prompts in flight there."""
        scheme = None if self.residency is None else self.residency.writer.scheme
        if scheme is None and self._elsewhere is not None:
            scheme = self._elsewhere.scheme(self.engine_id)
        if scheme is None:
            scheme = _NO_SCHEME if self.shadow is None else self.shadow.spec.scheme
        return scheme

    @property
    def layout(self) -> CacheLayout | None:
        """Layout of its cache, as far as it is known here or at another replica."""
        layout = None if self.residency is None else self.residency.writer.layout
        if layout is None and self._elsewhere is not None:
            layout = self._elsewhere.layout(self.engine_id)
        return layout

    @property
    def retention_tokens(self) -> int | None:
        """Distance of the blocks that its windows and states keep of a prompt; None: all."""
        facts = None if self.residency is None else self.residency.writer.facts
        interval = None if facts is None else facts.retention_interval
        return interval if type(interval) is int else retained_tokens(interval)

    def kept(self, prompt_tokens: int, hit: Hit) -> Kept:
        """Prefixes of a prompt with this hit here that it will be able to hit, in hash blocks."""
        layout = self.layout
        if layout is None:
            return ()
        return kept_prefixes(kept_rule(layout), prompt_tokens, hit, self.retention_tokens)

    def hit(self, asked: PromptView, held: EngineHit | None = None) -> Hit:
        """Hit of a prompt on this engine, discounted by missed events; ``held``: the index's answer, if it is
        in ``alike``."""
        name = self.engine_id
        held = held or asked.held.get(name) or asked.nothing.get(name)
        common, coming = asked.common.get(name, 0), asked.coming.get(name, 0)
        layout = self.layout if coming else None
        if layout is not None:
            coming = coming_hit(layout, coming, asked.tokens)
        if held is None:
            if self.shadow is None or asked.shadows is None:
                return Hit(shared_prefix_tokens=common, common_tokens=common)
            if self.stated is not None and self.stated.caches_prefixes is False:
                return Hit(confidence="exact")
            tokens, shared_prefix = asked.shadows.found_in(self.shadow)
            held = EngineHit("shadow", tokens, shared_prefix_tokens=shared_prefix)
        ruled = None if self.parts is None else self._ruled(asked, held)
        hit = self.discounted(held, common, coming, asked.tokens, ruled)
        relies = layout is not None and hit.confidence == "exact" and coming > hit.gpu_tokens
        if relies and kept_rule(layout).splits:
            hit.confidence = "pending"
        return hit

    def discounted(
        self,
        held: EngineHit,
        common: int = 0,
        coming: int = 0,
        prompt_tokens: int = 0,
        ruled: int | None = None,
    ) -> Hit:
        """Hit by the index's answer and the tokens of prompts in flight, discounted by missed events, and by
        SGLang's rules (``ruled``) or what receipts did not confirm where events tell a part only; its
        ``share`` is what costs count."""
        feed = self._feed
        unconfirmed = feed is not None and feed.unconfirmed and held.mode != "shadow"
        if held.mode == "unknown" or held.stale or unconfirmed:
            # Empty, but without the layout it is unknown what a prompt in flight there will leave.
            empty = held.mode == "unknown" and not common and self._known_empty
            # A stale shared prefix is uncertain, but more likely here than elsewhere.
            shared_prefix = max(held.shared_prefix_tokens if held.mode != "unknown" else 0, common)
            known: Confidence = "partial" if self.has_unseen_caches else "exact"
            return Hit(0, 0, 0, shared_prefix, coming, known if empty else "none", common, held)
        gpu, cpu, storage = held.hit_tokens, held.cpu_tokens, held.storage_tokens
        confidence: Confidence = _CONFIDENCE[held.mode]
        if confidence == "exact" and self.has_unseen_caches:
            confidence = "partial"
        if held.mode != "shadow" and (feed is None or feed.state is not _READY):
            gpu, cpu, storage = _expected(held, feed)
            if self.feed_state != _READY:
                confidence = "degraded"
        if self._unseen is not None and held.mode != "shadow":
            alignment = max(held.alignment, 1)
            left = self._unseen.expected(gpu + cpu + storage, prompt_tokens, alignment, ruled)
            coming = self._unseen.expected(coming, prompt_tokens, alignment, ruled)
            gpu, cpu, storage = min(gpu, left), min(cpu, max(0, left - gpu)), max(0, left - gpu - cpu)
        # Plain comparisons, as in ``Hit``.
        shared_prefix, whole = held.shared_prefix_tokens, gpu + cpu + storage
        shared_prefix = common if shared_prefix < common else shared_prefix  # noqa: FURB136
        shared_prefix = whole if shared_prefix < whole else shared_prefix  # noqa: FURB136
        replay = held.replay_tokens
        hit = Hit(gpu, cpu, storage, shared_prefix, coming, confidence, common, held, replay_tokens=replay)
        hit.share = self.hit_share
        if storage and self.load_rate is not None:
            hit.storage_s_per_token = self.load_rate.s_per_token
        return hit

    def after_evictions(self, hit: Hit, asked: PromptView) -> Hit:
        """Lower a hit by the evictions for prompts in flight ahead of this one."""
        prompt = None if asked.prompt is None else asked.prompt.behind(self.frontend)
        held = hit.held
        gpu, coming, soon = hit.gpu_tokens, hit.coming_tokens, hit.soon_tokens
        if prompt is None or held is None or held.mode != "native" or hit.whole_tokens > soon:
            # Blocks are unknown; or evicted ones may be loaded.
            return hit
        scheme = self.scheme
        unit = scheme.hash_block_size
        if unit != self.evictions.block_size:
            return hit
        hashes = prompt.hashes(scheme)
        left = self.evictions.at_lookup(hashes, asked.tokens, gpu // unit, coming // unit) * unit
        if left >= soon:
            return hit
        if left <= hit.replay_tokens:
            # The engine would compute all of it again.
            left = 0
        lowered = Hit(min(gpu, left), 0, 0, hit.shared_prefix_tokens, min(coming, left), hit.confidence)
        lowered.common_tokens, lowered.held, lowered.evicted_tokens = hit.common_tokens, held, soon - left
        lowered.replay_tokens, lowered.share = hit.replay_tokens, hit.share
        return lowered

    @property
    def _known_empty(self) -> bool:
        """Whether its history is known and it never stored a block: it cannot hit (unless chunk starts
        do)."""
        if self._feed is None or self._feed.state is not _READY or self.residency is None:
            return False
        writer = self.residency.writer
        return writer.layout is None and not writer.facts.has_chunks


def _later(step: Callable[[], None]) -> None:
    """Run a step in a turn of the event loop of its own; at once where none runs."""
    try:
        asyncio.get_running_loop().call_soon(step)
    except RuntimeError:
        step()


@lru_cache(maxsize=256)
def _longest_block(layout: CacheLayout) -> int:
    return max([spec_class.block_size for spec_class in layout.classes])


def _expected(held: EngineHit, feed: FeedStats | None) -> tuple[int, int, int]:
    """Expected hit on GPU, CPU and STORAGE while the feed has gaps."""
    gpu = expected_hit(held.hit_tokens, held.alignment, feed)
    if not held.cpu_tokens and not held.storage_tokens:
        return gpu, 0, 0
    near = expected_hit(held.hit_tokens + held.cpu_tokens, held.alignment, feed)
    return gpu, near - gpu, expected_hit(held.offloaded_tokens, held.alignment, feed) - near
