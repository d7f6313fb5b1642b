"""Serve one request of a gateway: an ext_proc stream that the router sees as a client's request.

It is an ASGI connection: the head and body from the gateway are the request, and the router's response goes
to the gateway. Its ``GatewayCarrier`` reaches the engine. So keys, prompts, placement, accounts, receipts and
metrics use the same code as other requests.

Invariants: a stream is answered, or ended with a gRPC error, exactly once; a gateway that misses a deadline
ends it; held body bytes are counted.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import structlog

from kvatlas.router.http.h2_codec import CANCEL, INTERNAL_ERROR
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.http.request_cycle import DISCONNECT_EXTENSION, Message
from kvatlas.router.openai.errors import ApiError, internal_error, request_timeout, too_many_bodies
from kvatlas.router.proxy.app import CARRIER
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.context import PickerContext, Timer, Wakeup
from kvatlas.router.services.epp.grpc import GrpcError, GrpcReader
from kvatlas.router.services.epp.header_fields import SUBSET_KEY, scope_of
from kvatlas.router.services.epp.messages import ProtobufError
from kvatlas.router.services.epp.responses import (
    GatewayAnswer,
    GatewayCarrier,
    RequestBody,
    ResponseWriter,
    immediate_answer,
)

_log = structlog.get_logger()
_QUEUED_BYTES_MAX = 256 * 1024
_DISCONNECT: Message = {"type": "http.disconnect"}


class GatewayExchange:
    """One gateway request. Used from the event loop only."""

    __slots__ = (
        "_body",
        "_carrier",
        "_context",
        "_gateways_own",
        "_gone",
        "_left_hook",
        "_own",
        "_reader",
        "_said_head",
        "_start",
        "_stream",
        "_task",
        "_timer",
        "_wakeup",
        "_writer",
    )

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(context.message_bytes_max)
        self._writer = ResponseWriter(stream)
        self._body = RequestBody(context.capacity)
        self._wakeup = Wakeup()
        self._timer = Timer(context.sweeper, context.clock, self._time_over)
        self._carrier = GatewayCarrier(
            stream, context, writer=self._writer, body=self._body, bell=self._wakeup, timer=self._timer
        )
        # The request's head has been received.
        self._said_head = False
        self._start: Message | None = None
        # Body of an answer of the router's own.
        self._own: list[bytes] = []
        # The gateway answered by itself before an engine was named.
        self._gateways_own = False
        self._gone = False
        self._left_hook: Any = None
        self._task: asyncio.Task[None] | None = None
        self._timer.wait(context.settings.request_timeout_s)

    # Stream side.

    def on_data(self, data: bytes) -> None:
        if self._writer.over:
            self._stream.acknowledge_data(len(data))
            return
        try:
            if not self._take(len(data)):
                return
            for message in self._reader.feed(data):
                self._on_message(m.read_request(message))
                if self._writer.over:
                    return
        except ProtobufError as error:
            self._refuse(grpc.INVALID_ARGUMENT, "malformed", str(error))
        except GrpcError as error:
            reason = "mode" if error.status == grpc.FAILED_PRECONDITION else "malformed"
            self._refuse(error.status, reason, str(error))
        except ApiError as error:
            self._answer_error(error)

    def on_end(self) -> None:
        """Implement ``StreamHandler``: the gateway has ended its side."""
        self.on_lost()

    def on_lost(self) -> None:
        if self._writer.over:
            return
        self._context.stats.cut_before_answer += self._carrier.asked and self._carrier.answer is None
        if not self._stream.closed:
            self._finish()
        self._handle_end()

    def _handle_end(self) -> None:
        self._writer.over = True
        if self._gone:
            return
        self._disconnect()

    def _disconnect(self) -> None:
        """Report a disconnected client to the router."""
        self._gone = True
        if self._task is None:
            self._free()
        self._wakeup.set()
        if self._left_hook is not None:
            self._left_hook()

    def _time_over(self) -> None:
        # an ended stream may mean a silent engine or a client that does not read: the two look alike
        if self._writer.shown:
            self._stream.reset(CANCEL)
            self.on_lost()
        elif self._carrier.asked:
            self._carrier.fail_wait()
        elif not self._said_head:
            self._refuse(grpc.INVALID_ARGUMENT, "timeout", "no request headers in time")
        else:
            self._answer_error(request_timeout("The request did not arrive in time."))

    def _take(self, size: int) -> bool:
        """Open the flow-control window: for a request if there is capacity, for an answer by the carrier."""
        if self._carrier.answer is not None:
            self._carrier.took(size)
            return True
        self._stream.acknowledge_data(size)
        if self._gateways_own:
            return True
        if self._body.reserve(size):
            return True
        self._answer_error(too_many_bodies())
        return False

    # Messages from the gateway.

    def _on_message(self, message: m.ProcessingRequest) -> None:
        kind = message.kind
        if kind == "request_headers":
            self._on_request(message)
        elif not self._said_head:
            raise GrpcError(grpc.INVALID_ARGUMENT, f"{kind} before request_headers")
        elif self._gateways_own and kind in {"request_body", "request_trailers"}:
            # The router no longer reads the request.
            pass
        elif kind == "request_body":
            self._on_request_body(message)
        elif kind == "request_trailers":
            self._body.trailers = self._body.whole = True
            self._wakeup.set()
        elif self._gateways_own or (kind == "response_headers" and not self._carrier.asked):
            self._pass_gateways_own(message)
        elif kind == "response_headers":
            self._carrier.on_headers(message)
        elif kind == "response_body":
            self._carrier.on_body(message)
        elif kind == "response_trailers":
            self._carrier.on_trailers()

    def _pass_gateways_own(self, message: m.ProcessingRequest) -> None:
        """Forward a reply that the gateway made before an engine was named: 413 for a body too large to be
        buffered, 504 for its stream_idle_timeout."""
        writer, kind, ends = self._writer, message.kind, message.end_of_stream
        self._timer.wait(self._context.settings.request_timeout_s)
        if not self._gateways_own:
            self._gateways_own = True
            self._context.stats.gateways_own += 1
            writer.send_headers([], ())
            ends = ends or writer.modes.response_body == m.NONE
            self._disconnect()
        elif kind == "response_body":
            writer.forward(kind, message.body, ends=ends)
        elif kind == "response_trailers":
            writer.resume(kind)
            ends = True
        if ends:
            self._finish()

    def _on_request(self, message: m.ProcessingRequest) -> None:
        if self._said_head:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_headers came twice")
        self._said_head = True
        body, writer = self._body, self._writer
        writer.modes = message.modes or writer.modes
        body.expected, body.whole = not message.end_of_stream, message.end_of_stream
        if problem := m.mode_problem(message, writer.modes):
            raise GrpcError(grpc.FAILED_PRECONDITION, problem)
        subset = m.endpoints(message.metadata, m.SUBSET, SUBSET_KEY)
        scope = scope_of(message.headers, self._context.header_bytes_max)
        path, query = scope["raw_path"], scope["query_string"]
        target = b"%b?%b" % (path, query) if query else path
        self._carrier.begin(scope["headers"], target, None if subset is None else frozenset(subset))
        if body.expected and writer.buffers:
            writer.resume("request_headers")
        scope["extensions"] = {DISCONNECT_EXTENSION: self._on_disconnect, CARRIER: self._carrier}
        self._task = self._context.start(self._run(scope))

    def _on_request_body(self, message: m.ProcessingRequest) -> None:
        if self._body.whole:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_body after the end")
        # A buffered body comes as one message; with trailers behind it, it does not end the request.
        self._body.add(message.body, ends=message.end_of_stream or self._writer.buffers)
        self._timer.wait(self._context.settings.request_timeout_s)
        self._wakeup.set()

    # Router side (ASGI).

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._context.app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._writer.reset(CANCEL)
            raise
        except Exception as error:  # noqa: BLE001 - log any router error and answer
            trace = "".join(traceback.format_exception(error))
            _log.error("request failed", path=scope["path"], traceback=trace)
            self._own.clear()
            self._answer_error(internal_error())
        finally:
            self._free()
            scope.pop("extensions", None)  # break the reference cycle
            if not self._writer.over and not self._gateways_own:
                self._writer.reset(INTERNAL_ERROR)
            self._carrier.release()

    def _on_disconnect(self, callback: Any) -> None:
        """Register a callback (extension ``kvatlas.router.http.request_cycle.EXTENSION``)."""
        self._left_hook = callback
        if callback is not None and self._gone:
            callback()

    async def receive(self) -> Message:
        body = self._body
        while not self._writer.over and not self._gone:
            if body.readable:
                return {"type": "http.request", "body": body.take(), "more_body": not body.whole}
            await self._wakeup.wait()
        return _DISCONNECT

    async def send(self, message: Message) -> None:
        """ASGI ``send``. Waits while the gateway is slow; does nothing after it has left."""
        carrier = self._carrier
        if message["type"] == "http.response.start":
            self._start = message
        elif self._writer.over or self._gone or self._start is None:
            return
        elif carrier.answer is None or carrier.broken or carrier.moved:
            self._send_own(message.get("body", b""), more=message.get("more_body", False))
        else:
            body, more = message.get("body", b""), message.get("more_body", False)
            await self._pass_on(carrier.answer, self._start, body, more=more)

    def _send_own(self, body: bytes, *, more: bool) -> None:
        """Send a piece of an answer that the router made itself."""
        self._own.append(body)
        if more or self._start is None:
            return
        # otherwise the answer is the gateway's, or from an unknown engine: forward it
        if not self._writer.shown and (not self._carrier.moved or self._carrier.broken):
            self._context.stats.immediate += 1
            self._writer.send(immediate_answer(self._start, b"".join(self._own)))
        self._finish()

    async def _pass_on(self, answer: GatewayAnswer, start: Message, body: bytes, *, more: bool) -> None:
        """Send a piece of an engine's answer, unless the gateway already forwards it."""
        writer, trailers = self._writer, self._carrier.trailers
        if not self._carrier.passes:
            headers_only = not writer.shown and answer.at_eof and not body and not trailers
            writer.send_headers(answer.headers, start["headers"])
            if not headers_only:
                writer.send_body("response_body", body, ends=not more and not trailers)
            if not more and trailers:
                writer.resume("response_trailers")
            if not more:
                self._finish()
        if more and self._stream.queued_bytes > _QUEUED_BYTES_MAX:
            await self._stream.drain(_QUEUED_BYTES_MAX)

    # End of the stream.

    def _answer_error(self, error: ApiError) -> None:
        """Answer with an error: the router has no request yet, or has failed."""
        if self._writer.over or self._gateways_own:
            return
        if self._writer.shown:
            self._writer.reset(INTERNAL_ERROR)
        else:
            self._carrier.broken = True
            headers = [(b"content-type", b"application/json"), *error.headers]
            self._start = {"status": error.status, "headers": headers}
            self._send_own(error.body(), more=False)
        self._handle_end()

    def _refuse(self, status: int, reason: str, text: str) -> None:
        """End the call with a gRPC error."""
        counts = self._context.stats.calls_refused
        counts[reason] = counts.get(reason, 0) + 1
        self._context.warn("gateway's call refused", reason, problem=text)
        if not self._writer.over:
            self._finish(status, text)
            self._handle_end()

    def _finish(self, status: int = grpc.OK, text: str = "") -> None:
        """End the stream."""
        self._timer.stop()
        self._writer.finish(status, text)

    def _free(self) -> None:
        """Release the body."""
        if not self._gateways_own:
            self._timer.stop()
        self._body.free()
