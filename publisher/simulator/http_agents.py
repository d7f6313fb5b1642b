"""Endpoints of the agents' APIs: ``/v1/messages``, ``/v1/responses``, their token counts and renderings, and
stored responses. Responses in the background are not simulated: what kvatlas does with them follows from the
request and its stream alone (docs/decisions/035-no-background-responses.md).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from kvatlas.publisher.simulator import api_answers
from kvatlas.publisher.simulator.api_agents import (
    CountTokensRequest,
    MessagesAnswer,
    MessagesRequest,
    ResponsesAnswer,
    ResponsesRequest,
)
from kvatlas.publisher.simulator.api_agents import event as sse_event
from kvatlas.publisher.simulator.api_answers import Json
from kvatlas.publisher.simulator.api_protocol import (
    ChatRequest,
    CompletionRequest,
    EngineError,
    decode,
    invalid,
    malformed,
)
from kvatlas.publisher.simulator.model import EngineModel, Prepared
from kvatlas.publisher.simulator.stepper import Generation, Piece, Stepper

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_BYTES_MAX = 64 << 20

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")


def _without_salt(body: bytes) -> bytes:
    """The body as a release sees it that does not know the field."""
    try:
        members = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body
    if not isinstance(members, dict):
        return body
    return msgspec.json.encode({name: value for name, value in members.items() if name != "cache_salt"})


class Call:
    """One HTTP exchange."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.drops_salt = False
        """Its ``cache_salt`` is not seen."""

    @property
    def query(self) -> dict[str, str]:
        """Query parameters by name."""
        return dict(self._parameters())

    def values(self, name: str) -> list[str]:
        """Values of a query parameter that may be repeated."""
        return [value for key, value in self._parameters() if key == name]

    def _parameters(self) -> list[tuple[str, str]]:
        return parse_qsl(self._scope["query_string"].decode("latin-1"))

    def apply_headers(self, request: ChatRequest | CompletionRequest) -> None:
        """Set the priority, where a numeric header overrides the body, and the session, where the body
        overrides the header (vllm/entrypoints/generate/base/serving.py, ``_get_priority`` and
        ``_get_session_id``, 0.32 and 0.33)."""
        with suppress(KeyError, ValueError):
            request.priority = int(self.headers[b"x-vllm-priority"])
        if not request.session_id:
            request.session_id = self.headers.get(b"x-session-id", b"").decode("latin-1") or None

    async def body(self) -> bytes:
        """Read the request body. Raises ``EngineError`` if its type is not JSON or it is too large."""
        content_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise malformed("Unsupported Media Type: Only 'application/json' is allowed")
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > BODY_BYTES_MAX:
                text = f"the body is larger than {BODY_BYTES_MAX} bytes"
                raise EngineError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            more = message.get("more_body", False)
        body = b"".join(parts)
        return _without_salt(body) if self.drops_salt else body

    async def start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        """Send the status line and headers."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def start_stream(self) -> None:
        """Begin an answer of server-sent events."""
        await self.start(200, _SSE, (b"cache-control", b"no-cache"))

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: tuple[bytes, bytes] = _JSON
    ) -> None:
        """Send a whole answer."""
        await self.start(status, content_type, (b"content-length", str(len(body)).encode()))
        await self.write(body, more=False)

    async def reply_json(self, value: Any) -> None:
        await self.reply(msgspec.json.encode(value))

    @asynccontextmanager
    async def on_disconnect(self, action: Callable[[], None]) -> AsyncIterator[None]:
        """Call ``action`` if the client disconnects within the block; read the body before."""
        watcher = asyncio.create_task(self._watch(action))
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, action: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        action()


class ClientGoneError(Exception):
    """The client closed the connection before its request was read."""


KEPT_MAX = 1024


class StoredResponse(NamedTuple):
    """One complete response: its body, and its messages for a following one."""

    body: Json
    messages: list[Json]


class AgentEndpoints:
    """Answer requests of agents as chats of one model."""

    def __init__(self, model: EngineModel, stepper: Stepper) -> None:
        self._model = model
        self._stepper = stepper
        self._stored: dict[str, StoredResponse] = {}

    async def messages(self, call: Call) -> None:
        chat = _as_chat(decode(await call.body(), MessagesRequest).chat)
        if self._model.owner == "sglang":
            chat.cache_salt = None  # AnthropicMessagesRequest (0.5.23) has no such field and drops it
        call.apply_headers(chat)
        prepared = await self._stepper.prepared(self._model.prepare_chat(chat), chat.kv_transfer_params)
        answer = MessagesAnswer(f"msg_{uuid.uuid4().hex}", chat.model or "", len(prepared.token_ids))
        running = self._begin(answer, prepared)
        await self._answer(call, running, stream=bool(chat.stream))

    async def count_tokens(self, call: Call) -> None:
        chat = _as_chat(decode(await call.body(), CountTokensRequest).chat)
        count = len((await self._model.prepare_chat(chat)).token_ids)
        await call.reply_json({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def render_messages(self, call: Call) -> None:
        chat = _as_chat(decode(await call.body(), MessagesRequest).chat)
        await self._render(call, chat, f"msg_{uuid.uuid4().hex}")

    async def render_responses(self, call: Call) -> None:
        chat = self._chat_of(decode(await call.body(), ResponsesRequest))
        await self._render(call, chat, f"resp_{uuid.uuid4().hex}")

    async def responses(self, call: Call) -> None:
        body = decode(await call.body(), ResponsesRequest)
        if body.background:
            raise invalid("responses in the background are not simulated", param="background")
        chat = self._chat_of(body)
        chat.priority = body.priority
        call.apply_headers(chat)
        prepared = await self._stepper.prepared(self._model.prepare_chat(chat), chat.kv_transfer_params)
        name, stream = chat.model or self._model.name, bool(chat.stream)
        response_id = body.request_id or f"resp_{uuid.uuid4().hex}"
        answer = ResponsesAnswer(response_id, name, len(prepared.token_ids), body.previous_response_id)
        running = self._begin(answer, prepared, runs_tools=body.runs_tools)

        def store(whole: Json, text: str) -> None:
            said = {"role": "assistant", "content": text}
            self._stored[response_id] = StoredResponse(whole, [*chat.messages, said])
            while len(self._stored) > KEPT_MAX:
                del self._stored[next(iter(self._stored))]

        await self._answer(call, running, stream=stream, store=store if body.store else None)

    async def get_response(self, call: Call, response_id: str) -> None:
        stored = self._stored_response(response_id)
        if call.query.get("stream", "").lower() in {"true", "1"}:
            raise invalid(f"Unknown response_id: {response_id}", param="response_id")
        await call.reply_json(stored.body)

    async def cancel_response(self, call: Call, response_id: str) -> None:
        self._stored_response(response_id)
        raise invalid("Cannot cancel a synchronous response.", param="response_id")

    def _stored_response(self, response_id: str) -> StoredResponse:
        stored = self._stored.get(response_id)
        if stored is None:
            text = f"Response with id '{response_id}' not found."
            raise EngineError(HTTPStatus.NOT_FOUND, text, kind="invalid_request_error", param="response_id")
        return stored

    def _chat_of(self, body: ResponsesRequest) -> ChatRequest:
        earlier = body.previous_response_id
        messages = [] if earlier is None else self._stored_response(earlier).messages
        return _as_chat(lambda: body.chat(messages))

    async def _render(self, call: Call, chat: ChatRequest, request_id: str) -> None:
        prepared = await self._model.prepare_chat(chat)
        rendered = api_answers.rendered(
            request_id,
            prepared.token_ids,
            model=chat.model,
            max_tokens=prepared.max_tokens,
            stream=bool(chat.stream),
            stream_options=chat.stream_options,
            cache_salt=chat.cache_salt,
        )
        await call.reply_json(rendered)

    def _begin(
        self, answer: MessagesAnswer | ResponsesAnswer, prepared: Prepared, *, runs_tools: bool = False
    ) -> _RunningAnswer:
        self._stepper.check()
        transfer = msgspec.structs.replace(prepared.transfer) if prepared.transfer is not None else None
        generation = self._stepper.submit(self._model.sim_request(answer.request_id, prepared))

        def next_turn() -> Generation | None:
            request = generation.request
            if not runs_tools or prepared.max_tokens == 1 or request.finish_reason not in ("stop", "length"):
                return None
            return self._stepper.submit(self._model.next_turn(request, prepared, transfer))

        return _RunningAnswer(answer, generation, self._stepper.abort, next_turn)

    async def _answer(
        self,
        call: Call,
        running: _RunningAnswer,
        *,
        stream: bool,
        store: Callable[[Json, str], None] | None = None,
    ) -> None:
        """Generate and send an answer; ``store`` gets the body and its text before the client does."""
        try:
            async with call.on_disconnect(running.abort):
                if stream:
                    await call.start_stream()
                async for event in running.events():
                    if stream:
                        await call.write(event, more=True)
                if running.reason == "error":
                    error = self._stepper.failure()
                    if not stream:
                        raise error
                    await running.break_off(call, error)
                    return
                if store is not None:
                    store(running.whole(), running.text)
                if stream:
                    await call.write(running.closing(), more=False)
                else:
                    await call.reply_json(running.whole())
        finally:
            running.abort()


class _RunningAnswer:
    """An answer in progress."""

    def __init__(
        self,
        answer: MessagesAnswer | ResponsesAnswer,
        generation: Generation,
        abort: Callable[[Generation], None],
        next_turn: Callable[[], Generation | None],
    ) -> None:
        self.reason = "abort"
        self._abort = abort
        self._answer = answer
        self._generation = generation
        self._next_turn = next_turn
        self._num_events = 0
        self._earlier: list[int] = []
        self._earlier_text = ""

    def abort(self) -> None:
        """Stop generating; no effect on a finished answer."""
        self._abort(self._generation)

    @property
    def text(self) -> str:
        return self._earlier_text + self._generation.text

    @property
    def _output(self) -> list[int]:
        return [*self._earlier, *self._generation.request.output]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events except the closing ones."""
        answer = self._answer
        if isinstance(answer, ResponsesAnswer):
            for event in answer.opening():
                yield event
            self._num_events = 1
        async for piece in self._pieces():
            self.reason = piece.finish_reason or self.reason
            if self.reason == "error":
                return
            if not self._num_events:
                for event in answer.opening():
                    yield event
            if piece.token_ids or isinstance(answer, MessagesAnswer):
                self._num_events += 1
                yield answer.delta(piece.text, self._num_events)

    async def _pieces(self) -> AsyncIterator[Piece]:
        async for piece in self._generation.pieces():
            yield piece
        following = self._next_turn()
        if following is None:
            return
        self._earlier, self._earlier_text = self._generation.request.output, self._generation.text
        self._generation = following
        async for piece in following.pieces():
            yield piece

    async def break_off(self, call: Call, error: EngineError) -> None:
        """End a failed stream with an error event if vLLM 0.32 has one (entrypoints/anthropic/serving.py).

        vLLM's Responses API fails to write it and cuts the connection.
        """
        if isinstance(self._answer, MessagesAnswer):
            body = {"error": {"type": "internal_error", "message": error.message}}
            await call.write(sse_event("error", body), more=False)

    def closing(self) -> bytes:
        return self._answer.closing(*self._end(), self._num_events + 1)

    def whole(self) -> Json:
        """The complete body."""
        return self._answer.full(*self._end(), self._generation.request.handed)

    def _end(self) -> tuple[str, int, int, str]:
        request = self._generation.request
        return self.text, len(self._output), request.cached_tokens or 0, self.reason


def _as_chat(convert: Callable[[], ChatRequest]) -> ChatRequest:
    try:
        return convert()
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"a message or tool of another shape: {error}") from None
