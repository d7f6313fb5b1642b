"""A first look at a request body: what the proxy needs of it, without decoding the messages.

``peek`` reads ``model`` and ``stream`` only; everything else of the JSON is skipped by the parser. It is
as lenient as the engine: fields of the wrong type are left for the engine to reject, only a body that is
no JSON object at all is refused here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.errors import bad_request

_REASON_LENGTH_MAX = 200


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
        raise bad_request(
            "invalid_json",
            f"The request body is not a JSON object: {str(error)[:_REASON_LENGTH_MAX]}. "
            "Send one UTF-8 encoded JSON object with content-type application/json.",
        ) from None
    model = seen.model if isinstance(seen.model, str) else None
    return Peek(model, seen.stream is True)
