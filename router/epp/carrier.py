"""The way of a gateway's request to its engine (``Carrier``): to ask an engine is to name it to the gateway
and to give the body back; its answer is what the gateway shows of it.

An answer that needs nobody's decision goes on to the client as it is shown, before the proxy reads it. Not
every answer is shown: the stream of a request that is not watched ends with the choice, and who placed it
says when it should be over (``Attempt.unseen``). Always true: an engine is named once; a gateway that went on
to another one is a refused attempt of the first.
"""

from __future__ import annotations

from router.epp import grpc
from router.epp import messages as m
from router.epp.answers import GatewayAnswer
from router.epp.context import PickerContext, Timer, Wakeup
from router.epp.context import told as told_of
from router.epp.grpc import SERVED_KEY, GrpcError, Header, status_of
from router.epp.speaker import ResponseWriter
from router.fleet.identity import endpoint_of
from router.http.client import UpstreamError
from router.http.h2.stream import Stream
from router.http.server.capacity import Capacity
from router.openai.request import Carried
from router.pd.settings import read_prefilled
from router.proxy.attempt import Answer, Attempt, Outbound
from router.proxy.headers import REDIRECTS, read_answer_headers

# The body of a gateway's request: collected as it is shown, counted as long as it is held.
#
# Always true: what is held counts in the router's capacity for bodies until ``free``; the router is given
# every byte once, and told of the end once.


class RequestBody:
    """``expected``: there is one; ``trailers``: trailers came behind it; ``latest``: what the router was
    given last, all of a body that came in one piece."""

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

    def hold(self, size: int) -> bool:
        """So many bytes came; False: there is no room for them."""
        if not self._capacity.take(size):
            return False
        self._held_bytes += size
        return True

    def add(self, piece: bytes, *, ends: bool) -> None:
        """The next bytes."""
        if piece:
            self._pieces.append(piece)
        self.whole = ends

    @property
    def waits(self) -> bool:
        """There is something to take: bytes, or the end."""
        return bool(self._pieces) or (self.whole and not self._ended)

    def take(self) -> bytes:
        """What came since the last time; with ``whole`` it is the rest."""
        self._ended = self.whole
        pieces = self._pieces
        self.latest = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return self.latest

    def free(self) -> None:
        """Nobody holds it any more."""
        self._pieces.clear()
        self.latest = b""
        self._capacity.give(self._held_bytes)
        self._held_bytes = 0


_HELD_BYTES_MAX = 256 * 1024
_ERRORS = 400


class GatewayCarrier:
    """Implements ``Carrier``. ``among``: the endpoints that the gateway allows; ``moved``: the one that
    served instead of the one that was chosen; ``passes``: the answer goes on to the client as it comes;
    ``broken``: it was given up before its end; ``trailers``: some came behind it."""

    __slots__ = (
        *("_bell", "_body", "_chosen", "_context", "_head", "_owed", "_own", "_request_id", "_speaker"),
        *(
            "_stream",
            "_target",
            "_timed_out",
            "_timer",
            "_unseen",
            "among",
            "answer",
            "asked",
            "broken",
            "moved",
        ),
        *("passes", "trailers"),
    )

    def __init__(
        self,
        stream: Stream,
        context: PickerContext,
        *,
        speaker: ResponseWriter,
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
        self._speaker = speaker
        self._body = body
        self._bell = bell
        self._timer = timer
        self._head: list[Header] = []
        self._target = b""
        self._owed = 0  # bytes of an answer that the gateway may send once those before are taken
        self._unseen = False  # the answer passes without being shown here
        self._timed_out = False
        self._chosen = ""
        self._own: tuple[Header, ...] = ()  # fields for the client
        self._request_id = b""

    def begin(self, head: list[Header], target: bytes, among: frozenset[str] | None) -> None:
        """The request's head came."""
        self._head, self._target, self.among = head, target, among

    @property
    def carried(self) -> Carried:
        """What the gateway and what is behind it can do."""
        return "sidecar" if self._context.settings.sidecar else "gateway"

    def release(self) -> None:
        """The request has ended: what refers to each other here is let go of."""
        self.answer = None

    # What the gateway shows.

    def took(self, size: int) -> None:
        """So many bytes of an answer came: the gateway may send more, unless the proxy lags behind."""
        self._owed += size
        if self.answer is None or self.answer.held_bytes < _HELD_BYTES_MAX:
            self._pay()

    def _pay(self) -> None:
        owed, self._owed = self._owed, 0
        self._stream.taken(owed)

    def on_headers(self, said: m.ProcessingRequest) -> None:
        """The answer's head."""
        if not self.asked or self.answer is not None:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_headers out of turn")
        status, headers = status_of(said.headers)
        answer = GatewayAnswer(status, headers, taken=self._pay, changed=self._changed)
        answer.complete = said.end_of_stream or self._speaker.modes.response_body == m.NONE
        self.answer = answer
        served = m.endpoints(said.metadata, m.LB, SERVED_KEY)
        self.moved = served[0] if served and served[0] != self._chosen else ""
        # What an engine refused, or another one answers, is for the proxy: it may have a better answer.
        # A redirect is answered here: it would show the engine's address.
        self.passes = status not in REDIRECTS and (
            not self._speaker.gives_back or (status < _ERRORS and not self.moved)
        )
        self._timer.wait(self._context.proxy.first_byte_timeout_s)
        if self.passes:
            fields = read_answer_headers(headers, self._request_id, self._own).fields
            self._speaker.show(headers, fields)
            self._end_if_complete(answer)
        self._bell.ring()

    def on_body(self, said: m.ProcessingRequest) -> None:
        """A piece of it."""
        answer = self.answer
        if answer is None or answer.complete:
            raise GrpcError(grpc.INVALID_ARGUMENT, "response_body out of turn")
        answer.add(said.body)
        answer.complete = said.end_of_stream
        self._timer.wait(self._context.proxy.idle_timeout_s)
        if self.passes:
            self._speaker.pass_on("response_body", said.body, ends=said.end_of_stream)
            self._end_if_complete(answer)
        self._bell.ring()

    def on_trailers(self) -> None:
        """Its end, with trailers."""
        if self.answer is None:
            return
        self.trailers = self.answer.complete = True
        if self.passes:
            self._speaker.go_on("response_trailers")
            self._end_if_complete(self.answer)
        self._bell.ring()

    def _end_if_complete(self, answer: GatewayAnswer) -> None:
        """The gateway needs nothing more; the proxy still reads what came."""
        if answer.complete:
            self._speaker.finish()

    # ``Carrier``

    async def ask(self, attempt: Attempt, out: Outbound, timeout_s: float) -> GatewayAnswer | None:
        """Implement ``Carrier``."""
        if self.answer is None:
            if self._speaker.over or self._speaker.shown:  # the client is gone, or has the gateway's answer
                raise UpstreamError("overflow", sent=False)
            self._send_request(attempt, out)
            if not attempt.watched and not self._context.watches(out.request.path):
                await self._let_pass(attempt, out)
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
        if (told := read_prefilled(answer.headers)) is not None:
            attempt.prefilled(told)
        return answer

    def done(self, answer: Answer) -> None:
        """Implement ``Carrier``."""
        self.broken = self.broken or not answer.finished

    def may_retry(self) -> bool:
        """Implement ``Carrier``: the gateway has asked another engine already, whose answer is there."""
        return bool(self.moved)

    def _send_request(self, attempt: Attempt, out: Outbound) -> None:
        self.asked = True
        context, speaker, body = self._context, self._speaker, self._body
        limits = out.entry.answer_headers() if out.entry is not None else ()
        self._own, self._request_id = (*attempt.client_headers, *limits), out.head.request_id
        self._chosen = endpoint_of(attempt.base_url)
        buffered = body.expected and speaker.buffers
        changed = None if not buffered or out.request.body is body.latest else out.request.body
        length = None if changed is None or out.head.content_length is None else len(changed)
        fallbacks = context.settings.fallbacks
        target = None if out.target == self._target else out.target
        headers, metadata = told_of(
            self._head, out.head.fields, attempt, fallbacks, length=length, target=target
        )
        context.stats.picked("buffered" if buffered else "duplex")
        if buffered:
            speaker.choose_buffered(headers, metadata, changed)
        else:
            speaker.choose(headers, metadata)
            if body.expected:
                speaker.give("request_body", out.request.body, ends=not body.trailers)
        if body.trailers:
            speaker.go_on("request_trailers")

    # Answers that pass unseen.

    async def _let_pass(self, attempt: Attempt, out: Outbound) -> None:
        """End the stream, so that the gateway shows no answer, and wait until that should be over."""
        context, self._unseen = self._context, True
        context.stats.unwatched += 1
        self._speaker.finish()
        out.request.body = b""
        self._body.free()
        context.passing.add(self.let_go)
        try:
            self._timer.wait(attempt.unseen(self.let_go))
            while self._unseen and not self._timed_out:
                await self._bell.rung()
        finally:
            context.passing.discard(self.let_go)

    def let_go(self) -> None:
        """The unseen answer is over as far as anybody can tell."""
        self._unseen = False
        self._bell.ring()

    # Waiting.

    def time_over(self) -> None:
        """What was waited for has not come."""
        self._timed_out = True
        self._context.stats.ends_estimated += self._unseen
        self._bell.ring()

    async def _changed(self) -> None:
        """The next thing that happens. Raises ``UpstreamError`` where the time is over."""
        if self._timed_out:
            self.broken = True
            raise UpstreamError("timeout")
        await self._bell.rung()
