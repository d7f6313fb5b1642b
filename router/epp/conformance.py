"""Answer requests of the conformance suite of the Gateway API Inference Extension, which tests gateways: a
request goes where its own header says, in rotation if several endpoints are allowed, and its answer names the
endpoint that served it. Nothing is placed, read or accounted. The behaviour is that of the suite's light
picker (pkg/lwepp of kubernetes-sigs/gateway-api-inference-extension).

The suite's pods are no engines, so this does not involve the router (``epp.conformance_headers``).
Invariants: no body is held; a pause longer than ``request_timeout_s`` ends the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.epp import grpc
from router.epp import messages as m
from router.epp.context import PickerContext, Timer
from router.epp.grpc import DESTINATION, SERVED_KEY, SUBSET_KEY, GrpcError, GrpcReader, Header
from router.epp.messages import ProtobufError
from router.epp.responses import ResponseWriter, immediate_answer
from router.http.h2_codec import CANCEL
from router.http.h2_streams import Stream
from router.openai.errors import no_ready_engine

SELECTION = b"test-epp-endpoint-selection"
SERVED = b"x-conformance-test-served-endpoint"
# The suite's backends answer with the field named here.
_ECHO = b"x-echo-set-header"
_NOT_SERVED = "fail: missing destination endpoint served metadata"


class ConformanceExchange:
    """One request of the suite; a ``StreamHandler``."""

    __slots__ = ("_context", "_reader", "_stream", "_timer", "_to", "_writer")

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._writer = ResponseWriter(stream)
        self._reader = GrpcReader(context.message_bytes_max)
        self._timer = Timer(context.sweeper, context.clock, self._time_over)
        self._to = ""
        self._timer.wait(context.settings.request_timeout_s)

    def on_data(self, data: bytes) -> None:
        """Implement ``StreamHandler``."""
        self._stream.acknowledge_data(len(data))
        if self._writer.over:
            return
        self._timer.wait(self._context.settings.request_timeout_s)
        try:
            for message in self._reader.feed(data):
                self._on_message(m.read_request(message))
                if self._writer.over:
                    return
        except (GrpcError, ProtobufError) as error:
            self._finish(grpc.INVALID_ARGUMENT, str(error))

    def on_end(self) -> None:
        """Implement ``StreamHandler``."""
        if not self._writer.over:
            self._finish()

    def on_lost(self) -> None:
        """Implement ``StreamHandler``."""
        self._writer.over = True
        self._timer.stop()

    def _time_over(self) -> None:
        self._writer.reset(CANCEL)
        self._timer.stop()

    def _finish(self, status: int = grpc.OK, text: str = "") -> None:
        self._timer.stop()
        self._writer.finish(status, text)

    def _on_message(self, message: m.ProcessingRequest) -> None:
        writer, kind = self._writer, message.kind
        if kind == "request_headers":
            self._on_request(message)
        elif kind == "request_body":
            if writer.buffers:
                self._choose(buffered=True)
            else:
                writer.send_body(kind, message.body, ends=message.end_of_stream)
        elif kind == "response_headers":
            served = m.endpoints(message.metadata, m.LB, SERVED_KEY) or [_NOT_SERVED]
            writer.send_headers([], [(SERVED, served[0].encode())])
            self._end_if(ends=message.end_of_stream)
        elif kind == "response_body":
            writer.forward(kind, message.body, ends=message.end_of_stream)
            self._end_if(ends=message.end_of_stream)
        elif kind is not None:  # trailers
            writer.resume(kind)
            self._end_if(ends=kind == "response_trailers")

    def _end_if(self, *, ends: bool) -> None:
        if ends:
            self._finish()

    def _on_request(self, message: m.ProcessingRequest) -> None:
        writer = self._writer
        writer.modes = message.modes or writer.modes
        if problem := m.mode_problem(message, writer.modes):
            self._finish(grpc.FAILED_PRECONDITION, problem)
            return
        allowed = m.endpoints(message.metadata, m.SUBSET, SUBSET_KEY)
        chosen = self._in_turn(select(message.headers, self._context.endpoints(), allowed=allowed))
        if not chosen:
            error = no_ready_engine("No endpoint of the pool is the one that the test asks for.")
            headers = [(b"content-type", b"application/json"), *error.headers]
            writer.send(immediate_answer({"status": error.status, "headers": headers}, error.body()))
            self._finish()
            return
        self._to = ",".join(chosen)
        if writer.buffers and not message.end_of_stream:
            writer.resume("request_headers")
        else:
            self._choose(buffered=False)

    def _in_turn(self, endpoints: list[str]) -> list[str]:
        """Rotate the endpoints; return as many as the gateway takes (ORIGINAL_DST takes one)."""
        context = self._context
        context.turn += 1
        at = context.turn % max(1, len(endpoints))
        return (endpoints[at:] + endpoints[:at])[: 1 + context.settings.fallbacks]

    def _choose(self, *, buffered: bool) -> None:
        to = self._to.encode()
        headers = m.header_mutation([(DESTINATION.encode(), to), (_ECHO, SERVED + b":" + to)])
        metadata = m.dynamic_metadata(m.LB, DESTINATION, self._to)
        if buffered:
            self._writer.choose_buffered(headers, metadata, None)
        else:
            self._writer.choose(headers, metadata)


def select(headers: list[Header], known: list[str], *, allowed: Sequence[str] | None = None) -> list[str]:
    """Return the endpoints that the test asks for, in its order, else those that the gateway allows, else
    all. Each is named by ``ip:port``, or by ``ip`` for all of its ports."""
    asked = next((value for name, value in headers if name == SELECTION), b"").decode("latin-1")
    names = [name.strip() for name in asked.split(",")] if asked else allowed
    if names is None:
        return known
    return list(
        dict.fromkeys(each for name in names for each in known if name in (each, each.rpartition(":")[0]))
    )
