"""A first look at a request body: what the proxy needs of it, without decoding the messages.

``peek`` reads ``model`` and ``stream`` only, and whether there is anything that may have to be kept from
engines; everything else of the JSON is skipped by the parser. ``peek_large`` does the same for a large body
without holding the event loop. Both are as lenient as the engine: fields of the wrong type are left for the
engine to reject, and what only Python's own JSON parser accepts (NaN, UTF-16) passes. A body that is no JSON
object at all is refused.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import msgspec

from router.openai.errors import ApiError, bad_request, body_too_complex
from router.openai.members import STEPS_MAX, MalformedError, Scan, Text, TooManyStepsError

_REASON_LENGTH_MAX = 200
_VALUE_BYTES_MAX = 64 * 1024
_GUARDED = frozenset({"kv_transfer_params", "vllm_xargs"})
LARGE_BYTES = 4 * 1024 * 1024
"""From this size on a body is looked at in steps."""
_LENIENT_BYTES_MAX = 1 << 20
"""Above this size a body is only read by the fast parser: the slow one would hold the event loop."""


class Peek(msgspec.Struct, frozen=True, gc=False):
    """The model a request names (None: not named) and whether its answer is to be streamed."""

    model: str | None = None
    stream: bool = False
    guarded: bool = False
    """It has a field that ``router.proxy.screen`` looks into."""


class _Peek(msgspec.Struct, gc=False):
    model: Any = None
    stream: Any = None
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_PEEK = msgspec.json.Decoder(_Peek)


def peek(body: bytes) -> Peek:
    """Model and stream of a JSON body. Raises ``ApiError`` 400 ``invalid_json`` if it is no JSON object."""
    try:
        seen = _PEEK.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        found = decode_leniently(body, error)
        guarded = not _GUARDED.isdisjoint(found)
        return _peek(found.get("model"), found.get("stream"), guarded=guarded)
    guarded = seen.kv_transfer_params is not msgspec.UNSET or seen.vllm_xargs is not msgspec.UNSET
    return _peek(seen.model, seen.stream, guarded=guarded)


def _peek(model: Any, stream: Any, *, guarded: bool) -> Peek:
    return Peek(model if isinstance(model, str) else None, stream is True, guarded)


def peek_large(body: Text) -> Generator[None, None, Peek]:
    """Steps (see ``members``) to what ``peek`` finds. Raises ``ApiError`` 400 ``invalid_json``, and 413
    ``body_too_complex`` for a body of too many values."""
    scan = Scan(body)
    start = scan.start()
    values: dict[bytes, Any] = {}
    try:
        if start is None:
            raise MalformedError("Expected `object`")
        for member in scan.members(start):
            if member is None:
                yield
            elif member.name in {b"model", b"stream"}:
                values[member.name] = _small(body[member.value : member.end])
            elif member.name.decode("utf-8", "replace") in _GUARDED:
                values[b"guarded"] = True
    except MalformedError as error:
        raise invalid_json(error) from None
    except TooManyStepsError:
        raise body_too_complex(STEPS_MAX) from None
    return _peek(values.get(b"model"), values.get(b"stream"), guarded=b"guarded" in values)


def _small(value: Text) -> Any:
    if len(value) > _VALUE_BYTES_MAX:  # no model's name, but not to be taken for none
        return bytes(value[:_VALUE_BYTES_MAX]).decode("utf-8", "replace") if value[:1] == b'"' else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


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
