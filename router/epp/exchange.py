"""One request of a gateway: an ext_proc stream that the router sees as a client's request, and as the way to
its engine.

Towards the router this is an ASGI connection: the head and body that the gateway shows are the request, and
what the router sends back goes to the gateway. Towards the proxy it is the carrier (``Carrier``): to ask an
engine is to name it to the gateway and to give the body back; its answer is what the gateway shows of it. So
keys, prompts, placement, accounts, receipts and metrics are those of every other request, by the same code.

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
from router.epp.answer import GatewayAnswer
from router.epp.context import PickerContext
from router.epp.fields import (
    DESTINATION,
    SERVED_KEY,
    SUBSET_KEY,
    Header,
    changes,
    own_fields,
    scope_of,
    status_of,
)
from router.epp.grpc import GrpcError, GrpcReader, message_frame
from router.epp.protobuf import ProtobufError
from router.fleet.identity import endpoint_of
from router.http.client.connection import UpstreamError
from router.http.deadlines import NEVER
from router.http.h2.frames import CANCEL, INTERNAL_ERROR
from router.http.h2.stream import Stream
from router.http.server.disconnect import EXTENSION, Message
from router.openai.errors import ApiError, internal_error, request_timeout, too_many_bodies
from router.proxy.app import CARRIER
from router.proxy.attempt import Attempt
from router.proxy.carrier import Answer, Outbound

_log = structlog.get_logger()
_PIECE_BYTES = 62_000
"""Of a body given back: below the window that gateways begin with."""
_QUEUED_BYTES_MAX = _HELD_BYTES_MAX = 256 * 1024
_DISCONNECT: Message = {"type": "http.disconnect"}
_DROPPED = b"x-llm-d-request-dropped-reason"
_REASONS = {429: b"rejected-saturated", 503: b"rejected-no-endpoints"}


class GatewayExchange:
    """See the module. Used from the event loop only. ``among``: the endpoints that the gateway allows."""

    __slots__ = (
        *(
            "_answer",
            "_asked",
            "_body",
            "_broken",
            "_came",
            "_context",
            "_given",
            "_gone",
            "_has_body",
            "_head",
            "_held_bytes",
        ),
        *(
            "_left_hook",
            "_modes",
            "_moved",
            "_over",
            "_owed",
            "_own",
            "_promised",
            "_reader",
            "_shown",
            "_start",
            "_stream",
        ),
        *("_task", "_timed_out", "_trailers", "_waiter", "_whole", "among", "deadline"),
    )

    def __init__(self, stream: Stream, context: PickerContext) -> None:
        self.among: frozenset[str] | None = None
        self.deadline = NEVER
        self._stream = stream
        self._context = context
        self._reader = GrpcReader(context.message_bytes_max)
        self._modes = m.Modes()
        self._head: list[Header] | None = None
        self._body: list[bytes] = []
        self._has_body = True
        self._whole = False
        self._given = False
        self._came = b""  # what the router was given last: all of a buffered body
        self._trailers = False  # of the request; later of the answer
        self._held_bytes = 0
        self._owed = 0  # bytes of an answer that the gateway may send once those before are taken
        self._asked = False
        self._answer: GatewayAnswer | None = None
        self._moved = ""  # the endpoint that served instead of the one that was chosen
        self._broken = False  # the answer was given up before its end
        self._shown = False  # the answer's head has been answered to
        self._start: Message | None = None
        self._promised: tuple[Header, ...] = ()  # fields for the client, where its answer is shown in passing
        self._own: list[bytes] = []  # of an answer of the router's own
        self._over = self._gone = self._timed_out = False
        self._waiter: asyncio.Future[None] | None = None
        self._left_hook: Any = None
        self._task: asyncio.Task[None] | None = None
        context.sweeper.add(self)
        self._wait_for_gateway()

    # The stream's side.

    def on_data(self, data: bytes) -> None:
        """See ``StreamHandler``."""
        if self._over or self._gone:
            self._stream.taken(len(data))
            return
        try:
            if not self._take(len(data)):
                return
            for message in self._reader.feed(data):
                self._on_message(m.read_request(message))
                if self._over:
                    return
        except ProtobufError as error:
            self._refuse(grpc.INVALID_ARGUMENT, "malformed", str(error))
        except GrpcError as error:
            reason = "mode" if error.status == grpc.FAILED_PRECONDITION else "malformed"
            self._refuse(error.status, reason, str(error))
        except ApiError as error:
            self._answer_error(error)

    def on_end(self) -> None:
        """See ``StreamHandler``: the gateway needs no more of this."""
        self.on_lost()

    def on_lost(self) -> None:
        """See ``StreamHandler``."""
        if self._gone or self._over:
            return
        self._context.stats.cut_before_answer += self._asked and self._answer is None
        if not self._stream.closed:
            self._finish()
        self._leave()

    def _leave(self) -> None:
        """Nobody waits for this request any more."""
        self._gone = True
        if self._task is None:
            self._free()
        self._wake()
        if self._left_hook is not None:
            self._left_hook()

    def expire(self) -> None:
        """The deadline passed."""
        self.deadline = NEVER
        if self._shown:  # whether the engine is silent or the client does not read, nobody here can tell
            self._stream.reset(CANCEL)
            self.on_lost()
        elif self._asked:
            self._timed_out = True
            self._wake()
        elif self._head is None:
            self._refuse(grpc.INVALID_ARGUMENT, "timeout", "no request headers in time")
        else:
            self._answer_error(request_timeout("The request did not arrive in time."))

    def _take(self, size: int) -> bool:
        """Let the gateway send more: of the request, if there is room; of an answer, unless the proxy has not
        taken what came."""
        if self._answer is not None:
            self._owed += size
            if self._answer.held_bytes < _HELD_BYTES_MAX:
                self._pay()
            return True
        self._stream.taken(size)
        if not self._context.capacity.take(size):
            self._answer_error(too_many_bodies())
            return False
        self._held_bytes += size
        return True

    def _pay(self) -> None:
        owed, self._owed = self._owed, 0
        self._stream.taken(owed)

    # What the gateway says.

    def _on_message(self, said: m.ProcessingRequest) -> None:
        kind = said.kind
        if kind == "request_headers":
            self._on_request(said)
        elif self._head is None:
            raise GrpcError(grpc.INVALID_ARGUMENT, f"{kind} before request_headers")
        elif kind == "request_body":
            self._on_request_body(said)
        elif kind == "request_trailers":
            self._trailers = self._whole = True
            self._wake()
        elif kind == "response_headers":
            self._on_answer(said)
        elif kind == "response_body":
            self._on_answer_body(said)
        elif kind == "response_trailers" and self._answer is not None:
            self._trailers = self._answer.complete = True
            if self._modes.response_body != m.FULL_DUPLEX:
                self._say(m.trailers_answer("response_trailers"))
            self._wake()

    def _on_request(self, said: m.ProcessingRequest) -> None:
        if self._head is not None:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_headers came twice")
        self._head = said.headers
        self._modes = modes = said.modes or self._modes
        self._has_body = not said.end_of_stream
        self._whole = said.end_of_stream
        if said.observes:
            raise GrpcError(grpc.FAILED_PRECONDITION, "observability_mode: set it to false")
        if self._has_body and modes.request_body not in (m.FULL_DUPLEX, m.BUFFERED):
            named = m.MODES[modes.request_body] if modes.request_body < len(m.MODES) else "unknown"
            wanted = "set FULL_DUPLEX_STREAMED (or BUFFERED)"
            raise GrpcError(grpc.FAILED_PRECONDITION, f"request_body_mode {named}: {wanted}")
        subset = m.endpoints(said.metadata, m.SUBSET, SUBSET_KEY)
        self.among = None if subset is None else frozenset(subset)
        scope = scope_of(said.headers, self._context.header_bytes_max)
        if self._has_body and modes.request_body == m.BUFFERED:
            self._say(m.answer("request_headers"))
        scope["extensions"] = {EXTENSION: self._on_disconnect, CARRIER: self}
        self._task = self._context.start(self._run(scope))

    def _on_request_body(self, said: m.ProcessingRequest) -> None:
        if self._whole:
            raise GrpcError(grpc.INVALID_ARGUMENT, "request_body after the end")
        if said.body:
            self._body.append(said.body)
        # A buffered body comes as one message; with trailers behind it, it does not end the request.
        self._whole = said.end_of_stream or self._modes.request_body == m.BUFFERED
        self._wait_for_gateway()
        self._wake()

    def _on_answer(self, said: m.ProcessingRequest) -> None:
        if not self._asked or self._answer is not None:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_headers out of turn")
        status, headers = status_of(said.headers)
        answer = GatewayAnswer(status, headers, taken=self._pay, changed=self._changed)
        answer.complete = said.end_of_stream or self._modes.response_body == m.NONE
        self._answer = answer
        self._trailers = False
        served = m.endpoints(said.metadata, m.LB, SERVED_KEY)
        self._moved = served[0] if served else ""
        if self._modes.response_body != m.FULL_DUPLEX:
            self._show(self._promised)
        self.deadline = self._context.clock() + self._context.proxy.first_byte_timeout_s
        self._wake()

    def _on_answer_body(self, said: m.ProcessingRequest) -> None:
        answer = self._answer
        if answer is None or answer.complete:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_body out of turn")
        answer.add(said.body)
        answer.complete = said.end_of_stream
        if self._modes.response_body != m.FULL_DUPLEX:
            self._say(m.answer("response_body"))
        self.deadline = self._context.clock() + self._context.proxy.idle_timeout_s
        self._wake()

    # The router's side (ASGI).

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._context.app(scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._stream.reset(CANCEL)
            raise
        except Exception as error:  # noqa: BLE001  # whatever the router raises: log, answer, go on
            trace = "".join(traceback.format_exception(error))
            _log.error("request failed", path=scope["path"], traceback=trace)
            self._own.clear()
            self._answer_error(internal_error())
        finally:
            self._free()
            scope.pop("extensions", None)  # it refers back to this: no cycle for the collector to find
            if not self._over:
                self._over = True
                self._stream.reset(INTERNAL_ERROR)

    def _on_disconnect(self, callback: Any) -> None:
        """The extension ``router.http.server.disconnect.EXTENSION``."""
        self._left_hook = callback
        if callback is not None and self._gone:
            callback()

    async def receive(self) -> Message:
        """ASGI ``receive``."""
        while not self._gone and not self._over:
            if self._body or (self._whole and not self._given):
                self._given = self._whole
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._came = body
                return {"type": "http.request", "body": body, "more_body": not self._whole}
            await self._woken()
        return _DISCONNECT

    async def send(self, message: Message) -> None:
        """ASGI ``send``. Waits while the gateway is too slow; silent once it has gone."""
        if message["type"] == "http.response.start":
            self._start = message
        elif self._gone or self._over or self._start is None:
            return
        elif self._answer is None or self._broken or self._moved:
            self._send_own(message.get("body", b""), more=message.get("more_body", False))
        else:
            await self._pass_on(message.get("body", b""), more=message.get("more_body", False))

    def _send_own(self, body: bytes, *, more: bool) -> None:
        """A piece of an answer that is not an engine's."""
        self._own.append(body)
        if more or self._start is None:
            return
        if self._shown or (self._moved and not self._broken):
            self._finish()  # the answer is the gateway's already, or of an engine not known here: let it
            return
        status = self._start["status"]
        headers = own_fields(self._start["headers"])
        if status in _REASONS:
            headers.append((_DROPPED, _REASONS[status]))
        self._context.stats.immediate += 1
        self._say(m.immediate(status, headers, b"".join(self._own), f"kvatlas_{status}"))
        self._finish()

    async def _pass_on(self, body: bytes, *, more: bool) -> None:
        """A piece of an engine's answer."""
        answer, start = self._answer, self._start
        if answer is None or start is None:
            return
        if self._modes.response_body == m.FULL_DUPLEX:
            headers_only = not self._shown and answer.finished and not body and not self._trailers
            self._show(start["headers"])
            if not headers_only:
                self._give("response_body", body, ends=not more and not self._trailers)
            if not more and self._trailers:
                self._say(m.trailers_answer("response_trailers"))
        if not more:
            self._finish()
        elif self._stream.queued_bytes > _QUEUED_BYTES_MAX:
            await self._stream.drained(_QUEUED_BYTES_MAX)

    def _answer_error(self, error: ApiError) -> None:
        """Before the router has the request, or where it failed."""
        if self._over or self._gone:
            return
        if self._shown:
            self._stream.reset(INTERNAL_ERROR)
        else:
            self._moved, self._broken = "", True
            self._start = {
                "status": error.status,
                "headers": [(b"content-type", b"application/json"), *error.headers],
            }
            self._send_own(error.body(), more=False)
        self._over = True
        self._leave()

    def _refuse(self, status: int, reason: str, text: str) -> None:
        """End the call with a gRPC error."""
        counts = self._context.stats.calls_refused
        counts[reason] = counts.get(reason, 0) + 1
        self._context.warn("gateway's call refused", reason, problem=text)
        if not self._over:
            self._finish(status, text)
            self._leave()

    # The proxy's side (``Carrier``).

    async def ask(self, attempt: Attempt, out: Outbound, timeout_s: float) -> GatewayAnswer:
        """See ``Carrier``."""
        if self._over or self._gone:
            raise UpstreamError("overflow", sent=False)
        if self._answer is None:
            self._send_request(attempt, out)
            self.deadline = self._context.clock() + timeout_s
        while (answer := self._answer) is None:
            await self._changed()
        if self._moved == endpoint_of(attempt.base_url):
            self._moved = ""
        if self._moved:
            out.request.among = frozenset({self._moved})
            self._context.stats.fallbacks_served += 1
            raise UpstreamError("refused", sent=False)
        try:
            await answer.check_origin()
        except UpstreamError:
            self._broken = True
            raise
        return answer

    def done(self, answer: Answer) -> None:
        """See ``Carrier``."""
        self._broken = self._broken or not answer.finished

    def may_retry(self) -> bool:
        """See ``Carrier``: the gateway has asked another engine already, whose answer is there."""
        return bool(self._moved)

    def _send_request(self, attempt: Attempt, out: Outbound) -> None:
        self._asked = True
        limits = out.entry.answer_headers() if out.entry is not None else ()
        self._promised = (*attempt.client_headers, *limits, (b"x-request-id", out.head.request_id))
        named = (attempt.base_url, *attempt.next_best(self._context.settings.fallbacks))
        destination = ",".join(dict.fromkeys(map(endpoint_of, named)))
        own = dict(attempt.engine_headers)
        wanted = [field for field in out.head.fields if field[0] not in own]
        sets, removes = changes(self._head or [], [*wanted, *own.items()])
        sets.append((DESTINATION.encode(), destination.encode()))
        metadata = m.dynamic_metadata(m.LB, DESTINATION, destination)
        buffered = self._has_body and self._modes.request_body == m.BUFFERED
        body = None if out.request.body is self._came else out.request.body
        if buffered and body is not None and out.head.content_length is not None:
            sets.append((b"content-length", b"%d" % len(body)))  # Envoy compares
        headers = m.header_mutation(sets, removes)
        picks = self._context.stats.picks
        name = "buffered" if buffered else "duplex"
        picks[name] = picks.get(name, 0) + 1
        if buffered:
            common = m.common_response(headers=headers, body=body, clear_route_cache=True)
            self._say(m.answer("request_body", common=common, metadata=metadata))
        else:
            common = m.common_response(headers=headers, clear_route_cache=True)
            self._say(m.answer("request_headers", common=common, metadata=metadata))
            if self._has_body:
                self._give("request_body", out.request.body, ends=not self._trailers)
        if self._trailers:
            self._say(m.trailers_answer("request_trailers"))

    # Speaking.

    def _say(self, message: bytes) -> None:
        if not self._stream.begun:
            self._stream.send_headers(grpc.HEAD)
        self._stream.send(message_frame(message))

    def _show(self, fields: Any) -> None:
        """Answer to the answer's head, with the fields that it does not have."""
        if self._shown or self._answer is None:
            return
        self._shown = True
        had = set(self._answer.headers)
        sets = [field for field in fields if field not in had]
        common = m.common_response(headers=m.header_mutation(sets)) if sets else b""
        self._say(m.answer("response_headers", common=common))

    def _give(self, kind: m.Kind, body: bytes, *, ends: bool) -> None:
        """Give a body back, in pieces."""
        last = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
        for at in range(0, last, _PIECE_BYTES):
            piece = m.streamed_body(body[at : at + _PIECE_BYTES], end_of_stream=False)
            self._say(m.answer(kind, common=piece))
        if body or ends:
            self._say(m.answer(kind, common=m.streamed_body(body[last:], end_of_stream=ends)))

    def _finish(self, status: int = grpc.OK, text: str = "") -> None:
        """Nothing more will be said."""
        self._over = True
        self.deadline = NEVER
        self._context.sweeper.discard(self)
        if self._stream.begun:
            self._stream.finish(grpc.trailers(status, text))
        else:
            self._stream.send_headers(grpc.only_trailers(status, text), end=True)

    # Waiting.

    def _wait_for_gateway(self) -> None:
        self.deadline = self._context.clock() + self._context.settings.request_timeout_s

    async def _changed(self) -> None:
        """The next thing that happens. Raises ``UpstreamError`` where the time is over."""
        if self._timed_out:
            self._broken = True
            raise UpstreamError("timeout")
        await self._woken()

    async def _woken(self) -> None:
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _free(self) -> None:
        """Nobody holds the body any more."""
        self._body.clear()
        self._context.capacity.give(self._held_bytes)
        self._held_bytes = 0
        self._context.sweeper.discard(self)
