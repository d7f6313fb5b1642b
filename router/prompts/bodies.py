"""A request's body by its path, and the configured model or adapter that its model name selects.

A chat is decoded once, for the proxy and for its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from kvatlas.router.openai import apis
from kvatlas.router.openai.body import Peek, named_session
from kvatlas.router.openai.guarded import GUARDED
from kvatlas.router.openai.numbers import whole_number
from kvatlas.router.prompts.chat.anthropic import MessagesBody, decode_messages
from kvatlas.router.prompts.chat.responses import ResponsesBody, decode_responses
from kvatlas.router.prompts.prompt import chat_pieces, completion_pieces
from kvatlas.router.prompts.request import (
    NULL,
    VALUES_MAX,
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

Converted = MessagesBody | ResponsesBody
"""APIs that the engine converts to a chat."""
Parsed = ChatBody | CompletionBody | BatchBody | GenerateBody | Converted

_DECODE: Final[dict[str, Callable[[bytes], Parsed]]] = {
    apis.CHAT: decode_chat,
    apis.COMPLETION: decode_completion,
    apis.BATCH: decode_batch,
    apis.MESSAGES: decode_messages,
    apis.RESPONSES: decode_responses,
    apis.GENERATE: decode_generate,
}
# Larger bodies may have too many values to be decoded: each takes two bytes.
_DECODED_BYTES_MAX: Final = 2 * VALUES_MAX
_FIRST_FIELD: Final = {apis.COMPLETION: b'"prompt"', apis.RESPONSES: b'"input"'}


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
    priority: msgspec.Raw = NULL
    session_id: msgspec.Raw = NULL
    metadata: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL


_OTHERS: Final = tuple(name for name in GUARDED if name != "kv_transfer_params")
_CHAT: Final = msgspec.json.Decoder(
    msgspec.defstruct(
        "_GuardedChat",
        [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in _OTHERS],
        bases=(_Chat,),
        gc=False,
        kw_only=True,
    )
)
_UNGUARDED: Final = (msgspec.UNSET,) * len(_OTHERS)


def peek_chat(path: str, body: bytes) -> Peek | None:
    """Peek at a chat and decode the fields of its prompt together; None for other requests, large bodies and
    unusual fields, for which ``peek`` is used."""
    if path != apis.CHAT or len(body) > _DECODED_BYTES_MAX:
        return None
    try:
        chat: _Chat = _CHAT.decode(body)  # type: ignore[assignment]  # made at run time, of this base
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if (
        chat.kv_transfer_params is not msgspec.UNSET
        or msgspec.structs.astuple(chat)[-len(_OTHERS) :] != _UNGUARDED
    ):
        return None
    chat.kv_transfer_params = None
    priority = None if chat.priority is NULL else whole_number(chat.priority, "priority")
    prioritized = chat.priority is not NULL and bytes(chat.priority) != b"null"
    look = Peek(chat.model, chat.stream is True, priority=priority, prioritized=prioritized, prompt=chat)
    if chat.session_id is chat.metadata is chat.prompt_cache_key is NULL:
        return look
    session = named_session(bytes(chat.session_id), bytes(chat.prompt_cache_key), bytes(chat.metadata))
    return msgspec.structs.replace(look, session=session)


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
