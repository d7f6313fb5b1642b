"""Which paths are forwarded to engines, which are refused, and which are unknown.

Engines compare the decoded path; so does this, after folding what an engine or a proxy on the way might
fold (doubled, trailing and dotted segments), so that no spelling slips past the refusal. Slashes at the end
are taken off before anything else looks at the path: an engine would redirect it (Starlette's
``redirect_slashes``), and the address that it redirects to is its own.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import MutableMapping
from enum import Enum
from typing import Any

from router.openai.apis import PROMPT_APIS, RESPONSES

_PASSED = frozenset({"/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify"})
_PASSED_PREFIXES = ("/v1/", "/v2/")
_DOUBLED = "/v1/v1/"
_TRAILING = re.compile(rb"(?:/|%2[fF])+$")
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
"""Where engines take nothing but POST."""


class Verdict(Enum):
    """What to do with a path."""

    FORWARD = "forward"
    REFUSE = "refuse"
    UNKNOWN = "unknown"


OBSERVED = frozenset({"/health", "/kv_event_sources", "/load", "/metrics", "/ping", "/version"})
"""What routers and probes ask an engine for itself."""
CACHE_RESETS = frozenset({"/reset_prefix_cache", "/flush_cache", "/sleep"})
"""After one of these an engine's GPU pool is empty."""


def judge(path: str, refused: frozenset[str], passed: frozenset[str] = frozenset()) -> Verdict:
    """``path`` as ASGI gives it: percent-decoded, without query. ``passed`` goes before ``refused``, by its
    exact spelling only."""
    if path in PROMPT_APIS or path in passed:
        return Verdict.FORWARD
    folded = _fold(path)
    if folded in refused:
        return Verdict.REFUSE
    if folded.startswith(_DOUBLED):
        return Verdict.UNKNOWN
    if path in _PASSED or (path.startswith(_PASSED_PREFIXES) and folded.startswith(_PASSED_PREFIXES)):
        return Verdict.FORWARD
    return Verdict.UNKNOWN


def response_named(method: str, path: str) -> str | None:
    """The response that a path is about, however it is spelled; None: about none."""
    named = posixpath.normpath("/" + path.lstrip("/"))
    if not named.lower().startswith(RESPONSES + "/"):
        return None
    response_id, _, action = named[len(RESPONSES) + 1 :].partition("/")
    # POST of one name more is an action of its own: render (vLLM), compact, input_tokens (OpenAI).
    return None if method == "POST" and not action else response_id


def remedy(path: str) -> str:
    """Advice for the sender of an unknown path; "" where there is none."""
    folded = _fold(path)
    if folded.startswith(_DOUBLED):
        return "/v1 is doubled: the client adds it to a base_url that has it already; take it off there"
    if f"/v1{folded}" in POST_PATHS:
        return f"/v1 is missing: the client's base_url ends in /v1, or it asks for /v1{folded}"
    return ""


def without_trailing_slashes(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The ASGI scope with the path that is meant, as sent and as decoded."""
    path, raw = scope["path"].rstrip("/") or "/", scope.get("raw_path")
    if raw is not None:
        raw = _TRAILING.sub(b"", raw) or b"/"
    return {**scope, "path": path, "raw_path": raw}


def _fold(path: str) -> str:
    folded = posixpath.normpath("/" + path.lstrip("/"))
    return "/" if folded == "." else folded.lower()
