"""Ask an engine for the tokens of a prompt that cannot be computed here.

vLLM has two endpoints. ``{path}/render`` (0.27 and later, only with ``--enable-scale-out``: 403 without) runs
the request's whole preprocessing and returns ``token_ids`` and, for multimodal prompts, the item hashes and
their places. ``/tokenize`` is always available and takes text chats and single prompts, but ignores some
fields; it is used only if those are absent. SGLang has ``/tokenize`` alone, which renders chats as its
generation does (0.5.23).

Invariants: at most ``CALLS_MAX`` calls at once; each ends within ``engine_timeout_s``; an endpoint
that is absent or failing is not called for a while. No sockets here: ``post`` is injected.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec

from kvatlas.publisher.block_hash import MultimodalItem
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.apis import CHAT, COHERE, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.prompts.chat.messages import MEDIA_KEYS
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.families.base import is_unlike_sglang
from kvatlas.router.prompts.request import (
    NO_REST,
    ChatBody,
    CompletionBody,
    NotLocalError,
    Rest,
    rest_of,
)
from kvatlas.router.prompts.settings import PromptSettings, PromptStats
from kvatlas.router.prompts.truncation import ids_of

Headers = dict[str, str]
Post = Callable[[str, bytes, Headers, float], Awaitable[tuple[int, bytes]]]
"""``post(url, json_body, headers, timeout_s) -> (status, body)``; may raise ``OSError`` or ``TimeoutError``.
It adds no credentials: what an engine computes for a client, it computes in the client's name."""

RENDER_PATHS: Final = frozenset({CHAT, COMPLETION, MESSAGES, RESPONSES, COHERE})
# Calls at once to all engines, and to all render servers: further prompts are placed by text affinity, so
# that tokenizing does not take the engines' API processes from clients.
CALLS_MAX = 32
# How long an endpoint rests after a time-out, a broken connection, a 5xx or a useless answer.
FAILED_S = 5.0
# Statuses of an endpoint that the engine does not serve.
_ABSENT: Final = frozenset({403, 404, 405, 501})
# How long such an endpoint is not called again: only a restart of the engine can add it.
_ABSENT_S: Final = 60.0
# Endpoints remembered as resting; when full, all are called again.
_RESTS_MAX: Final = 1024


class EngineTokens(msgspec.Struct, frozen=True):
    """Tokens from an engine: ids of the first prompt, multimodal items by place, the other prompts."""

    ids: Ids
    multimodal: tuple[MultimodalItem, ...] = ()
    rest: Rest = NO_REST


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_RENDERED: Final = msgspec.json.Decoder(_Rendered | list[_Rendered])
_TOKENIZED: Final = msgspec.json.Decoder(_Tokenized)


class EngineSide:
    """Calls render and tokenize endpoints; ``clock`` is in monotonic seconds."""

    def __init__(
        self,
        post: Post,
        settings: PromptSettings,
        stats: PromptStats,
        clock: Callable[[], float],
        *,
        who: Literal["engine", "renderer"] = "engine",
    ) -> None:
        """``who``: name under which the calls are counted."""
        self._who = who
        self._post = post
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._resting: dict[str, tuple[float, int]] = {}
        self._calls = 0

    async def tokens(
        self,
        base_url: str,
        path: str,
        body: bytes,
        parsed: ChatBody | CompletionBody | None,
        *,
        authorization: bytes | None = None,
        frontend: Frontend = "python",
    ) -> EngineTokens | None:
        """Return the request's tokens, or None if the engine gives none. ``parsed`` None: render only.

        ``authorization``: the client's own field value.
        """
        sglang = frontend == "sglang"
        if (parsed is not None and _is_empty(parsed)) or (sglang and is_unlike_sglang(body)):
            return None
        headers = {} if authorization is None else {"authorization": authorization.decode("latin-1")}
        if path in RENDER_PATHS and not sglang:
            url = base_url + path + "/render"
            status, answer = await self._ask(url, without_tensors(body), headers)
            if status == 200:
                return self._read(url, _rendered, answer)
            # refused, failing or too slow: the other endpoint would be too.
            if status not in _ABSENT:
                return None
        if parsed is not None and tokenize_is_exact(parsed):
            url = base_url + "/tokenize"
            status, answer = await self._ask(url, body, headers)
            if status == 200:
                return self._read(url, _tokenized, answer)
        return None

    def _read(self, url: str, decode: Callable[[bytes], EngineTokens], answer: bytes) -> EngineTokens | None:
        """Decode the answer. An endpoint with a useless answer rests like one that fails."""
        try:
            found = decode(answer)
        except (msgspec.MsgspecError, NotLocalError, ValueError, IndexError, KeyError, RecursionError):
            found = None
        if found is not None and found.ids:
            return found
        self._count("failures")
        self._rest(url, 0, FAILED_S)
        return None

    async def _ask(self, url: str, body: bytes, headers: Headers) -> tuple[int, bytes]:
        """Status and body of the answer; 0 without a timely answer. Resting endpoints return their last
        status."""
        rests_until, last_status = self._resting.get(url, (0.0, 0))
        resting = url in self._resting and self._clock() < rests_until
        if resting or self._calls >= CALLS_MAX:
            self._count("skipped")
            return (last_status if resting else 0), b""
        self._calls += 1
        self._count("calls")
        timeout = self._settings.engine_timeout_s
        try:
            async with asyncio.timeout(timeout):
                status, answer = await self._post(url, body, headers, timeout)
        except (OSError, TimeoutError):
            status, answer = 0, b""
        finally:
            self._calls -= 1
        self._resting.pop(url, None)
        if status != 200:
            self._count("failures")
        if status in _ABSENT:
            self._rest(url, status, _ABSENT_S)
        elif status == 0 or status >= 500:
            self._rest(url, status, FAILED_S)
        return status, answer

    def _count(self, what: str) -> None:
        name = f"{self._who}_{what}"
        setattr(self._stats, name, getattr(self._stats, name) + 1)

    def _rest(self, url: str, status: int, seconds: float) -> None:
        if len(self._resting) >= _RESTS_MAX:
            self._resting.clear()
        self._resting[url] = self._clock() + seconds, status


def without_tensors(body: bytes) -> bytes:
    """Return the body with the request for item hashes only, to a render endpoint; older ones ignore the
    field."""
    # The field comes first, so that a field of that name in the request itself wins.
    start = body.find(b"{") + 1
    empty = body[start:].lstrip().startswith(b"}")
    return body[:start] + b'"mm_payload":"none"' + (b"" if empty else b",") + body[start:]


_MEDIA: Final = re.compile(b'"(?:%s)"' % "|".join(sorted(MEDIA_KEYS)).encode())


def tokenize_is_exact(body: ChatBody | CompletionBody) -> bool:
    """Whether ``/tokenize`` sees everything that decides this prompt; it ignores the fields named here."""
    if body.truncate_prompt_tokens is not None or body.kv_transfer_params is not None:
        return False
    if isinstance(body, CompletionBody):
        is_text = bytes(body.prompt).lstrip().startswith(b'"')
        return is_text and body.suffix is None and body.prompt_embeds is None
    # It tells the tokens of images, but not their hashes, which are in those of their blocks.
    if any(_MEDIA.search(raw) for raw in body.messages):
        return False
    extra: tuple[Any, ...] = (body.documents, body.reasoning_effort)
    return all(value is None for value in extra) and body.tool_choice != "none"


def _is_empty(body: ChatBody | CompletionBody) -> bool:
    """Whether no tokens may be the right answer."""
    if isinstance(body, ChatBody):
        return not body.messages
    return bytes(body.prompt) in {b"null", b'""', b"[]"}


def _rendered(answer: bytes) -> EngineTokens:
    found = _RENDERED.decode(answer)
    first = found[0] if isinstance(found, list) else found
    others = found[1:] if isinstance(found, list) else []
    rest = rest_of([len(one.token_ids) for one in others], given=True)
    return EngineTokens(ids_of(first.token_ids), _items(first.features), rest)


def _tokenized(answer: bytes) -> EngineTokens:
    return EngineTokens(ids_of(_TOKENIZED.decode(answer).tokens))


def placed_items(features: Any) -> tuple[MultimodalItem, ...]:
    """Items of a request in the form of render endpoints. Raises ``NotLocalError``."""
    try:
        return _items(msgspec.convert(features, _Features | None))
    except (msgspec.ValidationError, ValueError, KeyError):
        raise NotLocalError("multimodal") from None


def _items(features: _Features | None) -> tuple[MultimodalItem, ...]:
    """Items of all modalities by their place in the prompt, as in the engine's hashes."""
    if features is None:
        return ()
    items = [
        MultimodalItem(identifier, place.offset, place.length)
        for modality, hashes in features.mm_hashes.items()
        for identifier, place in zip(hashes, features.mm_placeholders[modality], strict=True)
    ]
    return tuple(sorted(items, key=lambda item: item.offset))
