"""One request of a gateway: an ext_proc stream that the router sees as a client's request.

It is an ASGI connection: the head and body that the gateway shows are the request, and what the router sends
back goes to the gateway. Its ``GatewayCarrier`` is the way to the engine. So keys, prompts, placement,
accounts, receipts and metrics are those of every other request, by the same code.

Always true: a stream is answered, or ended with a gRPC error, exactly once; whatever the gateway does not do
in time ends it; what is held of bodies is counted.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import structlog

from router.epp import grpc
from router.epp import messages as m
from router.epp.answers import GatewayAnswer, own_answer
from router.epp.carrier import GatewayCarrier, RequestBody
from router.epp.context import PickerContext, Timer, Wakeup
from router.epp.grpc import SUBSET_KEY, GrpcError, GrpcReader, scope_of
from router.epp.messages import ProtobufError
from router.epp.speaker import ResponseWriter
from router.http.h2.frames import CANCEL, INTERNAL_ERROR
from router.http.h2.stream import Stream
from router.http.server.request_cycle import EXTENSION, Message
from router.openai.errors import ApiError, internal_error, request_timeout, too_many_bodies
from router.proxy.app import CARRIER

_log = structlog.get_logger()
_QUEUED_BYTES_MAX = 256 * 1024
_DISCONNECT: Message = {"type": "http.disconnect"}


class GatewayExchange:
    """See the module. Used from the event loop only."""

    __slots__ = (
        *("_bell", "_body", "_carrier", "_context", "_gateways_own", "_gone", "_left_hook", "_own"),
        *("_reader", "_said_head", "_speaker", "_start", "_stream", "_task", "_timer"),
    )

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(context.message_bytes_max)
        self._speaker = ResponseWriter(stream)
        self._body = RequestBody(context.capacity)
        self._bell = Wakeup()
        self._timer = Timer(context.sweeper, context.clock, self._time_over)
        self._carrier = GatewayCarrier(
            stream, context, speaker=self._speaker, body=self._body, bell=self._bell, timer=self._timer
        )
        self._said_head = False  # the request's head has come
        self._start: Message | None = None
        self._own: list[bytes] = []  # of an answer of the router's own
        self._gateways_own = False  # the answer is the gateway's, given before an engine was named
        self._gone = False
        self._left_hook: Any = None
        self._task: asyncio.Task[None] | None = None
        self._timer.wait(context.settings.request_timeout_s)

    # The stream's side.

    def on_data(self, data: bytes) -> None:
        """Implement ``StreamHandler``."""
        if self._speaker.over:
            self._stream.taken(len(data))
            return
        try:
            if not self._take(len(data)):
                return
            for message in self._reader.feed(data):
                self._on_message(m.read_request(message))
                if self._speaker.over:
                    return
        except ProtobufError as error:
            self._refuse(grpc.INVALID_ARGUMENT, "malformed", str(error))
        except GrpcError as error:
            reason = "mode" if error.status == grpc.FAILED_PRECONDITION else "malformed"
            self._refuse(error.status, reason, str(error))
        except ApiError as error:
            self._answer_error(error)

    def on_end(self) -> None:
        """Implement ``StreamHandler``: the gateway needs no more of this."""
        self.on_lost()

    def on_lost(self) -> None:
        """Implement ``StreamHandler``."""
        if self._speaker.over:
            return
        self._context.stats.cut_before_answer += self._carrier.asked and self._carrier.answer is None
        if not self._stream.closed:
            self._finish()
        self._leave()

    def _leave(self) -> None:
        """Nobody waits for this request any more."""
        self._speaker.over = True
        if self._gone:
            return
        self._leave_router()

    def _leave_router(self) -> None:
        """For the router the request is over: its client is gone."""
        self._gone = True
        if self._task is None:
            self._free()
        self._bell.ring()
        if self._left_hook is not None:
            self._left_hook()

    def _time_over(self) -> None:
        if self._speaker.shown:  # whether the engine is silent or the client does not read: nobody can tell
            self._stream.reset(CANCEL)
            self.on_lost()
        elif self._carrier.asked:
            self._carrier.time_over()
        elif not self._said_head:
            self._refuse(grpc.INVALID_ARGUMENT, "timeout", "no request headers in time")
        else:
            self._answer_error(request_timeout("The request did not arrive in time."))

    def _take(self, size: int) -> bool:
        """Let the gateway send more: of the request, if there is room; of an answer, as the carrier says."""
        if self._carrier.answer is not None:
            self._carrier.took(size)
            return True
        self._stream.taken(size)
        if self._gateways_own:
            return True
        if self._body.hold(size):
            return True
        self._answer_error(too_many_bodies())
        return False

    # What the gateway says.

    def _on_message(self, said: m.ProcessingRequest) -> None:
        kind = said.kind
        if kind == "request_headers":
            self._on_request(said)
        elif not self._said_head:
            raise GrpcError(grpc.INVALID_ARGUMENT, f"{kind} before request_headers")
        elif self._gateways_own and kind in {"request_body", "request_trailers"}:
            pass  # nobody reads the request any more
        elif kind == "request_body":
            self._on_request_body(said)
        elif kind == "request_trailers":
            self._body.trailers = self._body.whole = True
            self._bell.ring()
        elif self._gateways_own or (kind == "response_headers" and not self._carrier.asked):
            self._pass_gateways_own(said)
        elif kind == "response_headers":
            self._carrier.on_headers(said)
        elif kind == "response_body":
            self._carrier.on_body(said)
        elif kind == "response_trailers":
            self._carrier.on_trailers()

    def _pass_gateways_own(self, said: m.ProcessingRequest) -> None:
        """A piece of an answer that the gateway gives itself before an engine was named: 413 of a body too
        large to be buffered, 504 of its stream_idle_timeout. It goes to the client as it is."""
        speaker, kind, ends = self._speaker, said.kind, said.end_of_stream
        self._timer.wait(self._context.settings.request_timeout_s)
        if not self._gateways_own:
            self._gateways_own = True
            self._context.stats.gateways_own += 1
            speaker.show([], ())
            ends = ends or speaker.modes.response_body == m.NONE
            self._leave_router()
        elif kind == "response_body":
            speaker.pass_on(kind, said.body, ends=ends)
        elif kind == "response_trailers":
            speaker.go_on(kind)
            ends = True
        if ends:
            self._finish()

    def _on_request(self, said: m.ProcessingRequest) -> None:
        if self._said_head:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_headers came twice")
        self._said_head = True
        body, speaker = self._body, self._speaker
        speaker.modes = said.modes or speaker.modes
        body.expected, body.whole = not said.end_of_stream, said.end_of_stream
        if problem := m.mode_problem(said, speaker.modes):
            raise GrpcError(grpc.FAILED_PRECONDITION, problem)
        subset = m.endpoints(said.metadata, m.SUBSET, SUBSET_KEY)
        scope = scope_of(said.headers, self._context.header_bytes_max)
        path, query = scope["raw_path"], scope["query_string"]
        target = b"%b?%b" % (path, query) if query else path
        self._carrier.begin(scope["headers"], target, None if subset is None else frozenset(subset))
        if body.expected and speaker.buffers:
            speaker.go_on("request_headers")
        scope["extensions"] = {EXTENSION: self._on_disconnect, CARRIER: self._carrier}
        self._task = self._context.start(self._run(scope))

    def _on_request_body(self, said: m.ProcessingRequest) -> None:
        if self._body.whole:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_body after the end")
        # A buffered body comes as one message; with trailers behind it, it does not end the request.
        self._body.add(said.body, ends=said.end_of_stream or self._speaker.buffers)
        self._timer.wait(self._context.settings.request_timeout_s)
        self._bell.ring()

    # The router's side (ASGI).

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._context.app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._speaker.reset(CANCEL)
            raise
        except Exception as error:  # noqa: BLE001  # whatever the router raises: log, answer, go on
            trace = "".join(traceback.format_exception(error))
            _log.error("request failed", path=scope["path"], traceback=trace)
            self._own.clear()
            self._answer_error(internal_error())
        finally:
            self._free()
            scope.pop("extensions", None)  # it refers back to this: no cycle for the collector to find
            if not self._speaker.over and not self._gateways_own:
                self._speaker.reset(INTERNAL_ERROR)
            self._carrier.release()

    def _on_disconnect(self, callback: Any) -> None:
        """The extension ``router.http.server.request_cycle.EXTENSION``."""
        self._left_hook = callback
        if callback is not None and self._gone:
            callback()

    async def receive(self) -> Message:
        """ASGI ``receive``."""
        body = self._body
        while not self._speaker.over and not self._gone:
            if body.waits:
                return {"type": "http.request", "body": body.take(), "more_body": not body.whole}
            await self._bell.rung()
        return _DISCONNECT

    async def send(self, message: Message) -> None:
        """ASGI ``send``. Waits while the gateway is too slow; silent once it has gone."""
        carrier = self._carrier
        if message["type"] == "http.response.start":
            self._start = message
        elif self._speaker.over or self._gone or self._start is None:
            return
        elif carrier.answer is None or carrier.broken or carrier.moved:
            self._send_own(message.get("body", b""), more=message.get("more_body", False))
        else:
            body, more = message.get("body", b""), message.get("more_body", False)
            await self._pass_on(carrier.answer, self._start, body, more=more)

    def _send_own(self, body: bytes, *, more: bool) -> None:
        """A piece of an answer that is not an engine's."""
        self._own.append(body)
        if more or self._start is None:
            return
        # else the answer is the gateway's already, or of an engine not known here: let it
        if not self._speaker.shown and (not self._carrier.moved or self._carrier.broken):
            self._context.stats.immediate += 1
            self._speaker.say(own_answer(self._start, b"".join(self._own)))
        self._finish()

    async def _pass_on(self, answer: GatewayAnswer, start: Message, body: bytes, *, more: bool) -> None:
        """A piece of an engine's answer, which the gateway may have back already."""
        speaker, trailers = self._speaker, self._carrier.trailers
        if not self._carrier.passes:
            headers_only = not speaker.shown and answer.finished and not body and not trailers
            speaker.show(answer.headers, start["headers"])
            if not headers_only:
                speaker.give("response_body", body, ends=not more and not trailers)
            if not more and trailers:
                speaker.go_on("response_trailers")
            if not more:
                self._finish()
        if more and self._stream.queued_bytes > _QUEUED_BYTES_MAX:
            await self._stream.drained(_QUEUED_BYTES_MAX)

    # Its end.

    def _answer_error(self, error: ApiError) -> None:
        """Before the router has the request, or where it failed."""
        if self._speaker.over or self._gateways_own:
            return
        if self._speaker.shown:
            self._speaker.reset(INTERNAL_ERROR)
        else:
            self._carrier.broken = True
            headers = [(b"content-type", b"application/json"), *error.headers]
            self._start = {"status": error.status, "headers": headers}
            self._send_own(error.body(), more=False)
        self._leave()

    def _refuse(self, status: int, reason: str, text: str) -> None:
        """End the call with a gRPC error."""
        counts = self._context.stats.calls_refused
        counts[reason] = counts.get(reason, 0) + 1
        self._context.warn("gateway's call refused", reason, problem=text)
        if not self._speaker.over:
            self._finish(status, text)
            self._leave()

    def _finish(self, status: int = grpc.OK, text: str = "") -> None:
        """Nothing more will be said."""
        self._timer.stop()
        self._speaker.finish(status, text)

    def _free(self) -> None:
        """Nobody holds the body any more."""
        if not self._gateways_own:
            self._timer.stop()
        self._body.free()
