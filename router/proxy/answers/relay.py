"""Passes one engine's answer on to the client as it comes, and reads of it what the accounts need.

Whole answers and event streams; neither is decoded but for the usage and a response's id. What always holds:
the head is sent with the first bytes of the body, so an engine that dies before them raises ``UpstreamError``
with nothing sent, and can be replaced; an answer that ends early is told to the client, by an error event or
by a cut connection.
"""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec

from router.http.client.connection import UpstreamError
from router.http.server.seam import Answering
from router.observe.requests import RequestRecord
from router.openai.apis import PROMPT_APIS, RESPONSES
from router.openai.errors import stream_broken
from router.openai.request import Usage
from router.openai.shapes import error_event
from router.proxy.answers.sse import SseRelay
from router.proxy.answers.usage import read_response_id, read_usage
from router.proxy.attempt import Attempt
from router.proxy.carrier import Answer
from router.proxy.headers import AnswerHead
from router.proxy.stats import ProxyStats


class AnswerRelay(msgspec.Struct, eq=False):
    """One answer. Where ``run`` returns without having sent its end, the connection must be cut."""

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: Answering
    _stats: ProxyStats
    _usage_bytes_max: int

    def run(self) -> Awaitable[None] | None:
        """Pass everything on, what is left of it by what is to be awaited. Raises ``UpstreamError`` where
        nothing has been sent."""
        first = self._connection.take()
        return self._pass_later() if first is None else self._pass_on(first)

    async def _pass_later(self) -> None:
        if (rest := self._pass_on(await self._connection.read())) is not None:
            await rest

    def _pass_on(self, first: bytes) -> Awaitable[None] | None:
        connection = self._connection
        self._record.status = connection.status
        if self._head.sse:
            return self._pass_events(first)
        return self._pass_whole(first) if connection.finished else self._pass_body(first)

    def _pass_whole(self, data: bytes) -> Awaitable[None] | None:
        """What came in one piece goes in one."""
        self._attempt.first_byte(self._connection.status if data else 0)
        self._start()
        self._record.bytes_out += len(data)
        if (waits := self._answer.piece(data, more=False)) is not None:
            return self._settle_later(waits, data)
        self._settle(data)
        return None

    async def _settle_later(self, waits: Awaitable[None], body: bytes) -> None:
        await waits
        self._settle(body)

    def _settle(self, body: bytes) -> None:
        """The answer ended, with this whole body."""
        usage = None
        if len(body) <= self._usage_bytes_max and self._wants_usage:
            if self._attempt.request.path == RESPONSES:
                self._attempt.made_response(read_response_id(body))
            usage = self._record.usage = self._usage_of(body)
        self._attempt.finished(usage)

    @property
    def _wants_usage(self) -> bool:
        return self._attempt.request.path in PROMPT_APIS and self._success and not self._head.encoded

    @property
    def _success(self) -> bool:
        return 200 <= self._connection.status < 300

    def _start(self) -> None:
        head = self._head
        self._answer.begin(self._connection.status, head.fields, head.length)

    async def _pass_body(self, data: bytes) -> None:
        connection, attempt, record, answer = self._connection, self._attempt, self._record, self._answer
        more = True
        if data:
            attempt.first_byte(connection.status)
        self._start()
        wants_usage = self._wants_usage
        seen: list[bytes] = []
        seen_bytes = 0
        while True:
            if wants_usage:
                seen.append(data)
                seen_bytes += len(data)
                wants_usage = seen_bytes <= self._usage_bytes_max
            record.bytes_out += len(data)
            if (waits := answer.piece(data, more=more)) is not None:
                await waits
            if not more:
                break
            try:
                data = await connection.read()
            except UpstreamError as error:
                self._broke_off(error)
                return
            more = not connection.finished
        if wants_usage:
            self._settle(b"".join(seen))
        else:
            attempt.finished(None)

    def _usage_of(self, body: bytes) -> Usage | None:
        try:
            return read_usage(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._stats.usage_unread += 1
            return None

    async def _pass_events(self, data: bytes) -> None:
        connection, attempt, record, answer = self._connection, self._attempt, self._record, self._answer
        events = SseRelay(seeks_id=attempt.request.path == RESPONSES)
        begun = started = False
        success = self._success
        while True:
            out = events.feed(data) if data else events.end()
            more = not connection.finished
            if not more:
                out += events.end()
            if not begun and events.begun:
                begun = True
                attempt.first_byte(connection.status)  # an error's events are no tokens
                attempt.made_response(events.response_id)
            if begun and success:
                record.piece()
            record.bytes_out += len(out)
            if not started and (out or not more):
                started = True
                self._start()
            if (out or not more) and (waits := answer.piece(out, more=more)) is not None:
                await waits
            if not more:
                break
            try:
                while (got := connection.take()) is None:  # ``read``, without a coroutine per piece
                    await connection.changed()
                data = got
            except UpstreamError as error:
                if not started:
                    raise
                if not events.done:
                    await self._break_stream(events, error)
                    return
                await self._last(events.end())
                break
        self._stats.usage_unread += events.unread_usages
        record.usage = events.usage
        attempt.finished(events.usage)

    def _broke_off(self, error: UpstreamError) -> None:
        """The answer ended before its end, and the client has had a part of it."""
        self._stats.streams_broken += 1
        engine_failed(self._attempt, error, self._stats)
        engine_id = self._attempt.engine_id
        self._record.broken = True
        self._record.tracker.warn(
            "answer broke off", self._record, engine_id, engine=engine_id, problem=error.reason
        )

    async def _break_stream(self, events: SseRelay, error: UpstreamError) -> None:
        self._broke_off(error)
        said = "stopped sending" if error.reason == "timeout" else "broke off"
        error_told = stream_broken(f"The engine {said} before its answer was complete.")
        event = error_event(error_told, self._attempt.request.path, events.passed_on)
        await self._last(events.broken(*event))

    async def _last(self, data: bytes) -> None:
        if (waits := self._answer.piece(data, more=False)) is not None:
            await waits


def engine_failed(attempt: Attempt, error: UpstreamError, stats: ProxyStats) -> None:
    """Tell the attempt that its connection failed, and count that if it ended it."""
    if attempt.broke(error.reason):
        stats.count_failure("refused" if error.reason == "overflow" else error.reason)
