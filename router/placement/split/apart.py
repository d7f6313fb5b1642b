"""Whether a request's prompt is computed on one engine and decoded on another: asked once per decision, in
fleets whose engines have roles.

What keeps a request whole is a word (``Split.why``): who sent it, what it asks for, what became of it so far,
or that one engine alone is cheaper. All others go to the cheapest pair (``pairs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.fleet.identity import endpoint_of
from router.index.learn.layout import CacheLayout
from router.openai.apis import PROMPT_APIS
from router.openai.members import TooManyStepsError, at_leisure
from router.openai.request import InboundRequest
from router.pd.bodies import SplitBody, split_body
from router.pd.course import Course
from router.pd.handoff import Handoff
from router.pd.settings import PdSettings
from router.placement.candidate import Ask, Candidate, PolicySettings, Reason
from router.placement.cost import Choice, Weighed, chosen, weigh
from router.placement.engine import Engine, PromptView, candidates
from router.placement.placement import Decision, Split
from router.placement.split.legs import lacking
from router.placement.split.pairs import PairPlan, Partner, Pick, Side, cheapest_taker, fits, plan
from router.prompts.affinity import TextAffinity
from router.prompts.prompt import Prompt
from router.prompts.request import ChatBody


class Answerers(msgspec.Struct, frozen=True, gc=False):
    """The engines that may answer a request, and what is known of them; ``problem`` as in ``Decision``."""

    read: Prompt | TextAffinity | None
    engines: Sequence[Engine]
    candidates: Sequence[Candidate]
    problem: str


class Apart:
    """One request in one decision. ``why``: it is known to stay whole; "": not so far."""

    __slots__ = ("_body", "_course", "_messages", "_pd", "_policy", "_request", "helpers", "why")

    def __init__(
        self, request: InboundRequest, course: Course | None, pd: PdSettings, policy: PolicySettings
    ) -> None:
        self._request = request
        self._course = course
        self._pd = pd
        self._policy = policy
        self.helpers: list[Engine] = []
        """Engines that may compute its prompt for another one."""
        self._body: SplitBody | None = None
        chat = request.prompt  # as long as its prompt has not been read
        self._messages = chat.messages if isinstance(chat, ChatBody) else ()
        self.why = _bound_to_one(request)

    def find_helpers(self, ready: list[Engine], exclude: frozenset[str], now: float) -> None:
        """Fill ``helpers``."""
        if self.why:
            return
        if self._course is not None and not self._course.splits and self._course.handoff(now) is None:
            self.why = "retried"
            return
        self.helpers = [
            engine
            for engine in ready
            if engine.engine.prefills
            and engine.engine_id not in exclude
            and (not self._request.carried or self._can_be_named(engine))
            and now >= engine.rests_until
            and engine.breaker.allows(now, self._request.client)
        ]

    def _can_be_named(self, engine: Engine) -> bool:
        """To a sidecar, which is told of addresses alone; and a gateway may allow some only."""
        among = self._request.among
        allowed = among is None or endpoint_of(engine.engine.base_url) in among
        return allowed and engine.engine.dp_rank is None

    async def read_body(self, read: Prompt | TextAffinity | None) -> None:
        """Look for what keeps it whole, and for the places where its body is to be changed."""
        if self.why:
            return
        if not isinstance(read, Prompt):
            self.why = "unread"
        else:
            try:
                self._body = await at_leisure(
                    split_body(self._request.path, self._request.body, self._messages)
                )
            except TooManyStepsError:
                self.why = "body"
            else:
                self.why = self._body.whole

    def decide(
        self, able: Answerers, asked: PromptView, question: Ask, pick: Pick, now: float
    ) -> tuple[Choice, Split]:
        """Which engine answers, and whether another one computes the prompt."""
        read = able.read
        if self.why or not isinstance(read, Prompt):
            return pick(able.candidates), Split(self.why)
        engines = zip(able.engines, able.candidates, strict=True)
        decode = [_side(engine, candidate, read.num_tokens) for engine, candidate in engines]
        if self._course is not None and (handoff := self._course.handoff(now)) is not None:
            taken = self._take_over(decode, handoff, question)
            if taken is not None:
                return taken
            if not self._course.splits:
                return pick(able.candidates), Split("retried")
        return self._plan(able, decode, asked, question, pick, now)

    def _plan(
        self,
        able: Answerers,
        decode: Sequence[Side],
        asked: PromptView,
        question: Ask,
        pick: Pick,
        now: float,
    ) -> tuple[Choice, Split]:
        tokens = asked.tokens
        helpers: dict[str, Engine] = {
            engine.engine_id: engine for engine in self.helpers if not engine.closed
        }
        found = zip(helpers.values(), candidates(helpers.values(), asked, now), strict=True)
        best = plan(
            decode,
            [Side(candidate, engine.version) for engine, candidate in found],
            tokens,
            question.prompt_key,
            pick=pick,
            policy=self._policy,
            pd=self._pd,
        )
        partner = best.partner
        choice = _choice(best, partner)
        if partner is None:
            return choice, Split(best.why, local_s=best.local_s, remote_s=best.remote_s)
        mates = [side.candidate for side in partner.sides]
        there = [helpers[candidate.engine_id] for candidate in mates]
        lacks = decode[best.decode].lacks
        split = Split(
            body=self._body,
            prefill=Decision(able.read, tokens, there, mates, partner.choice, able.problem),
            lacks_tokens=lacks,
            transfer_s=self._transfer_s(lacks),
            local_s=best.local_s,
            remote_s=best.remote_s,
        )
        return choice, split

    def _take_over(
        self, decode: Sequence[Side], handoff: Handoff, question: Ask
    ) -> tuple[Choice, Split] | None:
        """Another engine fetches what one could not be told of; None: there is none that may."""
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
        weighed = weigh([side.candidate for side in decode], tokens, self._policy)
        choice = msgspec.structs.replace(chosen(weighed, places[taker], _reason(weighed)), uncached_tokens=0)
        return choice, Split(body=self._body, lacks_tokens=lacks, transfer_s=self._transfer_s(lacks))

    def _transfer_s(self, lacks: int) -> float:
        return self._pd.leg_overhead_s + self._pd.transfer_s_per_token * lacks


def complete_layouts(engines: Sequence[Engine]) -> None:
    """What one engine told of its groups holds for the others of its model: an engine that fetches prompts
    tells of full attention only, and would look as if it had nothing else."""
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


def _choice(found: PairPlan, partner: Partner | None) -> Choice:
    """The engine that answers; ``partner``: another one computes."""
    cost = found.cost
    uncached = cost.uncached_tokens if partner is None else partner.choice.uncached_tokens
    return Choice(found.decode, cost.engine_id, _reason(found.weighed), uncached, cost, found.weighed)


def _reason(weighed: Weighed) -> Reason:
    return "only" if len(weighed.totals) == 1 else "cheapest"


def _bound_to_one(request: InboundRequest) -> str:
    if request.method != "POST" or request.path not in PROMPT_APIS:
        return "api"
    if request.carried == "gateway":
        return "gateway"
    if request.pinned is not None:
        return "pinned"
    return "earlier_response" if request.earlier_response is not None else ""


def _side(engine: Engine, candidate: Candidate, tokens: int) -> Side:
    """An engine that can fetch nothing lacks nothing that could be sent."""
    lacks = lacking(engine, candidate.hit, tokens) if engine.engine.decodes else 0
    return Side(candidate, engine.version, lacks)
