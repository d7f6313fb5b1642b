"""A client's request as it is handed on, read whole; its session; what an engine reports of its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import xxhash

from kvatlas.router.openai.errors import ApiError


class Phases(Protocol):
    """Receives the phases of a request, one after the other."""

    def phase(self, name: str) -> None:
        """This begins, and what was before ends."""


class QueueTicketRequest(msgspec.Struct, frozen=True, gc=False):
    """Claims of a request where requests wait for each other."""

    tenant: str = ""
    """Whose key it came with; "" where keys are not used."""
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


class Session(msgspec.Struct, frozen=True, gc=False):
    """The conversation or agent run that a request belongs to, as its client names it. Printable and bounded;
    clients choose it, so it allows nothing, and two tenants may use the same name for sessions of their own.
    """

    id: str
    agent: str = ""
    """The sub-agent within it; "" for the session's own requests."""


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
    isolated: bool = False
    """Its ``cache_salt`` is of its tenant or group, set by the router."""
    cache_group: str = ""
    """The tenant or group that its salt is of; "" without one, or if its own salt is in it too."""
    session: Session | None = None
    earlier_response: str | None = None
    """Id of the response that it goes on from, asks for or cancels: one engine has it."""
    reads_response: bool = False
    """It asks for, deletes or cancels that response: its engine computes nothing, and may rest."""
    response_id: str = ""
    """Id that its own response gets, but for its engine (``response_ids``); "": of another API."""
    read_s: float | None = None
    """When its last byte was read (monotonic seconds); None where it did not come over HTTP."""
    priority: int = 0
    """Its place in an engine that schedules by priority, by its client or tenant; lower goes first."""
    claim: QueueTicketRequest = NO_CLAIM
    """Read only where requests may have to wait."""
    retention: tuple[str, bytes] | None = None
    """Its retention hint as JSON, behind what that rests on; set when it is placed."""
    prompt: Any = None
    """Parts of its prompt, decoded from this body; the reader takes them away."""
    context_tokens: float = 0.0
    """Longest context of the engines of its model, when it was placed."""
    longer_than: int = 0
    """An engine with a context of this many tokens has refused it as too long."""
    hides_usage: bool = False
    """The router asked for the usage of its stream, not its client."""


class Usage(msgspec.Struct, gc=False):
    """Usage as the engine reported it; ``cached_tokens`` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


# Reasons for a missing or incomplete answer of an engine.
FAILURES = ("refused", "reset", "timeout", "status", "broken_stream", "aborted")


# Where clients name their sessions: the first entry that a request has counts, header fields before the body.


class _SessionFields(NamedTuple):
    """Header fields of one client. ``agent`` names a sub-agent within the session, ``parent`` the session
    that the named one is a sub-agent of."""

    session: bytes
    agent: bytes = b""
    parent: bytes = b""


# Header field of vLLM (entrypoints/generate/base/serving.py, 0.33).
SESSION: Final = b"x-session-id"
_SESSION_FIELDS: Final = (
    # also OpenCode's, which has a session for each sub-agent
    _SessionFields(SESSION, parent=b"x-parent-session-id"),
    _SessionFields(b"x-claude-code-session-id", agent=b"x-claude-code-agent-id"),
    # Codex: the main thread has the id of its session
    _SessionFields(b"session-id", agent=b"thread-id"),
    _SessionFields(b"session_id", agent=b"thread-id"),
    _SessionFields(b"x-session-affinity", parent=b"x-parent-session-id"),
)
SESSION_FIELDS: Final = frozenset(fields.session for fields in _SESSION_FIELDS)
"""Without one of them a head names no session."""
# Members of the body that name a session; ``metadata.user_id`` is read between them.
SESSION_MEMBERS: Final = ("session_id", "prompt_cache_key")
# Claude Code's ``metadata.user_id`` ends in the session's UUID, or is a JSON text that has it.
_IN_USER_ID: Final = re.compile(r'(?:_session_|"session_id" ?: ?")([0-9A-Za-z-]{1,64})')
SESSION_CHARS_MAX: Final = 128
_PRINTABLE: Final = re.compile(rb"[!-~](?:[ -~]{0,%d}[!-~])?" % (SESSION_CHARS_MAX - 2))


def session_in_headers(told: Mapping[bytes, bytes]) -> Session | None:
    """The session that header fields name."""
    for fields in _SESSION_FIELDS:
        if name := session_name(told.get(fields.session, b"")):
            if parent := session_name(told.get(fields.parent, b"")):
                return Session(parent, "" if parent == name else name)
            agent = session_name(told.get(fields.agent, b""))
            return Session(name, "" if agent == name else agent)
    return None


def session_in_body(session_id: str | None, user_id: str | None, cache_key: str | None) -> Session | None:
    """The session that these members of a body name."""
    found = None if session_id or not user_id else _IN_USER_ID.search(user_id)
    text = session_id or (found[1] if found else cache_key)
    name = session_name(text.encode(errors="replace")) if text else ""
    return Session(name) if name else None


def session_name(value: bytes) -> str:
    """A client's name for a session, as kept here. Where it is too long or has other characters, its digest
    stands for it."""
    value = value.strip()
    if not value or _PRINTABLE.fullmatch(value):
        return value.decode("ascii")
    return f"xxh3-{xxhash.xxh3_128_hexdigest(value)}"


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
# Path -> name, as metrics, receipts and explain have it.
PROMPT_APIS: Final = {
    CHAT: "chat",
    COMPLETION: "completions",
    MESSAGES: "messages",
    RESPONSES: "responses",
    BATCH: "batch",
    GENERATE: "generate",
    COHERE: "cohere",
}
# Where vLLM 0.32 and 0.33 take ``cache_salt`` (its Rust frontend has only the first, second and sixth of the
# prompt APIs). ``CohereChatV2Request``, ``CohereEmbedRequest`` and audio forms have no such field.
SALTED: Final = frozenset(
    {
        *(PROMPT_APIS.keys() - {COHERE}),
        *("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/systemone", "/generative_scoring"),
    }
)
# SGLang 0.5.23 drops the field of all others unseen (entrypoints/anthropic/protocol.py, among others).
SALTED_BY_SGLANG: Final = frozenset({CHAT, COMPLETION, RESPONSES})
# No block is stored for them. Rendered prompts are sent to ``GENERATE``, where they get their salt.
UNCACHED: Final = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", MESSAGES + "/count_tokens"),
        *(f"{path}/render" for path in (CHAT, COMPLETION, MESSAGES, RESPONSES)),
        *(f"{path}/derender" for path in (CHAT, COMPLETION)),
    }
)


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
