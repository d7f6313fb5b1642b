"""Which paths are forwarded to engines, which are refused, and which are unknown.

Engines compare the decoded path; so does this, after folding what an engine or a proxy on the way might
fold (doubled, trailing and dotted segments), so that no spelling slips past the refusal. Slashes at the
end are taken off before anything else looks at the path: an engine would redirect it (Starlette's
``redirect_slashes``), and the address that it redirects to is its own.
"""

from __future__ import annotations

import posixpath
import re
from enum import Enum
from typing import Literal

import msgspec

from kvatlas.router.http.client_head import ClientHead
from kvatlas.router.openai.apis import PROMPT_APIS, RESPONSES, SALTED, UNCACHED

_PASSED = frozenset({"/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify"})
_PASSED_PREFIXES = ("/v1/", "/v2/")
_DOUBLED = "/v1/v1/"
_TRAILING = re.compile(rb"(?:/|%2[fF])+$")
# Where engines take nothing but POST.
POST_PATHS = (
    PROMPT_APIS.keys()
    | _PASSED
    | frozenset(
        {
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/embeddings",
            "/v1/messages/count_tokens",
            "/v1/rerank",
            "/v1/score",
            "/v2/rerank",
        }
    )
)


# Where engines keep nothing that another request could name, nor list it.
_KEEP_NOTHING = (
    POST_PATHS
    | SALTED
    | UNCACHED
    | frozenset(
        {
            "/v1/responses/input_tokens",
            "/v1/classify",
            "/v1/moderations",
            "/v1/audio/speech",
            "/v2/embed",
            "/v1/images/generations",
            "/v1/images/edits",
            "/v1/images/variations",
        }
    )
)


def keeps_nothing(path: str) -> bool:
    """Whether no request to this path names or lists what others left in an engine. Unknown paths may."""
    return path in _KEEP_NOTHING


class Verdict(Enum):
    """Treatment of a path."""

    FORWARD = "forward"
    REFUSE = "refuse"
    UNKNOWN = "unknown"


CacheReset = Literal["", "gpu", "all"]
"""Caches that a call empties: none, the GPU's, or also those of vLLM's connector."""


def cache_reset(path: str, query: bytes) -> CacheReset:
    """Return the caches that an engine empties for this request: vLLM 0.32 (entrypoints/serve/dev/cache,
    dev/sleep and entrypoints/rl/online, ``api_router.py``), and SGLang's ``/flush_cache``."""
    if path == "/sleep":
        return "" if b"level=0" in query else "all"
    if path == "/pause":
        return "" if b"clear_cache=false" in query.lower() else "all"
    if path == "/reset_prefix_cache":
        return "all" if b"reset_external=true" in query.lower() else "gpu"
    return "gpu" if path == "/flush_cache" else ""


def judge(path: str, refused: frozenset[str], passed: frozenset[str] = frozenset()) -> Verdict:
    """``path``: percent-decoded, without query. ``passed`` goes before ``refused``, by its
    exact spelling only."""
    # The exact spelling first: nearly all requests end here.
    if path in PROMPT_APIS or path in passed:
        return Verdict.FORWARD
    folded = _fold(path)
    if folded in refused:
        return Verdict.REFUSE
    if folded.startswith(_DOUBLED):
        return Verdict.UNKNOWN
    # Both spellings: ``/v1/../metrics`` begins with /v1 but is folded to another path.
    if path in _PASSED or (path.startswith(_PASSED_PREFIXES) and folded.startswith(_PASSED_PREFIXES)):
        return Verdict.FORWARD
    return Verdict.UNKNOWN


def response_named(method: str, path: str) -> str | None:
    """The response that a path is about, however it is spelled; None: about none."""
    # Engines normalise the path too, so every spelling of a response's id must lead to the check of its
    # tenant.
    named = posixpath.normpath("/" + path.lstrip("/"))
    if not named.lower().startswith(RESPONSES + "/"):
        return None
    response_id, _, action = named[len(RESPONSES) + 1 :].partition("/")
    # POST of one name more is an action of its own: render (vLLM), compact, input_tokens (OpenAI).
    return None if method == "POST" and not action else response_id


def remedy(path: str) -> str:
    """Advice for the sender of an unknown path."""
    folded = _fold(path)
    if folded.startswith(_DOUBLED):
        return "/v1 is doubled: the client adds it to a base_url that has it already; take it off there"
    if f"/v1{folded}" in POST_PATHS:
        return f"/v1 is missing: the client's base_url ends in /v1, or it asks for /v1{folded}"
    return "requests for engines begin with /v1/ or /v2/; operators can pass others on by proxy.passed_paths"


def without_trailing_slashes(head: ClientHead) -> ClientHead:
    """The head with the path that is meant, as sent and as decoded."""
    raw = _TRAILING.sub(b"", head.raw_path) or b"/"
    return msgspec.structs.replace(head, path=head.path.rstrip("/") or "/", raw_path=raw)


def _fold(path: str) -> str:
    folded = posixpath.normpath("/" + path.lstrip("/"))
    return "/" if folded == "." else folded.lower()
