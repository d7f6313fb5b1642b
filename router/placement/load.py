"""The load account: what the router has sent to each engine and the engine has not finished yet.

Per engine a first-in-first-out list of prompts whose first token is still awaited, each with the tokens the
engine has to compute (prompt - exact hit). Queue ahead = those tokens, less what the head has had time
for, at the engine's learned rate. Only the head is worked off by time; the next one starts when the head's
first token is seen. That is how vLLM schedules waiting prompts, and the account is corrected by evidence
instead of drifting. Where evidence cannot come (an answer that is not streamed), or is overdue, the head
counts as done after its time and the next one starts.

Load that the router did not cause (other routers, direct clients) is what the engine's own gauges show beyond
the account, while they are fresh; each such prompt counts as one of the size this router sends there. What
replicas tell each other (``own``, ``OthersLoad``) is better and sooner known, and counts where it is more.

Always true: queue_s >= 0; an engine without awaited prompts and foreign load has queue 0; ending a request
twice changes nothing. Times are the caller's clock and must not go backwards.
"""

from __future__ import annotations

import math

import msgspec

from router.placement.rates import PrefillSample, RateBook


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long evidence is waited for, and what stands in for it."""

    overdue_factor: float = 2.0
    overdue_s: float = 1.0
    """A streamed head counts as done after ``overdue_factor`` times its expected seconds plus this."""
    gauge_fresh_s: float = 10.0
    """Engine gauges older than this are not believed."""
    foreign_tokens: int = 1000
    """Size of a foreign prompt until the router has sent prompts of its own there."""
    awaited_max: int = 4096
    """Awaited prompts per engine; beyond it the oldest counts as done."""


class LoadStats(msgspec.Struct):
    """Counters for metrics."""

    admitted: int = 0
    """Requests placed on an engine, retries included."""
    first_tokens: int = 0
    """Streams that delivered a first token."""
    finished: int = 0
    """Placed requests that ended with an answer, or whose client left."""
    failed: int = 0
    """Placed requests that the engine refused or broke off."""
    overdue: int = 0
    """Streamed prompts whose first token came later than ``LoadSettings`` waits for."""
    overflow: int = 0
    """Prompts dropped from the account by ``awaited_max``."""


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """One engine now. ``running`` and ``waiting`` include foreign requests; ``idle_s`` is since our last."""

    queue_s: float
    running: int
    waiting: int
    awaited_tokens: int
    foreign: int
    idle_s: float


class OthersLoad(msgspec.Struct, frozen=True, array_like=True):
    """What other replicas have in flight at one engine; ``tokens`` of it are yet to be computed."""

    running: int = 0
    waiting: int = 0
    tokens: int = 0

    def plus(self, other: OthersLoad) -> OthersLoad:
        """Both together."""
        return OthersLoad(
            self.running + other.running, self.waiting + other.waiting, self.tokens + other.tokens
        )


class _Account:
    """What is open at one engine; a new object after ``forget``, so that old tickets touch nothing new."""

    __slots__ = (
        "awaited",
        "awaited_tokens",
        "carried_tokens",
        "foreign_running",
        "foreign_waiting",
        "gauges_s",
        "head_s",
        "last_admit_s",
        "mean_tokens",
        "running",
        "sure",
    )

    def __init__(self, foreign_tokens: int) -> None:
        self.awaited: dict[Ticket, None] = {}  # in the order of admission
        self.awaited_tokens = 0
        self.running = 0
        self.head_s = 0.0  # when the engine began with the head
        self.sure = True  # whether head_s is a fact (idle engine or first token seen) or a guess
        self.carried_tokens = 0  # of prompts that overtook the head
        self.last_admit_s = -math.inf
        self.mean_tokens = float(foreign_tokens)
        self.gauges_s = -math.inf
        self.foreign_running = 0
        self.foreign_waiting = 0


class Ticket(msgspec.Struct, eq=False):
    """One request in the account; opaque to its holder, who ends it with ``finish`` or ``fail``."""

    engine_id: str
    account: _Account
    uncached_tokens: int
    admitted_s: float
    streams: bool
    load_s: float = 0.0
    """What the engine is expected to spend loading offloaded blocks for it; others are computed meanwhile."""
    awaited: bool = True
    ended: bool = False


NO_OTHERS = OthersLoad()


class LoadAccount:
    """Load of every engine. Reads and writes advance it to ``now``; O(1) amortised."""

    def __init__(self, rates: RateBook, settings: LoadSettings | None = None) -> None:
        self.rates = rates
        self.settings = settings or LoadSettings()
        self.stats = LoadStats()
        self._accounts: dict[str, _Account] = {}

    def admit(
        self, engine_id: str, *, uncached_tokens: int, now: float, streams: bool = True, load_s: float = 0.0
    ) -> Ticket:
        """A request goes to this engine, which has ``uncached_tokens`` to compute before its first token, and
        offloaded blocks to load for ``load_s``.

        ``streams`` says whether the first byte will show when the prefill is over.
        """
        account = self._accounts.get(engine_id)
        if account is None:
            account = self._accounts[engine_id] = _Account(self.settings.foreign_tokens)
        self._advance(engine_id, account, now)
        if not account.awaited:
            account.head_s, account.sure, account.carried_tokens = now, True, 0
        ticket = Ticket(engine_id, account, max(1, uncached_tokens), now, streams, load_s)
        account.awaited[ticket] = None
        account.awaited_tokens += ticket.uncached_tokens
        account.last_admit_s = now
        account.mean_tokens += 0.1 * (ticket.uncached_tokens - account.mean_tokens)
        self.stats.admitted += 1
        if len(account.awaited) > self.settings.awaited_max:
            self.stats.overflow += 1
            self._start(account, next(iter(account.awaited)))
            account.head_s, account.sure = now, False
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> PrefillSample | None:
        """The first byte of a streamed answer arrived. Returns a sample for the rates, if it is one."""
        account = ticket.account
        if ticket.ended or not ticket.streams:
            return None
        self.stats.first_tokens += 1
        self._advance(ticket.engine_id, account, now)
        if not ticket.awaited:  # it was overdue: the engine was busy with this one until now
            account.head_s, account.sure = now, True
            return None
        was_head = next(iter(account.awaited)) is ticket
        running = account.running + self._foreign(account, now)[0]
        self._start(account, ticket)
        if not was_head:
            account.carried_tokens += ticket.uncached_tokens
            return None
        tokens = ticket.uncached_tokens + account.carried_tokens
        known = account.sure and not self._foreign(account, now)[1] and not ticket.load_s
        sample = PrefillSample(tokens, now - account.head_s, running)
        account.head_s, account.sure, account.carried_tokens = now, True, 0
        return sample if known else None

    def finish(self, ticket: Ticket, now: float) -> None:
        """The answer ended, or its client went away."""
        self.stats.finished += not ticket.ended
        self._end(ticket, now)

    def fail(self, ticket: Ticket, now: float) -> None:
        """The engine did not answer, or broke off."""
        self.stats.failed += not ticket.ended
        self._end(ticket, now)

    def report(self, engine_id: str, *, running: int, waiting: int, now: float) -> None:
        """The engine's own gauges (``vllm:num_requests_running``, ``..._waiting``) as polled at ``now``."""
        account = self._accounts.get(engine_id)
        if account is None:
            account = self._accounts[engine_id] = _Account(self.settings.foreign_tokens)
        self._advance(engine_id, account, now)
        own_awaited = len(account.awaited)
        foreign = max(0, running + waiting - own_awaited - account.running)
        account.foreign_waiting = min(foreign, max(0, waiting - own_awaited))
        account.foreign_running = foreign - account.foreign_waiting
        account.gauges_s = now

    def queue_ahead_s(self, engine_id: str, now: float) -> float:
        """Seconds of prefill still to do there before a prompt sent now would start."""
        return self.load(engine_id, now).queue_s

    def load(self, engine_id: str, now: float, others: OthersLoad = NO_OTHERS) -> EngineLoad:
        """Everything a candidate needs to know of the load of one engine.

        ``others`` is what other replicas told. The engine's gauges, where fresh, show their requests too, so
        the larger of both counts.
        """
        account = self._accounts.get(engine_id)
        if account is None:
            queue_s = others.tokens * self.rates.prefill_s_per_token(engine_id, now) if others.tokens else 0.0
            return EngineLoad(
                queue_s, others.running, others.waiting, 0, others.running + others.waiting, math.inf
            )
        rate = self._advance(engine_id, account, now)
        foreign_running, foreign_waiting = self._foreign(account, now)
        foreign_tokens = max(foreign_waiting * account.mean_tokens, others.tokens)
        foreign_running = max(foreign_running, others.running)
        foreign_waiting = max(foreign_waiting, others.waiting)
        return EngineLoad(
            max(0.0, foreign_tokens * rate + self._own_queue_s(account, rate, now)),
            account.running + foreign_running,
            len(account.awaited) + foreign_waiting,
            account.awaited_tokens,
            foreign_running + foreign_waiting,
            now - account.last_admit_s,
        )

    def own(self, now: float) -> dict[str, OthersLoad]:
        """What this router alone has in flight, for other replicas; engines without anything are absent."""
        told = {}
        for engine_id, account in self._accounts.items():
            rate = self._advance(engine_id, account, now)
            if account.awaited or account.running:
                tokens = round(self._own_queue_s(account, rate, now) / rate) if rate > 0 else 0
                told[engine_id] = OthersLoad(account.running, len(account.awaited), max(0, tokens))
        return told

    @staticmethod
    def _own_queue_s(account: _Account, rate: float, now: float) -> float:
        """Seconds of prefill in what this router awaits there, less what the head has had time for."""
        if not account.awaited:
            return 0.0
        head = next(iter(account.awaited))
        return account.awaited_tokens * rate - min(now - account.head_s, head.uncached_tokens * rate)

    def forget(self, engine_id: str) -> None:
        """The engine left the fleet or restarted: its requests are gone with it."""
        account = self._accounts.pop(engine_id, None)
        if account is not None:
            while account.awaited:
                self._start(account, next(iter(account.awaited)))

    def check_integrity(self) -> list[str]:
        """Recounts; an empty list, or one sentence per contradiction."""
        problems = []
        for engine_id, account in self._accounts.items():
            if account.awaited_tokens != sum(t.uncached_tokens for t in account.awaited):
                problems.append(f"{engine_id}: awaited tokens {account.awaited_tokens} are not their sum")
            if account.running < 0 or any(t.ended or not t.awaited for t in account.awaited):
                problems.append(f"{engine_id}: ended requests are still counted")
        return problems

    def _advance(self, engine_id: str, account: _Account, now: float) -> float:
        """Let heads that must be done by now, or are overdue, count as done. Returns the engine's rate."""
        rate = self.rates.prefill_s_per_token(engine_id, now)
        while account.awaited:
            head = next(iter(account.awaited))
            allowed_s = head.uncached_tokens * rate + head.load_s
            if head.streams:
                allowed_s = self.settings.overdue_factor * allowed_s + self.settings.overdue_s
            if now - account.head_s < allowed_s:
                break
            self.stats.overdue += head.streams
            self._start(account, head)
            account.head_s += allowed_s
            account.sure, account.carried_tokens = False, 0
        return rate

    def _foreign(self, account: _Account, now: float) -> tuple[int, int]:
        if now - account.gauges_s > self.settings.gauge_fresh_s:
            return 0, 0
        return account.foreign_running, account.foreign_waiting

    @staticmethod
    def _start(account: _Account, ticket: Ticket) -> None:
        """From awaited to running."""
        del account.awaited[ticket]
        account.awaited_tokens -= ticket.uncached_tokens
        ticket.awaited = False
        account.running += 1

    def _end(self, ticket: Ticket, now: float) -> None:
        if ticket.ended:
            return
        account = ticket.account
        self._advance(ticket.engine_id, account, now)
        if ticket.awaited:
            if next(iter(account.awaited)) is ticket:
                account.head_s, account.sure, account.carried_tokens = now, False, 0
            self._start(account, ticket)
        account.running -= 1
        ticket.ended = True
