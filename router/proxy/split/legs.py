"""One request on two engines: the first one computes the prompt and keeps it, the second one fetches it.

The first engine's answer is read whole and never passed on; the second one's is the client's. Where that is
allowed the second one is told at once what the first one will have (``together.py``). What always holds: the
attempt at the first engine has ended when ``prefill`` returns or raises; cancelled, it closes the connection,
upon which that engine frees what it had computed; the second engine's request is written once, and only while
the lease is young, and its answer is passed on only if it begins before the lease ends (``Handoff``).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from router.http.client.connection import UpstreamError
from router.openai.errors import retry_after_s
from router.openai.members import at_leisure
from router.openai.request import Usage
from router.pd.bodies import SplitBody
from router.pd.course import Course
from router.pd.handoff import Handoff, HandoffRefusedError
from router.pd.settings import PdSettings
from router.pd.sidecar import RANK
from router.pd.stats import PdStats
from router.pd.transfer import (
    Connector,
    PrefillHolder,
    Problem,
    Query,
    Told,
    expired_leases,
    without_blocks,
)
from router.proxy.answers.endings import aborted
from router.proxy.answers.failures import BROKEN, REFUSALS, abandoned, await_first_byte, engine_failed
from router.proxy.answers.usage import read_usage
from router.proxy.attempt import Attempt
from router.proxy.carrier import Answer, Outbound, OwnConnections
from router.proxy.headers import read_answer_headers
from router.proxy.settings import ProxySettings
from router.proxy.split.quiet import Quiet
from router.proxy.stats import ProxyStats


class AgainError(Exception):
    """The engine that was to answer is not at fault: the request is placed again, as its course allows.
    ``broke``: it may have broken the engine that computed its prompt."""

    def __init__(self, problem: str, *, broke: bool = False) -> None:
        super().__init__(problem)
        self.broke = broke


class Legs:
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
        self._quiet = Quiet(clock)

    def course(self) -> Course:
        """Of a request that is placed on two engines for the first time."""
        return Course(self.pd)

    async def prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: Course, transfer_id: str
    ) -> None:
        """Have the prompt computed, and tell the course what is held. Raises ``AgainError`` where that came
        to nothing."""
        course.asked(transfer_id)
        self._stats.split += 1
        try:
            await self._ask_prefill(attempt, body, out, course, transfer_id)
        except AgainError as error:
            problem = str(error)
            self._stats.count(self._stats.prefill_failures, problem.replace(" ", "_"))
            engine = attempt.engine_id
            out.record.tracker.warn("prefill failed", out.record, engine, engine=engine, problem=problem)
            raise
        except asyncio.CancelledError:
            self._proxy_stats.clients_gave_up += attempt.gave_up()
            raise

    async def ahead(self, attempt: Attempt, course: Course, transfer_id: str) -> Handoff | None:
        """While the prompt is being computed: what a decode engine can be told already, if anything; the
        course knows it then."""
        params = await self.connector.ahead(transfer_id, _holder(attempt))
        if params is None:
            return None
        handoff = self._handoff(attempt, params, self._clock(), ahead=True)
        return handoff if course.handed_over(transfer_id, handoff) else None

    async def _ask_prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: Course, transfer_id: str
    ) -> None:
        asks = await at_leisure(body.prefill(self.connector.asks(transfer_id)))
        asked_s = self._quiet.begin()
        usage: Usage | None = None
        answer: Any = None
        try:
            timeout_s = self.proxy.first_byte_timeout_s
            await_first_byte(attempt, self._carrier)
            answer = await self._carrier.ask(attempt, _without_rank(out), timeout_s, body=asks)
            held_since_s = max(asked_s, self._quiet.at_s)
            content = await self._read(answer)
            attempt.arrived()
            self._check(attempt, answer, out, course, transfer_id)
            if aborted(out.request.path, content):
                raise UpstreamError("aborted")
            usage = _usage(content)
            cached_tokens = None if usage is None else usage.cached_tokens
            await self._hand_over(attempt, content, course, transfer_id, held_since_s, cached_tokens)
            self._stats.prefill_s += self._clock() - asked_s
        except (UpstreamError, asyncio.CancelledError) as raised:
            error = raised if isinstance(raised, UpstreamError) else abandoned(attempt, self._proxy_stats)
            if error is None:
                raise
            engine_failed(attempt, error, self._proxy_stats)
            course.prefill_failed(transfer_id, attempt.engine_id)
            raise AgainError(error.reason, broke=broke(error)) from None
        finally:
            self._quiet.end()
            if answer is not None:
                self._carrier.done(answer)
            attempt.finished(usage)

    def _check(
        self, attempt: Attempt, answer: Answer, out: Outbound, course: Course, transfer_id: str
    ) -> None:
        """Raises ``AgainError`` for an answer that is no success."""
        status = answer.status
        if status in REFUSALS:
            head = read_answer_headers(answer.headers, out.head.request_id, ())
            wait_s = retry_after_s(head.retry_after, self.proxy.retry_after_s_max)
            if attempt.refused(status, wait_s):
                self._proxy_stats.count_failure("status")
            course.prefill_failed(transfer_id, attempt.engine_id)
            raise AgainError("status", broke=status == BROKEN)
        attempt.answered(status)
        if status != 200:
            course.nothing_held(transfer_id)  # the decode engine will tell the client what is wrong with it
            raise AgainError("refused")
        attempt.first_byte(status)

    async def _hand_over(
        self,
        attempt: Attempt,
        content: bytes,
        course: Course,
        transfer_id: str,
        held_since_s: float,
        cached_tokens: int | None,
    ) -> None:
        told: Told | Problem
        if course.given(transfer_id):
            told = self.connector.problem(content)
            course.learned(transfer_id, cached_tokens)
        else:
            told = await self.connector.told(content, transfer_id, _holder(attempt), cached_tokens)
        if isinstance(told, bytes):
            handoff = self._handoff(attempt, told, held_since_s, cached_tokens=cached_tokens)
            course.handed_over(transfer_id, handoff)
        elif told:
            course.nothing_held(transfer_id)
            if told != "stopped":
                attempt.held_nothing()
            raise AgainError(told)

    def _handoff(
        self,
        attempt: Attempt,
        params: bytes,
        held_since_s: float,
        *,
        ahead: bool = False,
        cached_tokens: int | None = None,
    ) -> Handoff:
        return Handoff.of(
            params,
            source=attempt.engine_id,
            version=attempt.version,
            held_since_s=held_since_s,
            answered_s=self._clock(),
            settings=self.pd,
            ahead=ahead,
            leased=self.connector.leased(_holder(attempt)),
            source_url=attempt.base_url,
            cached_tokens=cached_tokens,
        )

    async def _read(self, answer: Answer) -> bytes:
        pieces: list[bytes] = []
        left = self.pd.answer_bytes_max
        while not answer.finished:
            data = answer.take()
            if data is None:
                data = await answer.read()
            pieces.append(data)
            left -= len(data)
            if left < 0:
                raise UpstreamError("reset")
        return b"".join(pieces)

    async def fetch(
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: Course, timeout_s: float
    ) -> Answer:
        """Ask the second engine, telling it what is held. Raises ``UpstreamError``, and ``AgainError`` where
        it is too late to tell it."""
        handoff = course.handoff(self._clock())
        if handoff is None:
            raise self._late(attempt, out)

        def told() -> None:
            now = self._clock()
            handoff.take(now)
            attempt.handoff = handoff
            gap_s = now - handoff.answered_s
            self._stats.handoffs += 1
            self._stats.ahead += handoff.ahead
            self._stats.gap_s += gap_s
            attempt.handed_over(gap_s)
            if out.record.trace is not None:
                out.record.trace.learned({"kvatlas.gap_s": gap_s})

        try:
            timeout_s += self.proxy.first_byte_timeout_s * handoff.ahead
            text = await at_leisure(body.decode(handoff.params))
            asking = self._carrier.ask(attempt, out, timeout_s, told, text)
            waits_s = handoff.leased and not out.request.stream
            answer: Answer = await (self._witnessed(asking, handoff) if waits_s else asking)
        except HandoffRefusedError:
            raise self._late(attempt, out) from None
        except UpstreamError as error:
            if not handoff.sent:
                self._stats.handoffs_kept += 1
            elif error.stale:  # which says nothing of the engine
                self._stats.handoffs_spent += 1
                course.decode_failed()
                raise AgainError("stale connection") from None
            raise
        return answer

    async def _witnessed(self, asking: Awaitable[Answer], handoff: Handoff) -> Answer:
        """An answer that is not streamed begins when it is complete, which may be long after its blocks were
        fetched. They were in time if the prefill engine has let no lease end between a moment before the end
        of this one and the answer."""
        came = asyncio.Event()

        async def asks() -> Answer:
            try:
                return await asking
            finally:
                came.set()

        answer, before = await asyncio.gather(asks(), self._count_before(handoff, came))
        late = before is not None and self._clock() >= handoff.lease_end_s
        if late and await self._expired_leases(handoff.source_url) == before:
            handoff.fetched()
        return answer

    async def _count_before(self, handoff: Handoff, came: asyncio.Event) -> float | None:
        """The count shortly before the end of the lease; None: the answer came first, or it is not known."""
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

    def failed(self, attempt: Attempt, out: Outbound, course: Course | None, status: int = 0) -> None:
        """The second engine gave no answer that the client can have. Raises ``AgainError`` where that says
        only that the blocks could not be fetched."""
        if course is None or attempt.body is None or not course.told:
            return
        self._stats.handoffs_spent += 1
        course.decode_failed(status)
        if status == BROKEN and attempt.fetch_failed():
            raise _in_vain("fetch failed", attempt, out)

    def not_fetched(self, attempt: Attempt, out: Outbound, course: Course | None) -> AgainError:
        """The second engine's answer began after the end of the lease."""
        self._stats.answers_late += 1
        self._stats.handoffs_spent += 1
        if course is not None:
            course.not_fetched()
        attempt.fetch_failed()
        return _in_vain("late answer", attempt, out)


def broke(error: UpstreamError) -> bool:
    """Whether the request may have broken the engine: it was there, and no answer came of it."""
    return error.sent and error.reason not in ("overflow", "aborted") and not error.abandoned


def _in_vain(problem: str, attempt: Attempt, out: Outbound) -> AgainError:
    """What was computed for this engine is of no use."""
    engine = attempt.engine_id
    out.record.tracker.warn("prefill not fetched", out.record, engine, engine=engine, problem=problem)
    return AgainError(problem)


def new_transfer_id() -> str:
    """A name that no other transfer has."""
    return f"kvatlas-{random.getrandbits(128):032x}"


def _holder(attempt: Attempt) -> PrefillHolder:
    for name, value in attempt.engine_headers:
        if name == RANK:
            return PrefillHolder(attempt.base_url, value.decode())
    return PrefillHolder(attempt.base_url)


def _without_rank(out: Outbound) -> Outbound:
    """The client's is for the engine that answers."""
    if RANK not in dict(out.head.fields):
        return out
    fields = [field for field in out.head.fields if field[0] != RANK]
    return msgspec.structs.replace(out, head=msgspec.structs.replace(out.head, fields=fields))


def _usage(content: bytes) -> Usage | None:
    try:
        return read_usage(without_blocks(content))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
