"""One request on two engines: the first one computes the prompt and keeps it, the second one fetches it.

The first engine's answer is read whole and never passed on; the second one's is the client's. Where that is
allowed the second one learns at once what the first one will have. What always holds: the
attempt at the first engine has ended when ``prefill`` returns or raises; cancelled, it closes the connection,
upon which that engine frees what it had computed; the second engine's request is written once, and only while
the lease is young, and its answer is passed on only if it begins before the lease ends (``Handoff``).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from router.http.client import UpstreamClient, UpstreamError
from router.http.server.request_cycle import Send
from router.openai.errors import retry_after_s
from router.openai.members import run_cooperatively
from router.openai.request import Usage
from router.pd.bodies import SplitBody
from router.pd.handoff import DisaggState, Handoff, HandoffRefusedError, WaitSlots
from router.pd.settings import RANK, PdSettings, PdStats
from router.pd.transfer import (
    Connector,
    PrefillHolder,
    Problem,
    Query,
    Told,
    expired_leases,
    without_blocks,
)
from router.proxy.attempt import Answer, Attempt, Outbound, OwnConnections
from router.proxy.endings import BROKEN, REFUSALS, abandoned, aborted, await_first_byte, engine_failed
from router.proxy.headers import read_answer_headers, request_head
from router.proxy.settings import ProxySettings
from router.proxy.sse import read_usage
from router.proxy.stats import ProxyStats

# The last moment at which answers that have come since surely were not there yet, for callers that must know
# how old one may be at most.


_EVERY_S = 1.0
_LOOKED_S = 0.05


class IdleTracker:
    """For all requests of one loop: each says when it begins and ends, and once its answer has come, the
    later of its beginning and ``at_s`` is that moment. A moment counts only if the loop has looked at its
    sockets since, and all waiters have been woken: a loop that stood still finds answers that have lain
    there for long. Nothing is noted without waiters."""

    __slots__ = ("_clock", "_noting", "_waiting", "at_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._noting = False
        self.at_s = -math.inf

    def begin(self) -> float:
        """A request is sent from now on: the time."""
        self._waiting += 1
        if not self._noting:
            self._noting = True
            asyncio.get_running_loop().call_later(_EVERY_S, self._note)
        return self._clock()

    def end(self) -> None:
        """Its answer has been read, or there will be none."""
        self._waiting -= 1

    def _note(self) -> None:
        if self._waiting:
            asyncio.get_running_loop().call_later(_LOOKED_S, self._looked, self._clock())
        else:
            self._noting = False

    def _looked(self, then_s: float) -> None:
        asyncio.get_running_loop().call_soon(self._settle, then_s)

    def _settle(self, then_s: float) -> None:
        self.at_s = then_s
        asyncio.get_running_loop().call_later(_EVERY_S, self._note)


class AgainError(Exception):
    """The engine that was to answer is not at fault: the request is placed again, as its course allows.
    ``broke``: it may have broken the engine that computed its prompt."""

    def __init__(self, problem: str, *, broke: bool = False) -> None:
        super().__init__(problem)
        self.broke = broke


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
        self._quiet = IdleTracker(clock)

    def course(self) -> DisaggState:
        """Of a request that is placed on two engines for the first time."""
        return DisaggState(self.pd)

    async def prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: DisaggState, transfer_id: str
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
            self._proxy_stats.clients_left_unanswered += attempt.left_unanswered()
            raise

    async def ahead(self, attempt: Attempt, course: DisaggState, transfer_id: str) -> Handoff | None:
        """While the prompt is being computed: what a decode engine can be told already, if anything; the
        course knows it then."""
        params = await self.connector.ahead(transfer_id, _holder(attempt))
        if params is None:
            return None
        handoff = self._handoff(attempt, params, self._clock(), ahead=True)
        return handoff if course.handed_over(transfer_id, handoff) else None

    async def _ask_prefill(
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: DisaggState, transfer_id: str
    ) -> None:
        asks = await run_cooperatively(body.prefill(self.connector.asks(transfer_id)))
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
        self, attempt: Attempt, answer: Answer, out: Outbound, course: DisaggState, transfer_id: str
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
        course: DisaggState,
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
        self, attempt: Attempt, body: SplitBody, out: Outbound, course: DisaggState, timeout_s: float
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
            self._stats.early_decodes += handoff.ahead
            self._stats.gap_s += gap_s
            attempt.handed_over(gap_s)
            if out.record.trace is not None:
                out.record.trace.learned({"kvatlas.gap_s": gap_s})

        try:
            timeout_s += self.proxy.first_byte_timeout_s * handoff.ahead
            text = await run_cooperatively(body.decode(handoff.params))
            asking = self._carrier.ask(attempt, out, timeout_s, told, text)
            waits_s = handoff.leased and not out.request.stream
            answer: Answer = await (self._witnessed(asking, handoff) if waits_s else asking)
        except HandoffRefusedError:
            raise self._late(attempt, out) from None
        except UpstreamError as error:
            if not handoff.sent:
                self._stats.handoffs_redirected += 1
            elif error.stale:  # which says nothing of the engine
                self._stats.handoffs_lost += 1
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

    def failed(self, attempt: Attempt, out: Outbound, course: DisaggState | None, status: int = 0) -> None:
        """The second engine gave no answer that the client can have. Raises ``AgainError`` where that says
        only that the blocks could not be fetched."""
        if course is None or attempt.body is None or not course.told:
            return
        self._stats.handoffs_lost += 1
        course.decode_failed(status)
        if status == BROKEN and attempt.fetch_failed():
            raise _in_vain("fetch failed", attempt, out)

    def not_fetched(self, attempt: Attempt, out: Outbound, course: DisaggState | None) -> AgainError:
        """The second engine's answer began after the end of the lease."""
        self._stats.answers_late += 1
        self._stats.handoffs_lost += 1
        if course is not None:
            course.not_fetched()
        attempt.fetch_failed()
        return _in_vain("late answer", attempt, out)


def broke(error: UpstreamError) -> bool:
    """Whether the request may have broken the engine: it was there, and no answer came of it."""
    return error.sent and error.reason not in ("overflow", "aborted") and not error.abandoned


def _in_vain(problem: str, attempt: Attempt, out: Outbound) -> AgainError:
    """Discard what was computed for this engine."""
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


# Both requests of a split at once: the second engine waits for what the first one is computing.
#
# What always holds: an engine that waits for blocks which will not come has its request closed, before the
# client has had a byte of it. It keeps what it had reserved nevertheless, and the other engine a task for
# it, until their time is over: nothing but the end of the prefill wakes them. So a prefill of which an
# engine has been told goes on to its end, also when it is no longer wanted (its client left, the other
# engine failed), and how many may wait is bounded (``WaitSlots``).


Outcome = TypeVar("Outcome")


class ConcurrentPrefill:
    """One per proxy. ``close`` it with the loop: prefills may go on without a waiter."""

    def __init__(self, legs: DisaggForwarder, stats: PdStats, clock: Callable[[], float]) -> None:
        self._legs = legs
        self._stats = stats
        self._clock = clock
        self._places = WaitSlots()
        self._alone: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """End prefills without a waiter."""
        for task in self._alone:
            task.cancel()

    def allowed(self, prefill: Attempt) -> bool:
        """Whether another engine may wait at this one."""
        most = self._legs.pd.mooncake_ahead_max
        return most > 0 and self._places.taken(prefill.engine_id, self._clock()) < most

    async def run(
        self,
        placement: Attempt,
        out: Outbound,
        course: DisaggState,
        send: Send,
        answer: Callable[[Send], Coroutine[Any, Any, Outcome]],
    ) -> Outcome:
        """Ask the first engine and, by ``answer``, the second one; ends as ``answer`` does. Raises
        ``AgainError`` where the first one failed before the client had anything."""
        pair = _Pair(self._legs, placement, course, send)
        self._places.take(pair.prefill.engine_id)
        first = asyncio.create_task(pair.compute(out))
        first.add_done_callback(lambda task: self._over(task, pair))
        second = asyncio.create_task(pair.fetch(first, answer))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if _failed(first) and not pair.begun:  # whatever the other one says by now
                placement.finished(None)  # it is not at fault
                await first
            outcome = await second
            if not pair.told:  # another engine may be, once the blocks are there
                await first
            return outcome
        finally:
            await self._leave(first, second, pair)

    async def _leave(self, first: asyncio.Task[None], second: asyncio.Task[Any], pair: _Pair) -> None:
        second.cancel()
        if not pair.told:
            first.cancel()
        elif not first.done():
            self._alone.add(first)
            first.add_done_callback(self._alone.discard)
        ending: set[asyncio.Task[Any]] = {second} if first in self._alone else {first, second}
        await asyncio.gather(*ending, return_exceptions=True)

    def _over(self, first: asyncio.Task[None], pair: _Pair) -> None:
        engine_id = pair.prefill.engine_id
        if pair.told and _failed(first):
            self._stats.waits_leaked += 1
            self._places.stick(engine_id, self._clock(), self._legs.pd.mooncake_abort_s)
        else:
            self._places.free(engine_id)


class _Pair:
    """One request's two halves. ``begun``: the client has had something."""

    def __init__(self, legs: DisaggForwarder, placement: Attempt, course: DisaggState, send: Send) -> None:
        if placement.prefill is None or placement.body is None:
            raise ValueError("a request for one engine")
        self.prefill = placement.prefill
        self.begun = False
        self._body = placement.body
        self._placement = placement
        self._legs = legs
        self._course = course
        self._send = send
        self._transfer_id = new_transfer_id()
        self._handoff: Handoff | None = None

    @property
    def told(self) -> bool:
        """The second engine has been told before the first one had answered."""
        return self._handoff is not None and self._handoff.sent

    async def compute(self, out: Outbound) -> None:
        """Implement ``DisaggForwarder.prefill``."""
        await self._legs.prefill(self.prefill, self._body, out, self._course, self._transfer_id)

    async def fetch(
        self, first: asyncio.Task[None], answer: Callable[[Send], Coroutine[Any, Any, Outcome]]
    ) -> Outcome:
        """The second request, at once if it is known what to say; otherwise after the first one."""
        self._handoff = await self._legs.ahead(self.prefill, self._course, self._transfer_id)
        if self._handoff is None:
            await asyncio.shield(first)
        else:
            self._placement.expected_s += self.prefill.expected_s
        return await answer(self._passed_on)

    async def _passed_on(self, message: Any) -> None:
        self.begun = True
        await self._send(message)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


# Reads a page of an engine, or of the bootstrap server beside it, over the proxy's own connections.


_TIMEOUT_S = 5.0
_ANSWER_BYTES_MAX = 1 << 20


class EnginePage:
    """Implements ``router.pd.transfer.Query``."""

    def __init__(self, client: UpstreamClient, path: bytes) -> None:
        self._client = client
        self._path = path

    async def __call__(self, base_url: str) -> bytes:
        """Implement ``Query``."""
        origin = self._client.origin(base_url)
        head = request_head(
            "GET", origin.path_prefix + self._path, origin.host_header, [], own=(), length=None
        )
        try:
            answer = await self._client.exchange(origin, "GET", head, b"", _TIMEOUT_S)
        except UpstreamError as error:
            raise OSError(f"{base_url}: {error.reason}") from None
        try:
            content = b""
            while data := await answer.read():
                content += data
                if len(content) > _ANSWER_BYTES_MAX:
                    raise OSError(f"{base_url}: more than {_ANSWER_BYTES_MAX} bytes")
        except UpstreamError as error:
            raise OSError(f"{base_url}: {error.reason}") from None
        finally:
            self._client.done(answer)
        if answer.status != 200:
            raise OSError(f"{base_url}: status {answer.status}")
        return content
