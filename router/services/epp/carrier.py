"""Implement ``Carrier`` for gateway requests: the engine is named to the gateway and the body sent back; the
answer is what the gateway shows of it.

An answer that needs no decision is forwarded to the client before the proxy reads it. Not every answer is
shown: the stream of an unwatched request ends with the choice, and its placement estimates the end
(``Attempt.unseen``). Invariants: an engine is named once; a gateway that used another engine counts as a
refused attempt of the first one.
"""

from __future__ import annotations

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.http.client_head import Header
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.request import Carried
from kvatlas.router.openai.response_ids import of_engine, with_id
from kvatlas.router.proxy.attempt import Answer, Attempt
from kvatlas.router.proxy.carriers import Outbound
from kvatlas.router.proxy.headers import REDIRECTS, read_answer_headers
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.context import PickerContext
from kvatlas.router.services.epp.engine_fields import request_changes
from kvatlas.router.services.epp.gateway_answer import GatewayAnswer
from kvatlas.router.services.epp.grpc import GrpcError
from kvatlas.router.services.epp.header_fields import SERVED_KEY, status_of
from kvatlas.router.services.epp.metadata import endpoints
from kvatlas.router.services.epp.request_body import RequestBody
from kvatlas.router.services.epp.responses import ResponseWriter
from kvatlas.router.services.epp.waiting import Timer, Wakeup

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
        served = endpoints(message.metadata, m.LB, SERVED_KEY)
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
