"""The simulated engine as a raw ASGI application with vLLM's paths, bodies and errors.

Generation endpoints send a complete body or server-sent events. A client that disconnects aborts its request,
even before the first token. Long prompts are tokenized in a thread. One place turns every ``EngineError``
into JSON.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

from kvatlas.publisher.simulator import api_answers
from kvatlas.publisher.simulator.api_answers import Answer, Json
from kvatlas.publisher.simulator.api_protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EngineError,
    GenerateRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    UnroutedError,
    decode,
)
from kvatlas.publisher.simulator.http_agents import (
    AgentEndpoints,
    Call,
    ClientGoneError,
    Receive,
    Scope,
    Send,
)
from kvatlas.publisher.simulator.model import EngineModel, Prepared
from kvatlas.publisher.simulator.settings import CrashPoint
from kvatlas.publisher.simulator.stepper import Generation, Stepper

_Handler = Callable[["Call"], Awaitable[None]]

# The first release whose streams carry ``kv_transfer_params``.
_PARAMS_IN_STREAMS = (0, 33)

_GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"}
)
# Endpoints that SGLang does not have.
_ONLY_VLLM = (
    "/metrics/",
    "/version",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/inference/v1/generate",
)
_METRICS = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")


class CrashSwitch:
    """Crash a simulated engine during an answer, for tests and demonstrations.

    It wraps ``send`` between application and server. ``at`` is the point of the next generated answer at
    which the engine ends, without any further answer or event and with all ports closed; None to keep it
    running.
    """

    def __init__(self, at: CrashPoint | None, die: Callable[[], None]) -> None:
        self.at = at
        self._die = die

    def watch(self, send: Send) -> Send:
        """Wrap ``send`` of one answer; the wrapper raises ``ClientGoneError`` after the crash."""

        async def watched(message: MutableMapping[str, Any]) -> None:
            begins = message["type"] == "http.response.start"
            if begins and self.at == "before_answer":
                self._end()
            ends = not begins and not message.get("more_body", False)
            if not begins and self.at == "after_first_byte":
                body = message["body"]
                await send({**message, "body": body[: max(1, len(body) // 2)], "more_body": True})
                self._end()
            await send(message)
            if ends and self.at == "after_answer":
                self._end()

        return watched

    def _end(self) -> None:
        self._die()
        raise ClientGoneError


class EngineApp:
    """ASGI application over one model and one stepper.

    ``event_sources`` is the body of vLLM's /kv_event_sources, ``server_info`` that of SGLang's /server_info;
    ``enable_scale_out`` enables the render endpoints.
    """

    def __init__(
        self,
        model: EngineModel,
        stepper: Stepper,
        *,
        event_sources: Json | None,
        server_info: Json | None = None,
        enable_scale_out: bool,
        crash_switch: CrashSwitch,
        drops_salt: str = "",
    ) -> None:
        self._drops_salt = frozenset(drops_salt.split(","))
        self._crash_switch = crash_switch
        self._enable_scale_out = enable_scale_out
        self._model = model
        self._stepper = stepper
        self._created = int(time.time())
        self._agents = AgentEndpoints(model, stepper)
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/messages": ("POST", self._agents.messages),
            "/v1/messages/count_tokens": ("POST", self._agents.count_tokens),
            "/v1/messages/render": ("POST", self._scale_out(self._agents.render_messages)),
            "/v1/responses": ("POST", self._agents.responses),
            "/v1/responses/render": ("POST", self._scale_out(self._agents.render_responses)),
            "/v1/chat/completions/render": ("POST", self._scale_out(self._render_chat)),
            "/v1/completions/render": ("POST", self._scale_out(self._render_completion)),
            "/inference/v1/generate": ("POST", self._scale_out(self._generate_tokens)),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/metrics/": ("GET", self._metrics_by_name),
        }
        if event_sources is not None:
            self._routes["/kv_event_sources"] = ("GET", lambda call: call.reply_json(event_sources))
        if server_info is not None:
            self._routes["/server_info"] = ("GET", lambda call: call.reply_json(server_info))
            for path in _ONLY_VLLM:
                del self._routes[path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point; the server sends HTTP scopes only (lifespan and websockets are off)."""
        if scope["path"] in _GENERATING:
            send = self._crash_switch.watch(send)
        call = Call(scope, receive, send)
        call.drops_salt = scope["path"] in self._drops_salt
        try:
            await self._handler(scope)(call)
        except EngineError as error:
            with contextlib.suppress(ClientGoneError):
                await call.reply(error.body(), status=error.status)
        except ClientGoneError:
            return

    def _handler(self, scope: Scope) -> _Handler:
        path = scope["path"]
        method, handler = self._routes.get(path) or self._response_route(path)
        if handler is None:
            raise UnroutedError(HTTPStatus.NOT_FOUND)
        if scope["method"] != method:
            raise UnroutedError(HTTPStatus.METHOD_NOT_ALLOWED)
        return handler

    def _response_route(self, path: str) -> tuple[str, _Handler | None]:
        """Method and handler of a path below one stored response."""
        head, _, rest = path.partition("/v1/responses/")
        response_id, _, action = rest.partition("/")
        if head or not response_id or action not in {"", "cancel"}:
            return "", None
        if action:
            return "POST", lambda call: self._agents.cancel_response(call, response_id)
        return "GET", lambda call: self._agents.get_response(call, response_id)

    def _scale_out(self, handler: _Handler) -> _Handler:
        if self._enable_scale_out:
            return handler

        async def refused(_call: Call) -> None:
            text = "Scale-out endpoints are disabled (enable_scale_out)."
            raise EngineError(HTTPStatus.FORBIDDEN, text, kind="PermissionDeniedError")

        return refused

    async def _chat(self, call: Call) -> None:
        request = decode(await call.body(), ChatRequest)
        call.apply_headers(request)
        self._stepper.check()

        async def preparing() -> list[Prepared]:
            return [await self._model.prepare_chat(request)]

        await self._generate(call, request, preparing())

    async def _completion(self, call: Call) -> None:
        request = decode(await call.body(), CompletionRequest)
        call.apply_headers(request)
        self._stepper.check()
        await self._generate(call, request, self._model.prepare_completion(request))

    async def _generate(
        self, call: Call, body: ChatRequest | CompletionRequest, preparing: Awaitable[list[Prepared]]
    ) -> None:
        prepared = await self._stepper.prepared(preparing, body.kv_transfer_params)
        is_chat = isinstance(body, ChatRequest)
        request_id = _request_id(call, body, "chatcmpl" if is_chat else "cmpl")
        answer = Answer(
            request_id=request_id,
            created=int(time.time()),
            model=body.model or self._model.name,
            is_chat=is_chat,
            num_prompt_tokens=sum(len(one.token_ids) for one in prepared),
            prompt_token_ids=prepared[0].token_ids if body.return_token_ids else None,
        )
        generations = [
            self._stepper.submit(request) for request in self._model.sim_requests(request_id, prepared)
        ]
        try:
            async with call.on_disconnect(lambda: self._stepper.abort(*generations)):
                if body.stream:
                    await self._stream(call, answer, body, generations)
                else:
                    await self._whole(call, answer, generations)
        finally:
            self._stepper.abort(*generations)

    async def _whole(self, call: Call, answer: Answer, generations: list[Generation]) -> None:
        choices = []
        for generation in generations:
            finish_reason = await generation.finished()
            if finish_reason == "error":
                raise self._stepper.failure()
            output = generation.request.output
            prompt = generation.request.prompt
            stop = generation.stopped_by
            choices.append(api_answers.Choice(generation.text, output, finish_reason, prompt, stop))
        cached_tokens, first = generations[-1].request.cached_tokens, generations[0].request
        await call.reply_json(answer.full(choices, cached_tokens or 0, first.handed))

    async def _stream(
        self,
        call: Call,
        answer: Answer,
        body: ChatRequest | CompletionRequest,
        generations: list[Generation],
    ) -> None:
        """Stream the choices one after the other; clients may not rely on that order. An error is an
        event."""
        await call.start_stream()
        total = 0
        try:
            for index, generation in enumerate(generations):
                own = answer
                if answer.prompt_token_ids is not None:
                    own = msgspec.structs.replace(answer, prompt_token_ids=generation.request.prompt)
                total += await self._stream_choice(call, own, body, generation, (index, total))
            if body.include_usage:
                closing = answer.closing(total, generations[-1].request.cached_tokens or 0)
                await call.write(_event(closing), more=True)
        except EngineError as error:
            await call.write(b"data: " + error.body() + b"\n\n", more=True)
        await call.write(b"data: [DONE]\n\n", more=False)

    async def _stream_choice(
        self,
        call: Call,
        answer: Answer,
        body: ChatRequest | CompletionRequest,
        generation: Generation,
        place: tuple[int, int],
    ) -> int:
        """Stream one choice; returns its number of tokens.

        ``place`` is the index of the choice, and the number of tokens of the choices before it.
        """
        (index, before), count = place, 0
        async for piece in generation.pieces():
            if piece.finish_reason == "error":
                raise self._stepper.failure()
            if answer.is_chat and not count:
                await call.write(_event(_with_usage(answer.opening(index), body, answer, before)), more=True)
            last = piece.finish_reason is not None and not body.include_usage
            chunk = answer.chunk(
                piece.text, piece.token_ids, piece.finish_reason, first=not count, last=last, index=index
            )
            if generation.stopped_by is not None and piece.finish_reason is not None:
                chunk["choices"][0]["stop_reason"] = generation.stopped_by
            if piece.finish_reason is not None and self._model.release >= _PARAMS_IN_STREAMS:
                chunk["kv_transfer_params"] = generation.request.handed
            count += len(piece.token_ids)
            await call.write(_event(_with_usage(chunk, body, answer, before + count)), more=True)
        return count

    async def _generate_tokens(self, call: Call) -> None:
        """Generate from token ids; complete bodies only."""
        self._stepper.check()
        body = decode(await call.body(), GenerateRequest)
        completion = body.completion()
        preparing = self._model.prepare_completion(completion)
        (prepared,) = await self._stepper.prepared(preparing, body.kv_transfer_params)
        request_id = _request_id(call, completion, "generate-tokens")
        request = self._model.sim_request(request_id, prepared)
        generation = self._stepper.submit(request)
        try:
            async with call.on_disconnect(lambda: self._stepper.abort(generation)):
                reason = await generation.finished()
        finally:
            self._stepper.abort(generation)
        if reason == "error":
            raise self._stepper.failure()
        await call.reply_json(
            api_answers.generated(
                request_id, len(prepared.token_ids), request, reason, model=self._model.name
            )
        )

    async def _render_chat(self, call: Call) -> None:
        request = decode(await call.body(), ChatRequest)
        prepared = await self._model.prepare_chat(request)
        await call.reply_json(_rendered(call, request, prepared, "chatcmpl"))

    async def _render_completion(self, call: Call) -> None:
        request = decode(await call.body(), CompletionRequest)
        prepared = await self._model.prepare_completion(request)
        await call.reply_json([_rendered(call, request, one, "cmpl") for one in prepared])

    async def _tokenize(self, call: Call) -> None:
        body = await call.body()
        is_chat = "messages" in decode(body, dict[str, msgspec.Raw])
        request = decode(body, TokenizeChatRequest) if is_chat else decode(body, TokenizeTextRequest)
        token_ids = await self._model.tokenize(request)
        strings = self._model.token_strings(token_ids) if request.return_token_strs else None
        await call.reply_json(api_answers.tokenized(token_ids, strings, self._model.max_model_len))

    async def _detokenize(self, call: Call) -> None:
        request = decode(await call.body(), DetokenizeRequest)
        await call.reply_json({"prompt": self._model.detokenize(request)})

    async def _reset_prefix_cache(self, call: Call) -> None:
        await call.reply_json({"success": self._stepper.scheduler.reset_prefix_cache()})

    async def _models(self, call: Call) -> None:
        listed = api_answers.model_list(
            self._model.name,
            self._model.root,
            self._model.max_model_len,
            self._created,
            owner=self._model.owner,
        )
        await call.reply_json(listed)

    async def _health(self, call: Call) -> None:
        await call.start(503 if self._stepper.failed else 200, (b"content-length", b"0"))
        await call.write(b"", more=False)

    async def _version(self, call: Call) -> None:
        await call.reply_json({"version": f"{self._model.version}+kvatlas"})

    async def _metrics(self, call: Call) -> None:
        await call.reply(self._metrics_page(), content_type=_METRICS)

    async def _metrics_by_name(self, call: Call) -> None:
        """prometheus_client's application: the query names samples, which ``/metrics`` ignores in vLLM."""
        names = call.values("name[]")
        page = self._metrics_page(names)
        if names:
            found = re.compile(rf"(# \w+ )?({'|'.join(map(re.escape, names))})[{{ ]".encode())
            page = b"".join(line for line in page.splitlines(keepends=True) if found.match(line))
        await call.reply(page, content_type=_METRICS)

    def _metrics_page(self, only: Collection[str] = ()) -> bytes:
        scheduler = self._stepper.scheduler
        transfers = None if scheduler.connector is None else scheduler.connector.metrics
        return self._model.metrics(scheduler.stats, scheduler.gauges(), transfers, only)


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _with_usage(chunk: Json, body: ChatRequest | CompletionRequest, answer: Answer, count: int) -> Json:
    return {**chunk, "usage": answer.usage(count)} if body.continuous_usage else chunk


def _request_id(call: Call, body: ChatRequest | CompletionRequest, prefix: str) -> str:
    given = call.headers.get(b"x-request-id", b"").decode("latin-1")
    return f"{prefix}-{given or body.request_id or uuid.uuid4().hex}"


def _rendered(call: Call, body: ChatRequest | CompletionRequest, prepared: Prepared, prefix: str) -> Json:
    return api_answers.rendered(
        _request_id(call, body, prefix),
        prepared.token_ids,
        model=body.model,
        max_tokens=prepared.max_tokens,
        stream=bool(body.stream),
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
    )
