"""One decision per request: read the prompt, score every eligible engine, choose one.

``place`` is called by the proxy; ``explain`` makes the same decision and shows its details without
forwarding. Look-ups for all engines at once (index rows, prompts in flight, text affinity, other replicas)
come first and go into ``PromptView``; then a ``FleetSnapshot`` gives the candidates. A decision does not wait
after its look-ups, so its view of the engines is of one moment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog
import xxhash

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.fair_queue import Priority
from kvatlas.router.fleet.status import Fleet, Frontend
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.index.query_plan import EngineHit, Holders
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.openai.apis import MESSAGES, PROMPT_APIS
from kvatlas.router.openai.body import cache_control_s
from kvatlas.router.openai.errors import ApiError, predicted_wait
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import SplitBody
from kvatlas.router.pd.handoff import DisaggState
from kvatlas.router.pd.settings import PdSettings, PdStats
from kvatlas.router.placement.affinity import text_tokens
from kvatlas.router.placement.candidate import (
    Candidate,
    PlacementRequest,
    PolicySettings,
    PullSettings,
    placement_request,
)
from kvatlas.router.placement.candidate_sets import NO_CANDIDATES, CandidateSet, CandidateSets
from kvatlas.router.placement.cost import Choice
from kvatlas.router.placement.eligible import EligibleEngines, length_of
from kvatlas.router.placement.engine import (
    NO_PEER_SNAPSHOT,
    Accounts,
    Engine,
    PeerSnapshot,
    PromptView,
    SharedView,
)
from kvatlas.router.placement.engine_order import order_of
from kvatlas.router.placement.first_token import FirstTokenParts
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.placement.placement import Decision, Placement, Split, read_by
from kvatlas.router.placement.policies import ArmState, policy
from kvatlas.router.placement.pull import any_waits
from kvatlas.router.placement.pull_step import PullStep
from kvatlas.router.placement.saturation import SaturationGate
from kvatlas.router.placement.service_level import decide, slo_forecast
from kvatlas.router.placement.shadow import SHADOW_TOKENS_MAX, ShadowPrompt
from kvatlas.router.placement.snapshot import FleetSnapshots
from kvatlas.router.placement.split import (
    DecodeCandidates,
    DisaggregationPlanner,
    complete_layouts,
    messages_of,
)
from kvatlas.router.placement.split_steps import DecodeStep, PrefillStep, SidecarStep
from kvatlas.router.placement.wait_limit import LongWait, late_first_token, long_wait
from kvatlas.router.prompts.prompt import CHUNK_BYTES, Prompt, TextAffinity
from kvatlas.router.prompts.reader import INLINE_BLOCKS_MAX, PromptReader
from kvatlas.router.proxy.attempt import Fields
from kvatlas.router.proxy.headers import SERVER_TIMING

_log = structlog.get_logger()
_NO_QUEUE = QueueSettings()
_NO_PD = PdSettings()
_NO_PULL = PullSettings()
_LOG_EVERY_S = 1.0
# A decision looks up again where the engines changed while it waited; if they change each time, it goes by
# what it has: those that it chooses from are always those of the moment.
_LOOK_UPS_MAX: Final = 3
_NONE_ALIKE: Sequence[Holders] = ()
_NO_HITS: Mapping[str, EngineHit] = {}


class Planner:
    """Implements ``kvatlas.router.proxy.forward.Placer``.

    ``check_every``: decisions between two checks of integrity; 0: none. ``shared`` is queried for others'
    engines and load in each decision; without it ``peer_state`` has the latest state that others sent.
    """

    def __init__(
        self,
        *,
        fleet: Fleet[Engine],
        scopes: ModelIndexes,
        reader: PromptReader,
        accounts: Accounts,
        settings: PolicySettings,
        expose_decision: bool,
        check_every: int = 0,
        shared: SharedView | None = None,
        peer_state: Callable[[], PeerSnapshot] = lambda: NO_PEER_SNAPSHOT,
        queue: QueueSettings = _NO_QUEUE,
        pd: PdSettings = _NO_PD,
        pd_stats: PdStats | None = None,
        pull: PullSettings = _NO_PULL,
    ) -> None:
        self._fleet = fleet
        self._eligible = EligibleEngines(fleet, accounts)
        self._scopes = scopes
        self._candidate_sets = CandidateSets(fleet, scopes)
        self._reader = reader
        self._accounts = accounts
        self._snapshots = FleetSnapshots(accounts.changes)
        self._decisions = 0
        self._completed = -1, -1
        """Versions of fleet and scopes when layouts were last completed."""
        self._shared = shared
        self._peer_state = peer_state
        self.pd_stats = pd_stats or PdStats()
        self.pulls = Pulls()
        self._arm_state = ArmState()
        self._refusals_logged = LogThrottle(_LOG_EVERY_S)
        self.gate: SaturationGate | None = None
        """Holds requests while engines are saturated, if queueing is or was configured."""
        self.configure(settings, queue, pd, pull, expose_decision=expose_decision, check_every=check_every)

    def configure(
        self,
        settings: PolicySettings,
        queue: QueueSettings,
        pd: PdSettings,
        pull: PullSettings,
        *,
        expose_decision: bool,
        check_every: int,
    ) -> None:
        """Apply settings from the next decision on. Raises ``ValueError`` for an unknown policy."""
        self._policy = policy(settings.policy)
        self._settings = settings
        self._queue, self._has_wait_targets = queue, queue.has_wait_targets
        self._bounds_waits = queue.has_wait_targets or settings.slo_refuse != "off"
        self._pd = pd
        self.pulls.configure(pull, pd.offloading_port)
        self._expose = expose_decision
        self._check_every = check_every
        if self.gate is not None:
            self.gate.configure(queue)
        elif queue.saturation_s is not None:
            self.gate = SaturationGate(queue, self._fleet, self._accounts)
            self._accounts.room = self.gate.room

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> Placement:
        """Choose an engine, or two, and open their entries. Raises ``ApiError`` if no engine is eligible, or
        none soon enough. A request that is placed again has waited already, and is not refused for another
        wait."""
        decision = await self._decide(request, exclude, disagg=disagg)
        if self._check_every:
            self._check()
        gate = self.gate
        # Placed again: it has waited already, and its client has waited with it.
        if (exclude and (request.at_once or not request.continues)) or disagg is not None:
            if disagg is not None and disagg.distrusts_caches:
                request.retention = None  # its blocks are found by no other prompt
            return self._placed(request, decision, 0.0)
        waits = gate is not None and gate.must_queue(request, decision)
        # Before the queue: a request that is refused anyway must not wait first.
        bounded = self._bounds_waits or request.claim.wait_target_s is not None
        if (
            bounded
            and not request.continues
            and (long := self._long_wait(request, decision, waits=waits)) is not None
        ):
            raise self._refusal(request, long)
        if self._settings.retention_hints and request.method == "POST" and request.path in PROMPT_APIS:
            accounts, read, scheme = self._accounts, decision.read, decision.engine.scheme
            now, prefix = accounts.now(), None
            # Engines apply a hint to all prompts of a request; only the first one's prefix is known here.
            if isinstance(read, Prompt) and read.num_prompts == 1:
                prefix = accounts.hot.reuse(read.hashes(scheme), scheme.hash_block_size, now)
            cache_s = cache_control_s(request.body) if request.path == MESSAGES else 0.0
            accounts.retention.expect(request, now, prefix=prefix, cache_s=cache_s)
        if gate is None or not waits:
            return self._placed(request, decision, 0.0)
        if request.trace is not None:
            request.trace.phase("queue")
        began_s = self._accounts.now()
        ticket = await gate.wait(request, decision)
        try:
            waited_s = self._accounts.now() - began_s
            # Caches and load have changed while it waited; the prompt has not.
            decision = await self._decide(request, exclude, decision.read, disagg=disagg)
            return self._placed(request, decision, waited_s)
        finally:
            # After the accounts have the request: between the two, others would see free room.
            gate.room.leave(ticket)

    def decode(self, model: str, ids: Sequence[int], *, skips_special: bool) -> str | None:
        """Implement ``Placer``."""
        local = self._reader.local_of(model)
        return None if local is None else local.tokenizer.decode(ids, skips_special=skips_special)

    def _placed(self, request: InboundRequest, decision: Decision, waited_s: float) -> Placement:
        split = decision.split
        if split is not None:
            if split.body is not None:
                return self._placed_apart(request, decision, split, waited_s)
            self.pd_stats.count(self.pd_stats.aggregated, split.why)
        headers = self._client_headers(request, decision) if self._expose else ()
        steps = () if decision.pull is None else (PullStep(decision.pull, self.pulls),)
        placement = Placement(request, decision, self._accounts, headers, waited_s, steps)
        # A sidecar replaces the transfer parameters of a request that is to pull.
        if request.retention is not None and (decision.pull is None or not request.carried):
            _give_hint(request, self._accounts, placement)
        return placement

    def _placed_apart(
        self, request: InboundRequest, decision: Decision, split: Split, waited_s: float
    ) -> Placement:
        """Open the entry at the decode engine before the prefill engine is asked."""
        accounts, headers = self._accounts, self._client_headers(request, decision)
        helpers: list[Placement] = []
        if split.prefill is not None:
            as_stream = msgspec.structs.replace(request, stream=True)
            helpers = [Placement(as_stream, split.prefill, accounts, (), waited_s, (PrefillStep(),))]
        if helpers and request.carried:
            self.pd_stats.split += 1
            # Without a retention hint: the sidecar replaces the transfer parameters of both bodies.
            return Placement(request, decision, accounts, headers, 0.0, (SidecarStep(split, helpers[0]),))
        step = DecodeStep(split, helpers[0] if helpers else None)
        decode = Placement(request, decision, accounts, headers, 0.0, (step,))
        _give_hint(request, accounts, decode, *helpers)
        return decode

    def _check(self) -> None:
        """Check the accounts and the index for contradictions every ``check_every`` decisions."""
        self._decisions += 1
        if self._decisions % self._check_every:
            return
        problems = self._accounts.inflight.check_integrity() + self._scopes.check_integrity()
        for engine in self._fleet:
            found = engine.load.check_integrity() + engine.evictions.check_integrity()
            problems += [f"{engine.engine_id}: {problem}" for problem in found]
        self._accounts.integrity_problems += len(problems)
        for problem in problems:
            _log.error("the router's accounts contradict themselves", problem=problem)

    async def explain(self, request: InboundRequest) -> Decision:
        """The decision ``place`` would make now, with per-group detail; changes nothing."""
        decision = await self._decide(request, frozenset(), rehearsal=True)
        waits = self.gate is not None and self.gate.must_queue(request, decision)
        long = self._long_wait(request, decision, waits=waits)
        if not waits and long is None:
            return decision
        return msgspec.structs.replace(decision, waits=waits and long is None, long_wait=long)

    def _long_wait(self, request: InboundRequest, decision: Decision, *, waits: bool) -> LongWait | None:
        """Return the refusal of a request for its predicted wait; ``waits``: it would wait in the queue
        first."""
        if request.method != "POST" or request.path not in PROMPT_APIS:
            return None
        claim = request.claim
        target_s = claim.wait_target_s
        if target_s is None and self._has_wait_targets:
            target_s = self._queue.wait_target(claim.priority)
        refuses = "off" if claim.due_s is None else self._settings.slo_refuse
        left_s = 0.0 if claim.due_s is None else max(0.0, claim.due_s - self._accounts.now())
        if refuses != "off":
            # With refusing service levels, the remaining time to the target bounds the wait as well.
            target_s = left_s if target_s is None else min(target_s, left_s)
        if target_s is None:
            return None
        queued_s = self.gate.queued_s(request, decision) if waits and self.gate is not None else 0.0
        wait_s = queued_s + decision.wait_s()
        refused = long_wait(wait_s, target_s)
        by_level = refuses != "off" and target_s == left_s
        predicted = decision.level_s() if refused is None and refuses == "first-token" else None
        if predicted is not None:
            (first_s, wait_s, margin_s), by_level = predicted, True
            refused = late_first_token(queued_s + first_s, queued_s + wait_s, left_s, margin_s)
        if refused is None or not by_level:
            return refused
        return msgspec.structs.replace(refused, level_s=claim.level_s)

    def _refusal(self, request: InboundRequest, long: LongWait) -> ApiError:
        """Count and log a refusal; no account has the request yet."""
        claim = request.claim
        name = Priority(claim.priority).label
        refused = self._accounts.admission_stats.refused
        refused[name] = refused.get(name, 0) + 1
        # One line a second per tenant and class: refusals come in floods.
        unlogged = self._refusals_logged.due(f"{claim.tenant} {name}", self._accounts.now())
        if unlogged is not None:
            _log.info(
                "request refused for its predicted wait",
                model=request.model,
                tenant=claim.tenant,
                priority=name,
                wait_s=round(long.wait_s, 3),
                target_s=long.target_s if long.level_s is None else long.level_s,
                unlogged=unlogged,
            )
        return predicted_wait(long.wait_s, long.target_s, long.level_s)

    @property
    def slo_targets(self) -> tuple[float | None, float | None, float | None] | None:
        """Service levels by class; None without."""
        return self._settings.targets

    @property
    def reads_claims(self) -> bool:
        """Whether the claims of all requests are read (``kvatlas.router.admission.admission_queue``)."""
        ordered = self._settings.engine_priority > 0
        return self.gate is not None or ordered or self._queue.has_wait_targets

    async def _decide(
        self,
        request: InboundRequest,
        exclude: frozenset[str],
        read: Prompt | TextAffinity | None = None,
        *,
        rehearsal: bool = False,
        disagg: DisaggState | None = None,
    ) -> Decision:
        """Make a decision. ``read``: the prompt, if it has been read already."""
        fleet, accounts, scopes = self._fleet, self._accounts, self._scopes
        # Whatever makes other engines eligible, or a prompt look different to them, counts here.
        seen = fleet.changes, accounts.breaker_changes, scopes.changes
        # Also before the prompt is read: a request that no engine can take must not wait for that.
        engines = self._eligible.engines(request, exclude)
        apart = self._apart(request, disagg) if fleet.has_roles else None
        messages = messages_of(request) if self.pulls.enabled else ()
        if read is None and request.method == "POST" and request.path in PROMPT_APIS:
            if request.trace is not None:
                request.trace.phase("read prompt")
            read = await self._reader.read(request)
        pulling: SplitBody | None = None
        if apart is not None or (self.pulls.enabled and not exclude):
            pulling = await self._find_edits(request, apart, messages, read)
        if request.trace is not None:
            request.trace.phase("decide")
        lengths = fleet.lengths_of.get(request.model) or fleet.lengths(request.model)
        request.context_tokens = lengths.longest
        if request.longer_than or (
            lengths.shortest < lengths.longest
            if read is None
            else not read.is_surely_shorter(lengths.shortest)
        ):
            engines = self._eligible.engines(request, exclude, length_of(request, read))
        asked_of = engines if apart is None else apart.asked_of(engines, fleet, exclude, read)
        look, candidate_set = NO_PEER_SNAPSHOT, NO_CANDIDATES
        shadows: ShadowPrompt | None = None
        for _ in range(_LOOK_UPS_MAX):
            if isinstance(read, Prompt):
                candidate_set = self._candidate_sets.get(asked_of)
                if candidate_set.guessed or read.num_tokens > INLINE_BLOCKS_MAX:
                    shadows = await self._look_ahead(read, candidate_set, asked_of)
            look = (
                self._peer_state()
                if self._shared is None
                else await self._look(self._shared, read, asked_of, rehearsal)
            )
            now = fleet.changes, accounts.breaker_changes, scopes.changes
            if now == seen:
                break
            # Engines went down, fell asleep, were held, changed their model or came while we waited.
            seen, before, hashed = now, asked_of, candidate_set.schemes
            engines = self._eligible.engines(request, exclude, length_of(request, read))
            asked_of = engines if apart is None else apart.asked_of(engines, fleet, exclude, read)
            if isinstance(read, Prompt):
                candidate_set = self._candidate_sets.get(asked_of)
            # A hash scheme that became known meanwhile is hashed above, in turns, not by the look-up.
            if asked_of == before and candidate_set.schemes == hashed:
                break
        return self._choose(
            request,
            read,
            candidate_set,
            engines,
            look,
            apart,
            shadows=shadows,
            pulling=pulling,
            rehearsal=rehearsal,
        )

    async def _find_edits(
        self,
        request: InboundRequest,
        apart: DisaggregationPlanner | None,
        messages: Sequence[msgspec.Raw],
        read: Prompt | TextAffinity | None,
    ) -> SplitBody | None:
        """Find the places of a body where a request for two engines is edited. Returns the body if a source
        to pull from can be added: not to a request that is placed again, which has lost time already."""
        if apart is not None:
            await apart.read_body(read)
            return None
        return await self.pulls.body(request, messages, read) if isinstance(read, Prompt) else None

    async def _look_ahead(
        self, read: Prompt, candidate_set: CandidateSet, engines: Sequence[Engine]
    ) -> ShadowPrompt | None:
        """Do in turns of the loop what would hold it: hash a long prompt, and look it up in many shadows.
        Returns the prompt for them, if any engine has one."""
        # Hashing may move to a thread, and a decision must not wait after its look-ups; short prompts are
        # hashed where they are looked up.
        for frontend, scheme in candidate_set.schemes if read.num_tokens > INLINE_BLOCKS_MAX else ():
            variant = read.behind(frontend)
            if variant is not None and variant.num_tokens > INLINE_BLOCKS_MAX * scheme.hash_block_size:
                await self._reader.hashes(variant, scheme)
        if not candidate_set.guessed:
            return None
        shadows = ShadowPrompt(read.token_ids, read.hashes)
        if len(engines) * read.num_tokens > SHADOW_TOKENS_MAX:
            await run_cooperatively(shadows.look_ahead([engine.shadow for engine in engines]))
        return shadows

    def _choose(
        self,
        request: InboundRequest,
        read: Prompt | TextAffinity | None,
        candidate_set: CandidateSet,
        engines: Sequence[Engine],
        look: PeerSnapshot,
        apart: DisaggregationPlanner | None,
        *,
        shadows: ShadowPrompt | None,
        pulling: SplitBody | None,
        rehearsal: bool,
    ) -> Decision:
        """Make the decision when all look-ups are done. ``shadows``: the prompt for look-ups in shadows;
        ``pulling``: the body, if a source can be added."""
        now = self._accounts.now()
        self.pulls.others = look.load
        if self.gate is not None:
            self.gate.others(look.load)
        order = None
        if self._settings.engine_priority and apart is None and request.path in PROMPT_APIS:
            order = order_of(request.claim.priority, self._accounts.wall(), self._settings.engine_priority)
        if isinstance(read, Prompt):
            asked = self._asked(read, candidate_set, look, now, shadows, detail=rehearsal)
            hashes = read.hashes(candidate_set.schemes[0][1])
            # A prompt shorter than a block has no hash.
            key = 0 if hashes else xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(list(read.token_ids)))
            question = placement_request(read.num_tokens, hashes, fallback_key=key)
        else:
            asked = self._asked_by_text(read, look)
            key = read.keys[-1] if read is not None and read.keys else xxhash.xxh3_64_intdigest(request.body)
            question = PlacementRequest(
                asked.tokens, key, read.keys[0] if read is not None and read.keys else key
            )
        asked.order = order
        found: Sequence[Candidate] = self._snapshots.of(engines).candidates(asked, now)
        # An explanation must not advance round robin.
        state = copy.copy(self._arm_state) if rehearsal else self._arm_state
        due_s, forecast = request.claim.due_s, None
        left_s = math.inf if due_s is None else due_s - now

        def pick(among: Sequence[Candidate]) -> Choice:
            return self._policy(among, question, self._settings, state)

        if apart is None:
            chosen = decide(engines, found, pick, left_s, self._accounts.slo_stats, order)
            if due_s is not None and rehearsal:
                forecast = slo_forecast(engines, chosen.first or chosen.choice, left_s, order)
            engines, found, choice, pull = chosen.engines, chosen.candidates, chosen.choice, None
            if pulling is not None and isinstance(read, Prompt) and any_waits(found):
                held = self._held_alone(read, candidate_set)
                by_header = bool(request.carried)
                choice, pull = self.pulls.apply(choice, engines, held, pulling, now, by_header=by_header)
            tokens = asked.tokens
            if isinstance(read, Prompt) and read.variants:
                read, tokens = _read_by(read, tokens, engines[choice.index])
            return Decision(
                read,
                tokens,
                engines,
                found,
                choice,
                look.problem,
                pull=pull,
                order=order,
                skipped=chosen.skipped,
                slo_forecast=forecast,
            )
        able = DecodeCandidates(read, engines, found, look.problem)
        choice, split = apart.decide(able, asked, question, pick, now, left_s)
        read, tokens = _read_by(read, asked.tokens, engines[choice.index])
        if due_s is not None:
            self._accounts.slo_stats.decisions += 1
            self._accounts.slo_stats.hopeless += (split.first_token_s or 0.0) > left_s
            forecast = slo_forecast(engines, choice, left_s) if rehearsal else None
        return Decision(
            read, tokens, engines, found, choice, look.problem, split=split, slo_forecast=forecast
        )

    def _apart(self, request: InboundRequest, disagg: DisaggState | None) -> DisaggregationPlanner:
        changes = self._fleet.changes, self._scopes.changes
        if changes != self._completed or self._shared is not None:
            complete_layouts([engine for engine in self._fleet if engine.up])
            self._completed = changes
        return DisaggregationPlanner(request, disagg, self._pd, self._settings, self._accounts.now)

    async def _look(
        self, shared: SharedView, read: Prompt | TextAffinity | None, engines: list[Engine], detail: bool
    ) -> PeerSnapshot:
        """Query other replicas' state of these engines: the one wait that a shared index costs."""
        known: dict[str, str] = {
            e.engine_id: e.base_model for e in engines if e.publishes_events and e.base_model is not None
        }
        prompt = read if isinstance(read, Prompt) and not read.skips_cache else None
        if prompt is None or not prompt.variants:
            return await shared.look(prompt, known, detail=detail)
        # In a fleet with several frontends each engine is looked up with its own tokens. Load and shared
        # stores are those of the first answer.
        found: PeerSnapshot | None = None
        for frontend, variant in prompt.variants.items():
            behind = {name: model for name, model in known.items() if self._is_behind(name, frontend)}
            if behind:
                one = await shared.look(variant, behind, detail=detail)
                found = (
                    one if found is None else msgspec.structs.replace(found, hits={**found.hits, **one.hits})
                )
        return NO_PEER_SNAPSHOT if found is None else found

    def _asked(
        self,
        prompt: Prompt,
        candidate_set: CandidateSet,
        look: PeerSnapshot,
        now: float,
        shadows: ShadowPrompt | None = None,
        *,
        detail: bool,
    ) -> PromptView:
        """View of the prompt at these engines: the index, prompts in flight and shadows."""
        tokens, own = prompt.num_tokens, prompt.frontend
        if prompt.skips_cache:
            return PromptView(tokens, look.hits, others=look.load)
        held, alike, nothing = look.hits, _NONE_ALIKE, _NO_HITS
        for (model, frontend), names in candidate_set.by_model.items():
            variant = prompt if frontend == own else prompt.behind(frontend)
            if variant is None:
                continue
            ids = names if not look.hits else [name for name in names if name not in look.hits]
            peer_stores = look.stores.get(model)
            found = self._scopes.scope(model).hits(variant, ids, detail=detail, elsewhere=peer_stores)
            held = {**held, **found.single} if held else found.single
            alike = [*alike, *found.alike] if alike else found.alike
            nothing = {**nothing, **found.nothing} if nothing else found.nothing
        common: dict[str, int] = {}
        coming: dict[str, int] = {}
        last, inflight, mixed = tokens - 1, self._accounts.inflight, bool(prompt.variants)
        for frontend, scheme in candidate_set.schemes:
            variant = prompt if frontend == own else prompt.behind(frontend)
            if variant is None:
                continue
            unit = scheme.hash_block_size
            limit = tokens if scheme in candidate_set.dropping else last
            ahead = inflight.common(variant.hashes(scheme), now, limit // unit)
            for engine_id, blocks in ahead.blocks.items():
                if not mixed or self._is_behind(engine_id, frontend):
                    shared = blocks * unit
                    common[engine_id] = shared if shared < last else last  # noqa: FURB136
            for engine_id, blocks in ahead.coming.items():
                if not mixed or self._is_behind(engine_id, frontend):
                    coming[engine_id] = blocks * unit
        if not candidate_set.guessed:
            shadows = None
        elif shadows is None:
            shadows = ShadowPrompt(prompt.token_ids, prompt.hashes)
        return PromptView(
            tokens, held, common, coming, look.load, shadows, prompt=prompt, alike=alike, nothing=nothing
        )

    def _held_alone(self, prompt: Prompt, candidate_set: CandidateSet) -> dict[str, int]:
        """Tokens that the host memory of each engine followed here holds by itself."""
        held: dict[str, int] = {}
        for (model, _), names in candidate_set.by_model.items():
            held |= self._scopes.scope(model).held_alone(prompt, names)
        return held

    def _is_behind(self, engine_id: str, frontend: Frontend) -> bool:
        engine = self._fleet.get(engine_id)
        return engine is not None and engine.frontend == frontend

    def _asked_by_text(self, read: TextAffinity | None, look: PeerSnapshot) -> PromptView:
        """View of a text without tokens: engines that received similar texts."""
        if read is None or not read.keys:
            return PromptView(0, others=look.load)
        matched = self._accounts.affinity.match(read.keys)
        common = {engine_id: text_tokens(count, CHUNK_BYTES) for engine_id, count in matched.items()}
        return PromptView(text_tokens(len(read.keys), CHUNK_BYTES), common=common, others=look.load)

    def _client_headers(self, request: InboundRequest, decision: Decision) -> Fields:
        """Fields that expose the decision to the client, if configured."""
        if not self._expose:
            return ()
        hit, headers = decision.hit, [(b"x-kvatlas-engine", decision.engine.engine_id.encode())]
        split = decision.split
        if split is not None and split.prefill is not None:
            hit = split.prefill.candidate.hit
            headers.append((b"x-kvatlas-prefill-engine", split.prefill.engine.engine_id.encode()))
        if isinstance(decision.read, Prompt) and hit.confidence != "none":
            headers.append((b"x-kvatlas-hit-tokens", b"%d" % hit.whole_tokens))
        parts = None if split is not None and split.body is not None else decision.first_token()
        # Split over two engines: no sum has been verified.
        if parts is not None:
            since_s = 0.0 if request.read_s is None else self._accounts.now() - request.read_s
            headers.append((b"x-kvatlas-predicted-ttft-ms", b"%d" % (1000 * (since_s + parts.total_s) + 0.5)))
            headers.append((SERVER_TIMING, _timing(parts)))
        return tuple(headers)


def _timing(parts: FirstTokenParts) -> bytes:
    """The predicted parts of the first token, in milliseconds (W3C Server Timing)."""
    told = {
        "queue": parts.queue_s,
        "pages": parts.pages_s,
        "load": parts.load_s,
        "prefill": parts.prefill_s,
        "engine": parts.engine_s,
        "total": parts.total_s,
    }
    return ", ".join(f"predicted-{name};dur={1000 * seconds:.1f}" for name, seconds in told.items()).encode()


def _read_by(
    read: Prompt | TextAffinity | None, tokens: int, engine: Engine
) -> tuple[Prompt | TextAffinity | None, int]:
    """Return the prompt as this engine's frontend makes it, and its length in tokens."""
    read = read_by(read, engine)
    return read, read.num_tokens if isinstance(read, Prompt) else tokens


def _give_hint(request: InboundRequest, accounts: Accounts, *placements: Placement) -> None:
    """Give a request's retention hint to the engines that obey it."""
    if request.retention is None:
        return
    source, hint = request.retention
    for one in placements:
        if one.engine.obeys_hints:
            one.retention = hint
            accounts.retention.stats.sent[source] += 1
