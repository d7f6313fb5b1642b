"""A client's request as it is handed on, read whole, and what an engine reports of its answer."""

from __future__ import annotations

import re
from typing import Any, Final, Literal, Protocol

import msgspec

from router.openai.errors import ApiError


class Phases(Protocol):
    """Is told what the router does with a request, one thing after the other."""

    def phase(self, name: str) -> None:
        """This begins, and what was before ends."""


class QueueTicketRequest(msgspec.Struct, frozen=True, gc=False):
    """What a request may claim where requests wait for each other."""

    tenant: str = ""
    """Whose key it came with; "" where nobody has one."""
    weight: float = 1.0
    """Share of its tenant beside others'."""
    priority: int = 1
    """Class: 0 is high, 1 normal, 2 low."""
    until_s: float | None = None
    """When its client gives up (monotonic seconds), if it said so."""
    wait_target_s: float | None = None
    """Longest predicted wait, where its tenant has a target of its own for the class."""
    due_s: float | None = None
    """When its first token is due (monotonic seconds), where it has a service level."""


NO_CLAIM = QueueTicketRequest()
Carried = Literal["", "gateway", "sidecar"]
"""Who takes a request to its engines: we; a gateway, to one; a gateway, to one whose sidecar asks another one
first."""


class InboundRequest(msgspec.Struct, gc=False):
    """One client request, read whole. ``model`` and ``stream`` are peeked from the body where it is JSON.

    ``headers`` are lower-case names as ASGI gives them; ``body`` is forwarded byte-identical.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str | None = None
    stream: bool = False
    request_id: bytes = b""
    """The client's ``x-request-id``, or the one made for it."""
    client: int = 0
    """Tells clients apart: by tenant where they have keys, else by address; only in this process."""
    trace: Phases | None = None
    """Of a request that is traced."""
    pinned: str | None = None
    """The engine that the client has chosen, where it may."""
    among: frozenset[str] | None = None
    """``host:port`` of the engines that may take it, where a gateway says so."""
    carried: Carried = ""
    tenant: str = ""
    """Whose key it came with; "" where clients have none."""
    earlier_response: str | None = None
    """Id of the response that it goes on from, asks for or cancels: one engine has it."""
    read_s: float | None = None
    """When its last byte was read (monotonic seconds); None where it did not come over HTTP."""
    claim: QueueTicketRequest = NO_CLAIM
    """Read only where requests may have to wait."""
    prompt: Any = None
    """What its prompt is made of, decoded from this body; whoever reads it takes it away."""


class Usage(msgspec.Struct, gc=False):
    """What the engine reported; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


FAILURES = ("refused", "reset", "timeout", "status", "broken_stream", "aborted")
"""Why an engine did not answer whole."""


# The APIs whose requests carry a prompt, by path: what the proxy and the prompt reader tell apart.
#
# All others are passed on to the least loaded engine.


CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
BATCH: Final = "/v1/chat/completions/batch"
GENERATE: Final = "/inference/v1/generate"
COHERE: Final = "/cohere/v2/chat"
PROMPT_APIS: Final = {
    CHAT: "chat",
    COMPLETION: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    BATCH: "batch",
    GENERATE: "generate",
    COHERE: "cohere",
}
"""Path -> name, as metrics, receipts and explain have it."""


# Our own errors in the shape of the API that was asked: before an answer begins, and within its stream.


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
