"""Passes one engine's event stream on, piece by piece.

A piece is passed on by whoever brings it, the engine's connection; the request's task runs only where the
client is too slow, and at the end. What always holds: the head is sent with the first whole line; a stream
that breaks off before its end mark, or that the engine gives up, ends with an error event.
"""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from router.http.client.connection import UpstreamError
from router.http.server.seam import Answering
from router.observe.requests import RequestRecord
from router.openai.errors import stream_broken
from router.openai.shapes import error_event
from router.proxy.answers.endings import error_status
from router.proxy.answers.failures import REFUSALS, EventRefusedError, broke_off
from router.proxy.answers.sse import SseRelay
from router.proxy.attempt import Attempt
from router.proxy.carrier import Answer
from router.proxy.headers import AnswerHead
from router.proxy.stats import ProxyStats


class StreamRelay(msgspec.Struct, eq=False):
    """One stream. Where ``run`` returns without having sent its end, the connection must be cut."""

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: Answering
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
                    await self._connection.changed(self._take)
        except UpstreamError as error:
            if not self._started:
                raise
            if not events.done:
                await self._break(error)
                return
            self._waits = self._answer.piece(events.end(), more=False)
        await self._caught_up()
        self._stats.usage_unread += events.unread_usages
        self._record.usage = self._attempt.corrected(events.usage)
        self._attempt.finished(events.usage)

    async def _caught_up(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            await waits

    def _go_on(self) -> bool:
        """Pass on what has come. Whether to wait for more of it. Raises ``UpstreamError``."""
        while (data := self._connection.take()) is not None:
            self._pass_on(data)
            if not self._more or self._waits is not None:
                return False
        return True

    def _take(self) -> bool:
        """Pass on the next thing that came, all of which is there at once. Whether this may be called for the
        one after it. Raises ``UpstreamError``."""
        data = self._connection.take()
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
            self._attempt.streamed(data.count(b"\n\n"))
        if not out and self._more:
            return
        record.bytes_out += len(out)
        if not self._started:
            self._started = True
            self._answer.begin(self._connection.status, self._head.fields, self._head.length)
        self._waits = self._answer.piece(out, more=self._more)

    def _give_up(self, out: bytes) -> None:
        """The engine gave up behind ``out``, which nobody needs who can have another answer."""
        if self._started and out:
            self._record.bytes_out += len(out)
            self._waits = self._answer.piece(out, more=True)
        raise UpstreamError("aborted")

    def _begin(self, first: bytes) -> None:
        """The first event that is no opening came."""
        attempt, status = self._attempt, self._connection.status
        self._begun = True
        if self._replaceable and not self._started:
            attempt.check_fetched()
        if self._success and (named := error_status(first)):
            if self._replaceable and not self._started and named in REFUSALS:
                raise EventRefusedError(named, self._head.fields, first.strip())
            self._success, status = False, named
        attempt.first_byte(status)  # an error's events are no tokens
        attempt.made_response(self._events.response_id)

    async def _break(self, error: UpstreamError) -> None:
        """It broke off: tell the client."""
        await self._caught_up()
        broke_off(self._attempt, self._record, error, self._stats)
        said = "stopped sending" if error.reason == "timeout" else "broke off"
        told = stream_broken(f"The engine {said} before its answer was complete.")
        event = error_event(told, self._attempt.request.path, self._events.passed_on)
        self._waits = self._answer.piece(self._events.broken(*event), more=False)
        await self._caught_up()
