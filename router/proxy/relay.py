"""Passes one engine's answer on to the client as it comes, and reads of it what the accounts need.

Whole answers and event streams; neither is decoded but for the usage, a response's id and what says that the
engine gave it up. Invariants: the head is sent with the first bytes of the body, so an engine that
dies before them raises ``UpstreamError`` with nothing sent, and can be replaced; an answer that ends early is
told to the client, by an error event or by a cut connection.
"""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from router.http.request_cycle import ResponseSink
from router.http.upstream import UpstreamError
from router.observe.requests import RequestRecord
from router.openai.errors import stream_broken
from router.openai.request import PROMPT_APIS, RESPONSES, error_event
from router.proxy.answers import SseRelay, aborted, error_status, read_usage
from router.proxy.attempt import REFUSALS, Answer, Attempt, EventRefusedError, broke_off
from router.proxy.headers import AnswerHead
from router.proxy.settings import ProxyStats

# Passes one engine's event stream on, piece by piece.
#
# A piece is passed on by the engine's connection, which brings it; the request's task runs only where the
# client is too slow, and at the end. Invariants: the head is sent with the first whole line; a
# stream that breaks off before its end mark, or that the engine gives up, ends with an error event.


class StreamRelay(msgspec.Struct, eq=False):
    """One stream. Where ``run`` returns without having sent its end, the connection must be cut."""

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: ResponseSink
    _stats: ProxyStats
    _events: SseRelay
    _success: bool
    """The engine's status says so, and its first event is no error."""
    _replaceable: bool = False
    """Another engine may be asked while nothing has been sent."""
    _begun: bool = False
    """Its first token came."""
    _started: bool = False
    """The client has had something."""
    _more: bool = True
    _waits: Awaitable[None] | None = None
    """To be awaited before the next piece."""

    async def run(self, first: bytes) -> None:
        """Pass everything on. Raises ``UpstreamError``, ``EventRefusedError`` and ``NotFetchedError`` where
        nothing has been sent."""
        events = self._events
        try:
            self._pass_on(first)
            while self._more:
                if self._waits is not None:
                    await self._caught_up()
                if self._go_on():
                    # ``_take`` is called by the connection for each piece, so that a chunk costs no task
                    # switch.
                    await self._connection.next_event(self._take)
        except UpstreamError as error:
            if not self._started:
                raise
            if not events.done:
                await self._break(error)
                return
            self._waits = self._answer.write(events.end(), more=False)
        await self._caught_up()
        self._stats.usage_unreadable += events.unread_usages
        self._record.usage = self._attempt.corrected(events.usage)
        self._attempt.finished(events.usage)

    async def _caught_up(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            await waits

    def _go_on(self) -> bool:
        """Pass on what has come. Whether to wait for more of it. Raises ``UpstreamError``."""
        while (data := self._connection.read_nowait()) is not None:
            self._pass_on(data)
            if not self._more or self._waits is not None:
                return False
        return True

    def _take(self) -> bool:
        """Pass on the next thing that came, all of which is there at once. Whether this may be called for the
        one after it. Raises ``UpstreamError``."""
        data = self._connection.read_nowait()
        if data is None:
            return True
        self._pass_on(data)
        return self._more and self._waits is None

    def _pass_on(self, data: bytes) -> None:
        """Pass a piece on."""
        events, record = self._events, self._record
        out = events.feed(data) if data else events.end()
        if self._connection.complete:
            self._more = False
            out += events.end()
        if events.aborted:
            self._give_up(out)
        if not self._begun and events.begun:
            self._begin(events.first)
        if self._begun and self._success:
            record.piece()
            # An event ends with a blank line, and engines send one token per event: cheaper than parsing.
            self._attempt.streamed(data.count(b"\n\n"))
        # Nothing is sent before a whole line has come, so that an engine that dies first can be replaced.
        if not out and self._more:
            return
        record.bytes_out += len(out)
        if not self._started:
            self._started = True
            self._answer.start(self._connection.status, self._head.fields, self._head.length)
        self._waits = self._answer.write(out, more=self._more)

    def _give_up(self, out: bytes) -> None:
        """End the answer: the engine gave up behind ``out``, which is not needed if another engine
        answers."""
        # What came before the abort is the client's; unsent, it is dropped for the other engine's answer.
        if self._started and out:
            self._record.bytes_out += len(out)
            self._waits = self._answer.write(out, more=True)
        raise UpstreamError("aborted")

    def _begin(self, first: bytes) -> None:
        """The first event that is no opening came."""
        attempt, status = self._attempt, self._connection.status
        self._begun = True
        if self._replaceable and not self._started:
            attempt.check_fetched()
        if self._success and (named := error_status(first)):
            # vLLM reports an error of a stream as its first event, behind a status of 200.
            if self._replaceable and not self._started and named in REFUSALS:
                raise EventRefusedError(named, self._head.fields, first.strip())
            self._success, status = False, named
        attempt.first_byte(status)  # an error's events are no tokens

    async def _break(self, error: UpstreamError) -> None:
        """It broke off: tell the client."""
        await self._caught_up()
        broke_off(self._attempt, self._record, error, self._stats)
        said = "stopped sending" if error.reason == "timeout" else "broke off"
        told = stream_broken(f"The engine {said} before its answer was complete.")
        event = error_event(told, self._attempt.request.path, self._events.passed_on)
        self._waits = self._answer.write(self._events.broken(*event), more=False)
        await self._caught_up()


# Of an answer that is not streamed; engines send these at once when they are complete.
_GATHERED_BYTES_MAX = 256 * 1024


class AnswerRelay(msgspec.Struct, eq=False):
    """One answer. Where ``run`` returns without having sent its end, the connection must be cut."""

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: ResponseSink
    _stats: ProxyStats
    _usage_bytes_max: int
    _replaceable: bool = False
    """Another engine may be asked while nothing has been sent."""
    _success: bool = False
    _wants_usage: bool = False

    def run(self, first: bytes | None = None) -> Awaitable[None] | None:
        """Pass everything on, what is left of it by what is to be awaited. Raises ``UpstreamError``,
        ``EventRefusedError`` and ``NotFetchedError`` where nothing has been sent. ``first``: its beginning,
        if that has been read."""
        connection, head, attempt = self._connection, self._head, self._attempt
        if first is None and (first := connection.read_nowait()) is None:
            return self._run_later()
        attempt.arrived()
        self._record.status = status = connection.status
        self._success = 200 <= status < 300
        if head.sse:
            return self._pass_events(first)
        request = attempt.request
        self._wants_usage = (
            self._success
            and not head.encoded
            and (
                request.path in PROMPT_APIS
                or (
                    request.method == "POST"
                    and not request.path.startswith(RESPONSES + "/")  # they repeat what was reported
                    and head.json
                )
            )
        )
        return self._pass_whole(first) if connection.at_eof else self._pass_body(first)

    async def _run_later(self) -> None:
        if (rest := self.run(await self._connection.read())) is not None:
            await rest

    def _pass_events(self, first: bytes) -> Awaitable[None]:
        events = SseRelay(self._attempt.request.path, replaceable=self._replaceable and self._success)
        stream = StreamRelay(
            self._connection,
            self._attempt,
            self._record,
            self._head,
            self._answer,
            self._stats,
            events,
            self._success,
            self._replaceable,
        )
        return stream.run(first)

    def _pass_whole(self, data: bytes) -> Awaitable[None] | None:
        """Pass a body that came in one piece on in one."""
        attempt, status, head = self._attempt, self._connection.status, self._head
        if self._replaceable:
            # Raises where another engine is to be asked instead of passing this whole body on.
            if attempt.handoff is not None:
                attempt.check_fetched()
            if self._wants_usage and aborted(attempt.request.path, data):
                raise UpstreamError("aborted")
        # An empty body is no sign that the engine generates.
        attempt.first_byte(status if data else 0)
        self._answer.start(status, head.fields, head.length)
        self._record.bytes_out += len(data)
        if (waits := self._answer.write(data, more=False)) is not None:
            return self._settle_later(waits, data)
        self._settle(data)
        return None

    async def _settle_later(self, waits: Awaitable[None], body: bytes) -> None:
        await waits
        self._settle(body)

    def _settle(self, body: bytes) -> None:
        """The answer ended, with this whole body."""
        attempt, usage = self._attempt, None
        if self._wants_usage and len(body) <= self._usage_bytes_max:
            try:
                usage = read_usage(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._stats.usage_unreadable += 1
            if attempt.handoff is not None or attempt.watched:
                usage = attempt.corrected(usage)
            self._record.usage = usage
        attempt.finished(usage)

    async def _pass_body(self, data: bytes) -> None:
        connection, attempt, record, answer = self._connection, self._attempt, self._record, self._answer
        if self._replaceable:
            if self._wants_usage and self._head.json:
                # Kept back until its end is known: vLLM writes an abort at the end of an answer with status
                # 200.
                data = await self._gathered(data)
            if connection.at_eof:
                if (waits := self._pass_whole(data)) is not None:
                    await waits
                return
            attempt.check_fetched()
        more = True
        if data:
            attempt.first_byte(connection.status)
        answer.start(connection.status, self._head.fields, self._head.length)
        wants_usage = self._wants_usage
        seen: list[bytes] = []
        seen_bytes = 0
        while True:
            if wants_usage:
                seen.append(data)
                seen_bytes += len(data)
                # Bounded: beyond it the answer is forwarded but not read.
                wants_usage = seen_bytes <= self._usage_bytes_max
            record.bytes_out += len(data)
            if (waits := answer.write(data, more=more)) is not None:
                await waits
            if not more:
                break
            try:
                data = await connection.read()
            except UpstreamError as error:
                broke_off(attempt, record, error, self._stats)
                return
            more = not connection.at_eof
        if wants_usage:
            self._settle(b"".join(seen))
        else:
            attempt.finished(None)

    async def _gathered(self, data: bytes) -> bytes:
        """This and what follows, whole unless it is long: its end tells whether it is to be passed on. Raises
        ``UpstreamError``."""
        pieces, size = [data], len(data)
        while not self._connection.at_eof and size < _GATHERED_BYTES_MAX:
            pieces.append(await self._connection.read())
            size += len(pieces[-1])
        return b"".join(pieces)
