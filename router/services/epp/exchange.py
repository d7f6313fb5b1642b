"""Serve one request of a gateway: an ext_proc stream that the router sees as a client's request.

It is a ``ClientRequest``: head and body come from the gateway, and the router's answer goes there. Its
``GatewayCarrier`` reaches the engine. So keys, prompts, placement, accounts, receipts and metrics use the
same code as other requests.

Invariants: a stream is answered, or ended with a gRPC error, exactly once; a gateway that misses a deadline
ends it; held body bytes are counted.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import structlog

from kvatlas.router.http.asgi import connection_scope
from kvatlas.router.http.client_head import ClientHead, Header
from kvatlas.router.http.h2_codec import CANCEL, INTERNAL_ERROR
from kvatlas.router.http.h2_streams import Stream
from kvatlas.router.openai.errors import ApiError, internal_error, request_timeout, too_many_bodies
from kvatlas.router.services.epp import grpc
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.carrier import GatewayCarrier
from kvatlas.router.services.epp.context import PickerContext
from kvatlas.router.services.epp.gateway_answer import GatewayAnswer
from kvatlas.router.services.epp.grpc import GrpcError, GrpcReader
from kvatlas.router.services.epp.header_fields import SUBSET_KEY, head_of
from kvatlas.router.services.epp.immediate import immediate_answer
from kvatlas.router.services.epp.metadata import endpoints
from kvatlas.router.services.epp.protobuf import ProtobufError
from kvatlas.router.services.epp.request_body import RequestBody
from kvatlas.router.services.epp.responses import ResponseWriter
from kvatlas.router.services.epp.waiting import Timer, Wakeup

_log = structlog.get_logger()
_QUEUED_BYTES_MAX = 256 * 1024


class GatewayExchange:
    """One gateway request. Used from the event loop only."""

    __slots__ = (
        "_body",
        "_context",
        "_gateways_own",
        "_own",
        "_reader",
        "_said_head",
        "_start",
        "_stream",
        "_timer",
        "_wakeup",
        "_watched",
        "_writer",
        "carrier",
        "disconnected",
        "head",
        "policy",
        "task",
    )
    peer = b""
    _SCOPE: ClassVar[dict[str, Any]] = connection_scope()

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(context.message_bytes_max)
        self._writer = ResponseWriter(stream)
        self._body = RequestBody(context.capacity)
        self._wakeup = Wakeup()
        self._timer = Timer(context.sweeper, context.clock, self._time_over)
        self.carrier = GatewayCarrier(
            stream, context, writer=self._writer, body=self._body, bell=self._wakeup, timer=self._timer
        )
        # The request's head has been received.
        self._said_head = False
        self.head: ClientHead  # from then on
        self._start: tuple[int, list[Header]] | None = None
        # Body of an answer of the router's own.
        self._own: list[bytes] = []
        # The gateway answered by itself before an engine was named.
        self._gateways_own = False
        self.disconnected = self._watched = False
        self.policy: Callable[[list[Header]], list[Header]] | None = None
        self.task: asyncio.Task[None] | None = None
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
        self._context.stats.cut_before_answer += self.carrier.asked and self.carrier.answer is None
        if not self._stream.closed:
            self._finish()
        self._handle_end()

    def _handle_end(self) -> None:
        self._writer.over = True
        if self.disconnected:
            return
        self._disconnect()

    def _disconnect(self) -> None:
        """Report a disconnected client to the router."""
        self.disconnected = True
        if self.task is None:
            self._free()
        self._wakeup.set()
        if self._watched and self.task is not None:
            self.task.cancel()

    def _time_over(self) -> None:
        # an ended stream may mean a silent engine or a client that does not read: the two look alike
        if self._writer.shown:
            self._stream.reset(CANCEL)
            self.on_lost()
        elif self.carrier.asked:
            self.carrier.fail_wait()
        elif not self._said_head:
            self._refuse(grpc.INVALID_ARGUMENT, "timeout", "no request headers in time")
        else:
            self._answer_error(request_timeout("The request did not arrive in time."))

    def _take(self, size: int) -> bool:
        """Open the flow-control window: for a request if there is capacity, for an answer by the carrier."""
        if self.carrier.answer is not None:
            self.carrier.took(size)
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
        elif self._gateways_own or (kind == "response_headers" and not self.carrier.asked):
            self._pass_gateways_own(message)
        elif kind == "response_headers":
            self.carrier.on_headers(message)
        elif kind == "response_body":
            self.carrier.on_body(message)
        elif kind == "response_trailers":
            self.carrier.on_trailers()

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
        subset = endpoints(message.metadata, m.SUBSET, SUBSET_KEY)
        head = self.head = head_of(message.headers, self._context.header_bytes_max)
        target = b"%b?%b" % (head.raw_path, head.query) if head.query else head.raw_path
        self.carrier.begin(head.fields, target, None if subset is None else frozenset(subset))
        if body.expected and writer.buffers:
            writer.resume("request_headers")
        self.task = self._context.start(self._run())

    def _on_request_body(self, message: m.ProcessingRequest) -> None:
        if self._body.whole:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_body after the end")
        # A buffered body comes as one message; with trailers behind it, it does not end the request.
        self._body.add(message.body, ends=message.end_of_stream or self._writer.buffers)
        self._timer.wait(self._context.settings.request_timeout_s)
        self._wakeup.set()

    # Router side (``ClientRequest``).

    @property
    def connection_scope(self) -> dict[str, Any]:
        return self._SCOPE

    async def _run(self) -> None:
        try:
            await self._context.answer(self)
        except asyncio.CancelledError:
            self._writer.reset(CANCEL)
            raise
        except Exception as error:  # noqa: BLE001 - log any router error and answer
            trace = "".join(traceback.format_exception(error))
            _log.error("request failed", path=self.head.path, traceback=trace)
            self._own.clear()
            self._answer_error(internal_error())
        finally:
            self._free()
            if not self._writer.over and not self._gateways_own:
                self._writer.reset(INTERNAL_ERROR)
            self.carrier.release()
            self.task = None  # it refers back to this

    def watch(self) -> None:
        self._watched = True
        if self.disconnected and self.task is not None:
            self.task.cancel()

    def unwatch(self) -> None:
        self._watched = False

    def complete_body(self) -> bytes | None:
        whole = self._body.readable and self._body.whole and not self.disconnected
        return self._body.take() if whole else None

    async def read(self) -> tuple[bytes, bool] | None:
        body = self._body
        while not self._writer.over and not self.disconnected:
            if body.readable:
                return body.take(), not body.whole
            await self._wakeup.wait()
        return None

    def start(self, status: int, fields: list[Header], length: bytes | None) -> None:
        self._start = status, fields if self.policy is None else self.policy(fields)

    def write(self, data: bytes, *, more: bool) -> Awaitable[None] | None:
        carrier = self.carrier
        if self._writer.over or self.disconnected or self._start is None:
            return None
        if carrier.answer is None or carrier.broken or carrier.moved:
            self._send_own(data, more=more)
            return None
        return self._pass_on(carrier.answer, self._start[1], data, more=more)

    def _send_own(self, body: bytes, *, more: bool) -> None:
        """Send a piece of an answer that the router made itself."""
        self._own.append(body)
        if more or self._start is None:
            return
        # otherwise the answer is the gateway's, or from an unknown engine: forward it
        if not self._writer.shown and (not self.carrier.moved or self.carrier.broken):
            self._context.stats.immediate += 1
            self._writer.send(immediate_answer(*self._start, b"".join(self._own)))
        self._finish()

    def _pass_on(
        self, answer: GatewayAnswer, fields: list[Header], body: bytes, *, more: bool
    ) -> Awaitable[None] | None:
        """Send a piece of an engine's answer, unless the gateway already forwards it."""
        writer, trailers = self._writer, self.carrier.trailers
        if not self.carrier.passes:
            headers_only = not writer.shown and answer.at_eof and not body and not trailers
            writer.send_headers(answer.headers, fields)
            if not headers_only:
                writer.send_body("response_body", body, ends=not more and not trailers)
            if not more and trailers:
                writer.resume("response_trailers")
            if not more:
                self._finish()
        slow = more and self._stream.queued_bytes > _QUEUED_BYTES_MAX
        return self._stream.drain(_QUEUED_BYTES_MAX) if slow else None

    # End of the stream.

    def _answer_error(self, error: ApiError) -> None:
        """Answer with an error: the router has no request yet, or has failed."""
        if self._writer.over or self._gateways_own:
            return
        if self._writer.shown:
            self._writer.reset(INTERNAL_ERROR)
        else:
            self.carrier.broken = True
            self._start = error.status, [(b"content-type", b"application/json"), *error.headers]
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
