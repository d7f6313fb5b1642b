"""Passes one engine's answer on to the client as it comes, and reads of it what the accounts need.

Whole answers and event streams; neither is decoded but for what ``answers`` and ``events`` name. Invariants:
the head is sent with the first bytes of the body, so an engine that dies before them raises ``UpstreamError``
with nothing sent, and can be replaced; of a stream also after comments, until its first token or an opening
that must not wait; an answer that ends early, or with an error, is counted so, and told to the client by an
error event or by a cut connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from kvatlas.router.http.client_head import Header
from kvatlas.router.http.request_cycle import ClientRequest
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.observe.requests import RequestRecord
from kvatlas.router.openai.apis import PROMPT_APIS, RESPONSES
from kvatlas.router.openai.error_bodies import error_event
from kvatlas.router.openai.errors import stream_broken
from kvatlas.router.openai.response_ids import of_engine
from kvatlas.router.pd.handoff import NotFetchedError
from kvatlas.router.proxy.answers import SseRelay
from kvatlas.router.proxy.attempt import Answer, Attempt, Had
from kvatlas.router.proxy.comments import Comments
from kvatlas.router.proxy.continuation import ContinuedStream
from kvatlas.router.proxy.continuation_plan import ContinuationPlan
from kvatlas.router.proxy.events import Kind, aborted
from kvatlas.router.proxy.failures import REFUSALS, EventRefusedError, broke_off, client_told, stream_failed
from kvatlas.router.proxy.headers import SERVER_TIMING, AnswerHead
from kvatlas.router.proxy.kept_stream import KeptStream
from kvatlas.router.proxy.parsed_stream import ParsedStream
from kvatlas.router.proxy.settings import ProxyStats
from kvatlas.router.proxy.usage_reports import read_usage


class StreamRelay(msgspec.Struct, eq=False):
    """One stream. Where ``run`` returns without having sent its end, the connection must be cut.

    A piece is passed on by the engine's connection, which brings it; the request's task runs only where the
    client is too slow, and at the end.
    """

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: ClientRequest
    _stats: ProxyStats
    _events: SseRelay
    _success: bool
    """The engine's status says so, and its first event is no error."""
    _replaceable: bool = False
    """Another engine may be asked while nothing of an answer has been sent."""
    had: Had = Had.NOTHING
    kept: KeptStream | None = None
    """The state with which it may go on from another engine."""
    _goes_on: ContinuedStream | None = None
    """The stream of another engine that it goes on with."""
    broke: bool = False
    """It broke off, and may go on: the client has not been told."""
    hand_over: Callable[[], Awaitable[bool]] | None = None
    """Set where another engine is to take it over at the next event: has one do that, until its end. Returns
    whether one did."""
    _more: bool = True
    _waits: Awaitable[None] | None = None
    """To be awaited before the next piece."""
    _slow: bool = False
    """That is being awaited."""

    async def run_with_comments(self, first: bytes | None, silence_s: float) -> None:
        """``run``, with a comment to the client before nothing has been sent for this long."""
        comments = Comments(silence_s / 2, self._record, self._comment)
        try:
            await self.run(first)
        finally:
            comments.cancel()

    def _comment(self) -> Awaitable[None] | None:
        """Send a comment, where it stands between two events and the client reads."""
        between = self.had is Had.NOTHING or self._events.passed_on.endswith((b"\n\n", b"\n\r\n"))
        if not (between and self._success and self._more) or self._slow or self._waits is not None:
            return None
        self._send(_COMMENT)
        waits, self._waits = self._waits, None
        return waits

    async def run(self, first: bytes | None) -> None:
        """Pass everything on; ``first``: what has come of it. Raises ``UpstreamError`` and
        ``EventRefusedError`` where nothing of an answer has been sent, ``NotFetchedError`` where its first
        token must not be: the client has been told if it has had an opening."""
        events = self._events
        try:
            self._pass_on(await self._connection.read() if first is None else first)
            while self._more:
                if self._waits is not None:
                    await self._caught_up()
                    self._check_parsed()
                if self.hand_over is not None and not self._connection.complete and await self._left():
                    return
                if self._go_on():
                    # The connection gives each piece to ``_take``, so that a chunk costs no task switch.
                    await self._connection.next_event(self._take)
            if self._goes_on is not None:
                await self._caught_up()
                self._check_parsed()
        except UpstreamError as error:
            if self.had < Had.ANSWER:
                raise
            state = self.state
            if not events.done or (state is not None and state.failed):
                await self._break(error)
                return
            self._waits = self._answer.write(events.end(), more=False)
        except NotFetchedError:
            if self.had is Had.ANSWER:
                events.take_back()
                client_told(self._attempt, self._record, "late answer", self._stats)
                await self._tell("computed its answer too late")
            raise
        await self._caught_up()
        self._stats.usage_unreadable += events.unread_usages
        usage = self._attempt.corrected(events.usage)
        if self._goes_on is not None:
            recomputed = self._attempt.work.computed(usage)
            self._record.recomputed_tokens += recomputed
            self._stats.recomputed_tokens += recomputed
            usage = self._goes_on.usage
        self._record.usage = usage
        self._attempt.finished(events.usage)

    async def _left(self) -> bool:
        """Whether another engine has taken the stream over, and it has ended."""
        hand_over, self.hand_over = self.hand_over, None
        self._slow = True
        taken = hand_over is not None and await hand_over()
        self._slow = False
        return taken

    @property
    def state(self) -> KeptStream | None:
        """The state with which it may go on from another engine."""
        return self.kept if self._goes_on is None else self._goes_on.kept

    async def _caught_up(self) -> None:
        waits, self._waits = self._waits, None
        if waits is not None:
            self._slow = True
            await waits
            self._slow = False

    async def _parse(self, stream: ParsedStream) -> None:
        """Have its engine make events of what came, and send them."""
        while stream.due and not stream.kept.failed:
            out = await stream.parsed()
            more = self._more or stream.due or bool(stream.kept.failed)
            if (waits := self._answer.write(out, more=more)) is not None:
                await waits

    def _check_parsed(self) -> None:
        """Raise ``UpstreamError`` where its engine could not make events of what came."""
        if self._goes_on is not None and self._goes_on.kept.failed:
            raise UpstreamError("broken_stream")

    def _go_on(self) -> bool:
        """Pass on what has come. Whether to wait for more of it. Raises ``UpstreamError``."""
        while (data := self._connection.read_nowait()) is not None:
            self._pass_on(data)
            if not self._more or self._waits is not None:
                return False
        return True

    def _take(self, data: bytes) -> bool:
        """Pass on what came. Whether this takes what comes next. Raises ``UpstreamError``."""
        if self.kept is not None:
            if (whole := self._without_ids(self.kept, data)) is None:
                return True
            data = whole
        if not data or not self._success or self._goes_on is not None or not self._events.passes(data):
            self._pass_events(data, complete=self._connection.complete)
            return self._more and self._waits is None and self.hand_over is None
        record = self._record
        record.piece()
        record.streamed_tokens += 1
        record.bytes_out += len(data)
        self._attempt.streamed(1)
        self._waits = self._answer.write(data, more=True)
        return self._waits is None and self.hand_over is None

    def _pass_on(self, data: bytes) -> None:
        """Pass a piece on as it came. Raises ``UpstreamError``."""
        kept = self.kept
        whole = data if kept is None else self._without_ids(kept, data)
        if whole is not None:
            self._pass_events(whole, complete=self._connection.complete)

    def _without_ids(self, kept: KeptStream, data: bytes) -> bytes | None:
        """The part of a piece that is to be passed on, without ids, which are kept; None: nothing yet. Raises
        ``UpstreamError`` where it is an error in place of an answer's end."""
        ends = self._connection.complete or not data
        whole = kept.feed(data) if data else b""
        if ends:
            whole += kept.rest()
        if kept.failed:
            if whole:
                self._pass_events(whole, complete=False)
            raise UpstreamError("broken_stream")
        return whole if whole or ends else None

    def _pass_events(self, data: bytes, *, complete: bool) -> None:
        """Pass on what came of its events; ``complete``: it is the last of them."""
        events = self._events
        begun, passing = events.begun, events.passing
        if data:
            out = events.feed(data)
        else:
            # The end came in a piece of its own: the tokens of the one before are counted.
            events.count, out = 0, events.end()
        if complete:
            self._more = False
            out += events.end()
        if not begun and events.passing:
            self._begin()
            named = self._attempt.request.response_id and not passing
            if named and self._success and not events.failed:
                tell_named(self._attempt, out)
        if events.aborted or events.failed or events.given_up:
            self._failed(out)
        if events.waits:
            events.waits = False
            self._connection.kept_alive()
        if events.begun and self._success:
            self._count()
        # Nothing is sent before a whole event has come, so that an engine that dies first can be replaced.
        if out or not self._more:
            self._send(out)

    def _send(self, out: bytes) -> None:
        self._record.bytes_out += len(out)
        if self.had is Had.NOTHING:
            fields, length = self._head.fields, self._head.length
            if length and (self._more or self._attempt.request.hides_usage or self.kept is not None):
                # Events may be added to it, or left out.
                fields, length = [field for field in fields if field[0] != b"content-length"], b""
            if self._attempt.client_headers:
                fields = measured(self._attempt, self._record, fields)
            self._answer.start(self._connection.status, fields, length)
        self.had = Had.ANSWER if self._events.passing else Had.COMMENTS
        if self._goes_on is not None:
            out = self._goes_on.feed(out)
            self._more = self._more and not self._goes_on.done
            if isinstance(self._goes_on, ParsedStream) and self._goes_on.due:
                self._waits = self._parse(self._goes_on)
                return
        self._waits = self._answer.write(out, more=self._more)

    def _begin(self) -> None:
        """The first event came that is passed on: an opening that is not held, a token, an error."""
        attempt, events, status = self._attempt, self._events, self._connection.status
        if events.exposed:
            attempt.arrived(self._connection)
        if not events.begun or events.aborted:
            return
        if self._replaceable:
            refused = events.said.status and (self._goes_on is not None or events.said.status in REFUSALS)
            if self.had < Had.ANSWER and self._success and refused:
                # vLLM reports an error of a stream as its first event, behind a status of 200.
                raise EventRefusedError(events.said.status, self._head.fields, events.error.strip())
            attempt.check_fetched()
        if self._goes_on is not None:
            self._goes_on.taken()
        attempt.arrived(self._connection)
        if self._success and events.said.status:
            # An error's events are no tokens. Without an opening it is the whole answer, and nothing broke.
            status, self._success = events.said.status, self.had is Had.ANSWER
        # A stream that ends without one is no sign that the engine generates.
        attempt.first_byte(status if events.said.kind is not Kind.OPENING else 0)

    def _count(self) -> None:
        """Note the tokens of a piece that is passed on."""
        self._record.piece()
        self._record.streamed_tokens += self._events.count
        self._attempt.streamed(self._events.count)

    def _failed(self, out: bytes) -> None:
        """The engine says that it gave up, or that its answer failed. Raises ``UpstreamError`` where it gave
        up behind ``out``, which is not needed if another engine answers; an error is passed on as it is."""
        if not self._success:
            return
        events, goes_on = self._events, self._goes_on
        error = UpstreamError("aborted" if events.aborted else "broken_stream")
        again = goes_on is not None and self.had is Had.ANSWER and not goes_on.kept.check()
        if not events.aborted and not again:
            if events.count:
                self._count()
            self._success = False
            broke_off(self._attempt, self._record, events.failed or error, self._stats)
        else:
            # What came before the abort is the client's; unsent, it is dropped for the other engine's answer.
            if out and self.had is Had.ANSWER:
                self._more = True
                self._count()
                self._send(out)
            raise error

    async def _break(self, error: UpstreamError) -> None:
        """It broke off: tell the client, unless another engine may go on with it."""
        kept, record = self.state, self._record
        told = stream_failed(self._attempt, error if kept is None else kept.failed or error, self._stats)
        if kept is not None:
            if kept.complete:
                # Nothing but the end mark is missing.
                rest = b""
                if self._goes_on is None:
                    self._stats.count_continuation("closed")
                    rest = self._events.end()
                record.usage = kept.usage()
                await self._caught_up()
                self._waits = self._answer.write(rest + kept.closing(), more=False)
                await self._caught_up()
                return
            if not (why := kept.check()):
                record.tracker.warn("stream broke", record, record.engine, engine=record.engine, problem=told)
                self.broke = True
                # An engine that is stopped says nothing against the request.
                kept.aborts += error.reason == "aborted"
                kept.broken = kept.broken or error.reason != "aborted"
                await self._caught_up()
                return
            self._stats.count_continuation("", refused=why)
        client_told(self._attempt, record, told, self._stats)
        said = "stopped sending" if error.reason == "timeout" else "broke off"
        await self._tell(f"{said} before its answer was complete")

    async def _tell(self, what: str) -> None:
        """End the stream with an event that is an error."""
        await self._caught_up()
        told = stream_broken(f"The engine {what}.")
        event = error_event(told, self._attempt.request.path, self._events.passed_on)
        self.had = Had.END
        # What came of another event of a stream that goes on is not in its shape.
        data = self._events.broken(*event) if self._goes_on is None else b"data: %b\n\n" % event[0]
        self._waits = self._answer.write(data, more=False)
        await self._caught_up()


# Of no field: a client skips it (WHATWG HTML, section 9.2.6).
_COMMENT = b": keep-alive\n\n"


def measured(attempt: Attempt, record: RequestRecord, fields: list[Header]) -> list[Header]:
    """The fields, with what was measured until here, beside what the decision says."""
    if record.asked_s is None:
        return fields
    now = attempt.now()
    parts = {
        "router": record.overhead_s,
        "wait": record.waited_s,
        "engine": now - record.asked_s,
        "total": now - record.read_s,
    }
    text = ", ".join(f"{name};dur={1000 * max(0.0, seconds):.1f}" for name, seconds in parts.items())
    return [*fields, (SERVER_TIMING, text.encode())]


def tell_named(attempt: Attempt, begin: bytes) -> None:
    """Tell the attempt whether its answer of success, which begins so, has the id that was chosen for it."""
    chosen = of_engine(attempt.request.response_id, attempt.engine_id)
    attempt.named(obeyed=chosen.encode() in begin)


# Of an answer that is not streamed; engines send these at once when they are complete.
_GATHERED_BYTES_MAX = 256 * 1024


class AnswerRelay(msgspec.Struct, eq=False):
    """One answer. Where ``run`` returns without having sent its end, the connection must be cut."""

    _connection: Answer
    _attempt: Attempt
    _record: RequestRecord
    _head: AnswerHead
    _answer: ClientRequest
    _stats: ProxyStats
    _usage_bytes_max: int
    _replaceable: bool = False
    """Another engine may be asked while nothing of an answer has been sent."""
    _had: Had = Had.NOTHING
    _success: bool = False
    _wants_usage: bool = False
    _seen_end: bool = False
    """Its end has been looked at: the engine did not give it up."""
    _silence_s: float = 0.0
    """A client of a stream gets a comment before it has had nothing for this long; 0: none."""
    _plan: ContinuationPlan | None = None
    """How a stream may go on from another engine."""
    _goes_on: ContinuedStream | None = None
    """The stream that this one goes on with."""
    stream: StreamRelay | None = None
    """Set where the answer is an event stream."""

    def run(self, first: bytes | None = None) -> Awaitable[None] | None:
        """Pass everything on, what is left of it by what is to be awaited. Raises ``UpstreamError``,
        ``EventRefusedError`` and ``NotFetchedError`` where nothing has been sent. ``first``: its beginning,
        if that has been read."""
        connection, head, attempt = self._connection, self._head, self._attempt
        streams = head.sse and not head.encoded
        # A client that is to have comments has them from now on.
        watched = streams and self._silence_s
        if first is None and (first := connection.read_nowait()) is None and not watched:
            return self._run_later()
        self._record.status = status = connection.status
        self._success = 200 <= status < 300
        if streams or first is None:
            return self._pass_events(first)
        attempt.arrived(connection)
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

    def _pass_events(self, first: bytes | None) -> Awaitable[None]:
        request = self._attempt.request
        events = SseRelay(
            request.path,
            replaceable=self._replaceable and self._success,
            hides_usage=request.hides_usage,
        )
        attempt, kept = self._attempt, None
        if self._plan is not None:
            kept = attempt.kept = KeptStream(self._plan, attempt.usage_facts().tokens)
        elif self._goes_on is not None:
            attempt.kept, attempt.tokens_before = self._goes_on.kept, self._goes_on.before
        self.stream = StreamRelay(
            self._connection,
            self._attempt,
            self._record,
            self._head,
            self._answer,
            self._stats,
            events,
            self._success,
            self._replaceable,
            self._had,
            kept,
            self._goes_on,
        )
        if self._silence_s:
            return self.stream.run_with_comments(first, self._silence_s)
        return self.stream.run(first)

    def _pass_whole(self, data: bytes) -> Awaitable[None] | None:
        """Pass a body that came in one piece on in one."""
        attempt, status, head = self._attempt, self._connection.status, self._head
        if self._replaceable:
            # Raises where another engine is to be asked instead of passing this whole body on.
            if attempt.handoff is not None:
                attempt.check_fetched()
            if self._wants_usage and aborted(attempt.request.path, data):
                raise UpstreamError("aborted")
            self._seen_end = True
        # An empty body is no sign that the engine generates.
        attempt.first_byte(status if data else 0)
        fields = measured(attempt, self._record, head.fields) if attempt.client_headers else head.fields
        self._answer.start(status, fields, head.length)
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
            if not self._seen_end and aborted(attempt.request.path, body):
                # It was too long to be kept back, or a gateway's.
                broke_off(attempt, self._record, UpstreamError("aborted"), self._stats)
            if attempt.request.response_id:
                tell_named(attempt, body)
            try:
                usage = read_usage(body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._stats.usage_unreadable += 1
            self._record.usage = usage = attempt.corrected(usage)
        attempt.finished(usage)

    async def _pass_body(self, data: bytes) -> None:
        connection, attempt, record, answer = self._connection, self._attempt, self._record, self._answer
        if self._replaceable:
            if attempt.handoff is not None or (self._wants_usage and self._head.json):
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
        head = self._head
        fields = measured(attempt, record, head.fields) if attempt.client_headers else head.fields
        answer.start(connection.status, fields, head.length)
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

    async def _gathered(self, data: bytes) -> bytes:
        """This and what follows, whole unless it is long: its end tells whether it is to be passed on. Raises
        ``UpstreamError``."""
        pieces, size = [data], len(data)
        while not self._connection.at_eof and size < _GATHERED_BYTES_MAX:
            pieces.append(await self._connection.read())
            size += len(pieces[-1])
        return b"".join(pieces)
