"""The endpoints of the agents' APIs, ``/v1/messages`` and ``/v1/responses``, with the responses that are
kept."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from http import HTTPStatus

from publisher.simulator.api.agents import MessagesAnswer, MessagesRequest, ResponsesAnswer, ResponsesRequest
from publisher.simulator.api.answers import Json
from publisher.simulator.api.protocol import ChatRequest, EngineError, decode, malformed
from publisher.simulator.http.call import Call
from publisher.simulator.model import EngineModel, Prepared
from publisher.simulator.stepper import Stepper

_RESPONSES_KEPT = 1024


class AgentEndpoints:
    """Answers requests of agents as chats of one model."""

    def __init__(self, model: EngineModel, stepper: Stepper) -> None:
        self._model = model
        self._stepper = stepper
        self._kept: dict[str, tuple[list[Json], Json]] = {}
        """Responses to go on from: their messages and bodies, oldest first."""

    async def messages(self, call: Call) -> None:
        asked = decode(await call.body(), MessagesRequest)
        chat = _as_chat(asked.chat)
        prepared = await self._model.prepare_chat(chat)
        answer = MessagesAnswer(f"msg_{uuid.uuid4().hex}", chat.model or "", len(prepared.token_ids))
        await self._answer(call, answer, chat, prepared)

    async def responses(self, call: Call) -> None:
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

        await self._answer(call, answer, chat, prepared, keep=keep if asked.store else None)

    async def kept_response(self, call: Call, response_id: str) -> None:
        if response_id not in self._kept:
            raise _no_response(response_id)
        await call.reply_json(self._kept[response_id][1])

    async def _answer(
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
                        await call.start_stream()
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


def _as_chat(convert: Callable[[], ChatRequest]) -> ChatRequest:
    try:
        return convert()
    except (KeyError, TypeError, AttributeError) as error:
        raise malformed(f"a message or tool of another shape: {error}") from None


def _no_response(response_id: str) -> EngineError:
    text = f"Response with id '{response_id}' not found."
    return EngineError(HTTPStatus.NOT_FOUND, text, kind="invalid_request_error", param="response_id")
