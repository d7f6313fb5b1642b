"""A request on its engine: open in the load account and among the prompts in flight, until it ends.

Invariants: a placement is removed from every account exactly once (``Attempt``); learning from an answer
(rates, shadows, receipts) happens only while the engine is in the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family
from kvatlas.router.admission.admission_queue import AdmissionQueue
from kvatlas.router.admission.claims import ENGINE_PRIORITY
from kvatlas.router.admission.fair_queue import Charge, Priority
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.index.model import Residency
from kvatlas.router.observe.receipts import KeptReceipt, Leg, Missed
from kvatlas.router.observe.requests import REQUEST_ID_CHARS_MAX
from kvatlas.router.observe.usage import PlacementFacts
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.openai.estimates import estimated_tokens, pooled
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.openai.work import Work
from kvatlas.router.pd.bodies import SplitBody
from kvatlas.router.placement.candidate import Candidate, Hit
from kvatlas.router.placement.cost import Choice
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.evictions import PooledPrompt
from kvatlas.router.placement.first_token import FirstTokenParts
from kvatlas.router.placement.fleet_values import columns
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.own_pulls import PullOrder
from kvatlas.router.placement.radix_parts import SentPrompt
from kvatlas.router.placement.service_level import SloForecast
from kvatlas.router.placement.wait_limit import LongWait, predicted_wait_s
from kvatlas.router.prompts.prompt import Prompt, TextAffinity
from kvatlas.router.proxy.attempt import Answer, Attempt, Fields
from kvatlas.router.proxy.paths import cache_reset

_NO_FIRST_TOKEN = FirstTokenParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Split(msgspec.Struct, frozen=True, gc=False):
    """Decision about computing a prompt on one engine for another. ``why``: reason for not splitting."""

    why: str = ""
    body: SplitBody | None = None
    prefill: Decision | None = None
    """Decision for the prefill engine; None without one, or if the prompt has been computed already."""
    lacks_tokens: int = 0
    """Tokens that the decode engine would receive."""
    transfer_s: float = 0.0
    local_s: float | None = None
    """Cost of the best engine alone."""
    remote_s: float | None = None
    """Cost of the best pair."""
    first_token_s: float | None = None
    """Predicted time to first token; None if the prompt has been computed already."""
    margin_s: float = 0.0
    """For errors of that prediction."""


class MostHeld(msgspec.Struct, frozen=True, gc=False):
    """Longest hit of all eligible engines for a prompt."""

    tokens: int
    missed: Missed
    """Why the prompt goes to another engine; "": it does not."""
    sole: Engine | None
    """Engine with a longer hit than any other engine not left out; None if two are equal."""
    sole_s: float
    """Seconds of prefill by which its hit is longer."""


def read_by(read: Prompt | TextAffinity | None, engine: Engine) -> Prompt | TextAffinity | None:
    """The request as this engine's frontend makes it; None: its tokens are unknown."""
    if not isinstance(read, Prompt) or not read.variants:
        return read
    return read.behind(engine.frontend)


NOTHING_HELD = MostHeld(0, "", None, 0.0)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A choice with its inputs; ``candidates`` in the order of ``engines``."""

    read: Prompt | TextAffinity | None
    prompt_tokens: int
    engines: Sequence[Engine]
    candidates: Sequence[Candidate]
    choice: Choice
    index_problem: str = ""
    """Why the index shared with other replicas could not be queried; "" if it answered, or if there is
    none."""
    waits: bool = False
    """Explained: the request would wait in the queue now."""
    long_wait: LongWait | None = None
    """Explained: the request would be refused for its predicted wait."""
    split: Split | None = None
    """In fleets with roles: whether the prompt is computed on another engine."""
    skipped: Sequence[Candidate] = ()
    """Engines left out, because they are predicted to miss the request's service level."""
    slo_forecast: SloForecast | None = None
    """Explained, of a request with a service level."""
    order: EngineOrder | None = None
    """Place of the request in the engine's own order, if it has one."""
    pull: PullOrder | None = None
    """Prefix that the chosen engine pulls from another one."""

    @property
    def engine(self) -> Engine:
        """The chosen engine."""
        return self.engines[self.choice.index]

    @property
    def candidate(self) -> Candidate:
        """State of the chosen engine."""
        return self.choice.candidate

    @property
    def hit(self) -> Hit:
        """Hit on the chosen engine, with the prefix that it pulls."""
        return self.candidate.hit if self.pull is None else self.pull.hit

    def most_held(self) -> MostHeld:
        """Return the longest hit of all engines, and the part that only one of them holds."""
        columns_of = columns(self.candidates)
        hits, most, second, longest = columns_of.hits, 0, 0, 0
        for number, held in enumerate(hits, 1):
            tokens = held.whole_tokens
            if tokens > most:
                most, second, longest = tokens, most, number
            elif tokens > second:
                second = tokens
        chosen = self.choice.candidate
        own = (chosen.hit if self.pull is None else self.pull.hit).whole_tokens
        index, sole, sole_s = 0, None, 0.0
        if most > second or most > own:
            which: list[int] = columns_of.which.tolist()
            index = which.index(longest)
            if most == second:
                index = min(
                    at for at, number in enumerate(which) if number and hits[number - 1].whole_tokens == most
                )
            elif which.count(longest) == 1:
                sole_s = columns_of.states[index].prefill_s_per_token * (most - second)
                sole = self.engines[index]
        if self.skipped:
            late = max([one.whole_tokens for one in columns(self.skipped).hits], default=0)
            if late > most:
                return MostHeld(late, "slo", sole, sole_s)
        missed: Missed = ""
        if most > own:
            holder = columns_of[index]
            if holder.room_s > holder.queue_s and holder.room_s > chosen.room_s:
                missed = "pages"
            else:
                missed = "load" if holder.queue_s > chosen.queue_s else "choice"
        return MostHeld(most, missed, sole, sole_s)

    def work(self, request: InboundRequest) -> Work:
        """Return the work of the request at the chosen engine: all its prompts, times all its answers."""
        read, uncached, tokens = self.read, self.choice.uncached_tokens, self.prompt_tokens
        if isinstance(read, Prompt):
            if read.num_prompts == 1 == read.num_answers:
                return Work(uncached, tokens)
            return _work_of_many(read, self.engine, uncached, tokens)
        size = estimated_tokens(request, None if read is None else read.reason)
        # of a text, without the tokens assumed to be cached
        uncached += max(0, size - tokens)
        if read is None:
            prompts, more = pooled(request)
            # Nothing that a query brings again is taken to be cached.
            return Work(uncached + more, max(size, tokens) + more, prompts, known=False)
        if read.num_prompts == 1 == read.num_answers:
            return Work(uncached, max(size, tokens), known=False)
        prompts, answers = read.num_prompts, read.num_answers
        again = (answers - 1) * prompts * _BLOCK_TOKENS
        return Work(uncached + again, max(size, tokens), prompts, answers, again, known=False)

    def more_s(self, work: Work) -> float:
        """Return the seconds of ``work`` that the choice did not count: those of prompts behind the first, of
        further answers, and of what is not read."""
        more = work.uncached_tokens - self.choice.uncached_tokens
        return more * self.candidate.prefill_s_per_token if more > 0 else 0.0

    def wait_s(self) -> float:
        """Return the predicted wait for an engine; for a split request that of the prefill or of the decode
        engines, whichever is longer."""
        order, split = self.order, self.split
        rank_s = 0.0 if order is None else order.rank_s(self.choice.cost.prefill_s)
        wait_s = predicted_wait_s(self.candidates, self.engines, rank_s)
        if split is None or split.prefill is None:
            return wait_s
        return max(wait_s, split.prefill.wait_s())

    def first_token(self) -> FirstTokenParts | None:
        """Return the predicted time to first token; None without a prediction of the hit."""
        candidate, read = self.candidate, self.read
        if candidate.hit.confidence == "none" or not isinstance(read, Prompt) or read.num_prompts > 1:
            return None
        return self.engine.first_token(candidate, self.choice.cost, read.num_tokens, self.order)

    def level_s(self) -> tuple[float, float, float] | None:
        """Return the predicted seconds to the first token, of these the ones before an engine begins with the
        prompt, and the margin for errors; of a split request, at both engines. None without a prediction."""
        split = self.split
        if split is not None and split.prefill is not None:
            parts = split.prefill.first_token()
            if parts is None or split.first_token_s is None:
                return None
            wait_s = parts.queue_s + parts.pages_s + self.choice.cost.wait_s
            return split.first_token_s, wait_s, split.margin_s
        # A body without a prefill engine: the prompt has been computed.
        parts = self.first_token() if split is None or split.body is None else None
        if parts is None:
            return None
        margin_s = self.engine.first_tokens.margin_of(parts.total_s)
        return parts.total_s, parts.queue_s + parts.pages_s, margin_s or 0.0


# The usual block of engines whose blocks are not known.
_BLOCK_TOKENS: Final = 16


def _work_of_many(read: Prompt, engine: Engine, uncached: int, tokens: int) -> Work:
    """Return the work of several prompts, or of several answers."""
    rest, answers = read.rest, read.num_answers
    whole = tokens + rest.size
    again = 0
    if answers > 1:
        stated, block = engine.stated, engine.scheme.hash_block_size
        if read.skips_cache or (stated is not None and stated.caches_prefixes is False):
            again = whole
        else:
            # The siblings of a prompt's first answer hit its whole blocks, but never its last token.
            again = tokens - (tokens - 1) // block * block + min(rest.size, rest.prompts * block)
    again *= answers - 1
    # The prompts behind the first are not looked up: nothing of them is taken to be cached.
    return Work(uncached + rest.size + again, whole, read.num_prompts, answers, again)


class Step:
    """One step of a plan beside its engine (``pull_step``, ``split_steps``), told what happens to its
    placement. ``alone``: no other engine could take its engine's place."""

    leg: Leg = ""
    alone: bool = False
    hit: Hit | None = None
    """Predicted part of the answer's ``cached_tokens``, if that is another engine's."""
    prefill_engine: str = ""
    """Engine that computes the prompt, known to the one that answers alone."""

    def sent(self, placement: Placement) -> None:
        """Set what is sent; the accounts have the placement."""

    def facts(self) -> dict[str, Any]:
        """Implement ``Attempt``."""
        return {}

    def nothing_held(self, placement: Placement) -> None:
        """Implement ``Attempt``."""

    def refused(self, status: int, wait_s: float) -> bool:
        """The engine answered with an error. Returns whether it is another one's."""
        return False

    def begun(self) -> None:
        """The first byte of an answer of success came."""

    def learned(
        self, placement: Placement, usage: Usage | None, predicted_s: float | None, ttft_s: float | None
    ) -> None:
        """The answer ended. ``usage`` None: without one of a single predicted prompt; then the seconds to its
        first token, predicted and measured."""

    def ended(self, placement: Placement, failed: str) -> None:
        """The end, once."""


class Placement(Attempt):
    """One request on one engine, with its decision and the steps of its plan."""

    _answered = _prefilled = _unseen = False
    _untimed = False
    """Whether its first byte does not show the end of the prefill."""
    _predicted = False
    """Whether the hit of this engine was predicted, for a single prompt with one answer."""
    _streamed_tokens = 0
    _ttft_s: float | None = None
    _gap_s: float | None = None
    """Seconds between the answer of the prefill engine and this request."""
    _first_token: FirstTokenParts | None = None
    _charged: Charge | None = None
    """Of two engines for one request the one that answers is charged, until the request's end."""
    _flying: InflightPrompt | None = None
    _pooled: PooledPrompt | None = None
    _parted: SentPrompt | None = None
    _hashes: Sequence[BlockHash] | None = None

    def __init__(
        self,
        request: InboundRequest,
        decision: Decision,
        accounts: Accounts,
        client_headers: Fields,
        waited_s: float = 0.0,
        steps: Sequence[Step] = (),
    ) -> None:
        self._steps = steps
        leg = self._leg = steps[0].leg if steps else ""
        decodes = leg == "decode"
        # Whether the client gets this engine's answer.
        self._is_answer = leg != "prefill"
        choice, read = decision.choice, decision.read
        engine, candidate = decision.engines[choice.index], choice.candidate
        address = engine.engine
        rank, cost = address.dp_rank, choice.cost
        fields: Fields = () if rank is None else ((b"x-data-parallel-rank", b"%d" % rank),)
        hit = candidate.hit if decision.pull is None else decision.pull.hit
        order = decision.order if engine.takes_order else None
        work = decision.work(request)
        more_s = 0.0 if work.uncached_tokens == choice.uncached_tokens else decision.more_s(work)
        # Of several prompts, that of the last one.
        first_token_s = cost.wait_s + cost.prefill_s + cost.load_s + more_s
        work_s = cost.prefill_s + more_s
        place = float(request.priority) if order is None else order.rank_s(work_s)
        if isinstance(read, Prompt):
            scheme = engine.scheme
            self._block_tokens = unit = scheme.hash_block_size
            self._hashes = hashes = read.hashes(scheme)
            if hit.coming_tokens > hit.gpu_tokens and (
                (passed := accounts.inflight.passed(engine.engine_id, hashes, hit, unit, place)) is not None
            ):
                if order is not None:
                    work_s = order.work_behind(work_s, passed)
                    place = order.rank_s(work_s)
                if place <= passed and hit.confidence == "exact":
                    hit = msgspec.structs.replace(hit, confidence="pending")
        if order is not None:
            fields += ((ENGINE_PRIORITY, b"%d" % order.priority(work_s)),)
        super().__init__(
            engine.engine_id,
            address.base_url,
            engine.breaker,
            request,
            now=accounts.now,
            expected_s=first_token_s + cost.decode_s,
            work=work,
            engine_headers=fields,
            client_headers=client_headers,
            waited_s=waited_s,
            later=decodes,
        )
        self.decision, self.engine, self._accounts = decision, engine, accounts
        self._candidate, self._hit = candidate, hit
        now = self.asked_s
        if decodes:
            self._ticket = engine.load.reserve(now, decision.prompt_tokens)
        else:
            self._first_token = decision.first_token()
            self._ticket = engine.load.admit(
                uncached_tokens=work.uncached_tokens,
                now=now,
                # The first token of several prompts says nothing of the others.
                streams=request.stream and work.prompts == 1,
                load_s=cost.load_s,
                expected_s=first_token_s,
                running=candidate.running,
                waiting=candidate.waiting,
                prompt_tokens=work.prompt_tokens,
                rank_s=0.0 if order is None else place,
                sequences=work.prompts * work.answers,
            )
        accounts.load_stats.admitted_silent += not engine.up
        if accounts.room is not None and self._is_answer:
            base_model = engine.base_model or ""
            self._charged = accounts.room.charge(request.claim, base_model, work.uncached_tokens)
        if isinstance(read, Prompt):
            known = candidate.hit.confidence != "none"
            single = read.num_prompts == read.num_answers == 1
            self._predicted = known and single and not decodes
            kept = () if decodes else engine.kept(read.num_tokens, candidate.hit)
            self._flying = accounts.inflight.add(engine.engine_id, hashes, now, kept, place)
            limit = 1 if self._leg == "prefill" else read.answer_tokens_max
            self._pooled = engine.evictions.admit(hashes, read.num_tokens, limit)
            if engine.parts is not None and single:
                self._parted = engine.parts.sent(hashes, read.num_tokens)
        elif isinstance(read, TextAffinity):
            accounts.affinity.record(read.keys, engine.engine_id)
        for step in steps:
            step.sent(self)

    @property
    def says_ids(self) -> bool:
        """Implement ``Attempt``."""
        return self._is_answer and self.engine.says_ids

    def streamed(self, events: int) -> None:
        """Implement ``Attempt``."""
        self._streamed_tokens += events
        if self._pooled is not None:
            self._pooled.answered_tokens += events

    def rest_s(self) -> float:
        """Implement ``Attempt``."""
        events, read = self._streamed_tokens, self.decision.read
        if not events:
            return math.inf
        limit = read.answer_tokens_max if isinstance(read, Prompt) else 0
        # An event may hold several tokens, and a stream that goes on has those of other engines.
        before = self.tokens_before
        made = events if self.kept is None else max(1, len(self.kept.ids) - before)
        expected = self.engine.evictions.expected_tokens(limit and limit + before)
        # One that is longer than most is taken to be as long again.
        left = expected - before - made if expected > before + made else before + made
        if limit:
            left = min(left, limit - made)
        return max(left, 0) * (self.now() - self.asked_s - (self._ttft_s or 0.0)) / made

    def order_refused(self) -> None:
        """Implement ``Attempt``."""
        self.engine.takes_order = False

    def parses_not(self) -> None:
        """Implement ``Attempt``."""
        self.engine.parses = False

    def facts(self) -> dict[str, Any]:
        """Implement ``Attempt``."""
        decision, candidate = self.decision, self._candidate
        known = candidate.hit.confidence != "none"
        found = {
            "kvatlas.reason": decision.choice.reason,
            "kvatlas.mode": candidate.hit.mode,
            "kvatlas.prompt_tokens": decision.prompt_tokens,
            "kvatlas.predicted_hit_tokens": self._hit.whole_tokens if known else None,
            "kvatlas.queue_s": candidate.queue_s,
            "kvatlas.waited_s": self.waited_s or None,
            "kvatlas.engines": len(decision.engines),
            "kvatlas.read": decision.read.source if isinstance(decision.read, Prompt) else None,
        }
        if self._leg:
            found["kvatlas.leg"] = self._leg
        if self._leg == "decode":
            found["kvatlas.gap_s"] = self._gap_s
        for step in self._steps:
            found |= step.facts()
        return found

    def handed_over(self, gap_s: float) -> None:
        """Implement ``Attempt``."""
        self._gap_s = gap_s

    def nothing_held(self) -> None:
        """Implement ``Attempt``."""
        for step in self._steps:
            step.nothing_held(self)

    def end_unobserved(self) -> None:
        """The end will not be reported: infer it from the engine's running-requests gauge."""
        self._untimed = True
        self.engine.load.unseen(self._ticket, self.now(), lambda: None)

    def refused(self, status: int, wait_s: float) -> bool:
        """Implement ``Attempt``."""
        for step in self._steps:
            if step.refused(status, wait_s):
                return self._end("status")
        return super().refused(status, wait_s)

    def next_best(self, count: int) -> tuple[str, ...]:
        """Implement ``Attempt``."""
        if any(step.alone for step in self._steps):
            # The others may have another version than the prefill engine, or be the source of a pull.
            return ()
        decision, totals = self.decision, self.decision.choice.scored.totals
        order = sorted(range(len(totals)), key=totals.__getitem__)
        urls = dict.fromkeys(decision.engines[i].engine.base_url for i in order)
        urls.pop(self.base_url, None)
        return tuple(urls)[:count]

    def needs_longer(self) -> bool:
        """Implement ``Attempt``."""
        request, own = self.request, self.engine.context_tokens(self.request.model)
        bound = (request.pinned, request.earlier_response, request.among) != (None, None, None)
        if bound or not own < request.context_tokens:
            return False
        request.longer_than = max(request.longer_than, int(own))
        return True

    def check_eligible(self) -> None:
        """Implement ``Attempt``."""
        engine, model = self.engine, self.request.model
        rests = not self.request.reads_response and (bool(engine.held) or engine.asleep)
        gone = rests or engine.closed or not (engine.up or engine.silent)
        if gone or not (model is None or engine.serves(model)):
            self.blameless = True
            error = UpstreamError("refused", sent=False)
            error.abandoned = True
            raise error

    def awaited(self, cancel: Callable[[], object]) -> None:
        """Implement ``Attempt``."""
        self.engine.waiting[self] = cancel

    def arrived(self, answer: Answer | None = None) -> None:
        """Implement ``Attempt``."""
        self.engine.waiting.pop(self, None)
        if answer is not None and self.open:
            self.engine.answering[self] = answer

    def named(self, *, obeyed: bool) -> None:
        """Implement ``Attempt``."""
        self.engine.ignores_ids = not obeyed

    def answered(self, status: int) -> None:
        """Implement ``Attempt``."""
        super().answered(status)
        self.engine.answers += 1

    def unseen(self, ended: Callable[[], None]) -> float:
        """Implement ``Attempt``."""
        super().unseen(ended)
        self._answered = self._unseen = True
        return self.engine.load.unseen(self._ticket, self.now(), ended)

    def _begun(self, now: float) -> None:
        self._answered = True
        engine = self.engine
        engine.answers += 1
        for step in self._steps:
            step.begun()
        path = self.request.path
        if path not in PROMPT_APIS and (emptied := cache_reset(path, self.request.query)):
            # Its engine announces this only with its next batch, so known blocks are dropped at once; after a
            # reset that was not carried out the router expects less than there is.
            engine.reset(cleared=emptied)
        if not self.request.stream:
            # Only a stream's first byte shows the end of the prefill.
            return
        self._prefilled = True
        if not self._untimed:
            self._ttft_s = now - self.asked_s
            # A pull's says more of another engine and of the link.
            if self._first_token is not None and self.decision.pull is None and not engine.closed:
                engine.first_tokens.add(self.request.model or "", self._first_token.total_s, self._ttft_s)
        due_s = self.request.claim.due_s
        if due_s is not None and self._is_answer:
            stats = self._accounts.slo_stats
            counts = stats.met if now <= due_s else stats.missed
            name = Priority(self.request.claim.priority).label
            counts[name] = counts.get(name, 0) + 1
        sample = engine.load.first_token(self._ticket, now)
        if not engine.closed:
            engine.rates.learn(sample, engine.load.timed(self._ticket), now - self.asked_s, now)
        if self._flying is not None:
            self._accounts.inflight.prefilled(self._flying, now)
        engine.prompt_started(self._pooled, self._parted)
        if engine.shadow is not None:
            self._served()
        if self._accounts.room is not None:
            self._accounts.room.changed()

    def _served(self) -> None:
        """Update the shadow: the engine has computed the prompt."""
        read, shadow = self.decision.read, self.engine.shadow
        if shadow is None or not isinstance(read, Prompt):
            return
        # A decode engine receives the blocks of full attention only.
        if self._leg != "decode" or all(group.family is Family.FULL for group in shadow.spec.groups):
            shadow.served(read.token_ids, read.hashes)

    def _ended(self, usage: Usage | None, failed: str) -> None:
        now, accounts, engine = self.now(), self._accounts, self.engine
        engine.waiting.pop(self, None)
        engine.answering.pop(self, None)
        engine.answers += usage is not None
        if failed:
            engine.load.fail(self._ticket, now)
        else:
            engine.load.finish(self._ticket, now)
        if accounts.room is not None:
            self._settle(accounts.room, usage)
        if self._flying is not None:
            if self._answered:
                accounts.inflight.end(self._flying, now)
            else:
                # Refused or failed: the engine computed nothing.
                accounts.inflight.drop(self._flying)
        tokens = None if usage is None else usage.completion_tokens
        if self._pooled is not None or self._parted is not None:
            engine.prompt_ended(self._pooled, self._parted, tokens, computed=self._answered)
        if isinstance(self.decision.read, Prompt):
            feed: str | None = None
            if self._answered and not engine.closed:
                if not self._prefilled and engine.shadow is not None:
                    self._served()
                if not self._unseen:
                    feed = engine.feed_state
                    self._learn(usage, feed)
            accounts.books.add(self._book, usage, feed, now)
        for step in self._steps:
            step.ended(self, failed)

    def _book(self, usage: Usage | None, feed: str | None, now: float) -> None:
        """Enter it in the books, once per tick. ``feed``: state of the feed at the end of the request, the
        time ``now``; None: it has no receipt."""
        accounts, decision, request, engine = self._accounts, self.decision, self.request, self.engine
        read, hit, hashes = decision.read, self._hit, self._hashes
        if hashes is None or not isinstance(read, Prompt):
            return
        block_tokens = self._block_tokens
        hot, model, extras, whole = accounts.hot_so_far, request.model or "", read.extras, hit.whole_tokens
        seen = hot.longest(hashes, block_tokens, whole)
        if self._is_answer:
            hot.add(model, hashes, block_tokens, self.asked_s)
        own = other = 0
        if request.cache_group and self._leg != "decode" and not extras.multimodal:
            groups, base_model = accounts.group_prefixes, engine.base_model or ""
            own, other = groups.add(request.cache_group, base_model, extras.lora_name or "", read.token_ids)
        if feed is None:
            return
        held = NOTHING_HELD
        predicted, soon, near = None, whole, whole
        if self._predicted:
            held = decision.most_held()
            # Nothing is loaded that is not predicted.
            predicted, soon, near = whole, hit.soon_tokens, hit.near_tokens
            if held.sole is not None:
                held.sole.receipts_so_far.worth.add(held.sole_s, now)
        parts = self._first_token or _NO_FIRST_TOKEN
        read_s, due_s, order = request.read_s, request.claim.due_s, decision.pull
        router_s = 0.0 if read_s is None else self.asked_s - read_s - self.waited_s
        kept: KeptReceipt = (
            request.request_id[:REQUEST_ID_CHARS_MAX].decode("latin-1"),
            self.engine_id,
            model,
            # Without the index's answer: its problem, not a prediction of nothing.
            "fallback" if decision.index_problem and hit.confidence == "none" else hit.mode,
            feed,
            decision.prompt_tokens,
            predicted,
            near - soon,
            whole - near,
            None if usage is None else usage.cached_tokens,
            # Usage is the sum over all prompts.
            None if usage is None or read.num_prompts > 1 else usage.prompt_tokens,
            0 if order is None else order.pull.tokens,
            request.tenant,
            held.tokens,
            held.missed,
            self._candidate.prefill_s_per_token * (held.tokens - whole) if held.missed else 0.0,
            seen,
            max(0, other - max(own, held.tokens)) if other and self._predicted else 0,
            # Isolated: as all prompts of its tenant are.
            extras.cache_salt is not None and not request.isolated,
            hit.shared_prefix_tokens,
            hit.evicted_tokens,
            PROMPT_APIS.get(request.path, ""),
            read.source,
            decision.choice.reason,
            self._ttft_s,
            None if self._first_token is None else parts.total_s,
            parts.queue_s,
            parts.pages_s,
            parts.load_s,
            parts.prefill_s,
            parts.engine_s,
            router_s if router_s > 0.0 else 0.0,  # noqa: FURB136
            self._leg,
            self._gap_s,
            None if due_s is None or read_s is None else due_s - read_s,
            self.waited_s,
            decision.index_problem,
        )
        if order is not None:
            came = None if usage is None or predicted is None else order.came_tokens(usage.cached_tokens)
            kept += (order.source.engine_id, came, order.pull.link_s)
        engine.receipts_so_far.add(kept)
        accounts.receipts_so_far.add(kept)

    def _learn(self, usage: Usage | None, feed: str) -> None:
        """Learn from the engine's report."""
        for step in self._steps:
            predicted_s = None if self._first_token is None else self._first_token.total_s
            step.learned(self, usage if self._predicted else None, predicted_s, self._ttft_s)
        # Behind a prefill elsewhere it is that engine's.
        if usage is None or usage.cached_tokens is None or self._leg == "decode":
            return
        engine, decision, hit, actual = self.engine, self.decision, self._hit, usage.cached_tokens
        if isinstance(decision.read, Prompt) and decision.read.num_prompts == 1:
            engine.computed(usage.prompt_tokens - actual, self.asked_s)
        if not self._predicted or engine.residency is None:
            return
        mode, predicted = "native" if hit.confidence == "exact" else hit.mode, hit.whole_tokens
        if mode == "shadow" and hit.coming_tokens <= hit.gpu_tokens:
            engine.reported(predicted, actual)
        if mode in {"assumed", "learned"} and actual > predicted:
            self._learn_more(usage, actual)
            if mode == "assumed":
                engine.residency.writer.doubt()
        same = feed == "ready" and usage.prompt_tokens == decision.prompt_tokens
        if hit.confidence in {"partial", "learned"} and same:
            engine.confirmed(hit, usage.prompt_tokens, actual, self._parted)
        if mode == "native" and same:
            from_gpu = hit.soon_tokens == hit.near_tokens == predicted
            if from_gpu and not hit.evicted_tokens:
                engine.residency.writer.learn_receipt(predicted, actual, usage.prompt_tokens)
            elif hit.near_tokens < predicted:
                self._learn_outside(actual, engine.residency)

    def _learn_outside(self, actual: int, residency: Residency) -> None:
        """Learn from a hit of which a part was to be loaded."""
        hit, hashes = self._hit, self._hashes
        if actual == hit.whole_tokens:
            self._learn_load()
        elif hit.near_tokens <= actual < hit.whole_tokens and hashes and self.decision.pull is None:
            now = self._accounts.now()
            residency.not_delivered(hashes, actual, self._block_tokens, asked_s=self.asked_s, now=now)

    def _learn_load(self) -> None:
        """Learn how long a load from a store took, where nothing else kept the first token waiting."""
        hit, parts, rate, ttft_s = self._hit, self._first_token, self.engine.load_rate, self._ttft_s
        if rate is None or parts is None or ttft_s is None or self.decision.pull is not None:
            return
        loaded = hit.whole_tokens - hit.near_tokens
        if loaded and hit.near_tokens == hit.soon_tokens and not parts.queue_s and not parts.pages_s:
            rate.add(ttft_s - (parts.total_s - parts.load_s), loaded)

    def _learn_more(self, usage: Usage, actual: int) -> None:
        """Learn from a hit that events did not show."""
        read, residency = self.decision.read, self.engine.residency
        prompt = read.behind(self.engine.frontend) if isinstance(read, Prompt) else None
        if prompt is not None and residency is not None and usage.prompt_tokens == prompt.num_tokens:
            residency.writer.learn_cached(prompt.token_ids, prompt.extras, actual)

    def _settle(self, room: AdmissionQueue, usage: Usage | None) -> None:
        """Settle the tenant's charge, and wake the queue, which may have room now."""
        if self._answered and self._is_answer:
            pool = self.engine.base_model or ""
            streamed = self._streamed_tokens
            room.settle(self.request.claim, pool, self._charged, self.work, usage, streamed)
        elif self._charged is not None:
            self._charged.correct(0)
        room.changed()

    def usage_facts(self) -> PlacementFacts:
        """Describe the prompt and the predicted hit."""
        read, hit = self.decision.read, self._hit
        for step in self._steps:
            hit = step.hit or hit
        if not isinstance(read, Prompt) or read.num_prompts > 1:
            return PlacementFacts(
                queue_s=self._candidate.queue_s, prefill_engine=self._prefill_engine, work=self.work
            )
        known = hit.confidence != "none"
        soon, near, whole = hit.soon_tokens, hit.near_tokens, hit.whole_tokens
        return PlacementFacts(
            tokens=read.token_ids,
            extras=read.extras,
            mode=hit.mode,
            predicted_tokens=whole if known else None,
            host_tokens=near - soon if known else 0,
            store_tokens=whole - near if known else 0,
            queue_s=self._candidate.queue_s,
            predicted_ttft_s=None if self._first_token is None else self._first_token.total_s,
            prefill_engine=self._prefill_engine,
            work=self.work,
        )

    @property
    def _prefill_engine(self) -> str:
        """Engine that computed the prompt for this one; "": none."""
        if self.handoff is not None:
            return self.handoff.source
        return self._steps[0].prefill_engine if self._steps else ""
