"""Request bodies by path: which API's fields they are read as."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from router.openai import apis
from router.prompts.affinity import chat_pieces, completion_pieces
from router.prompts.chat.anthropic import MessagesBody, decode_messages
from router.prompts.chat.cohere import CohereBody, decode_cohere
from router.prompts.chat.responses import ResponsesBody, decode_responses
from router.prompts.request import (
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

Converted = MessagesBody | ResponsesBody | CohereBody
"""What the engine turns into a chat."""
Parsed = ChatBody | CompletionBody | BatchBody | GenerateBody | Converted

_DECODE: Final[dict[str, Callable[[bytes], Parsed]]] = {
    apis.CHAT: decode_chat,
    apis.COMPLETION: decode_completion,
    apis.BATCH: decode_batch,
    apis.MESSAGES: decode_messages,
    apis.RESPONSES: decode_responses,
    apis.GENERATE: decode_generate,
    apis.COHERE: decode_cohere,
}
_FIRST_FIELD: Final = {apis.COMPLETION: b'"prompt"', apis.RESPONSES: b'"input"'}


def decode_body(path: str, body: bytes) -> Parsed:
    """The fields that decide the prompt. Raises ``NotLocalError``, or ``ApiError`` 400."""
    decode = _DECODE.get(path)
    if decode is None:
        raise NotLocalError("endpoint")
    return decode(body)


def pieces_of(parsed: Parsed) -> Iterator[bytes]:
    """The text of the (first) prompt, in order. Raises ``ApiError`` 400 for a wrong type."""
    if isinstance(parsed, ChatBody):
        return chat_pieces(parsed)
    if isinstance(parsed, CompletionBody):
        return completion_pieces(parsed)
    return parsed.pieces()


def prompt_field(path: str) -> bytes:
    """The key where the prompt begins in a body that is not decoded."""
    return _FIRST_FIELD.get(path, b'"messages"')
