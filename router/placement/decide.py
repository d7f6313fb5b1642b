"""Joins what is known into one decision per request: prompt, hits, shadows, in-flight prefixes, load, cost.

``place`` is what the proxy calls; ``explain`` makes the same decision and shows its workings without
forwarding anything. A placement opens an entry in the load account and in the in-flight prefixes; how they
are closed is in ``placed``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import xxhash

from publisher.block_hash import HashScheme
from publisher.events import BlockHash
from publisher.groups import Family
from router.feeds.base import FeedState, FeedStats
from router.feeds.trust import expected_hit
from router.fleet.status import EngineStatus, Fleet
from router.index.model import EngineHit
from router.index.models import Scopes
from router.openai.errors import model_not_found, no_ready_engine
from router.openai.request import InboundRequest
from router.placement.affinity import text_tokens
from router.placement.books import Books
from router.placement.candidate import Ask, Candidate, Choice, Confidence, PolicySettings, ask
from router.placement.decision import Decision, Shared, View
from router.placement.inflight import InflightPrompt, keeps
from router.placement.load import NO_OTHERS, EngineLoad
from router.placement.placement import Bookkeeper, Placed
from router.placement.policies import ArmState, policy
from router.placement.shadow import ShadowHit
from router.prompts.affinity import CHUNK_BYTES, TextAffinity
from router.prompts.prompt import Prompt
from router.prompts.reader import PromptReader
from router.proxy.breaker import BreakerBoard
from router.replication.base import NO_LOOK, Look, SharedView

PROMPT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Requests that are placed by their prompt; all others go to the least loaded engine."""

_CONFIDENCE: dict[str, Confidence] = {"native": "exact", "learned": "learned", "assumed": "assumed"}


class Planner:
    """Implements ``router.openai.request.Planner``."""

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
        shared: SharedView | None = None,
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
        self._keeper = Bookkeeper(
            fleet, books, feed_state=self.feed_state, clear=scopes.clear, doubt=scopes.doubt
        )
        self._shared = shared
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

    def feed_state(self, engine_id: str) -> str:
        """State of the engine's feed, ``none`` where it publishes nothing."""
        stats = self._feeds.get(engine_id)
        if stats is not None:
            return str(stats.state)
        return (self._shared.feed_state(engine_id) if self._shared is not None else None) or "none"

    async def _decide(
        self, request: InboundRequest, exclude: frozenset[str], *, rehearsal: bool = False
    ) -> Decision:
        engines = self._askable(request.model, exclude)
        state = copy.deepcopy(self._arm_state) if rehearsal else self._arm_state
        read: Prompt | TextAffinity | None = None
        if request.method == "POST" and request.path in PROMPT_PATHS:
            read = await self._reader.read(request)
        schemes: dict[str, HashScheme] = {}
        if isinstance(read, Prompt):
            schemes = {status.engine_id: self._scheme(status.engine_id) for status in engines}
            for scheme in set(schemes.values()):
                await self._reader.hashes(read, scheme)
        look = await self._look(read, engines, rehearsal) if self._shared is not None else NO_LOOK
        engines = [status for status in engines if self._fleet.get(status.engine_id) is status]
        if not engines:  # they left while the prompt was being read
            raise no_ready_engine("The engines that serve this model have just been removed; retry shortly.")
        if isinstance(read, Prompt):
            return self._decide_by_tokens(read, engines, schemes, state, look, detail=rehearsal)
        return self._decide_by_text(read, request, engines, state, look)

    async def _look(
        self, read: Prompt | TextAffinity | None, engines: list[EngineStatus], detail: bool
    ) -> Look:
        """What other replicas know of these engines: the one wait that a shared index costs."""
        if self._shared is None:
            return NO_LOOK
        models = {s.engine_id: s.base_model for s in engines if s.publishes_events}
        known = {engine_id: model for engine_id, model in models.items() if model is not None}
        prompt = read if isinstance(read, Prompt) and not read.skips_cache else None
        return await self._shared.look(prompt, known, detail=detail)

    def _askable(self, model: str | None, exclude: frozenset[str]) -> list[EngineStatus]:
        ready = self._fleet.ready(model)
        if not ready and model is not None and self._fleet.ready(None) and not self._fleet.knows(model):
            raise model_not_found(model)
        untried = [s for s in ready if s.engine_id not in exclude]
        if not untried:
            raise no_ready_engine("No engine can take this request now; GET /ready gives the reason.")
        open_to_all = [s for s in untried if self._board.available(s.engine_id)]
        if open_to_all:
            return open_to_all
        # With every breaker open a try costs less than a certain refusal: the fleet may be fine again.
        waits_s = {s.engine_id: self._board.waits_s(s.engine_id) for s in untried}
        willing = [s for s in untried if not waits_s[s.engine_id]]
        if not willing:
            raise no_ready_engine(
                "All engines are rate-limiting (Retry-After).",
                retry_after_s=math.ceil(min(waits_s.values())),
            )
        return willing

    def _decide_by_tokens(
        self,
        prompt: Prompt,
        engines: list[EngineStatus],
        schemes: dict[str, HashScheme],
        state: ArmState,
        look: Look,
        *,
        detail: bool,
    ) -> Decision:
        now = self._clock()
        ids = [status.engine_id for status in engines if status.publishes_events]
        hits: dict[str, EngineHit] = dict(look.hits)
        for model in {status.base_model for status in engines}:
            if model is not None and not prompt.skips_cache:
                hits |= self._scopes.scope(model).predict(
                    prompt,
                    [i for i in ids if self._model(i) == model and i not in look.hits],
                    detail=detail,
                    elsewhere=look.stores.get(model),
                )
        shadows: dict[str, ShadowHit] = {}
        if len(ids) < len(engines) and not prompt.skips_cache:
            shadows = self._books.shadows.lookup(prompt.token_ids, prompt.hashes)
        inflight = {} if prompt.skips_cache else self._inflight(prompt, set(schemes.values()), now)
        nothing = Shared()
        views = tuple(
            self._view(
                s,
                hits.get(s.engine_id),
                shadows.get(s.engine_id),
                inflight.get(s.engine_id, nothing),
                self._load(s.engine_id, look, now),
                now,
            )
            for s in engines
        )
        hashes = prompt.hashes(schemes[engines[0].engine_id])
        fallback = 0 if hashes else xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(list(prompt.token_ids)))
        question = ask(
            prompt.num_tokens, hashes, prefix_blocks=self._settings.prefix_blocks, fallback_key=fallback
        )
        choice = self._choose(views, question, state)
        return Decision(prompt, prompt.num_tokens, views, choice, look.problem)

    def _decide_by_text(
        self,
        read: TextAffinity | None,
        request: InboundRequest,
        engines: list[EngineStatus],
        state: ArmState,
        look: Look,
    ) -> Decision:
        now = self._clock()
        keys = read.keys if read is not None else ()
        matched = self._books.affinity.match(keys) if keys else {}
        tokens = text_tokens(len(keys), CHUNK_BYTES)
        views = tuple(
            self._view(
                s,
                None,
                None,
                Shared(text_tokens(matched.get(s.engine_id, 0), CHUNK_BYTES)),
                self._load(s.engine_id, look, now),
                now,
            )
            for s in engines
        )
        key = keys[-1] if keys else xxhash.xxh3_64_intdigest(request.body)
        question = Ask(tokens, key, keys[0] if keys else key)
        return Decision(read, tokens, views, self._choose(views, question, state), look.problem)

    def _choose(self, views: tuple[View, ...], question: Ask, state: ArmState) -> Choice:
        return self._policy([view.candidate for view in views], question, self._settings, state)

    def _view(
        self,
        status: EngineStatus,
        hit: EngineHit | None,
        shadow: ShadowHit | None,
        shared: Shared,
        load: EngineLoad,
        now: float,
    ) -> View:
        tokens, trunk, cpu, storage = 0, 0, 0, 0
        confidence: Confidence = "none"
        if hit is not None and hit.mode == "unknown":
            # Empty, but what a prompt in flight there will leave cannot be told before the layout is known.
            if not shared.common_tokens and self._known_empty(status):
                confidence = "exact"
        elif hit is not None and hit.stale:  # nothing to count on, but a better bet than elsewhere
            trunk = hit.trunk_tokens
        elif hit is not None:
            feed = self._feeds.get(status.engine_id)
            tokens = expected_hit(hit.hit_tokens, hit.alignment, feed)
            trunk, confidence = hit.trunk_tokens, _CONFIDENCE[hit.mode]
            if hit.cpu_tokens or hit.storage_tokens:
                near = expected_hit(hit.hit_tokens + hit.cpu_tokens, hit.alignment, feed)
                cpu, storage = near - tokens, expected_hit(hit.offloaded_tokens, hit.alignment, feed) - near
            if self.feed_state(status.engine_id) != FeedState.READY:
                confidence = "degraded"
        elif shadow is not None:
            tokens, trunk, confidence = shadow.hit_tokens, shadow.trunk_tokens, "shadow"
        rates = self._books.load.rates
        candidate = Candidate(
            status.engine_id,
            hit_tokens=tokens,
            trunk_tokens=max(trunk, shared.common_tokens, tokens + cpu + storage),
            cpu_tokens=cpu,
            storage_tokens=storage,
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
        feed = self._feeds.get(status.engine_id)
        if feed is None or feed.state is not FeedState.READY:
            return False
        return engine is not None and engine.layout is None and not engine.facts.has_chunks

    def _load(self, engine_id: str, look: Look, now: float) -> EngineLoad:
        return self._books.load.load(engine_id, now, look.load.get(engine_id, NO_OTHERS))

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
        if layout is None and self._shared is not None:
            layout = self._shared.layout(view.status.engine_id)
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
        elsewhere = self._shared.scheme(engine_id) if self._shared is not None else None
        if elsewhere is not None:
            return elsewhere
        shadows = self._books.shadows
        return shadows.spec(engine_id).scheme if engine_id in shadows else HashScheme()

    def _model(self, engine_id: str) -> str | None:
        status = self._fleet.get(engine_id)
        return None if status is None else status.base_model

    def _open(self, request: InboundRequest, decision: Decision) -> Placed:
        now, view = self._clock(), decision.view
        engine_id = view.status.engine_id
        ticket = self._books.load.admit(
            engine_id,
            uncached_tokens=decision.choice.uncached_tokens,
            now=now,
            streams=request.stream,
            load_s=decision.choice.cost.load_s,
        )
        flying: InflightPrompt | None = None
        if isinstance(decision.read, Prompt):
            hashes: Sequence[BlockHash] = decision.read.hashes(self._scheme(engine_id))
            flying = self._books.inflight.add(engine_id, hashes, now, self._keeps(decision, decision.read))
        elif isinstance(decision.read, TextAffinity):
            self._books.affinity.record(decision.read.keys, engine_id)
        return Placed(
            self._keeper,
            request,
            decision,
            ticket=ticket,
            flying=flying,
            client_headers=self._client_headers(decision),
            now=now,
        )

    def _client_headers(self, decision: Decision) -> tuple[tuple[bytes, bytes], ...]:
        """What the client is told of the decision, if it is to be told anything."""
        if not self._expose:
            return ()
        headers = [(b"x-kvatlas-engine", decision.view.status.engine_id.encode())]
        if isinstance(decision.read, Prompt) and decision.view.candidate.confidence != "none":
            headers.append((b"x-kvatlas-hit-tokens", b"%d" % decision.view.expected_tokens))
        return tuple(headers)
