"""A request of the conformance suite of the Gateway API Inference Extension, which tests gateways: it goes
where its own header says, in turns where that allows several endpoints, and its answer says who served it.
Nothing is placed, read or accounted. What the suite relies on is what its light picker does (pkg/lwepp of
kubernetes-sigs/gateway-api-inference-extension).

The suite's pods are no engines, so this stands beside the router (``epp.conformance_headers``). Always true:
nothing is held of bodies, and a pause longer than ``request_timeout_s`` ends the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.epp import grpc
from router.epp import messages as m
from router.epp.answers import own_answer
from router.epp.context import PickerContext, Timer
from router.epp.grpc import DESTINATION, SERVED_KEY, SUBSET_KEY, GrpcError, GrpcReader, Header
from router.epp.messages import ProtobufError
from router.epp.speaker import ResponseWriter
from router.http.h2.frames import CANCEL
from router.http.h2.stream import Stream
from router.openai.errors import no_ready_engine

SELECTION = b"test-epp-endpoint-selection"
SERVED = b"x-conformance-test-served-endpoint"
_ECHO = b"x-echo-set-header"
"""The suite's backends answer with the field that this one names."""
_NOT_SERVED = "fail: missing destination endpoint served metadata"


class ConformanceExchange:
    """See the module; a ``StreamHandler``."""

    __slots__ = ("_context", "_reader", "_speaker", "_stream", "_timer", "_to")

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._speaker = ResponseWriter(stream)
        self._reader = GrpcReader(context.message_bytes_max)
        self._timer = Timer(context.sweeper, context.clock, self._time_over)
        self._to = ""
        self._timer.wait(context.settings.request_timeout_s)

    def on_data(self, data: bytes) -> None:
        """Implement ``StreamHandler``."""
        self._stream.taken(len(data))
        if self._speaker.over:
            return
        self._timer.wait(self._context.settings.request_timeout_s)
        try:
            for message in self._reader.feed(data):
                self._on_message(m.read_request(message))
                if self._speaker.over:
                    return
        except (GrpcError, ProtobufError) as error:
            self._finish(grpc.INVALID_ARGUMENT, str(error))

    def on_end(self) -> None:
        """Implement ``StreamHandler``."""
        if not self._speaker.over:
            self._finish()

    def on_lost(self) -> None:
        """Implement ``StreamHandler``."""
        self._speaker.over = True
        self._timer.stop()

    def _time_over(self) -> None:
        self._speaker.reset(CANCEL)
        self._timer.stop()

    def _finish(self, status: int = grpc.OK, text: str = "") -> None:
        self._timer.stop()
        self._speaker.finish(status, text)

    def _on_message(self, said: m.ProcessingRequest) -> None:
        speaker, kind = self._speaker, said.kind
        if kind == "request_headers":
            self._on_request(said)
        elif kind == "request_body":
            if speaker.buffers:
                self._choose(buffered=True)
            else:
                speaker.give(kind, said.body, ends=said.end_of_stream)
        elif kind == "response_headers":
            served = m.endpoints(said.metadata, m.LB, SERVED_KEY) or [_NOT_SERVED]
            speaker.show([], [(SERVED, served[0].encode())])
            self._end_if(ends=said.end_of_stream)
        elif kind == "response_body":
            speaker.pass_on(kind, said.body, ends=said.end_of_stream)
            self._end_if(ends=said.end_of_stream)
        elif kind is not None:  # trailers
            speaker.go_on(kind)
            self._end_if(ends=kind == "response_trailers")

    def _end_if(self, *, ends: bool) -> None:
        if ends:
            self._finish()

    def _on_request(self, said: m.ProcessingRequest) -> None:
        speaker = self._speaker
        speaker.modes = said.modes or speaker.modes
        if problem := m.mode_problem(said, speaker.modes):
            self._finish(grpc.FAILED_PRECONDITION, problem)
            return
        allowed = m.endpoints(said.metadata, m.SUBSET, SUBSET_KEY)
        chosen = self._in_turn(select(said.headers, self._context.endpoints(), allowed=allowed))
        if not chosen:
            error = no_ready_engine("No endpoint of the pool is the one that the test asks for.")
            headers = [(b"content-type", b"application/json"), *error.headers]
            speaker.say(own_answer({"status": error.status, "headers": headers}, error.body()))
            self._finish()
            return
        self._to = ",".join(chosen)
        if speaker.buffers and not said.end_of_stream:
            speaker.go_on("request_headers")
        else:
            self._choose(buffered=False)

    def _in_turn(self, endpoints: list[str]) -> list[str]:
        """One of them, and as many behind it as the gateway takes: ORIGINAL_DST takes no list."""
        context = self._context
        context.turn += 1
        at = context.turn % max(1, len(endpoints))
        return (endpoints[at:] + endpoints[:at])[: 1 + context.settings.fallbacks]

    def _choose(self, *, buffered: bool) -> None:
        to = self._to.encode()
        headers = m.header_mutation([(DESTINATION.encode(), to), (_ECHO, SERVED + b":" + to)])
        metadata = m.dynamic_metadata(m.LB, DESTINATION, self._to)
        if buffered:
            self._speaker.choose_buffered(headers, metadata, None)
        else:
            self._speaker.choose(headers, metadata)


def select(headers: list[Header], known: list[str], *, allowed: Sequence[str] | None = None) -> list[str]:
    """The endpoints that the test asks for, in its order, else those that the gateway allows, else all; each
    is named by ``ip:port``, or by ``ip``, which stands for all of its ports."""
    asked = next((value for name, value in headers if name == SELECTION), b"").decode("latin-1")
    names = [name.strip() for name in asked.split(",")] if asked else allowed
    if names is None:
        return known
    return list(
        dict.fromkeys(each for name in names for each in known if name in (each, each.rpartition(":")[0]))
    )
