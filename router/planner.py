"""Joins what is known into one decision per request: prompt, hits, shadows, in-flight prefixes, load, cost.

``place`` is what the proxy calls; ``explain`` makes the same decision and shows its workings without
forwarding anything. The planner owns the in-flight books: a placement opens an entry in the load account
and in the in-flight prefixes, and closes both exactly once, with the receipt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from publisher.block_hash import HashScheme
from publisher.events import BlockHash
from publisher.groups import Family
from router.books import Books
from router.errors import model_not_found, no_ready_engine
from router.feeds.base import FeedState, FeedStats
from router.feeds.trust import expected_hit
from router.fleet.registry import EngineStatus, Fleet
from router.index.predict import EngineHit
from router.index.scopes import Scopes
from router.observe.receipts import Receipt
from router.policy.affinity import text_tokens
from router.policy.arms import ArmState, policy
from router.policy.base import Ask, Candidate, Choice, Confidence, PolicySettings, ask
from router.policy.inflight import InflightPrompt, keeps
from router.policy.load import Ticket
from router.policy.shadow import ShadowHit
from router.prompts.affinity import CHUNK_BYTES, TextAffinity
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.proxy.base import InboundRequest, Usage
from router.proxy.breaker import BreakerBoard
from router.proxy.paths import CACHE_RESETS

PROMPT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Requests that are placed by their prompt; all others go to the least loaded engine."""

_CONFIDENCE: dict[str, Confidence] = {"native": "exact", "learned": "learned"}


class Shared(NamedTuple):
    """What a prompt shares with prompts in flight at one engine, in tokens."""

    common_tokens: int = 0
    coming_tokens: int = 0
    """Of those, what will be a hit once the prompt in flight is computed."""


class View(NamedTuple):
    """One engine as this decision saw it."""

    status: EngineStatus
    candidate: Candidate
    hit: EngineHit | None
    shadow: ShadowHit | None
    shared: Shared

    @property
    def mode(self) -> str:
        """Where the hit comes from: ``native``, ``learned`` or ``shadow``; ``none`` where there is none."""
        if self.candidate.confidence == "none":
            return "none"
        if self.candidate.confidence == "degraded" and self.hit is not None:
            return self.hit.mode
        return "native" if self.candidate.confidence == "exact" else self.candidate.confidence

    @property
    def expected_tokens(self) -> int:
        """The hit when the engine gets to this prompt: what it holds, or what a prompt ahead leaves there."""
        return max(self.candidate.hit_tokens, self.shared.coming_tokens)


class Decision(msgspec.Struct, frozen=True):
    """A choice and all it rested on."""

    read: Prompt | TextAffinity | None
    prompt_tokens: int
    views: tuple[View, ...]
    choice: Choice

    @property
    def view(self) -> View:
        return self.views[self.choice.index]


class Planner:
    """Implements ``router.proxy.base.Planner``."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        scopes: Scopes,
        feeds: Mapping[str, FeedStats],
        reader: PromptReader,
        books: Books,
        board: BreakerBoard,
        settings: PolicySettings,
        retention: Callable[[str], int | None],
        expose_decision: bool,
    ) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._feeds = feeds
        self._reader = reader
        self._books = books
        self._board = board
        self._settings = settings
        self._retention = retention
        self._expose = expose_decision
        self._clock = books.now
        self._policy = policy(settings.policy)
        self._arm_state = ArmState()

    async def place(self, request: InboundRequest, *, exclude: frozenset[str]) -> Placed:
        """Choose an engine and open its entries. Raises ``ApiError`` where nobody can be asked."""
        decision = await self._decide(request, exclude)
        return self._open(request, decision)

    async def explain(self, request: InboundRequest) -> Decision:
        """The decision ``place`` would make now, with per-class detail; it leaves no trace."""
        return await self._decide(request, frozenset(), rehearsal=True)

    def now(self) -> float:
        """The router's clock, in seconds."""
        return self._clock()

    def feed_state(self, engine_id: str) -> str:
        """State of the engine's feed, ``none`` where it publishes nothing."""
        stats = self._feeds.get(engine_id)
        return str(stats.state) if stats is not None else "none"

    async def _decide(
        self, request: InboundRequest, exclude: frozenset[str], *, rehearsal: bool = False
    ) -> Decision:
        engines = self._askable(request.model, exclude)
        state = copy.deepcopy(self._arm_state) if rehearsal else self._arm_state
        read: Prompt | TextAffinity | None = None
        if request.path in PROMPT_PATHS:
            read = await self._reader.read(request)
        schemes: dict[str, HashScheme] = {}
        if isinstance(read, Prompt):
            schemes = {status.engine_id: self._scheme(status.engine_id) for status in engines}
            for scheme in set(schemes.values()):
                await self._reader.hashes(read, scheme)
        engines = [status for status in engines if self._fleet.get(status.engine_id) is status]
        if not engines:  # they left while the prompt was being read
            raise no_ready_engine("The engines of this model have just left; try again shortly.")
        if isinstance(read, Prompt):
            return self._decide_by_tokens(read, engines, schemes, state, detail=rehearsal)
        return self._decide_by_text(read, request, engines, state)

    def _askable(self, model: str | None, exclude: frozenset[str]) -> list[EngineStatus]:
        ready = self._fleet.ready(model)
        if not ready and model is not None and self._fleet.ready(None) and not self._fleet.knows(model):
            raise model_not_found(model)
        untried = [s for s in ready if s.engine_id not in exclude]
        if not untried:
            raise no_ready_engine("No engine can take this request now; GET /ready says more.")
        # With every breaker open a try costs less than a certain refusal: the fleet may be fine again.
        return [s for s in untried if self._board.available(s.engine_id)] or untried

    def _decide_by_tokens(
        self,
        prompt: Prompt,
        engines: list[EngineStatus],
        schemes: dict[str, HashScheme],
        state: ArmState,
        *,
        detail: bool,
    ) -> Decision:
        now = self._clock()
        ids = [status.engine_id for status in engines if status.publishes_events]
        hits: dict[str, EngineHit] = {}
        for model in {status.base_model for status in engines}:
            if model is not None and not prompt.skips_cache:
                hits |= self._scopes.scope(model).predict(
                    prompt, [i for i in ids if self._model(i) == model], detail=detail
                )
        shadows: dict[str, ShadowHit] = {}
        if len(ids) < len(engines) and not prompt.skips_cache:
            shadows = self._books.shadows.lookup(prompt.token_ids, prompt.hashes)
        inflight = {} if prompt.skips_cache else self._inflight(prompt, set(schemes.values()), now)
        nothing = Shared()
        views = tuple(
            self._view(
                s, hits.get(s.engine_id), shadows.get(s.engine_id), inflight.get(s.engine_id, nothing), now
            )
            for s in engines
        )
        hashes = prompt.hashes(schemes[engines[0].engine_id])
        fallback = 0 if hashes else xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(list(prompt.token_ids)))
        question = ask(
            prompt.num_tokens, hashes, prefix_blocks=self._settings.prefix_blocks, fallback_key=fallback
        )
        return Decision(prompt, prompt.num_tokens, views, self._choose(views, question, state))

    def _decide_by_text(
        self,
        read: TextAffinity | None,
        request: InboundRequest,
        engines: list[EngineStatus],
        state: ArmState,
    ) -> Decision:
        now = self._clock()
        keys = read.keys if read is not None else ()
        matched = self._books.affinity.match(keys) if keys else {}
        tokens = text_tokens(len(keys), CHUNK_BYTES)
        views = tuple(
            self._view(s, None, None, Shared(text_tokens(matched.get(s.engine_id, 0), CHUNK_BYTES)), now)
            for s in engines
        )
        key = keys[-1] if keys else xxhash.xxh3_64_intdigest(request.body)
        question = Ask(tokens, key, keys[0] if keys else key)
        return Decision(read, tokens, views, self._choose(views, question, state))

    def _choose(self, views: tuple[View, ...], question: Ask, state: ArmState) -> Choice:
        return self._policy([view.candidate for view in views], question, self._settings, state)

    def _view(
        self,
        status: EngineStatus,
        hit: EngineHit | None,
        shadow: ShadowHit | None,
        shared: Shared,
        now: float,
    ) -> View:
        load = self._books.load.load(status.engine_id, now)
        tokens, trunk, offloaded = 0, 0, 0
        confidence: Confidence = "none"
        if hit is not None and hit.mode == "unknown":
            # Empty, but what a prompt in flight there will leave cannot be told before the layout is known.
            if not shared.common_tokens and self._known_empty(status):
                confidence = "exact"
        elif hit is not None:
            feed = self._feeds.get(status.engine_id)
            tokens = expected_hit(hit.hit_tokens, hit.alignment, feed)
            trunk, confidence = hit.trunk_tokens, _CONFIDENCE[hit.mode]
            offloaded = expected_hit(hit.offloaded_tokens, hit.alignment, feed) - tokens
            if feed is not None and feed.state is not FeedState.READY:
                confidence = "degraded"
        elif shadow is not None:
            tokens, trunk, confidence = shadow.hit_tokens, shadow.trunk_tokens, "shadow"
        rates = self._books.load.rates
        candidate = Candidate(
            status.engine_id,
            hit_tokens=tokens,
            trunk_tokens=max(trunk, shared.common_tokens, tokens + offloaded),
            offloaded_tokens=offloaded,
            coming_tokens=shared.coming_tokens,
            confidence=confidence,
            queue_s=load.queue_s,
            running=load.running,
            waiting=load.waiting,
            idle_s=load.idle_s,
            prefill_s_per_token=rates.prefill_s_per_token(status.engine_id, now),
            decode_interference_s=rates.decode_interference_s(status.engine_id),
        )
        return View(status, candidate, hit, shadow, shared)

    def _known_empty(self, status: EngineStatus) -> bool:
        """Its history is known and it never stored a block: it cannot hit (unless chunk starts do)."""
        engine = self._scopes.engine(status.engine_id)
        ready = self.feed_state(status.engine_id) == FeedState.READY
        return (
            ready and engine is not None and engine.layout is None and not engine.facts.attention_chunk_size
        )

    def _inflight(self, prompt: Prompt, schemes: set[HashScheme], now: float) -> dict[str, Shared]:
        """What the prompt shares with prompts in flight, per engine."""
        found: dict[str, Shared] = {}
        last = prompt.num_tokens - 1
        for scheme in schemes:
            unit = scheme.hash_block_size
            blocks, coming = self._books.inflight.common(prompt.hashes(scheme), now)
            for engine_id, count in blocks.items():
                found[engine_id] = Shared(min(count * unit, last), min(coming.get(engine_id, 0) * unit, last))
        return found

    def _keeps(self, decision: Decision, prompt: Prompt) -> tuple[int, ...]:
        """The prefixes of a placed prompt that its engine will be able to hit, in hash blocks."""
        view = decision.view
        engine = self._scopes.engine(view.status.engine_id)
        layout = engine.layout if engine is not None else None
        if layout is None:
            return ()
        return keeps(
            prompt.num_tokens,
            view.candidate.trunk_tokens,
            alignment=layout.alignment,
            hash_block_size=layout.hash_block_size,
            retention_interval=self._retention(view.status.base_model or ""),
            every_block=all(c.family is Family.FULL for c in layout.classes),
        )

    def _scheme(self, engine_id: str) -> HashScheme:
        """The scheme whose hashes stand for prompts in flight at this engine."""
        engine = self._scopes.engine(engine_id)
        if engine is not None and engine.scheme is not None:
            return engine.scheme
        shadows = self._books.shadows
        return shadows.spec(engine_id).scheme if engine_id in shadows else HashScheme()

    def _model(self, engine_id: str) -> str | None:
        status = self._fleet.get(engine_id)
        return None if status is None else status.base_model

    def _open(self, request: InboundRequest, decision: Decision) -> Placed:
        now, view = self._clock(), decision.view
        engine_id = view.status.engine_id
        ticket = self._books.load.admit(
            engine_id, uncached_tokens=decision.choice.uncached_tokens, now=now, streams=request.stream
        )
        flying: InflightPrompt | None = None
        if isinstance(decision.read, Prompt):
            hashes: Sequence[BlockHash] = decision.read.hashes(self._scheme(engine_id))
            flying = self._books.inflight.add(engine_id, hashes, now, self._keeps(decision, decision.read))
        elif isinstance(decision.read, TextAffinity):
            self._books.affinity.record(decision.read.keys, engine_id)
        return Placed(self, request, decision, ticket=ticket, flying=flying, now=now)

    def client_headers(self, decision: Decision) -> tuple[tuple[bytes, bytes], ...]:
        """What the client is told of the decision, if it is to be told anything."""
        if not self._expose:
            return ()
        headers = [(b"x-kvatlas-engine", decision.view.status.engine_id.encode())]
        if isinstance(decision.read, Prompt) and decision.view.candidate.confidence != "none":
            headers.append((b"x-kvatlas-hit-tokens", b"%d" % decision.view.expected_tokens))
        return tuple(headers)

    def close(self, placed: Placed, usage: Usage | None, *, failed: str = "") -> None:
        """Take the request out of every book, and write its receipt."""
        now, books, engine_id = self._clock(), self._books, placed.engine_id
        if failed:
            books.load.fail(placed.ticket, now)
        else:
            books.load.finish(placed.ticket, now)
        if placed.flying is not None:
            if placed.answered:
                books.inflight.end(placed.flying, now)
            else:  # refused or failed: the engine computed nothing
                books.inflight.drop(placed.flying)
        read = placed.decision.read
        here = self._fleet.get(engine_id) is not None  # else nobody would ever take it out of the books again
        if here and placed.answered and isinstance(read, Prompt):
            if not placed.prefilled:
                books.shadows.served(engine_id, read.token_ids, read.hashes)
            books.receipts.add(self._receipt(placed, usage))

    def prefilled(self, placed: Placed) -> None:
        """The first token arrived: the prompt is computed, and how long that took is known."""
        now = self._clock()
        sample = self._books.load.first_token(placed.ticket, now)
        if sample is not None and self._fleet.get(placed.engine_id) is not None:
            self._books.load.rates.observe(placed.engine_id, sample, now)
        if placed.flying is not None:
            self._books.inflight.prefilled(placed.flying)
        read = placed.decision.read
        if isinstance(read, Prompt):
            self._books.shadows.served(placed.engine_id, read.token_ids, read.hashes)

    def cache_reset(self, engine_id: str) -> None:
        """A reset was passed on and answered. The engine tells of it only with its next batch, so what is
        known goes at once; a reset that it did not carry out leaves us expecting less than there is."""
        engine = self._scopes.engine(engine_id)
        if engine is not None:
            engine.clear()
        self._books.shadows.reset(engine_id)
        self._books.inflight.forget(engine_id)

    def _receipt(self, placed: Placed, usage: Usage | None) -> Receipt:
        view, decision = placed.decision.view, placed.decision
        read = decision.read
        one_prompt = isinstance(read, Prompt) and read.num_prompts == 1  # usage is the sum over all prompts
        predicted = one_prompt and view.candidate.confidence != "none"
        return Receipt(
            request_id=placed.request.request_id.decode("latin-1"),
            engine_id=placed.engine_id,
            model=placed.request.model or "",
            mode=view.mode,
            feed=self.feed_state(placed.engine_id),
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=view.expected_tokens if predicted else None,
            offloaded_tokens=view.candidate.offloaded_tokens,
            trunk_tokens=view.candidate.trunk_tokens,
            actual_tokens=usage.cached_tokens if usage is not None else None,
            reported_prompt_tokens=usage.prompt_tokens if usage is not None and one_prompt else None,
            reason=decision.choice.reason,
            ttft_s=placed.ttft_s,
        )


class Placed:
    """One request on one engine (``router.proxy.base.Placement``)."""

    def __init__(
        self,
        planner: Planner,
        request: InboundRequest,
        decision: Decision,
        *,
        ticket: Ticket,
        flying: InflightPrompt | None,
        now: float,
    ) -> None:
        engine = decision.view.status.engine
        self.engine_id = engine.engine_id
        self.base_url = engine.base_url
        self.engine_headers: tuple[tuple[bytes, bytes], ...] = (
            () if engine.dp_rank is None else ((b"x-data-parallel-rank", b"%d" % engine.dp_rank),)
        )
        self.client_headers = planner.client_headers(decision)
        self.request = request
        self.decision = decision
        self.ticket = ticket
        self.flying = flying
        self.answered = False
        self.prefilled = False
        self.ttft_s: float | None = None
        self._planner = planner
        self._placed_s = now
        self._open = True

    def first_byte(self) -> None:
        """See ``Placement``; only a stream's first byte tells when the prefill was over."""
        self.answered = True
        if self.request.path in CACHE_RESETS:
            self._planner.cache_reset(self.engine_id)
        if self._open and not self.prefilled and self.request.stream:
            self.prefilled = True
            self.ttft_s = self._planner.now() - self._placed_s
            self._planner.prefilled(self)

    def finished(self, usage: Usage | None) -> None:
        self._close(usage, "")

    def failed(self, reason: str) -> None:
        self._close(None, reason)

    def _close(self, usage: Usage | None, failed: str) -> None:
        if self._open:
            self._open = False
            self._planner.close(self, usage, failed=failed)
