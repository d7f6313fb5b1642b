"""The simulated engine as a raw ASGI application with vLLM's paths, bodies and errors.

Generation endpoints answer whole or as server-sent events; a client that goes away aborts its request, also
before the first token. Tokenizing long prompts happens in a thread. Every error is an ``EngineError`` turned
into JSON in one place.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec

from publisher.simulator.api import answers
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
)
from publisher.simulator.http.agents import AgentEndpoints
from publisher.simulator.http.call import Call, ClientGoneError, Receive, Scope, Send
from publisher.simulator.model import EngineModel, Prepared
from publisher.simulator.stepper import Generation, Stepper

_Handler = Callable[["Call"], Awaitable[None]]

VERSION = "0.32.0+kvatlas"
"""The vLLM release whose behaviour is simulated, marked as a simulation."""

_METRICS = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")


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
        self._agents = AgentEndpoints(model, stepper)
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/messages": ("POST", self._agents.messages),
            "/v1/responses": ("POST", self._agents.responses),
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
            return lambda call: self._agents.kept_response(call, path.rpartition("/")[2])
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
        await call.start_stream()
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
