"""A first look at a request body: what the proxy needs of it, without decoding the messages.

``peek`` reads ``model`` and ``stream`` only, and whether there is anything to be kept from engines;
everything else of the JSON is skipped by the parser. It is as lenient as the engine: fields of the wrong
type are left for the engine to reject, and what only Python's own JSON parser accepts (NaN, UTF-16) passes.
A body that is no JSON object at all is refused.

Always true: the event loop is held for some 3 ms per megabyte at most and 15 ms in all: larger bodies are
looked at by ``outline.py`` in a thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Final

import msgspec

from router.openai.errors import ApiError, bad_request
from router.openai.members import at_leisure, has_any
from router.openai.outline import OutlineError, top_level

_REASON_LENGTH_MAX = 200
_LENIENT_BYTES_MAX = 1 << 20
"""Above this size a body is only read by the fast parser: the slow one would hold the event loop."""
_GUARDED: Final = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs", "sampling_params"})
_HINTS: Final = (b"_transfer_params", b"vllm_xargs", b"\\u")
"""Without one of these no key of a text can be a guarded one, however it is written."""
_INLINE_BYTES_MAX: Final = 4 << 20
"""Above this size even skipping holds the loop for too long: up to 4 ms per megabyte of empty lists."""


class Peek(msgspec.Struct, frozen=True, gc=False):
    """The model a request names (None: not named) and whether its answer is to be streamed."""

    model: str | None = None
    stream: bool = False
    guarded: bool = False
    """It has a field that ``router.proxy.screen`` looks into; of a large body: it may have."""
    previous_response: str | None = None
    """The response that it goes on from (Responses API)."""
    request_id: str | None = None
    """The id that its own response is to get (vLLM's Responses API)."""
    priority: int | None = None
    """The whole number that it has there, for engines that schedule by it."""
    prioritized: bool = False
    """It has something there, which an engine may take for a number."""
    prompt: object | None = None
    """What its prompt is made of, where that was decoded with the rest."""


_ABSENT = msgspec.Raw(b"null")
_SEEN = ("model", "stream", "previous_response_id", "priority", "request_id")
_WHOLE = re.compile(rb"-?[0-9]{1,18}")
_PRIORITY_END = 10**18


class _Peek(msgspec.Struct, gc=False):
    """All stay raw: whatever else a client puts there is not worth decoding."""

    model: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    ec_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    previous_response_id: msgspec.Raw = _ABSENT
    request_id: msgspec.Raw = _ABSENT
    priority: msgspec.Raw = _ABSENT


_PEEK = msgspec.json.Decoder(_Peek)
_TEXT = msgspec.json.Decoder(str)


async def peek_any_size(body: bytes) -> Peek:
    """``peek`` for what clients send: a large body is looked at in a thread."""
    if len(body) <= _INLINE_BYTES_MAX:
        return peek(body)
    try:
        found = await asyncio.to_thread(top_level, body, _SEEN)
    except OutlineError as error:
        raise invalid_json(error) from None
    guarded = await at_leisure(has_any(body, _HINTS))
    return _read(*(found.get(name, b"") for name in _SEEN), guarded=guarded)


def peek(body: bytes) -> Peek:
    """Model and stream of a JSON body. Raises ``ApiError`` 400 ``invalid_json`` if it is no JSON object."""
    try:
        seen = _PEEK.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        found = decode_leniently(body, error)
        return Peek(
            _plain_text(found.get("model")),
            found.get("stream") is True,
            not _GUARDED.isdisjoint(found),
            _plain_text(found.get("previous_response_id")),
            _plain_text(found.get("request_id")),
            _whole(found.get("priority")),
            found.get("priority") is not None,
        )
    unset = msgspec.UNSET
    guarded = any(getattr(seen, name) is not unset for name in _GUARDED)
    rest = (seen.previous_response_id, seen.priority, seen.request_id)
    others = (b"" if raw is _ABSENT else bytes(raw) for raw in rest)
    return _read(bytes(seen.model), bytes(seen.stream), *others, guarded=guarded)


def _plain_text(value: Any) -> str | None:
    """Half a surrogate pair is a string in Python and text nowhere else."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


def _read(
    model: bytes, stream: bytes, previous: bytes, priority: bytes, request_id: bytes, *, guarded: bool
) -> Peek:
    try:
        name, earlier, own = map(_text, (model, previous, request_id))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid_json(error) from None
    number = int(priority) if priority and _WHOLE.fullmatch(priority) else None
    prioritized = priority not in (b"", b"null")
    return Peek(name, stream == b"true", guarded, earlier, own, number, prioritized)


def _text(raw: bytes) -> str | None:
    return _TEXT.decode(raw) if raw.startswith(b'"') else None


def whole_number(raw: msgspec.Raw) -> int | None:
    """A number without fraction and of few digits; None for anything else."""
    return int(bytes(raw)) if _WHOLE.fullmatch(raw) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _PRIORITY_END else None


def decode_leniently(body: bytes, first_error: Exception) -> dict[str, Any]:
    """The object in a body the fast parser refused. Raises ``ApiError`` if Python's refuses it too."""
    try:
        found = json.loads(body) if len(body) <= _LENIENT_BYTES_MAX else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise invalid_json(first_error) from None


def invalid_json(error: Exception) -> ApiError:
    """400 ``invalid_json``, with the parser's reason and what to send instead."""
    reason = str(error)[:_REASON_LENGTH_MAX]
    return bad_request(
        "invalid_json",
        f"The request body is not a JSON object: {reason}. "
        "Send one UTF-8 encoded JSON object with content-type application/json.",
    )
