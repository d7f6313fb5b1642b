"""A first look at a request body: what the proxy needs of it, without decoding the messages.

``peek`` reads ``model`` and ``stream`` only; everything else of the JSON is skipped by the parser. It is
as lenient as the engine: fields of the wrong type are left for the engine to reject, and what only
Python's own JSON parser accepts (NaN, UTF-16) passes. A body that is no JSON object at all is refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from router.openai.errors import ApiError, bad_request

_REASON_LENGTH_MAX = 200
_LENIENT_BYTES_MAX = 1 << 20
"""Above this size a body is only read by the fast parser: the slow one would hold the event loop."""


class Peek(msgspec.Struct, frozen=True, gc=False):
    """The model a request names (None: not named) and whether its answer is to be streamed."""

    model: str | None = None
    stream: bool = False


class _Peek(msgspec.Struct, gc=False):
    model: Any = None
    stream: Any = None


_PEEK = msgspec.json.Decoder(_Peek)


def peek(body: bytes) -> Peek:
    """Model and stream of a JSON body. Raises ``ApiError`` 400 ``invalid_json`` if it is no JSON object."""
    try:
        seen = _PEEK.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        found = decode_leniently(body, error)
        seen = _Peek(found.get("model"), found.get("stream"))
    model = seen.model if isinstance(seen.model, str) else None
    return Peek(model, seen.stream is True)


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
