"""Text-prefix affinity: placement keys of a request whose tokens cannot be known exactly.

The text of a request is laid out canonically (role and content of each message, in order), cut into chunks of
fixed size, and each chunk's key hashes everything up to its end. Two requests share their first n keys
exactly when they share the first n chunks, so a next turn shares all of its past ones.

Invariants: at least one key, at most ``KEYS_MAX``; the same request gives the same keys in every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec
import xxhash

from router.prompts.request import ChatBody, CompletionBody, decode_message, decode_prompt

CHUNK_BYTES: Final = 512
"""About 128 tokens: a few blocks, small enough that a short system prompt already counts."""
KEYS_MAX: Final = 256
"""128 KiB of text; what two longer texts share beyond that does not change their placement."""
_PIECES_MAX: Final = 4096
"""Decoding the messages of more would block the event loop for 5 ms and longer."""
_FIELD_WITHIN_BYTES: Final = 1 << 16

_ANY = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder(order="deterministic")


class TextAffinity(msgspec.Struct, frozen=True):
    """Chained 64-bit keys of text-prefix chunks, and the reason why tokens are not known."""

    keys: tuple[int, ...]
    reason: str


def affinity_keys(pieces: Iterable[bytes], scope: bytes) -> tuple[int, ...]:
    """Keys of the concatenated pieces; ``scope`` (model, adapter, salt) separates requests that share no
    cache."""
    keys: list[int] = []
    parent = xxhash.xxh3_64_intdigest(scope)
    rest = b""
    for piece in islice(pieces, _PIECES_MAX):
        view = memoryview(rest + piece if rest else piece)
        whole = len(view) - len(view) % CHUNK_BYTES
        for start in range(0, whole, CHUNK_BYTES):
            parent = xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES], parent)
            keys.append(parent)
            if len(keys) == KEYS_MAX:
                return tuple(keys)
        rest = bytes(view[whole:])
    if rest or not keys:
        keys.append(xxhash.xxh3_64_intdigest(rest, parent ^ 1))
    return tuple(keys)


def chat_pieces(body: ChatBody) -> Iterator[bytes]:
    """Tools, then role and content of each message; lazily, so that a huge chat costs only its beginning.

    Raises ``ApiError`` 400 for a message of a wrong type.
    """
    if bytes(body.tools) != b"null":
        yield _canonical(body.tools)
    for index, raw in enumerate(body.messages):
        message = decode_message(raw, index)
        yield f"\x1e{message.get('role')}\x1f".encode(errors="replace")
        yield from _content(message.get("content"))
        if message.get("tool_calls"):
            yield _ENCODER.encode(message["tool_calls"])


def completion_pieces(body: CompletionBody) -> Iterator[bytes]:
    """The first prompt's text, or its token ids as JSON. Raises ``ApiError`` 400 for a wrong type."""
    prompt = decode_prompt(body.prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    yield prompt.encode() if isinstance(prompt, str) else _ENCODER.encode(prompt)


def raw_piece(body: bytes, field: bytes) -> bytes:
    """The beginning of a body that is too large to be decoded, from ``field`` on if that is near: there,
    bodies of one conversation differ only in the newest messages."""
    start = max(0, body.find(field, 0, _FIELD_WITHIN_BYTES))
    return body[start : start + KEYS_MAX * CHUNK_BYTES]


def _content(content: Any) -> Iterator[bytes]:
    if isinstance(content, str):
        yield content.encode()
        return
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        yield text.encode() if isinstance(text, str) else _ENCODER.encode(part)


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return _ANY.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _canonical(raw: msgspec.Raw) -> bytes:
    value = _decoded(raw)
    return bytes(raw) if value is None else _ENCODER.encode(value)
