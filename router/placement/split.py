"""Decide whether a request's prompt is computed on one engine and decoded on another, in fleets whose engines
have roles.

``Split.why`` is the reason for not splitting: the client, the request's fields, its earlier attempts, or a
lower cost on one engine alone. All others go to the cheapest pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from kvatlas.publisher.groups import Family
from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.openai.apis import PROMPT_APIS, SALTED
from kvatlas.router.openai.members import TooManyStepsError, run_cooperatively
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import SplitBody, split_body
from kvatlas.router.pd.handoff import DisaggState, Handoff
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import Candidate, Hit, PlacementRequest, PolicySettings, Reason
from kvatlas.router.placement.cost import Choice, ScoredCandidates, make_choice, score
from kvatlas.router.placement.eligible import Length, length_of
from kvatlas.router.placement.engine import Engine, PromptView
from kvatlas.router.placement.pair_plan import (
    PairPlan,
    Partner,
    Side,
    cheapest_taker,
    fits,
    lacked,
    pick_in_time,
    plan,
)
from kvatlas.router.placement.placement import Decision, Split, read_by
from kvatlas.router.placement.service_level import Pick
from kvatlas.router.placement.snapshot import candidates
from kvatlas.router.prompts.prompt import Prompt, TextAffinity
from kvatlas.router.prompts.request import ChatBody


class DecodeCandidates(msgspec.Struct, frozen=True, gc=False):
    """The engines that may answer a request, and their state; ``problem`` as in ``Decision``."""

    read: Prompt | TextAffinity | None
    engines: Sequence[Engine]
    candidates: Sequence[Candidate]
    problem: str


class DisaggregationPlanner:
    """One request in one decision. ``why``: known reason for not splitting; "": none so far."""

    __slots__ = ("_body", "_disagg", "_messages", "_now", "_pd", "_policy", "_request", "helpers", "why")

    def __init__(
        self,
        request: InboundRequest,
        disagg: DisaggState | None,
        pd: PdSettings,
        policy: PolicySettings,
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._request = request
        self._disagg = disagg
        self._pd = pd
        self._policy = policy
        self.helpers: list[Engine] = []
        """Engines that may compute its prompt for another one."""
        self._body: SplitBody | None = None
        self._messages = messages_of(request)
        self.why = _bound_to_one(request)
        if not self.why and disagg is not None and not disagg.may_split and disagg.handoff(now()) is None:
            self.why = "retried"

    def asked_of(
        self,
        engines: list[Engine],
        fleet: Fleet[Engine],
        exclude: frozenset[str],
        read: Prompt | TextAffinity | None,
    ) -> list[Engine]:
        """Return these engines, which may answer, with those that may compute the prompt for them now
        (``helpers``)."""
        length = length_of(self._request, read)
        self.helpers = [] if self.why else self._helpers(fleet, exclude, length)
        return list(dict.fromkeys([*engines, *self.helpers]))

    def _helpers(self, fleet: Fleet[Engine], exclude: frozenset[str], length: Length) -> list[Engine]:
        lengths, now = fleet.lengths(self._request.model).of, self._now()
        isolated = self._request.isolated and self._request.path in SALTED
        return [
            engine
            for engine in fleet.ready(self._request.model)
            if engine.engine.prefills
            and not (isolated and fleet.why_unsalted(engine, self._request.path))
            and engine.engine_id not in exclude
            and lengths[engine.engine_id] >= length.least
            and (not self._request.carried or self._can_be_named(engine))
            and now >= engine.rests_until
            and engine.breaker.allows(now, self._request.client)
        ]

    def _can_be_named(self, engine: Engine) -> bool:
        """Whether a sidecar can reach it by its address, and the gateway allows it."""
        among = self._request.among
        allowed = among is None or endpoint_of(engine.engine.base_url) in among
        return allowed and engine.engine.dp_rank is None

    async def read_body(self, read: Prompt | TextAffinity | None) -> None:
        """Check the body for reasons not to split, and find the places of its edits."""
        if self.why:
            return
        if not isinstance(read, Prompt):
            self.why = "unread"
        else:
            try:
                self._body = await run_cooperatively(
                    split_body(self._request.path, self._request.body, self._messages)
                )
            except TooManyStepsError:
                self.why = "body"
            else:
                self.why = self._body.whole

    def decide(
        self,
        able: DecodeCandidates,
        asked: PromptView,
        question: PlacementRequest,
        pick: Pick,
        now: float,
        left_s: float,
    ) -> tuple[Choice, Split]:
        """Return the answering engine, and whether another one computes the prompt. ``left_s``: time until
        the target of the first token."""
        read = able.read
        if self.why or not isinstance(read, Prompt):
            return self._whole(able, pick, left_s, self.why)
        engines = zip(able.engines, able.candidates, strict=True)
        decode = [_side(engine, candidate, read.num_tokens) for engine, candidate in engines]
        if self._disagg is not None and (handoff := self._disagg.handoff(now)) is not None:
            taken = self._take_over(decode, handoff, question)
            if taken is not None:
                return taken
            if not self._disagg.may_split:
                return self._whole(able, pick, left_s, "retried")
        return self._plan(able, decode, asked, question, pick, now, left_s)

    def _whole(self, able: DecodeCandidates, pick: Pick, left_s: float, why: str) -> tuple[Choice, Split]:
        """Choose one engine for both."""
        engines = zip(able.engines, able.candidates, strict=True)
        sides = [Side(candidate, engine.version, engine=engine) for engine, candidate in engines]
        choice = pick_in_time(sides, pick, left_s)
        first_s, margin_s = sides[choice.index].level_s(choice.scored, choice.index)
        return choice, Split(why, first_token_s=first_s, margin_s=margin_s)

    def _plan(
        self,
        able: DecodeCandidates,
        decode: Sequence[Side],
        asked: PromptView,
        question: PlacementRequest,
        pick: Pick,
        now: float,
        left_s: float,
    ) -> tuple[Choice, Split]:
        tokens = asked.tokens
        helpers: dict[str, Engine] = {
            engine.engine_id: engine
            for engine in self.helpers
            if not engine.closed and engine.kind == "vllm"  # SGLang knows no ``kv_transfer_params``
        }
        found = zip(helpers.values(), candidates(list(helpers.values()), asked, now), strict=True)
        best = plan(
            decode,
            [Side(candidate, engine.version, engine=engine) for engine, candidate in found],
            tokens,
            question.prompt_key,
            pick=pick,
            policy=self._policy,
            pd=self._pd,
            left_s=left_s,
        )
        partner = best.partner
        choice = _choice(best, partner)
        if partner is None:
            return choice, Split(
                best.why,
                local_s=best.local_s,
                remote_s=best.remote_s,
                first_token_s=best.first_token_s,
                margin_s=best.margin_s,
            )
        mates = [side.candidate for side in partner.sides]
        there = [helpers[candidate.engine_id] for candidate in mates]
        lacks = decode[best.decode].lacks
        split = Split(
            body=self._body,
            prefill=Decision(
                read_by(able.read, there[partner.choice.index]),
                tokens,
                there,
                mates,
                partner.choice,
                able.problem,
            ),
            lacks_tokens=lacks,
            transfer_s=self._transfer_s(lacks),
            local_s=best.local_s,
            remote_s=best.remote_s,
            first_token_s=best.first_token_s,
            margin_s=best.margin_s,
        )
        return choice, split

    def _take_over(
        self, decode: Sequence[Side], handoff: Handoff, question: PlacementRequest
    ) -> tuple[Choice, Split] | None:
        """Choose another decode engine if the earlier one could not be reached; None: there is none."""
        places = [
            place
            for place, side in enumerate(decode)
            if side.lacks
            and side.candidate.engine_id != handoff.source
            and fits(side.version, handoff.version, self._pd)
        ]
        if not places:
            return None
        able, tokens = [decode[place] for place in places], question.prompt_tokens
        taker = cheapest_taker(able, tokens, question.prompt_key, policy=self._policy, pd=self._pd)
        lacks = able[taker].lacks
        scored = score([side.candidate for side in decode], tokens, self._policy)
        choice = msgspec.structs.replace(
            make_choice(scored, places[taker], _reason(scored)), uncached_tokens=0
        )
        return choice, Split(body=self._body, lacks_tokens=lacks, transfer_s=self._transfer_s(lacks))

    def _transfer_s(self, lacks: int) -> float:
        return self._pd.leg_overhead_s + self._pd.transfer_s_per_token * lacks


def complete_layouts(engines: Sequence[Engine]) -> None:
    """Copy the group layout of one engine to others of its model that lack it: an engine that fetches prompts
    reports only full attention, and would otherwise look as if it had nothing else."""
    fullest: dict[str | None, CacheLayout] = {}
    differ = False
    for engine in engines:
        layout, known = engine.layout, fullest.get(engine.base_model)
        if layout is None or layout is known:
            continue
        differ = differ or known is not None
        if known is None or len(known.groups) < len(layout.groups):
            fullest[engine.base_model] = layout
    for engine in engines if differ else ():
        layout, known = engine.layout, fullest.get(engine.base_model)
        if layout is known or layout is None or known is None or engine.residency is None:
            continue
        if len(layout.groups) < len(known.groups):
            engine.residency.writer.expect(known.groups)


def messages_of(request: InboundRequest) -> Sequence[msgspec.Raw]:
    """Return a chat's messages as they stand in its body, until its prompt has been read."""
    chat = request.prompt
    return chat.messages if isinstance(chat, ChatBody) else ()


def _choice(found: PairPlan, partner: Partner | None) -> Choice:
    """The answering engine; ``partner``: another one computes."""
    cost = found.cost
    uncached = cost.uncached_tokens if partner is None else partner.choice.uncached_tokens
    scored, index = found.scored, found.decode
    return Choice(index, cost.engine_id, _reason(scored), uncached, cost, scored.candidates[index], scored)


def _reason(scored: ScoredCandidates) -> Reason:
    return "only" if len(scored.totals) == 1 else "cheapest"


def _bound_to_one(request: InboundRequest) -> str:
    if request.method != "POST" or request.path not in PROMPT_APIS:
        return "api"
    if request.carried == "gateway":
        return "gateway"
    if request.pinned is not None:
        return "pinned"
    return "earlier_response" if request.earlier_response is not None else ""


def _side(engine: Engine, candidate: Candidate, tokens: int) -> Side:
    """An engine that cannot fetch lacks nothing that could be sent."""
    fetches = engine.engine.decodes and engine.kind == "vllm"
    lacks = lacking(engine, candidate.hit, tokens) if fetches else 0
    own_s, margin_s = engine.rates.model.parts.overhead_s, engine.first_tokens.margin_s or 0.0
    return Side(candidate, engine.version, lacks, own_s, margin_s, engine)


def lacking(engine: Engine, hit: Hit, prompt_tokens: int) -> int:
    """Prompt tokens that would be transferred to this engine."""
    layout = engine.layout
    return lacked(hit, prompt_tokens, states=layout is not None and _has_mamba(layout))


@lru_cache(maxsize=256)
def _has_mamba(layout: CacheLayout) -> bool:
    return any(c.family is Family.MAMBA for c in layout.classes)
