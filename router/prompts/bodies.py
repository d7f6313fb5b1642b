"""Request bodies by path: the API whose fields they are read as. A chat is decoded once, for the proxy and
for its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from router.openai import request
from router.openai.body import Peek, named_session, whole_number
from router.prompts.affinity import chat_pieces, completion_pieces
from router.prompts.chat.anthropic import MessagesBody, decode_messages
from router.prompts.chat.cohere import CohereBody, decode_cohere
from router.prompts.chat.responses import ResponsesBody, decode_responses
from router.prompts.request import (
    NULL,
    BatchBody,
    ChatBody,
    CompletionBody,
    GenerateBody,
    NotLocalError,
    decode_batch,
    decode_chat,
    decode_completion,
    decode_generate,
)
from router.prompts.sizes import VALUES_MAX

Converted = MessagesBody | ResponsesBody | CohereBody
"""APIs that the engine converts to a chat."""
Parsed = ChatBody | CompletionBody | BatchBody | GenerateBody | Converted

_DECODE: Final[dict[str, Callable[[bytes], Parsed]]] = {
    request.CHAT: decode_chat,
    request.COMPLETION: decode_completion,
    request.BATCH: decode_batch,
    request.MESSAGES: decode_messages,
    request.RESPONSES: decode_responses,
    request.GENERATE: decode_generate,
    request.COHERE: decode_cohere,
}
_DECODED_BYTES_MAX: Final = 2 * VALUES_MAX
"""Larger bodies may have too many values to be decoded: each takes two bytes."""
_FIRST_FIELD: Final = {request.COMPLETION: b'"prompt"', request.RESPONSES: b'"input"'}


def decode_body(path: str, body: bytes) -> Parsed:
    """Decode the fields that decide the prompt. Raises ``NotLocalError``, or ``ApiError`` 400."""
    decode = _DECODE.get(path)
    if decode is None:
        raise NotLocalError("endpoint")
    return decode(body)


class _Chat(ChatBody, gc=False, kw_only=True):
    """A chat with all fields that are checked in its request."""

    model: str | None = None
    stream: bool | None = False
    kv_transfer_params: Any = msgspec.UNSET
    ec_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    priority: msgspec.Raw = NULL
    session_id: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL


_CHAT: Final = msgspec.json.Decoder(_Chat)


def peek_chat(path: str, body: bytes) -> Peek | None:
    """Peek at a chat and decode the fields of its prompt together; None for other requests, large bodies and
    unusual fields, for which ``peek`` is used."""
    if path != request.CHAT or len(body) > _DECODED_BYTES_MAX:
        return None
    try:
        chat = _CHAT.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not chat.kv_transfer_params is chat.vllm_xargs is chat.sampling_params is msgspec.UNSET:
        return None
    if chat.ec_transfer_params is not msgspec.UNSET:
        return None
    chat.kv_transfer_params = None
    priority = None if chat.priority is NULL else whole_number(chat.priority)
    prioritized = chat.priority is not NULL and bytes(chat.priority) != b"null"
    look = Peek(chat.model, chat.stream is True, priority=priority, prioritized=prioritized, prompt=chat)
    if chat.session_id is chat.metadata is chat.prompt_cache_key is NULL:
        return look
    session = named_session(bytes(chat.session_id), bytes(chat.prompt_cache_key), bytes(chat.metadata))
    return msgspec.structs.replace(look, session=session)


def answer_tokens_max(parsed: Parsed) -> int:
    """Return the limit that a request sets to its answer, in tokens; 0 if it sets none."""
    given: Any = parsed.sampling_params if isinstance(parsed, GenerateBody) else None
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        limit = given.get(name) if isinstance(given, dict) else getattr(parsed, name, None)
        if type(limit) is int and limit > 0:
            return limit
    return 0


def pieces_of(parsed: Parsed) -> Iterator[bytes]:
    """The text of the (first) prompt, in order. Raises ``ApiError`` 400 for a wrong type."""
    if isinstance(parsed, ChatBody):
        return chat_pieces(parsed)
    if isinstance(parsed, CompletionBody):
        return completion_pieces(parsed)
    return parsed.pieces()


def prompt_field(path: str) -> bytes:
    """The key at which the prompt begins in a body that is not decoded."""
    return _FIRST_FIELD.get(path, b'"messages"')
