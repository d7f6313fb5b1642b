"""Errors a client sees: OpenAI's shape, a stable string code, and the HTTP status that goes with it.

``{"error": {"message", "type", "param", "code"}}``; ``retry-after`` and ``x-should-retry`` are set where
they help the ``openai`` client to do the right thing. Every error of ours is made by a named constructor
below; errors of an engine are passed through as bytes and never come here.
"""

from __future__ import annotations

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]


class ApiError(Exception):
    """An answer to the client that is not a success."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The JSON body of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_NO_RETRY: Headers = ((b"x-should-retry", b"false"),)


def bad_request(code: str, message: str, *, param: str | None = None) -> ApiError:
    """400: the request itself is wrong; repeating it cannot help."""
    return ApiError(400, code, message, param=param, headers=_NO_RETRY)


_ECHOED_CHARS_MAX = 200


def echoed(text: str) -> str:
    """What a client sent, quoted, as far as it is worth telling back."""
    return repr(text) if len(text) <= _ECHOED_CHARS_MAX else f"{text[:_ECHOED_CHARS_MAX]!r}..."


def model_not_found(model: str) -> ApiError:
    """404: no engine of the fleet serves this model."""
    return ApiError(
        404,
        "model_not_found",
        f"The model {echoed(model)} is not served here; GET /v1/models lists the served models.",
        kind="not_found_error",
        param="model",
        headers=_NO_RETRY,
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body is over the configured limit."""
    message = f"The request body is larger than body_bytes_max = {limit_bytes} bytes."
    return ApiError(413, "body_too_large", message, headers=_NO_RETRY)


def body_too_complex(values_max: int) -> ApiError:
    """413: so many values that looking for a field among them would take too long."""
    message = f"This request body has more than {values_max} strings, lists and objects to be checked."
    return ApiError(413, "body_too_complex", message, headers=_NO_RETRY)


def method_not_allowed(method: str, path: str, allow: str) -> ApiError:
    """405: there is something at this path, for other methods."""
    message = f"{path} does not take {echoed(method)}."
    return ApiError(405, "method_not_allowed", message, headers=((b"allow", allow.encode()), *_NO_RETRY))


def encoding_not_supported(encoding: str) -> ApiError:
    """415: the request body is compressed, which no engine undoes."""
    return ApiError(
        415,
        "unsupported_content_encoding",
        f"The request body is encoded as {echoed(encoding)}; send it without a content encoding.",
        headers=_NO_RETRY,
    )


def no_ready_engine(message: str, *, retry_after_s: int = 1) -> ApiError:
    """503: every engine is down, excluded or draining."""
    return ApiError(
        503,
        "no_ready_engine",
        message,
        kind="service_unavailable_error",
        headers=((b"retry-after", str(retry_after_s).encode()),),
    )


def engine_unreachable(message: str) -> ApiError:
    """502: the engines that were tried could not be reached or broke the connection."""
    return ApiError(502, "engine_unreachable", message, kind="service_unavailable_error")


def engine_timeout(message: str) -> ApiError:
    """504: an engine did not answer in time."""
    return ApiError(504, "engine_timeout", message, kind="service_unavailable_error")


def stream_broken(message: str) -> ApiError:
    """Sent as an SSE event: the engine died after its answer had begun."""
    return ApiError(502, "engine_stream_broken", message, kind="service_unavailable_error")


def retry_after_s(value: bytes | str | None, limit_s: float) -> float:
    """Seconds of a Retry-After field, 0 without one. A date (which needs a shared clock) counts as 1 s."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = 1.0
    return min(seconds, limit_s) if seconds > 0 else 0.0
