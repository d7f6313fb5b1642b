"""The simulated engine's HTTP face: a raw ASGI application with vLLM's paths, bodies and errors.

Generation endpoints answer whole or as server-sent events; a client that goes away aborts its request, also
before the first token. Tokenizing long prompts happens in a thread. Every error is an ``EngineError`` turned
into JSON in one place.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from publisher.simulator.api import answers
from publisher.simulator.api.agents import MessagesAnswer, MessagesRequest, ResponsesAnswer, ResponsesRequest
from publisher.simulator.api.answers import Answer, Json
from publisher.simulator.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EngineError,
    TokenizeChatRequest,
    TokenizeTextRequest,
    UnroutedError,
    decode,
    malformed,
)
from publisher.simulator.model import EngineModel, Prepared
from publisher.simulator.stepper import Generation, Stepper

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Handler = Callable[["Call"], Awaitable[None]]

VERSION = "0.32.0+kvatlas"
"""The vLLM release whose behaviour is simulated, marked as a simulation."""
BODY_BYTES_MAX = 64 << 20
_RESPONSES_KEPT = 1024

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_METRICS = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")


class Call:
    """One HTTP exchange."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])

    async def body(self) -> bytes:
        """The request body. Raises ``EngineError`` where it is not JSON by its type, or too large."""
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
        return b"".join(parts)

    async def start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        """Send the status line and headers."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(
        self, body: bytes, *, status: int = 200, content_type: tuple[bytes, bytes] = _JSON
    ) -> None:
        """Send a whole answer."""
        await self.start(status, content_type, (b"content-length", str(len(body)).encode()))
        await self.write(body, more=False)

    async def reply_json(self, value: Any) -> None:
        """Send ``value`` as JSON with status 200."""
        await self.reply(msgspec.json.encode(value))

    @asynccontextmanager
    async def on_disconnect(self, action: Callable[[], None]) -> AsyncIterator[None]:
        """Call ``action`` if the client goes away within the block; the body must have been read."""
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


class EngineApp:
    """ASGI application over one model and one stepper; ``event_sources`` is what /kv_event_sources says,
    ``enable_scale_out`` whether the render endpoints answer."""

    def __init__(
        self, model: EngineModel, stepper: Stepper, *, event_sources: Json, enable_scale_out: bool
    ) -> None:
        self._enable_scale_out = enable_scale_out
        self._model = model
        self._stepper = stepper
        self._event_sources = event_sources
        self._created = int(time.time())
        self._kept: dict[str, tuple[list[Json], Json]] = {}
        """Responses to go on from: their messages and bodies, oldest first."""
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/messages": ("POST", self._messages),
            "/v1/responses": ("POST", self._responses),
            "/v1/chat/completions/render": ("POST", self._render_chat),
            "/v1/completions/render": ("POST", self._render_completion),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/kv_event_sources": ("GET", self._sources),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point; the server sends HTTP scopes only (lifespan and websockets are off)."""
        call = Call(scope, receive, send)
        try:
            await self._handler(scope)(call)
        except EngineError as error:
            await call.reply(error.body(), status=error.status)
        except ClientGoneError:
            return

    def _handler(self, scope: Scope) -> _Handler:
        path = scope["path"]
        if path.startswith("/v1/responses/") and scope["method"] == "GET":
            return lambda call: self._kept_response(call, path.rpartition("/")[2])
        method, handler = self._routes.get(path, ("", None))
        if handler is None:
            raise UnroutedError(HTTPStatus.NOT_FOUND)
        if scope["method"] != method:
            raise UnroutedError(HTTPStatus.METHOD_NOT_ALLOWED)
        return handler

    async def _chat(self, call: Call) -> None:
        request = decode(await call.body(), ChatRequest)
        await self._generate(call, request, await self._model.prepare_chat(request))

    async def _completion(self, call: Call) -> None:
        request = decode(await call.body(), CompletionRequest)
        await self._generate(call, request, await self._model.prepare_completion(request))

    async def _messages(self, call: Call) -> None:
        asked = decode(await call.body(), MessagesRequest)
        chat = _as_chat(asked.chat)
        prepared = await self._model.prepare_chat(chat)
        answer = MessagesAnswer(f"msg_{uuid.uuid4().hex}", chat.model or "", len(prepared.token_ids))
        await self._answer_agent(call, answer, chat, prepared)

    async def _responses(self, call: Call) -> None:
        asked = decode(await call.body(), ResponsesRequest)
        earlier = asked.previous_response_id
        if earlier is not None and earlier not in self._kept:
            raise _no_response(earlier)
        chat = _as_chat(lambda: asked.chat(self._kept[earlier][0] if earlier is not None else []))
        prepared = await self._model.prepare_chat(chat)
        name = chat.model or self._model.name
        answer = ResponsesAnswer(f"resp_{uuid.uuid4().hex}", name, len(prepared.token_ids), earlier)

        def keep(text: str, whole: Json) -> None:
            said = {"role": "assistant", "content": text}
            self._kept[answer.request_id] = [*chat.messages, said], whole
            while len(self._kept) > _RESPONSES_KEPT:
                del self._kept[next(iter(self._kept))]

        await self._answer_agent(call, answer, chat, prepared, keep=keep if asked.store else None)

    async def _kept_response(self, call: Call, response_id: str) -> None:
        if response_id not in self._kept:
            raise _no_response(response_id)
        await call.reply_json(self._kept[response_id][1])

    async def _answer_agent(
        self,
        call: Call,
        answer: MessagesAnswer | ResponsesAnswer,
        asked: ChatRequest,
        prepared: Prepared,
        *,
        keep: Callable[[str, Json], None] | None = None,
    ) -> None:
        """Generate and answer; ``keep`` is told the text and the whole answer before the client has it."""
        generation = self._stepper.submit(self._model.sim_request(answer.request_id, prepared))
        reason, begun = "abort", False
        try:
            async with call.on_disconnect(lambda: self._stepper.abort(generation)):
                async for token in generation.tokens():
                    reason = token.finish_reason or reason
                    if not asked.stream:
                        continue
                    if not begun:
                        begun = True
                        await call.start(200, _SSE, (b"cache-control", b"no-cache"))
                        await call.write(answer.opening(), more=True)
                    piece = "" if token.token_id is None else self._model.text([token.token_id])
                    await call.write(answer.delta(piece), more=True)
                if reason == "error" and not begun:
                    text = "the engine failed"
                    raise EngineError(HTTPStatus.INTERNAL_SERVER_ERROR, text, kind="EngineDeadError")
                output = generation.request.output
                text, cached = self._model.text(output), generation.request.cached_tokens or 0
                whole = answer.full(text, len(output), cached, reason)
                if keep is not None:
                    keep(text, whole)
                if begun:
                    await call.write(answer.closing(text, len(output), cached, reason), more=False)
                else:
                    await call.reply_json(whole)
        finally:
            self._stepper.abort(generation)

    async def _generate(self, call: Call, asked: ChatRequest | CompletionRequest, prepared: Prepared) -> None:
        if self._stepper.failed:
            raise EngineError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine is dead", kind="EngineDeadError")
        is_chat = isinstance(asked, ChatRequest)
        request_id = _request_id(call, asked, "chatcmpl" if is_chat else "cmpl")
        answer = Answer(
            request_id=request_id,
            created=int(time.time()),
            model=asked.model or self._model.name,
            is_chat=is_chat,
            num_prompt_tokens=len(prepared.token_ids),
            prompt_token_ids=prepared.token_ids if asked.return_token_ids else None,
        )
        generation = self._stepper.submit(self._model.sim_request(request_id, prepared))
        try:
            async with call.on_disconnect(lambda: self._stepper.abort(generation)):
                if asked.stream:
                    await self._stream(call, answer, asked, generation)
                else:
                    await self._whole(call, answer, generation)
        finally:
            self._stepper.abort(generation)

    async def _whole(self, call: Call, answer: Answer, generation: Generation) -> None:
        finish_reason = "abort"
        async for token in generation.tokens():
            finish_reason = token.finish_reason or finish_reason
        if finish_reason == "error":
            raise EngineError(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine failed", kind="EngineDeadError")
        request = generation.request
        text = self._model.text(request.output)
        await call.reply_json(answer.full(text, request.output, finish_reason, request.cached_tokens or 0))

    async def _stream(
        self, call: Call, answer: Answer, asked: ChatRequest | CompletionRequest, generation: Generation
    ) -> None:
        await call.start(200, _SSE, (b"cache-control", b"no-cache"))
        count = 0
        async for token in generation.tokens():
            if answer.is_chat and not count:
                await call.write(_event(_with_usage(answer.opening(), asked, answer, 0)), more=True)
            text = "" if token.token_id is None else self._model.text([token.token_id])
            last = token.finish_reason is not None and not asked.include_usage
            chunk = answer.chunk(text, token.token_id, token.finish_reason, first=not count, last=last)
            count += token.token_id is not None
            await call.write(_event(_with_usage(chunk, asked, answer, count)), more=True)
        if asked.include_usage:
            closing = answer.closing(count, generation.request.cached_tokens or 0)
            await call.write(_event(closing), more=True)
        await call.write(b"data: [DONE]\n\n", more=False)

    async def _render_chat(self, call: Call) -> None:
        self._check_scale_out()
        request = decode(await call.body(), ChatRequest)
        prepared = await self._model.prepare_chat(request)
        await call.reply_json(_rendered(call, request, prepared, "chatcmpl"))

    async def _render_completion(self, call: Call) -> None:
        self._check_scale_out()
        request = decode(await call.body(), CompletionRequest)
        prepared = await self._model.prepare_completion(request)
        await call.reply_json([_rendered(call, request, prepared, "cmpl")])

    def _check_scale_out(self) -> None:
        if not self._enable_scale_out:
            text = "Scale-out endpoints are disabled (enable_scale_out)."
            raise EngineError(HTTPStatus.FORBIDDEN, text, kind="PermissionDeniedError")

    async def _tokenize(self, call: Call) -> None:
        body = await call.body()
        is_chat = "messages" in decode(body, dict[str, msgspec.Raw])
        request = decode(body, TokenizeChatRequest) if is_chat else decode(body, TokenizeTextRequest)
        token_ids = await self._model.tokenize(request)
        strings = self._model.token_strings(token_ids) if request.return_token_strs else None
        await call.reply_json(answers.tokenized(token_ids, strings, self._model.max_model_len))

    async def _detokenize(self, call: Call) -> None:
        request = decode(await call.body(), DetokenizeRequest)
        await call.reply_json({"prompt": self._model.detokenize(request)})

    async def _reset_prefix_cache(self, call: Call) -> None:
        await call.reply_json({"success": self._stepper.scheduler.reset_prefix_cache()})

    async def _models(self, call: Call) -> None:
        listed = answers.model_list(self._model.name, self._model.max_model_len, self._created)
        await call.reply_json(listed)

    async def _health(self, call: Call) -> None:
        await call.start(503 if self._stepper.failed else 200, (b"content-length", b"0"))
        await call.write(b"", more=False)

    async def _version(self, call: Call) -> None:
        await call.reply_json({"version": VERSION})

    async def _metrics(self, call: Call) -> None:
        scheduler = self._stepper.scheduler
        await call.reply(self._model.metrics(scheduler.stats, scheduler.gauges()), content_type=_METRICS)

    async def _sources(self, call: Call) -> None:
        await call.reply_json(self._event_sources)


def _as_chat(convert: Callable[[], ChatRequest]) -> ChatRequest:
    try:
        return convert()
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"a message or tool of another shape: {error}") from None


def _no_response(response_id: str) -> EngineError:
    text = f"Response with id '{response_id}' not found."
    return EngineError(HTTPStatus.NOT_FOUND, text, kind="invalid_request_error", param="response_id")


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _with_usage(chunk: Json, asked: ChatRequest | CompletionRequest, answer: Answer, count: int) -> Json:
    return {**chunk, "usage": answer.usage(count)} if asked.continuous_usage else chunk


def _request_id(call: Call, asked: ChatRequest | CompletionRequest, prefix: str) -> str:
    given = call.headers.get(b"x-request-id", b"").decode("latin-1")
    return f"{prefix}-{given or asked.request_id or uuid.uuid4().hex}"


def _rendered(call: Call, asked: ChatRequest | CompletionRequest, prepared: Prepared, prefix: str) -> Json:
    return answers.rendered(
        _request_id(call, asked, prefix),
        prepared.token_ids,
        model=asked.model,
        max_tokens=prepared.max_tokens,
        stream=bool(asked.stream),
        stream_options=asked.stream_options,
        cache_salt=asked.cache_salt,
    )
