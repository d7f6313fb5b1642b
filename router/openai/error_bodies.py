"""Our own errors in the shape of the API that was asked: before an answer begins, and within its stream."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import COHERE, MESSAGES, RESPONSES
from kvatlas.router.openai.errors import ApiError

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SEQUENCE: Final = re.compile(rb'"sequence_number":\s*(\d{1,18})')


def error_body(error: ApiError, path: str) -> bytes:
    """The JSON body of an answer with this error."""
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        return msgspec.json.encode({"type": "error", "error": _anthropic(error)}) + b"\n"
    if path == COHERE:
        return msgspec.json.encode({"message": error.message, "code": error.code}) + b"\n"
    return error.body()


def error_event(error: ApiError, path: str, passed_on: bytes) -> tuple[bytes, bytes]:
    """Data and name of an event with this error; ``passed_on`` is the end of the stream so far."""
    if path == RESPONSES:
        numbers = _SEQUENCE.findall(passed_on)
        event: dict[str, Any] = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return msgspec.json.encode(event), b"error"
    return error_body(error, path).rstrip(), b"error" if path == MESSAGES else b""


def _anthropic(error: ApiError) -> dict[str, str]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": kind, "message": error.message, "code": error.code}
