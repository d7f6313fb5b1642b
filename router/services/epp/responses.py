"""Implement ``Carrier`` for gateway requests: the engine is named to the gateway and the body sent back; the
answer is what the gateway shows of it.

An answer that needs no decision is forwarded to the client before the proxy reads it. Not every answer is
shown: the stream of an unwatched request ends with the choice, and its placement estimates the end
(``Attempt.unseen``). Invariants: an engine is named once; a gateway that used another engine counts as a
refused attempt of the first one.

Invariants of reading: bytes are held until the proxy has taken them; their number is known, so that the
gateway can be throttled. Invariants of writing: a stream ends once and nothing is sent after that; a body is
sent in pieces smaller than the gateway's initial window.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.http.client_head import Header
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.http.listener import Capacity
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.request import Carried
from kvatlas.router.openai.response_ids import of_engine, with_id
from kvatlas.router.proxy.attempt import Answer, Attempt, Outbound
from kvatlas.router.proxy.headers import NAMES_ENGINE, REDIRECTS, read_answer_headers
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.context import PickerContext, Timer, Wakeup, request_changes
from kvatlas.router.services.epp.grpc import GrpcError, message_head
from kvatlas.router.services.epp.header_fields import SERVED_KEY, own_fields, status_of

# Beginnings of Envoy's local replies, which are no answer of an engine.
_GATEWAYS_OWN = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")


class GatewayAnswer:
    """Implement ``kvatlas.router.proxy.attempt.Answer``. ``taken``: no bytes are held; ``next_event`` waits
    for the next state change and raises ``UpstreamError`` if there will be none."""

    __slots__ = ("_next_event", "_pieces", "_taken", "complete", "headers", "held_bytes", "status")

    def __init__(
        self,
        status: int,
        headers: list[Header],
        *,
        taken: Callable[[], None],
        next_event: Callable[[], Awaitable[None]],
    ) -> None:
        self.status = status
        self.headers = headers
        self.complete = False
        """Whether the gateway has shown the whole answer."""
        self.held_bytes = 0
        self._pieces: list[bytes] = []
        self._taken = taken
        self._next_event = next_event

    def add(self, piece: bytes) -> None:
        """Append the next bytes of the body."""
        if piece:
            self._pieces.append(piece)
            self.held_bytes += len(piece)

    @property
    def at_eof(self) -> bool:
        return self.complete and not self._pieces

    def read_nowait(self) -> bytes | None:
        pieces = self._pieces
        if not pieces:
            return b"" if self.complete else None
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.held_bytes = 0
        self._taken()
        return data

    def next_event(self, step: Callable[[bytes], bool] | None = None) -> Awaitable[None]:
        """Implement ``Answer``: a task reads the gateway's stream, so ``step`` is not used."""
        return self._next_event()

    async def read(self) -> bytes:
        while (data := self.read_nowait()) is None:
            await self.next_event()
        return data

    def kept_alive(self) -> None:
        """Implement ``Answer``: gateways have time-outs of their own."""

    def lose(self, since_s: float) -> bool:
        """Implement ``Answer``: the gateway owns the connection, and sees its end itself."""
        return False

    async def check_origin(self) -> None:
        """Raise ``UpstreamError`` if the gateway answered for an engine that it could not reach."""
        if self.status not in (503, 504) or (b"content-type", b"text/plain") not in self.headers:
            return
        while not self._pieces and not self.complete:
            await self.next_event()
        if self._pieces and self._pieces[0].startswith(_GATEWAYS_OWN):
            raise UpstreamError("timeout" if self.status == 504 else "refused", sent=False)


# Answers of the picker itself, sent as the gateway's reply: errors, and paths that need no engine.
#
# Pure. For an error, a header of the Inference Extension carries the reason why the request was dropped.


_DROPPED = b"x-llm-d-request-dropped-reason"
_BY_STATUS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}
_BY_CODE = {b"queue_timeout": b"rejected-ttl-expired", b"too_many_bodies": b"rejected-saturated"}
_CODE = re.compile(rb'"code":\s*"(\w+)"')


def dropped_reason(status: int, body: bytes) -> bytes | None:
    """Return the Inference Extension's reason for a dropped request; None if the request was not dropped."""
    if status not in _BY_STATUS:
        return None
    code = _CODE.search(body)
    return _BY_CODE.get(code[1] if code else b"", _BY_STATUS[status])


def immediate_answer(status: int, fields: list[Header], body: bytes) -> bytes:
    """Encode this answer as an immediate response."""
    headers = own_fields(fields)
    reason = dropped_reason(status, body)
    if reason is not None:
        headers.append((_DROPPED, reason))
    return m.immediate(status, headers, body, f"kvatlas_{status}")


_PIECE_BYTES = 62_000


class ResponseWriter:
    """Writes responses to one stream. ``modes``: how the gateway sends bodies; ``over``: the stream has
    ended; ``shown``: the answer's head has been acknowledged."""

    __slots__ = ("_stream", "modes", "over", "shown")

    def __init__(self, stream: Stream) -> None:
        self.modes = m.Modes()
        self.over = False
        self.shown = False
        self._stream = stream

    @property
    def buffers(self) -> bool:
        """Whether the request's body comes and goes in one message."""
        return self.modes.request_body == m.BUFFERED

    @property
    def sends_body_back(self) -> bool:
        """Whether the answer's body is sent back (full duplex); otherwise it is only shown here."""
        return self.modes.response_body == m.FULL_DUPLEX

    def send(self, *pieces: bytes) -> None:
        """Send one message, in one piece or several."""
        stream = self._stream
        if not stream.headers_sent:
            stream.send_headers(grpc.HEAD)
        stream.send_data(message_head(sum(map(len, pieces))), *pieces)

    def resume(self, kind: m.Kind) -> None:
        """Acknowledge a message without changes."""
        self.send(m.unchanged(kind))

    def choose_buffered(self, headers: bytes, metadata: bytes, body: bytes | None) -> None:
        """Send the choice in the response to a buffered body; ``body`` replaces it."""
        common = m.common_response(headers=headers, body=body, clear_route_cache=True)
        self.send(m.answer("request_body", common=common, metadata=metadata))

    def choose(self, headers: bytes, metadata: bytes) -> None:
        """Send the choice in the response to the request's headers."""
        common = m.common_response(headers=headers, clear_route_cache=True)
        self.send(m.answer("request_headers", common=common, metadata=metadata))

    def send_headers(self, had: list[Header], fields: Iterable[Header]) -> None:
        """Respond to the answer's head, once: set missing fields, remove those that may name the engine."""
        if self.shown:
            return
        self.shown = True
        sets = [field for field in fields if field not in had]
        removes = [name for name, _ in had if name in NAMES_ENGINE]
        if not sets and not removes:
            self.resume("response_headers")
            return
        common = m.common_response(headers=m.header_mutation(sets, removes))
        self.send(m.answer("response_headers", common=common))

    def forward(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """Forward a piece of an answer's body unchanged."""
        if self.sends_body_back:
            self.send_body(kind, body, ends=ends)
        else:
            self.resume(kind)

    def send_body(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for at in range(0, last, _PIECE_BYTES):
            self._give(kind, body[at : at + _PIECE_BYTES], ends=False)
        if body or ends:
            self._give(kind, body[last:] if last else body, ends=ends)

    def _give(self, kind: m.Kind, piece: bytes, *, ends: bool) -> None:
        before, behind = m.around_piece(kind, len(piece), ends=ends)
        self.send(before, piece, behind)

    def finish(self, status: int = grpc.OK, text: str = "") -> None:
        """End the stream."""
        self.over = True
        if self._stream.headers_sent:
            self._stream.send_trailers(grpc.trailers(status, text))
        else:
            self._stream.send_headers(grpc.only_trailers(status, text), end=True)

    def reset(self, code: int) -> None:
        self.over = True
        self._stream.reset(code)


# The body of a gateway's request: collected as it arrives, counted while it is held.
#
# Held bytes count towards the router's body capacity until ``free``. The router receives every byte once, and
# the end once.


class RequestBody:
    """Body of a request. ``expected``: there is one; ``trailers``: it had trailers; ``latest``: the bytes
    last given to the router (the whole body if it came in one piece)."""

    __slots__ = ("_capacity", "_ended", "_held_bytes", "_pieces", "expected", "latest", "trailers", "whole")

    def __init__(self, capacity: Capacity) -> None:
        self.expected = True
        self.whole = False
        self.trailers = False
        self.latest = b""
        self._capacity = capacity
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._ended = False

    def reserve(self, size: int) -> bool:
        """Reserve capacity for received bytes; False if there is none."""
        if not self._capacity.reserve_body(size):
            return False
        self._held_bytes += size
        return True

    def add(self, piece: bytes, *, ends: bool) -> None:
        """Append the next bytes."""
        if piece:
            self._pieces.append(piece)
        self.whole = ends

    @property
    def readable(self) -> bool:
        """Whether there is something to take: bytes, or the end."""
        return bool(self._pieces) or (self.whole and not self._ended)

    def take(self) -> bytes:
        """Take the bytes received since the last call; with ``whole`` set, these are the rest of the body."""
        self._ended = self.whole
        pieces = self._pieces
        self.latest = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return self.latest

    def free(self) -> None:
        """Release the held bytes and their capacity."""
        self._pieces.clear()
        self.latest = b""
        self._capacity.release_body(self._held_bytes)
        self._held_bytes = 0


_HELD_BYTES_MAX = 256 * 1024
_ERRORS = 400


class GatewayCarrier:
    """Implement ``Carrier``. ``among``: the endpoints that the gateway allows; ``moved``: the endpoint that
    served instead of the chosen one; ``passes``: the answer is forwarded to the client as it arrives;
    ``broken``: it was cut before its end; ``trailers``: it had trailers."""

    __slots__ = (
        "_body",
        "_chosen",
        "_context",
        "_head",
        "_owed",
        "_own",
        "_request_id",
        "_stream",
        "_target",
        "_timed_out",
        "_timer",
        "_unseen",
        "_wakeup",
        "_writer",
        "among",
        "answer",
        "asked",
        "broken",
        "moved",
        "passes",
        "trailers",
    )

    def __init__(
        self,
        stream: Stream,
        context: PickerContext,
        *,
        writer: ResponseWriter,
        body: RequestBody,
        bell: Wakeup,
        timer: Timer,
    ) -> None:
        self.among: frozenset[str] | None = None
        self.asked = False
        self.answer: GatewayAnswer | None = None
        self.moved = ""
        self.passes = False
        self.broken = False
        self.trailers = False
        self._stream = stream
        self._context = context
        self._writer = writer
        self._body = body
        self._wakeup = bell
        self._timer = timer
        self._head: list[Header] = []
        self._target = b""
        # Answer bytes that the gateway may send once the previous ones are taken.
        self._owed = 0
        # The answer is forwarded without being shown here.
        self._unseen = False
        self._timed_out = False
        self._chosen = ""
        self._own: tuple[Header, ...] = ()  # fields for the client
        self._request_id = b""

    def begin(self, head: list[Header], target: bytes, among: frozenset[str] | None) -> None:
        """Begin with the request's head."""
        self._head, self._target, self.among = head, target, among

    @property
    def carried(self) -> Carried:
        """Return the capabilities of the gateway and of the engines behind it."""
        return "sidecar" if self._context.settings.sidecar else "gateway"

    def release(self) -> None:
        """Break the reference cycles after the request has ended."""
        self.answer = None

    # Messages from the gateway.

    def took(self, size: int) -> None:
        """Account for received answer bytes and let the gateway send more, unless the proxy lags behind."""
        self._owed += size
        if self.answer is None or self.answer.held_bytes < _HELD_BYTES_MAX:
            self._pay()

    def _pay(self) -> None:
        owed, self._owed = self._owed, 0
        self._stream.acknowledge_data(owed)

    def on_headers(self, message: m.ProcessingRequest) -> None:
        """Handle the head of the answer."""
        if not self.asked or self.answer is not None:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_headers out of turn")
        status, headers = status_of(message.headers)
        answer = GatewayAnswer(status, headers, taken=self._pay, next_event=self._changed)
        answer.complete = message.end_of_stream or self._writer.modes.response_body == m.NONE
        self.answer = answer
        served = m.endpoints(message.metadata, m.LB, SERVED_KEY)
        self.moved = served[0] if served and served[0] != self._chosen else ""
        # A refused request, or an answer from another engine, goes to the proxy, which may retry. A redirect
        # is answered here: it would reveal the engine's address.
        self.passes = status not in REDIRECTS and (
            not self._writer.sends_body_back or (status < _ERRORS and not self.moved)
        )
        self._timer.wait(self._context.proxy.first_byte_timeout_s)
        if self.passes:
            fields = read_answer_headers(headers, self._request_id, self._own).fields
            self._writer.send_headers(headers, fields)
            self._end_if_complete(answer)
        self._wakeup.set()

    def on_body(self, message: m.ProcessingRequest) -> None:
        """Handle a piece of the answer's body."""
        answer = self.answer
        if answer is None or answer.complete:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_body out of turn")
        answer.add(message.body)
        answer.complete = message.end_of_stream
        self._timer.wait(self._context.proxy.idle_timeout_s)
        if self.passes:
            self._writer.forward("response_body", message.body, ends=message.end_of_stream)
            self._end_if_complete(answer)
        self._wakeup.set()

    def on_trailers(self) -> None:
        """Handle the trailers, which end the answer."""
        if self.answer is None:
            return
        self.trailers = self.answer.complete = True
        if self.passes:
            self._writer.resume("response_trailers")
            self._end_if_complete(self.answer)
        self._wakeup.set()

    def _end_if_complete(self, answer: GatewayAnswer) -> None:
        """End the stream when the gateway needs nothing more; the proxy may still read buffered bytes."""
        if answer.complete:
            self._writer.finish()

    # ``Carrier``

    async def ask(self, attempt: Attempt, out: Outbound, timeout_s: float) -> GatewayAnswer | None:
        if self.answer is None:
            # the client has left, or has received the gateway's own reply
            if self._writer.over or self._writer.shown:
                raise UpstreamError("overflow", sent=False)
            self._send_request(attempt, out)
            if not attempt.watched and not self._context.watches(out.request.path):
                await self._forward_unobserved(attempt, out)
                return None
            self._timer.wait(timeout_s)
        while (answer := self.answer) is None:
            await self._changed()
        if self.moved == endpoint_of(attempt.base_url):
            self.moved = ""
        if self.moved:
            out.request.among, out.request.carried = frozenset({self.moved}), "gateway"
            self._context.stats.fallbacks_served += 1
            raise UpstreamError("refused", sent=False)
        try:
            await answer.check_origin()
        except UpstreamError:
            self.broken = True
            raise
        self.broken = answer.status in REDIRECTS
        return answer

    def done(self, answer: Answer) -> None:
        self.broken = self.broken or not answer.at_eof

    @property
    def may_retry(self) -> bool:
        """Implement ``Carrier``: False, since the gateway has already tried another engine, whose answer is
        there."""
        return bool(self.moved)

    def _send_request(self, attempt: Attempt, out: Outbound) -> None:
        self.asked = True
        context, writer, body = self._context, self._writer, self._body
        limits = out.entry.answer_headers() if out.entry is not None else ()
        self._own, self._request_id = (*attempt.client_headers, *limits), out.head.request_id
        self._chosen = endpoint_of(attempt.base_url)
        buffered = body.expected and writer.buffers
        sent = out.request.body if attempt.sent_body is None else attempt.sent_body
        if body.expected and out.request.response_id:
            sent = b"".join(with_id(sent, of_engine(out.request.response_id, attempt.engine_id)))
        changed = None if not buffered or sent is body.latest else sent
        length = None if changed is None or out.head.content_length is None else len(changed)
        # The id of a response names one engine.
        fallbacks = 0 if out.request.response_id else context.settings.fallbacks
        target = None if out.target == self._target else out.target
        headers, metadata = request_changes(
            self._head, out.head.fields, attempt, fallbacks, length=length, target=target
        )
        context.stats.picked("buffered" if buffered else "duplex")
        if buffered:
            writer.choose_buffered(headers, metadata, changed)
        else:
            writer.choose(headers, metadata)
            if body.expected:
                writer.send_body("request_body", sent, ends=not body.trailers)
        if body.trailers:
            writer.resume("request_trailers")

    # Answers that are not shown here.

    async def _forward_unobserved(self, attempt: Attempt, out: Outbound) -> None:
        """End the stream, so that the gateway does not show the answer, and wait until its estimated end."""
        context, self._unseen = self._context, True
        context.stats.unwatched += 1
        self._writer.finish()
        out.request.body = b""
        self._body.free()
        context.passing[self.end_unobserved] = None
        try:
            self._timer.wait(attempt.unseen(self.end_unobserved))
            while self._unseen and not self._timed_out:
                await self._wakeup.wait()
        finally:
            context.passing.pop(self.end_unobserved, None)

    def end_unobserved(self) -> None:
        """End the wait for an unobserved answer."""
        self._unseen = False
        self._wakeup.set()

    # Waiting.

    def fail_wait(self) -> None:
        """Fail the wait: the deadline has passed."""
        self._timed_out = True
        self._context.stats.ends_estimated += self._unseen
        self._wakeup.set()

    async def _changed(self) -> None:
        """Wait for the next change. Raises ``UpstreamError`` after the deadline."""
        if self._timed_out:
            self.broken = True
            raise UpstreamError("timeout")
        await self._wakeup.wait()
