"""The load account of one engine: requests that the router has sent and the engine has not finished.

A list of prompts whose first token is still awaited, in the engine's order, each with the tokens the engine
must compute (prompt - exact hit) and the seconds to load offloaded blocks. Queue ahead = those tokens at the
engine's learned rate, and those seconds, minus the time that the head has had. First tokens, ends of answers
and the engine's gauges correct the account; without them the head counts as done after its time.

Load of other clients is kept apart (``ForeignLoad``).

Invariants: queue_s >= 0; an engine without awaited prompts and foreign load has queue 0; ending a request
twice changes nothing. Times are the caller's clock and must not go backwards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import islice
from operator import attrgetter
from typing import Annotated

import msgspec

from kvatlas.router.placement.others import NEWS, NO_OTHERS, ForeignLoad, OthersLoad
from kvatlas.router.placement.pages import PageAccount
from kvatlas.router.placement.rates import EngineRates, PrefillSample
from kvatlas.router.placement.seconds import FirstTokenWork


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time-outs for evidence, and values assumed without it."""

    overdue_factor: float = 2.0
    overdue_s: float = 1.0
    """A streamed head counts as done after ``overdue_factor`` times its expected seconds plus this."""
    gauge_fresh_s: float = 10.0
    """Older engine gauges are ignored."""
    foreign_tokens: int = 1000
    """Assumed size of a foreign prompt until the router has sent prompts of its own there."""
    awaited_max: int = 4096
    """Awaited prompts per engine; beyond it the oldest counts as done."""
    answer_s: float = 10.0
    """Assumed time from a first token to the answer's end, until answers were seen."""
    late_fresh_s: float = 30.0
    """Without a first token for this long, lateness is reset."""
    recent_s: float = 30.0
    """Time constant with which work sent to an engine fades from ``EngineLoad.recent_s``."""
    step_tokens_max: int = 8192
    """Tokens of one scheduler step (``--max-num-batched-tokens``), at most, unless one prompt has more."""
    unseen_s_min: float = 1.0
    """Gauges are ignored for requests sent less than this before: they may not have arrived yet."""


class LoadStats(msgspec.Struct):
    """Counters for metrics."""

    admitted: Annotated[int, "kvatlas_load_admitted_total"] = 0
    """Requests placed on an engine, retries included."""
    admitted_silent: Annotated[int, "kvatlas_load_admitted_silent_total"] = 0
    """Requests placed on an engine whose polls timed out, because no other one of its model was up."""
    first_tokens: Annotated[int, "kvatlas_load_first_tokens_total"] = 0
    """Streams that delivered a first token."""
    finished: Annotated[int, "kvatlas_load_finished_total"] = 0
    """Placed requests that ended with an answer, or whose client left."""
    failed: Annotated[int, "kvatlas_load_failed_total"] = 0
    """Placed requests that the engine refused or cut."""
    overdue: Annotated[int, "kvatlas_load_overdue_total"] = 0
    """Streamed prompts whose first token was later than ``LoadSettings`` allows."""
    ended_by_gauges: Annotated[int, "kvatlas_load_ended_by_gauges_total"] = 0
    """Unobserved requests that ended by the engine's own numbers."""
    socket_readings: Annotated[int, "kvatlas_load_socket_readings_total"] = 0
    """Loads read from the sockets of SGLang engines (`--load-publish-endpoint`)."""
    socket_malformed: Annotated[int, "kvatlas_load_socket_malformed_total"] = 0
    """Messages of these sockets that could not be read."""
    overflow: Annotated[int, "kvatlas_load_overflow_total"] = 0
    """Prompts dropped from the account by ``awaited_max``."""


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """Current load of one engine. ``running`` and ``waiting`` include foreign requests; ``idle_s``: since our
    last."""

    queue_s: float
    running: int
    waiting: int
    awaited_tokens: int
    foreign: int
    idle_s: float
    recent_s: float = 0.0
    """Seconds of work recently sent there by all routers, decayed (``LoadSettings.recent_s``)."""


_NO_WORK = FirstTokenWork(0)


class Ticket(msgspec.Struct, eq=False, gc=False):
    """One request in the account; opaque to its holder, which ends it with ``finish`` or ``fail``."""

    uncached_tokens: int
    streams: bool
    load_s: float = 0.0
    """Expected seconds to load its offloaded blocks."""
    sent_s: float = 0.0
    due_s: float = math.inf
    """Expected time of its first token."""
    begun_s: float = 0.0
    """Time at which its prompt was done."""
    alone: bool = True
    """Whether no prompt of others waited there when it was sent."""
    beside: int = 0
    """Number of others' requests running there then."""
    work_s: float = 0.0
    """Expected computing and loading when it was sent."""
    pages: int = 0
    """Blocks of the cache that it takes, if it shared none."""
    sequences: int = 1
    """Requests that the engine makes of it: prompts times answers."""
    rank_s: float = 0.0
    """Its place among waiting prompts: lower goes first, equals in the order of admission."""
    work: FirstTokenWork = _NO_WORK
    """Work until its first token when it was sent."""
    computed: tuple[int, float] = (0, 0.0)
    """Tokens and pairs that the engine had computed by then, of all prompts."""
    counted: bool = False
    """Whether it is among the computed ones."""
    sure: bool = True
    """Whether nothing but what the account has makes it wait."""
    awaited: bool = True
    ended: bool = False


_DEFAULTS = LoadSettings()


_rank_s = attrgetter("rank_s")


class _WaitingOrder:
    """The awaited prompts behind the head, by rank, with what those from each place on have together: a
    decision asks every engine what a prompt would pass there, and few have changed since the last one."""

    __slots__ = ("load_s", "pages", "ranks", "tokens")

    def __init__(self, awaited: Iterable[Ticket]) -> None:
        behind = list(islice(awaited, 1, None))
        self.ranks = [ticket.rank_s for ticket in behind]
        self.tokens, self.load_s, self.pages = [0], [0.0], [0]
        for ticket in reversed(behind):
            self.tokens.append(self.tokens[-1] + ticket.uncached_tokens)
            self.load_s.append(self.load_s[-1] + ticket.load_s)
            self.pages.append(self.pages[-1] + ticket.pages)
        for sums in (self.tokens, self.load_s, self.pages):
            sums.reverse()


# Changes of less than half of this are not sent to other routers.
_RECENT_STEP_MS = 100
# Older recent work is decayed when it is read: a tenth of its time constant.
_RECENT_AGE_S = 3.0
# Sums of times are rounded: a snapshot asks again this much before a value is due to change.
_EARLY_S = 1e-6


class HeadProgress(msgspec.Struct, frozen=True, gc=False):
    """``queue_s`` at time t: ``whole_s - min(t - head_at_s, head_s)``, at least 0, plus ``beyond_s``."""

    whole_s: float
    head_at_s: float
    head_s: float
    beyond_s: float


class LoadAccount:
    """Load of one engine. Reads and writes advance it to ``now``; O(1) amortised.

    ``stats`` may be shared by all accounts of a fleet.
    """

    __slots__ = (
        "_answer_s",
        "_assumed",
        "_awaited",
        "_awaited_load_s",
        "_awaited_tokens",
        "_batch_tokens",
        "_beyond_tokens",
        "_carried_tokens",
        "_computed_pairs",
        "_computed_tokens",
        "_foreign",
        "_fresh_until_s",
        "_gauges_s",
        "_head_s",
        "_late_s",
        "_late_seen_s",
        "_order",
        "_others_waiting",
        "_recent_at_s",
        "_recent_s",
        "_running",
        "_sent_pairs",
        "_sent_tokens",
        "_settings",
        "_startable",
        "_step_s",
        "_stuck",
        "_sure",
        "_unseen",
        "_unsure_s",
        "_waiting",
        "last_admit_s",
        "link_free_s",
        "pages",
        "rates",
        "stats",
        "touched",
    )

    def __init__(
        self, rates: EngineRates, settings: LoadSettings = _DEFAULTS, stats: LoadStats | None = None
    ) -> None:
        self.rates = rates
        self.touched: Callable[[], None] = lambda: None
        """Called when the values of ``ahead`` may have changed by anything but time."""
        self.link_free_s = 0.0
        """Time at which this router's pulls leave the engine's link to the others free."""
        self.stats = stats if stats is not None else LoadStats()
        self._settings = settings
        self.pages = PageAccount()
        self._awaited: dict[Ticket, None] = {}  # in the order of admission
        self._order: _WaitingOrder | None = None
        # Of the running: those assumed to have begun by their time.
        self._assumed: dict[Ticket, None] = {}
        # Heads that may have begun, by the last gauges.
        self._startable = 0
        # Time of the last gauges, and until when they count.
        self._gauges_s = self._fresh_until_s = -math.inf
        # By the last gauges all our awaited prompts wait, and nothing has changed since.
        self._stuck = False
        # Latest known number of other routers' prompts that wait there.
        self._others_waiting = 0
        self._awaited_tokens, self._awaited_load_s = 0, 0.0
        # Sequences of the awaited, and of those that run.
        self._waiting = self._running = 0
        self._unseen: dict[Ticket, Callable[[], None]] = {}  # in the order of admission
        # mean, from a first token to the end.
        self._answer_s = settings.answer_s
        # Time at which the engine began with the head.
        self._head_s = 0.0
        # Whether _head_s is a fact (idle engine or first token seen) or a guess.
        self._sure = True
        self._carried_tokens = 0  # of prompts that overtook the head
        # For predictions (``asked``): tokens, and pairs of a token and one before it, of all prompts ever
        # sent, and of those whose first token came, or was not to be seen. Unlike the awaited ones, no
        # expectation moves them.
        self._sent_tokens = self._computed_tokens = 0
        self._sent_pairs = self._computed_pairs = 0.0
        # Time at which the running step began, and tokens of the prompts that waited then.
        self._step_s, self._batch_tokens = 0.0, 0
        # Those sent before waited for something else than the tokens that the account has.
        self._unsure_s = -math.inf
        # Latest known tokens of prompts there that are not ours.
        self._beyond_tokens = 0.0
        self.last_admit_s = -math.inf  # of our last request there
        self._late_s = 0.0
        self._late_seen_s = -math.inf
        self._recent_s = self._recent_at_s = 0.0
        self._foreign = ForeignLoad(fresh_s=settings.gauge_fresh_s, tokens=settings.foreign_tokens)

    def admit(
        self,
        *,
        uncached_tokens: int,
        now: float,
        streams: bool = True,
        load_s: float = 0.0,
        expected_s: float = math.inf,
        running: int = 0,
        waiting: int = 0,
        prompt_tokens: int = 0,
        rank_s: float = 0.0,
        sequences: int = 1,
    ) -> Ticket:
        """Add a request sent to this engine, which has ``uncached_tokens`` to compute before its first token,
        and offloaded blocks to load for ``load_s``.

        ``streams``: whether the first byte will show the end of the prefill; ``expected_s``: after what
        computing and loading time. ``prompt_tokens``: of the whole prompt, for its share of the pool.
        ``running`` and ``waiting``: requests there already, including others'. ``rank_s``: key in the
        engine's order (``kvatlas.router.placement.engine``), constant for order of arrival. ``sequences``:
        requests that the engine makes of it."""
        if self._awaited:
            self._advance(now)
        if not self._awaited:
            self._head_s, self._sure, self._carried_tokens = now, True, 0
            self._startable, self._stuck = 1, False
        # At least 1: vLLM always computes the last token of a prompt, for its logits.
        tokens = uncached_tokens if uncached_tokens > 1 else 1  # noqa: FURB136
        ticket = Ticket(tokens, streams, load_s, now, now + expected_s, rank_s=rank_s, sequences=sequences)
        ticket.work = work = self.asked(now, tokens, prompt_tokens, running, rank_s)
        ticket.computed = self._computed_tokens, self._computed_pairs
        if self._sent_tokens == self._computed_tokens:
            self._step_s, self._batch_tokens = now, tokens
        self._sent_tokens += tokens
        self._sent_pairs += work.pairs
        # A first token that waited for other clients' prompts would count their prefill as its own: four
        # workers would believe equal engines to differ by half.
        ticket.alone = waiting <= self._waiting
        if running > self._running:
            ticket.beside = running - self._running
        awaited, self._order = self._awaited, None
        if not awaited or next(reversed(awaited)).rank_s <= rank_s:
            awaited[ticket] = None
        else:
            self._insert(ticket)
        self._waiting += sequences
        self._awaited_tokens += ticket.uncached_tokens
        self._awaited_load_s += load_s
        ticket.pages = self.pages.need(prompt_tokens)
        ticket.sure = ticket.alone and ticket.pages <= self.pages.free  # else it waits for room
        self.pages.admit(ticket.pages)
        ticket.work_s = tokens * self.rates.prefill_s_per_token(now) + load_s
        self._recent_s, self._recent_at_s = self.recent_s(now) + ticket.work_s, now
        self.last_admit_s = now
        self._foreign.sent(tokens)
        self.touched()
        self.stats.admitted += 1
        # Bounded; the oldest prompt is the likeliest to have been computed.
        if len(self._awaited) > self._settings.awaited_max:
            self.stats.overflow += 1
            self._assume(next(iter(self._awaited)), now)
            self._head_s = now
        return ticket

    def reserve(self, now: float, prompt_tokens: int = 0) -> Ticket:
        """Reserve a place for a request of ``prompt_tokens`` whose prompt is computed elsewhere."""
        if self._awaited:
            self._advance(now)
        pages = self.pages.need(prompt_tokens)
        ticket = Ticket(0, streams=False, counted=True, awaited=False, begun_s=now, pages=pages)
        self.pages.admit(ticket.pages)
        self.pages.start(ticket.pages)
        self._running += 1
        self.last_admit_s = now
        self.stats.admitted += 1
        self.touched()
        return ticket

    def asked(
        self, now: float, tokens: int, prompt_tokens: int = 0, running: int = 0, rank_s: float = 0.0
    ) -> FirstTokenWork:
        """Return what the engine does until the first token of a prompt sent now, with ``tokens`` to compute;
        the rest as for ``admit``."""
        pairs = tokens * (prompt_tokens - 0.5 * tokens) if prompt_tokens > tokens else 0.5 * tokens * tokens
        running = running if running > self._running else self._running  # noqa: FURB136
        own = self._sent_tokens - self._computed_tokens
        ahead = own + self._beyond_tokens
        if rank_s and ahead:
            ahead = max(0.0, ahead - self.behind(rank_s, 1.0)[0])
        if not ahead:
            return FirstTokenWork(tokens, pairs, running=running, waits=0.5 if running else 0.0)
        begun_s = 0.0
        # By the gauges all our prompts wait for something else, or the step is not ours.
        if own and not (self._stuck and now < self._fresh_until_s):
            begun_s = now - self._step_s
        head = next(iter(self._awaited)).uncached_tokens if self._awaited else 0
        batch = min(max(self._batch_tokens, head), max(head, self._settings.step_tokens_max), ahead)
        pairs_ahead, load_s = self._sent_pairs - self._computed_pairs, self._awaited_load_s
        return FirstTokenWork(tokens, pairs, ahead, pairs_ahead, load_s, running, 1.0, begun_s, batch)

    def timed(self, ticket: Ticket) -> FirstTokenWork | None:
        """Return what the engine did until the first token that ``first_token`` has just noted; None: it is
        not known, or its time says nothing of it."""
        if not (ticket.counted and ticket.sure and ticket.sent_s > self._unsure_s) or ticket.load_s:
            return None
        # What was computed meanwhile: others may have overtaken it, or left.
        work, (tokens, pairs) = ticket.work, ticket.computed
        return FirstTokenWork(
            work.tokens,
            work.pairs,
            self._computed_tokens - tokens - work.tokens,
            self._computed_pairs - pairs - work.pairs,
            0.0,
            work.running,
            work.waits,
            work.begun_s,
            work.batch_tokens,
            self._sent_tokens > self._computed_tokens,
        )

    def first_token(self, ticket: Ticket, now: float) -> PrefillSample | None:
        """Note the first byte of a streamed answer. Returns a sample for the rates, if it is valid."""
        if ticket.ended or not ticket.streams:
            return None
        self.stats.first_tokens += 1
        if ticket.due_s < math.inf:
            self._late_s += NEWS * (max(0.0, now - ticket.due_s) - self._late_s)
            self._late_seen_s = now
        self._advance(now)
        self._stuck = False
        self.touched()
        foreign_waiting = self._foreign.num_waiting(now)
        if foreign_waiting or not ticket.sure:
            ticket.sure, self._unsure_s = False, now  # nor is it known what those behind it waited for
        if not ticket.counted:
            self._count(ticket)
        # A step ended, and all that wait may be in the next one.
        self._step_s, self._batch_tokens = now, self._sent_tokens - self._computed_tokens
        # It was overdue: the engine was busy with this one until now.
        if not ticket.awaited:
            self._assumed.pop(ticket, None)
            self._head_s, self._sure = now, True
            return None
        was_head = next(iter(self._awaited)) is ticket
        running = self._running + ticket.beside
        self._start(ticket, now)
        if not was_head:
            # A first token out of order: with an engine order the head has not begun; otherwise both prompts
            # were in one step, and the head's sample has the tokens of both.
            if ticket.rank_s:
                self._head_s, self._sure = now, False
            else:
                self._carried_tokens += ticket.uncached_tokens
            return None
        tokens = ticket.uncached_tokens + self._carried_tokens
        known = self._sure and ticket.alone and not foreign_waiting and not ticket.load_s
        sample = PrefillSample(tokens, now - self._head_s, running)
        self._head_s, self._sure, self._carried_tokens = now, True, 0
        return sample if known else None

    def unseen(self, ticket: Ticket, now: float, ended: Callable[[], None]) -> float:
        """Note that the request will not be observed. Returns the seconds after which it should be over;
        ``ended`` is called when the gauges show an earlier end."""
        if ticket.ended:
            return 0.0
        ticket.streams = False
        if not ticket.awaited and not ticket.counted:
            self._count(ticket)
        self._unseen[ticket] = ended
        self.touched()
        return self.queue_ahead_s(now) + self._answer_s

    def finish(self, ticket: Ticket, now: float) -> None:
        """Note the answer's end, or that its client left."""
        if not ticket.ended:
            self.stats.finished += 1
            # Unobserved answers end by a guess, which must not be learned as their duration.
            if not ticket.awaited and ticket not in self._unseen:
                self._answer_s += NEWS * (now - ticket.begun_s - self._answer_s)
        self._end(ticket, now)

    def fail(self, ticket: Ticket, now: float) -> None:
        """Note that the engine did not answer, or cut the answer."""
        self.stats.failed += not ticket.ended
        # The recent work decays, so its part is subtracted with the decay since it was added.
        if ticket.awaited and not ticket.ended:  # none of its work was done
            since_s = ticket.sent_s - now
            undone_s = ticket.work_s * math.exp(since_s / self._settings.recent_s)
            self._recent_s, self._recent_at_s = max(0.0, self.recent_s(now) - undone_s), now
        self._end(ticket, now)

    def report(self, *, running: int, waiting: int, now: float, usage: float | None = None) -> None:
        """Set the engine's own gauges (``vllm:num_requests_running``, ``..._waiting``,
        ``vllm:kv_cache_usage_perc``), polled at ``now``."""
        self._advance(now)
        own = self._running + self._waiting
        self._end_unseen(own - running - waiting, now)
        self._believe(max(0, waiting - self._others_waiting), now)
        self._recent_s, self._recent_at_s = self.recent_s(now), now
        if usage is not None:
            self.pages.report(usage)
        self._foreign.report(
            beyond=running + waiting - self._running - self._waiting,
            beyond_waiting=waiting - self._waiting,
            now=now,
        )
        self.touched()

    def _believe(self, waiting: int, now: float) -> None:
        """Assume that ``waiting`` of our requests wait there: the last of those not seen to begin."""
        # Prompts that ``vllm:num_requests_waiting`` counts have not begun, so those assumed to have begun are
        # put back, the last ones first: vLLM starts them in order.
        again, back = waiting - self._waiting, list[Ticket]()
        for ticket in reversed(self._assumed) if again > 0 else ():
            if again <= 0:
                break
            again -= ticket.sequences
            back.append(ticket)
        if back:
            self._unassume(back[::-1])
        self._gauges_s, self._fresh_until_s = now, now + self._settings.gauge_fresh_s
        self._startable = max(0, self._waiting - waiting)
        self._stuck = bool(self._awaited) and not self._startable
        if waiting:
            begun = islice(self._awaited, self._startable)
            self._batch_tokens = min(self._batch_tokens, sum([one.uncached_tokens for one in begun]))
        if self._stuck:
            self._step_s = self._unsure_s = now
            self._batch_tokens = self._awaited_tokens
            self._head_s, self._sure, self._carried_tokens = now, False, 0
            ranks = islice((ticket.rank_s for ticket in self._awaited), 2)
            if next(ranks) > next(ranks, math.inf):  # the head waits too, so that those above it pass it
                self._awaited, self._order = dict.fromkeys(sorted(self._awaited, key=_rank_s)), None

    def _end_unseen(self, count: int, now: float) -> None:
        """End the oldest unobserved requests: the engine has ``count`` fewer than the account."""
        before_s = now - self._settings.unseen_s_min
        # The oldest ones: nothing shows which of them ended, and older requests have mostly ended first.
        for ticket, ended in list(self._unseen.items()) if count > 0 else ():
            if count <= 0 or ticket.sent_s > before_s:
                break
            count -= ticket.sequences
            self.stats.ended_by_gauges += 1
            self.finish(ticket, now)
            ended()

    def queue_ahead_s(self, now: float) -> float:
        """Seconds of prefill and loads still to do there before a prompt sent now would start."""
        return self.current(now).queue_s

    def current(self, now: float, others: OthersLoad | None = None) -> EngineLoad:
        """Current load. ``others``: as in ``ahead``, but it may be older: only decisions settle foreign
        load."""
        rate, unsettled = self.rates.prefill_s_per_token(now), self._foreign.unsettled
        queue_s, running, waiting, idle_s, _, recent_s, _, _ = self.ahead(now, others, rate)
        # Only decisions settle foreign load: a page or a scrape may see an older state of the others.
        self._foreign.unsettled = unsettled
        own = self._running + self._waiting
        queue_s = max(queue_s, self.pages.wait_s(0))
        return EngineLoad(
            queue_s, running, waiting, self._awaited_tokens, running + waiting - own, idle_s, recent_s
        )

    def ahead(
        self, now: float, others: OthersLoad | None, rate: float
    ) -> tuple[float, int, int, float, float, float, HeadProgress | None, float]:
        """Values for a decision: ``queue_s``, ``running``, ``waiting`` and ``idle_s`` of the load, ``late_s``
        and ``recent_s``. Then how ``queue_s`` falls with time, None: it does not; and the time until which
        the values change by that and the idle time alone, unless ``touched`` is called: it may be too early
        by ``_EARLY_S``, and is never too late.

        ``rate``: the engine's prefill rate at ``now``; ``others``: load of other replicas, None: unknown, and
        all requests that only gauges show are foreign."""
        # Plain comparisons: this runs for each engine that changed since the decision before.
        until_s = self._advance(now, rate) if self._awaited else math.inf
        running, waiting, foreign, beyond_s = self._running, self._waiting, self._foreign, 0.0
        head: HeadProgress | None = None
        self._beyond_tokens = 0.0
        # The first decision after a poll settles what is foreign (``ForeignLoad.settle``).
        if foreign.unsettled and others is not None:
            foreign.settle(others)
        if foreign.running or foreign.waiting or others is not NO_OTHERS:
            more_running, more_waiting, tokens = foreign.totals(others, now)
            self._beyond_tokens, beyond_s = tokens, tokens * rate
            running += more_running
            waiting += more_waiting
            if others is not None:
                self._others_waiting = others.waiting
            if (others is None or foreign.running or foreign.waiting) and now <= foreign.fresh_until_s:
                until_s = min(until_s, foreign.fresh_until_s)
        queue_s = beyond_s
        if self._awaited:
            head = self._progress(rate, beyond_s)
            if self._stuck and now < self._fresh_until_s:
                # By the gauges all our prompts wait: the engine waits for something outside the account
                # (pages of its cache), so no time is deducted.
                queue_s, head = head.whole_s + beyond_s, None
            else:
                done_s, head_s = now - head.head_at_s, head.head_s
                own_s = head.whole_s - (done_s if done_s < head_s else head_s)  # noqa: FURB136
                queue_s = own_s + beyond_s if own_s > 0.0 else beyond_s
                head = head if done_s < head_s else None
        late_s = 0.0
        if self._late_s:
            late_until_s = self._late_seen_s + self._settings.late_fresh_s
            if now <= late_until_s:
                late_s, until_s = self._late_s, min(until_s, late_until_s)
        recent_s = self._recent_s
        if recent_s:
            # Decayed in steps: the exponential costs more than the rest, and a snapshot needs constant
            # values.
            if now - self._recent_at_s > _RECENT_AGE_S:
                self._recent_s = recent_s = self.recent_s(now)
                self._recent_at_s = now
            recent_until_s = self._recent_at_s + _RECENT_AGE_S
            until_s = until_s if until_s < recent_until_s else recent_until_s  # noqa: FURB136
        if others is not None and others.recent_ms:
            recent_s += others.recent_ms / 1000
        idle_s = now - self.last_admit_s
        return queue_s, running, waiting, idle_s, late_s, recent_s, head, until_s - _EARLY_S

    def recent_s(self, now: float) -> float:
        """Seconds of computing and loading that this router recently sent there: the sum decays with the time
        constant ``LoadSettings.recent_s``."""
        return self._recent_s * math.exp((self._recent_at_s - now) / self._settings.recent_s)

    def own(self, now: float) -> OthersLoad | None:
        """This router's own requests in flight there, recent work and use of the link, for other replicas;
        None if there are none."""
        self._advance(now)
        # Rounded to steps: an unrounded value would change with every message and be sent each time.
        recent_ms = _RECENT_STEP_MS * round(1000 * self.recent_s(now) / _RECENT_STEP_MS)
        link_ms = round(1000 * (self.link_free_s - now))
        if not self._awaited and not self._running and not recent_ms and link_ms <= 0:
            return None
        rate, tokens = self.rates.prefill_s_per_token(now), 0
        if rate > 0 and self._awaited:
            found = self._progress(rate)
            moves = not (self._stuck and now < self._fresh_until_s)
            done_s = min(now - found.head_at_s, found.head_s) if moves else 0.0
            tokens = round((found.whole_s - done_s) / rate)
        return OthersLoad.bounded(self._running, self._waiting, tokens, recent_ms, link_ms)

    def _progress(self, rate: float, beyond_s: float = 0.0) -> HeadProgress:
        """How the seconds of prefill and loads of our awaited prompts there (at least one) fall with time."""
        # Loads count although others are computed meanwhile: the next prompt mostly loads too, over the same
        # link (docs/decisions/010-loads-in-the-queue.md).
        whole_s = self._awaited_tokens * rate + self._awaited_load_s
        # Only the head is reduced by time: vLLM computes waiting prompts in order, so the next one starts
        # when the head's first token arrives.
        head = next(iter(self._awaited))
        return HeadProgress(whole_s, self._head_s, head.uncached_tokens * rate + head.load_s, beyond_s)

    def check_integrity(self) -> list[str]:
        """Recount; an empty list, or one sentence per contradiction."""
        problems = []
        if self._waiting != sum(t.sequences for t in self._awaited):
            problems.append(f"waiting sequences {self._waiting} are not their sum")
        if self._awaited_tokens != sum(t.uncached_tokens for t in self._awaited):
            problems.append(f"awaited tokens {self._awaited_tokens} are not their sum")
        if not math.isclose(self._awaited_load_s, sum(t.load_s for t in self._awaited), abs_tol=1e-6):
            problems.append(f"awaited loads of {self._awaited_load_s} s are not their sum")
        problems += self.pages.check_integrity()
        if any(t.ended for t in self._unseen):
            problems.append("ended requests still pass unseen")
        if self._running < 0 or any(t.ended or not t.awaited for t in self._awaited):
            problems.append("ended requests are still counted")
        return problems

    def _advance(self, now: float, rate: float | None = None) -> float:
        """Count heads as done that must be done by now, or are overdue. Returns the time until which the next
        one is not, infinite without one."""
        settings, fresh = self._settings, now < self._fresh_until_s
        if rate is None and self._awaited:
            rate = self.rates.prefill_s_per_token(now)
        while self._awaited and rate is not None:
            head = next(iter(self._awaited))
            # The engine's gauges show that it has not begun with the head.
            if fresh and (self._stuck or (head.streams and self._startable <= 0)):
                return self._fresh_until_s
            allowed_s = head.uncached_tokens * rate + head.load_s
            if head.streams:
                # A stream shows its first token, so it gets more time before it is assumed done. Other
                # answers show nothing before their end: their prompt is done after its expected time.
                allowed_s = settings.overdue_factor * allowed_s + settings.overdue_s
            if now - self._head_s < allowed_s:
                return self._head_s + allowed_s
            self.stats.overdue += head.streams
            self._head_s += allowed_s
            self._assume(head, self._head_s)
            if fresh and self._startable <= 0 and self._head_s < self._gauges_s:
                self._head_s = self._gauges_s  # the next one still waited then
        return math.inf

    def _assume(self, head: Ticket, now: float) -> None:
        """Count an overdue head as done, and the next one as begun."""
        self.touched()
        self._start(head, now)
        self._assumed[head] = None
        self._sure, self._carried_tokens = False, 0

    def _unassume(self, tickets: list[Ticket]) -> None:
        """Put back prompts that wait by the gauges, before all that were sent after them."""
        # The sort is stable: without an order all ranks are equal, and the put-back prompts stay before those
        # sent after them.
        self._awaited, self._order = dict.fromkeys(sorted([*tickets, *self._awaited], key=_rank_s)), None
        for ticket in tickets:
            del self._assumed[ticket]
            if not ticket.streams and ticket.counted:
                ticket.counted = False
                self._computed_tokens -= ticket.uncached_tokens
                self._computed_pairs -= ticket.work.pairs
            self._running -= ticket.sequences
            self._waiting += ticket.sequences
            ticket.awaited = True
            self._awaited_tokens += ticket.uncached_tokens
            self._awaited_load_s += ticket.load_s
            self.pages.unstart(ticket.pages)

    def _insert(self, ticket: Ticket) -> None:
        """Insert in the engine's order: behind the head, which may have begun, and behind its equals."""
        order = list(self._awaited)
        # The head may have begun, and vLLM does not reorder what runs: nothing is inserted before it, unless
        # the gauges show that all prompts wait.
        order.insert(bisect_right(order, ticket.rank_s, lo=not self._stuck, key=_rank_s), ticket)
        self._awaited = dict.fromkeys(order)

    def behind(self, rank_s: float, rate: float) -> tuple[float, int]:
        """Seconds of work, and pages, of the awaited prompts that a prompt of this rank would pass."""
        order = self._order
        if order is None:
            order = self._order = _WaitingOrder(self._awaited)
        at = bisect_right(order.ranks, rank_s)
        tokens, load_s, pages = order.tokens[at], order.load_s[at], order.pages[at]
        # The head cannot be passed once it may have begun.
        if self._stuck and not at and self._awaited:
            head = next(iter(self._awaited))
            if head.rank_s > rank_s:
                tokens, load_s, pages = (
                    tokens + head.uncached_tokens,
                    load_s + head.load_s,
                    pages + head.pages,
                )
        return tokens * rate + load_s, pages

    def _start(self, ticket: Ticket, now: float) -> None:
        """Move from awaited to running, after ``touched``."""
        ticket.begun_s = now
        del self._awaited[ticket]
        self._order = None
        self._waiting -= ticket.sequences
        self._awaited_tokens -= ticket.uncached_tokens
        # No awaited prompts, nothing to load: rounding errors do not add up.
        self._awaited_load_s = self._awaited_load_s - ticket.load_s if self._awaited else 0.0
        ticket.awaited = False
        self._startable -= ticket.sequences
        if not ticket.streams and not ticket.counted:
            self._count(ticket)
        self.pages.start(ticket.pages)
        self._running += ticket.sequences

    def _count(self, ticket: Ticket) -> None:
        """Count it among the computed ones."""
        ticket.counted = True
        self._computed_tokens += ticket.uncached_tokens
        self._computed_pairs += ticket.work.pairs

    def _end(self, ticket: Ticket, now: float) -> None:
        if ticket.ended:
            return
        self._advance(now)
        if not ticket.counted:
            self._count(ticket)
            # A part of it may have been computed.
            self._step_s, self._batch_tokens = now, self._sent_tokens - self._computed_tokens
            self._unsure_s = now
        if ticket.awaited:
            if next(iter(self._awaited)) is ticket:
                self._head_s, self._sure, self._carried_tokens = now, False, 0
            self._start(ticket, now)
        self._unseen.pop(ticket, None)
        self._assumed.pop(ticket, None)
        # Pages are held from the start of the prefill, which is ``work_s`` before the first token.
        self.pages.end(ticket.pages, now - ticket.begun_s + ticket.work_s, now)
        self._running -= ticket.sequences
        self.touched()
        ticket.ended = True
