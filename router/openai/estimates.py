"""Estimates of a request's tokens by its size, until an engine reports usage: of the order of what engines
report, rather above it, so that no tenant gets far ahead of a limit while many requests are under way.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import UNCACHED
from kvatlas.router.openai.request import InboundRequest

# Bytes of text for a token.
_TEXT_BYTES: Final = 4
# The same by reason why a prompt was not read: images in base64 (a JPEG of 1 MB is some 2,500 tokens), and
# prompt embeddings (4,096 values of 16 bits, in base64, are 11 kB).
_BYTES: Final = {"multimodal": 512, "embeds": 8192}
# Audio at 16 kHz with 16 bits, 50 tokens a second.
_FORM_BYTES: Final = 640
# No model runs for rendering and tokenizing, but the API process that serves all clients does: about as long
# for this many tokens as a GPU for one.
_RENDERED_TOKENS: Final = 16


def estimated_tokens(request: InboundRequest, reason: str | None) -> int:
    """Prompt tokens by the size of the body; ``reason``: why its prompt was not read, None if its API has
    none that is read here."""
    size = len(request.body)
    if request.method != "POST" or not size:
        return 0
    if request.path in UNCACHED:
        return size // (_TEXT_BYTES * _RENDERED_TOKENS) + 1
    if reason is not None:
        return size // _BYTES.get(reason, _TEXT_BYTES)
    is_form = bytes(request.body[:2]) == b"--"
    return size // (_FORM_BYTES if is_form else _TEXT_BYTES)


# Where vLLM 0.33 reads a query and documents (entrypoints/pooling/scoring/protocol.py), and inputs; Cohere's
# API has ``texts``.
_QUERIES: Final = ("query", "queries", "text_1", "data_1")
_DOCUMENTS: Final = ("documents", "text_2", "data_2")
_INPUTS: Final = ("input", "inputs", "texts")
_POOLING: Final = frozenset({"embeddings", "embed", "pooling", "classify", "score", "rerank"})
# Larger bodies, or those with more commas, are counted by their quotes: an item takes 0.1 us.
_DECODED_BYTES_MAX: Final = 4 << 20
_COMMAS_MAX: Final = 1 << 16
_Items = msgspec.json.Decoder(list[msgspec.Raw])
_Pooling = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Pooling",
        [(name, msgspec.Raw, msgspec.Raw(b"")) for name in (*_QUERIES, *_DOCUMENTS, *_INPUTS)],
        gc=False,
    )
)


def _pools(request: InboundRequest) -> bool:
    return request.method == "POST" and request.path.rstrip("/").rpartition("/")[2] in _POOLING


def pooled(request: InboundRequest) -> tuple[int, int]:
    """Prompts of a request that pools, at least 1, and the tokens of its query for each document but the
    first; (1, 0) for other requests, and for what cannot be read."""
    body = request.body
    if not _pools(request):
        return 1, 0
    if len(body) > _DECODED_BYTES_MAX or body.count(b",") > _COMMAS_MAX:
        # Of a list of texts, rather above it. Token ids are counted as one prompt.
        return max(1, body.count(b'"') // 2), 0
    found = _members(body)
    queries, documents, inputs = (_list_of(found, names) for names in (_QUERIES, _DOCUMENTS, _INPUTS))
    if not documents or not queries:
        return max(1, len(inputs)), 0
    prompts = max(len(documents), len(queries))
    again = len(queries[0]) * (prompts - 1) if len(queries) == 1 else 0
    return prompts, again // _TEXT_BYTES


def longest_input(request: InboundRequest) -> tuple[int, int]:
    """Tokens of the longest input of a request that pools: by its size where it is a text, and exactly of
    those given as token ids. (0, 0) for other requests, for what cannot be read, and where engines shorten
    inputs."""
    body = request.body
    if not _pools(request):
        return 0, 0
    if len(body) > _DECODED_BYTES_MAX or body.find(b'"truncate_') >= 0:
        return 0, 0
    found = _members(body)
    given = estimated = 0
    for item in _list_of(found, _INPUTS):
        if item[:1] == b"[" and item[1:64].lstrip()[:1].isdigit():
            given = max(given, item.count(b",") + 1)
        else:
            estimated = max(estimated, len(item) // _TEXT_BYTES)
    return max(given, estimated), given


def _members(body: bytes) -> dict[str, bytes]:
    """Raw values by name."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {name: bytes(raw) for name, raw in msgspec.structs.asdict(_Pooling.decode(body)).items()}
    # As engines read it: NaN, and half surrogate pairs.
    with suppress(ValueError, RecursionError):
        told: Any = json.loads(body)
        if isinstance(told, dict):
            return {name: json.dumps(value).encode() for name, value in told.items()}
    return {}


def _list_of(found: dict[str, bytes], names: tuple[str, ...]) -> list[bytes]:
    """Items of the first of these members that is given: one where it is no list, or a list of token ids."""
    raw = next((found[name] for name in names if found.get(name, b"null") not in (b"", b"null")), b"")
    if raw.startswith(b"{") and b'"content"' in raw:
        # Several contents of one text, image or video each.
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raw = bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("content", b""))
    if not raw.startswith(b"["):
        return [raw] if raw else []
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if raw[1:64].lstrip()[:1].isdigit():
            return [raw]
        return list(map(bytes, _Items.decode(raw)))
    return [raw]
