"""One engine: who it is, and everything that is known of it or under way there.

Identity, addresses, models and state are the fleet's (``EngineStatus``); here they meet the engine's parts: what
it holds (``residency``, or a ``shadow`` where it publishes no events), its ``feed``, what it has to do (``load``),
how fast it is (``rates``), whether it is well (``breaker``), and how predictions did (``receipts``). A room below
is given its own part, never the whole. The composition root makes engines; ``close`` is the only way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import structlog

from publisher.block_hash import HashScheme
from router.feeds.base import FeedState, FeedStats
from router.feeds.trust import expected_hit
from router.fleet.identity import Engine as Address
from router.fleet.status import EngineStatus
from router.index.learn.layout import CacheLayout
from router.index.model import EngineHit, Residency
from router.observe.receipts import EngineReceipts
from router.placement.accounts import Accounts
from router.placement.candidate import Candidate, Confidence, Hit
from router.placement.load import NO_OTHERS, LoadAccount, OthersLoad
from router.placement.shadow import Shadow, ShadowPrompt, ShadowSpec
from router.proxy.breaker import Breaker
from router.replication.base import SharedView

_log = structlog.get_logger()
_CONFIDENCE: dict[str, Confidence] = {"native": "exact", "learned": "learned", "shadow": "shadow"}
_NO_SCHEME = HashScheme()


class Asked(msgspec.Struct, gc=False):
    """One prompt as all engines are asked about it: what is searched for all of them at once, by engine id.

    ``held`` is what the index says, ``common`` and ``coming`` what the prompt shares with prompts in flight (or,
    of a text without tokens, with what went there lately), in tokens; ``others`` the load by other replicas;
    ``shadows`` the prompt as shadows look for it.
    """

    tokens: int
    held: Mapping[str, EngineHit] = {}
    common: Mapping[str, int] = {}
    coming: Mapping[str, int] = {}
    others: Mapping[str, OthersLoad] = {}
    shadows: ShadowPrompt | None = None


class Engine(EngineStatus):
    """See the module. ``leaving`` are told when it closes, each once, the engine being whole until then."""

    __slots__ = (
        *("_accounts", "_closed", "_elsewhere", "_leaving"),
        *("breaker", "feed", "load", "rates", "receipts", "residency", "shadow"),
    )

    def __init__(
        self,
        address: Address,
        accounts: Accounts,
        *,
        fleet_changed: Callable[[], None] = lambda: None,
        elsewhere: SharedView | None = None,
        leaving: tuple[Callable[[Engine], None], ...] = (),
    ) -> None:
        super().__init__(address, fleet_changed=fleet_changed)
        self.breaker = Breaker()
        self.rates = accounts.rates.engine()
        self.load = LoadAccount(self.rates, stats=accounts.load_stats)
        self.receipts = EngineReceipts()
        self.residency: Residency | None = None
        """What it holds, by its events; None before its model is known."""
        self.shadow: Shadow | None = None
        """What it probably holds; only of an engine without events."""
        self.feed: FeedStats | None = None
        """Of the feed that runs here; None where none does."""
        self._accounts = accounts
        self._elsewhere = elsewhere
        self._leaving = leaving
        self._closed = False

    @property
    def closed(self) -> bool:
        """It has left the fleet: nothing more is to be kept of it."""
        return self._closed

    def close(self) -> None:
        """It left the fleet. What a placement that is still open there says goes nowhere."""
        self._closed = True
        self.rates.close()
        self._accounts.leave(self.engine_id)
        for leave in self._leaving:
            try:
                leave(self)
            except Exception:  # noqa: BLE001  # one part's fault must not keep the others in
                _log.exception("engine not left", engine=self.engine_id)
        self.residency = self.shadow = self.feed = None

    def reset(self, *, cleared: bool = False) -> None:
        """What it was thought to hold by our own requests is gone; ``cleared``: all of its GPU cache is."""
        if cleared and self.residency is not None:
            self.residency.writer.clear()
        if self.shadow is not None:
            self.shadow.reset()
        self._accounts.inflight.forget(self.engine_id)

    def begin_shadow(self, spec: ShadowSpec) -> None:
        """It publishes no events: stand in for them, unless that is being done already."""
        if self.shadow is None:
            self.shadow = Shadow(spec, self._accounts.shadow_stats)

    @property
    def feed_state(self) -> str:
        """State of its feed, here or at another replica; ``none`` where it publishes nothing."""
        if self.feed is not None:
            return str(self.feed.state)
        told = None if self._elsewhere is None else self._elsewhere.feed_state(self.engine_id)
        return told or "none"

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

    def candidate(self, asked: Asked, now: float) -> Candidate:
        """This engine for one prompt: what it has of it, how much it has to do, how fast it is."""
        name, rates = self.engine_id, self.rates
        rate = rates.prefill_s_per_token(now)
        load = self.load.at(now, asked.others.get(name, NO_OTHERS), rate)
        return Candidate(
            name,
            self.hit(asked),
            load.queue_s,
            load.running,
            load.waiting,
            load.idle_s,
            rate,
            rates.decode_interference_s,
        )

    def hit(self, asked: Asked) -> Hit:
        """What this engine has of a prompt, discounted by what its feed has missed."""
        name = self.engine_id
        common = asked.common.get(name, 0)
        held = asked.held.get(name)
        if held is None and self.shadow is not None and asked.shadows is not None:
            tokens, trunk = self.shadow.lookup(asked.shadows)
            held = EngineHit("shadow", tokens, trunk_tokens=trunk)
        if held is None:
            return Hit(trunk_tokens=common, common_tokens=common)
        coming = asked.coming.get(name, 0)
        if held.mode == "unknown" or held.stale:
            # Empty, but what a prompt in flight there will leave cannot be told before the layout is known.
            empty = held.mode == "unknown" and not common and self._known_empty
            # A stale trunk is nothing to count on, but a better bet than elsewhere.
            trunk = max(held.trunk_tokens if held.stale else 0, common)
            return Hit(0, 0, 0, trunk, coming, "exact" if empty else "none", common, held)
        gpu, cpu, storage = held.hit_tokens, held.cpu_tokens, held.storage_tokens
        confidence: Confidence = _CONFIDENCE[held.mode]
        feed = self.feed
        if held.mode != "shadow" and (feed is None or feed.state is not FeedState.READY):
            gpu, cpu, storage = self._discounted(held)
            if self.feed_state != FeedState.READY:
                confidence = "degraded"
        return Hit(
            gpu,
            cpu,
            storage,
            max(held.trunk_tokens, common, gpu + cpu + storage),
            coming,
            confidence,
            common,
            held,
        )

    def _discounted(self, held: EngineHit) -> tuple[int, int, int]:
        feed, unit = self.feed, held.alignment
        gpu = expected_hit(held.hit_tokens, unit, feed)
        if not held.cpu_tokens and not held.storage_tokens:
            return gpu, 0, 0
        near = expected_hit(held.hit_tokens + held.cpu_tokens, unit, feed)
        return gpu, near - gpu, expected_hit(held.offloaded_tokens, unit, feed) - near

    @property
    def _known_empty(self) -> bool:
        """Its history is known and it never stored a block: it cannot hit (unless chunk starts do)."""
        if self.feed is None or self.feed.state is not FeedState.READY or self.residency is None:
            return False
        writer = self.residency.writer
        return writer.layout is None and not writer.facts.has_chunks
