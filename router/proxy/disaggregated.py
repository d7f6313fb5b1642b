"""Serve one request on two engines: one computes the prompt and keeps its blocks, the other fetches them.

The prefill engine's answer is read whole and never forwarded; the decode engine's answer is the client's.
Invariants: the attempt at the prefill engine has ended when ``prefill`` returns or raises; on cancellation
its connection is closed, upon which that engine frees the blocks; the decode request is sent once, and only
while the lease is young, and its answer is forwarded only if it begins before the lease ends (``Handoff``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

import msgspec

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.errors import retry_after_s
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.openai.request import Usage
from kvatlas.router.pd.bodies import SplitBody
from kvatlas.router.pd.handoff import DisaggState, Handoff, HandoffRefusedError
from kvatlas.router.pd.settings import RANK, PdSettings, PdStats
from kvatlas.router.pd.transfer import (
    Connector,
    PrefillHolder,
    Query,
    expired_leases,
    without_blocks,
)
from kvatlas.router.proxy.attempt import Answer, Attempt
from kvatlas.router.proxy.carriers import Outbound, OwnConnections
from kvatlas.router.proxy.events import aborted
from kvatlas.router.proxy.failures import (
    BROKEN,
    BROKEN_STATUSES,
    REFUSALS,
    abandoned,
    ended_with_process,
    engine_failed,
)
from kvatlas.router.proxy.headers import read_answer_headers
from kvatlas.router.proxy.idle_tracker import IdleTracker
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from kvatlas.router.proxy.usage_reports import read_usage

_PREFILL_ANSWER_BYTES_MAX = 8 << 20
"""Of a prefill engine's answer, which lists the numbers of its blocks."""


class Harm(Enum):
    """Of a request to an engine that did not serve it."""

    NONE = 0
    MAYBE = 1
    """It may have ended it."""
    BROKE = 2
    """The same, and it counts as broken by it."""
    RESTARTED = 3
    """Another process runs there now."""


class AgainError(Exception):
    """Place the request again, as its state allows: the decode engine is not at fault. ``harm``: to the
    engine ``engine_id``."""

    def __init__(self, problem: str, engine_id: str, harm: Harm = Harm.NONE) -> None:
        super().__init__(problem)
        self.engine_id = engine_id
        self.harm = harm


class DisaggForwarder:
    """Sends both requests. One per proxy; holds no state of a request."""

    def __init__(
        self,
        carrier: OwnConnections,
        connector: Connector,
        *,
        pd: PdSettings,
        proxy: ProxySettings,
        stats: PdStats,
        proxy_stats: ProxyStats,
        clock: Callable[[], float],
        metrics: Query,
    ) -> None:
        self._carrier = carrier
        self._metrics = metrics
        self.connector = connector
        self.pd = pd
        self.proxy = proxy
        self._stats = stats
        self._proxy_stats = proxy_stats
        self._clock = clock
        self._idle = IdleTracker(clock)

    def disagg(self) -> DisaggState:
        """Return the state of a request that is split for the first time."""
        return DisaggState(self.pd)

    async def prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, disagg: DisaggState, transfer_id: str
    ) -> None:
        """Have the prompt computed, and note the handoff. Raises ``AgainError`` if the prefill failed."""
        disagg.prefill_sent()
        self._stats.split += 1
        try:
            await self._ask_prefill(attempt, body, out, disagg, transfer_id)
        except AgainError as error:
            problem = str(error)
            self._stats.count(self._stats.prefill_failures, problem.replace(" ", "_"))
            engine = attempt.engine_id
            out.record.tracker.warn("prefill failed", out.record, engine, engine=engine, problem=problem)
            raise
        except asyncio.CancelledError:
            self._proxy_stats.clients_left_unanswered += attempt.left_unanswered()
            raise

    async def _ask_prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, disagg: DisaggState, transfer_id: str
    ) -> None:
        params = self.connector.prefill_params(transfer_id)
        asked_s = self._idle.begin()
        usage: Usage | None = None
        answer: Any = None
        try:
            attempt.sent_body = await run_cooperatively(body.prefill(params, attempt.retention))
            timeout_s = self.proxy.first_byte_timeout_s
            attempt.check_eligible()
            if (task := asyncio.current_task()) is not None:
                attempt.awaited(task.cancel)
            answer = await self._carrier.ask(attempt, _without_rank(out), timeout_s)
            # Not the time of arrival: the loop may have been busy, and the lease would be taken for younger
            # than it is.
            held_since_s = max(asked_s, self._idle.at_s)
            content = await self._read(answer)
            attempt.arrived()
            self._check(attempt, answer, out, disagg)
            if aborted(out.request.path, content):
                raise UpstreamError("aborted")
            usage = _usage(content)
            cached_tokens = None if usage is None else usage.cached_tokens
            await self._hand_over(attempt, content, disagg, transfer_id, held_since_s, cached_tokens)
            self._stats.prefill_s += self._clock() - asked_s
        except (UpstreamError, asyncio.CancelledError) as raised:
            error = raised if isinstance(raised, UpstreamError) else abandoned(attempt, self._proxy_stats)
            if error is None:
                raise
            engine_failed(attempt, error, self._proxy_stats)
            disagg.prefill_failed(attempt.engine_id)
            if ended_with_process(attempt, error):
                raise AgainError(error.reason, attempt.engine_id, Harm.RESTARTED) from None
            harm = Harm.BROKE if broke(error) else Harm.NONE
            raise AgainError(error.reason, attempt.engine_id, harm) from None
        finally:
            self._idle.end()
            if answer is not None:
                self._carrier.done(answer)
            # Ends the account whatever happened: a leaked prefill would count as queued work forever.
            attempt.finished(usage)

    def _check(self, attempt: Attempt, answer: Answer, out: Outbound, disagg: DisaggState) -> None:
        """Raise ``AgainError`` for an unsuccessful answer."""
        status = answer.status
        if status in REFUSALS:
            head = read_answer_headers(answer.headers, out.head.request_id, ())
            wait_s = retry_after_s(head.retry_after, self.proxy.retry_after_s_max)
            if attempt.refused(status, wait_s):
                self._proxy_stats.count_failure("status")
            disagg.prefill_failed(attempt.engine_id)
            harm = Harm.BROKE if status in BROKEN_STATUSES else Harm.NONE
            raise AgainError("status", attempt.engine_id, harm)
        attempt.answered(status)
        if status != 200:
            # the decode engine will tell the client why its request is invalid
            disagg.nothing_to_fetch()
            raise AgainError("refused", attempt.engine_id)
        attempt.first_byte(status)

    async def _hand_over(
        self,
        attempt: Attempt,
        content: bytes,
        disagg: DisaggState,
        transfer_id: str,
        held_since_s: float,
        cached_tokens: int | None,
    ) -> None:
        holder = _holder(attempt)
        result = await self.connector.decode_params(content, transfer_id, holder, cached_tokens)
        if isinstance(result, bytes):
            handoff = Handoff.from_answer(
                result,
                source=attempt.engine_id,
                version=attempt.version,
                held_since_s=held_since_s,
                answered_s=self._clock(),
                settings=self.pd,
                leased=self.connector.leased(holder),
                source_url=attempt.base_url,
                cached_tokens=cached_tokens,
            )
            disagg.handed_over(handoff)
            return
        disagg.nothing_to_fetch()
        # Without a connector the engine never hands anything over; a prefill that ended by itself says
        # nothing of the next one.
        if result != "stopped":
            attempt.nothing_held()
        raise AgainError(result, attempt.engine_id)

    async def _read(self, answer: Answer) -> bytes:
        pieces: list[bytes] = []
        left = _PREFILL_ANSWER_BYTES_MAX
        while not answer.at_eof:
            data = answer.read_nowait()
            if data is None:
                data = await answer.read()
            pieces.append(data)
            left -= len(data)
            # An engine's answer to a prompt of one token is small: more than that is no answer to our
            # request.
            if left < 0:
                raise UpstreamError("reset")
        return b"".join(pieces)

    def check_decode(self, attempt: Attempt, out: Outbound) -> None:
        """Raise ``AgainError`` if the decode engine may not get the request any more: another one fetches
        what has been computed meanwhile."""
        try:
            attempt.check_eligible()
        except UpstreamError:
            self._stats.handoffs_redirected += 1
            raise _in_vain("decode engine left", attempt, out) from None

    async def fetch(
        self, attempt: Attempt, body: SplitBody, out: Outbound, disagg: DisaggState, timeout_s: float
    ) -> Answer:
        """Ask the decode engine to fetch the blocks. Raises ``UpstreamError``, and ``AgainError`` if the
        lease is too old."""
        handoff = disagg.handoff(self._clock())
        if handoff is None:
            raise self._late(attempt, out)

        def on_sent() -> None:
            now = self._clock()
            handoff.take(now)
            attempt.handoff = handoff
            gap_s = now - handoff.answered_s
            self._stats.handoffs += 1
            self._stats.gap_s += gap_s
            attempt.handed_over(gap_s)
            if out.record.trace is not None:
                out.record.trace.learned({"kvatlas.gap_s": gap_s})

        try:
            attempt.sent_body = await run_cooperatively(body.decode(handoff.params, attempt.retention))
            attempt.check_eligible()
            asking = self._carrier.ask(attempt, out, timeout_s, on_sent)
            waits_s = handoff.leased and not out.request.stream
            answer: Answer = await (self._witnessed(asking, handoff) if waits_s else asking)
        except HandoffRefusedError:
            raise self._late(attempt, out) from None
        except UpstreamError as error:
            if not handoff.sent:
                self._stats.handoffs_redirected += 1
            # The engine may have closed the connection before it read the request, or after: the parameters
            # may have been used, and must not be sent twice.
            elif error.stale:  # not a failure of the engine
                self._stats.handoffs_lost += 1
                disagg.decode_failed()
                # One that only closed it is alive; one that died may have died of the request.
                raise AgainError("stale connection", attempt.engine_id, Harm.MAYBE) from None
            raise
        return answer

    async def _witnessed(self, asking: Awaitable[Answer], handoff: Handoff) -> Answer:
        """Wait for an answer that is not streamed. It begins when it is complete, which may be long after its
        blocks were fetched. They were in time if no lease expired at the prefill engine between shortly
        before the end of this one and the answer."""
        came = asyncio.Event()
        owned: Answer | None = None

        async def ask() -> Answer:
            nonlocal owned
            try:
                owned = await asking
            finally:
                came.set()
            return owned

        try:
            answer, before = await asyncio.gather(ask(), self._count_before(handoff, came))
            # An unstreamed answer begins when it is complete. Its blocks were fetched in time if no lease at
            # all expired at the prefill engine meanwhile.
            late = before is not None and self._clock() >= handoff.lease_end_s
            if late and await self._expired_leases(handoff.source_url) == before:
                handoff.fetched()
        except BaseException:
            # Owned here until it is returned: the client may leave during the second wait.
            if owned is not None:
                self._carrier.done(owned)
            raise
        return answer

    async def _count_before(self, handoff: Handoff, came: asyncio.Event) -> float | None:
        """Return the number of expired leases shortly before the end of the lease; None: the answer came
        first, or the number is unknown."""
        try:
            async with asyncio.timeout(max(0.0, handoff.until_s - self._clock())):
                await came.wait()
        except TimeoutError:
            count = await self._expired_leases(handoff.source_url)
            return count if self._clock() < handoff.lease_end_s else None
        return None

    async def _expired_leases(self, base_url: str) -> float | None:
        try:
            return expired_leases(await self._metrics(base_url))
        except OSError:
            return None

    def _late(self, attempt: Attempt, out: Outbound) -> AgainError:
        self._stats.leases_late += 1
        return _in_vain("late", attempt, out)

    def failed(self, attempt: Attempt, out: Outbound, disagg: DisaggState | None, status: int = 0) -> None:
        """Handle a decode engine's failure. Raises ``AgainError`` if it only means that blocks could not be
        fetched."""
        if disagg is None or attempt.body is None or not disagg.is_sent:
            return
        self._stats.handoffs_lost += 1
        disagg.decode_failed(status)
        # vLLM answers 500 if the blocks cannot be loaded: a failure of the transfer, not of the request.
        if status == BROKEN and attempt.fetch_failed():
            raise _in_vain("fetch failed", attempt, out, Harm.MAYBE)

    def not_fetched(self, attempt: Attempt, out: Outbound, disagg: DisaggState | None) -> AgainError:
        """Handle an answer that began after the end of the lease."""
        self._stats.answers_late += 1
        self._stats.handoffs_lost += 1
        if disagg is not None:
            disagg.not_fetched()
        attempt.fetch_failed()
        return _in_vain("late answer", attempt, out)


def broke(error: UpstreamError) -> bool:
    """Whether the request may have broken the engine: it was reached but did not answer."""
    return error.sent and error.reason not in ("overflow", "aborted") and not error.abandoned


def _in_vain(problem: str, attempt: Attempt, out: Outbound, harm: Harm = Harm.NONE) -> AgainError:
    """Discard the blocks computed for this engine."""
    engine = attempt.engine_id
    out.record.tracker.warn("prefill not fetched", out.record, engine, engine=engine, problem=problem)
    return AgainError(problem, engine, harm)


def new_transfer_id() -> str:
    """Return a unique transfer id."""
    # Unique over all routers: engines take equal ids for the same transfer.
    return f"kvatlas-{random.getrandbits(128):032x}"


def _holder(attempt: Attempt) -> PrefillHolder:
    for name, value in attempt.engine_headers:
        if name == RANK:
            return PrefillHolder(attempt.base_url, value.decode())
    return PrefillHolder(attempt.base_url)


def _without_rank(out: Outbound) -> Outbound:
    """Remove the client's rank header, which is for the answering engine."""
    if RANK not in dict(out.head.fields):
        return out
    fields = [field for field in out.head.fields if field[0] != RANK]
    return msgspec.structs.replace(out, head=msgspec.structs.replace(out.head, fields=fields))


def _usage(content: bytes) -> Usage | None:
    try:
        return read_usage(without_blocks(content))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
