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
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvatlas.publisher.block_hash import MultimodalItem
from kvatlas.router.fleet.status import Frontend
from kvatlas.router.openai.apis import CHAT, COHERE, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.bodies import Parsed
from kvatlas.router.prompts.chat.anthropic import MessagesBody
from kvatlas.router.prompts.chat.messages import MEDIA_KEYS
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.families.base import is_unlike_sglang
from kvatlas.router.prompts.request import (
    NO_REST,
    SHARE,
    ChatBody,
    CompletionBody,
    NotLocalError,
    Rest,
    rest_of,
)
from kvatlas.router.prompts.settings import PromptSettings, PromptStats
from kvatlas.router.prompts.tokenizer import ids_of

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
# Interval between checks of a render server's ``/health``.
HEALTH_CHECK_S = 5.0
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


# Render servers (``vllm launch render``): asked for tokens before any engine.
#
# They answer like an engine's render endpoint, without a GPU. The one with the fewest open calls is asked,
# then, if it gives nothing, one other. A server that fails rests for ``FAILED_S``; one whose ``GET
# /health`` does not answer 200 is skipped until it does.
#
# Invariants: at most ``ASKED_MAX`` servers per prompt, each within ``engine_timeout_s``; no sockets here.


ASKED_MAX: Final = 2
Healthy = Callable[[str], Awaitable[bool]]
"""``healthy(url)``: whether ``GET url/health`` answers 200 in time; raises nothing."""


class Renderers:
    """The configured servers, each ``http://host:port``; event-loop thread only."""

    def __init__(self, urls: tuple[str, ...], side: EngineSide) -> None:
        self._side = side
        self._calls = dict.fromkeys((url.rstrip("/") for url in urls), 0)
        self._up = dict.fromkeys(self._calls, True)

    @property
    def up(self) -> dict[str, bool]:
        """By server, whether it answered its last health check; True before the first one."""
        return dict(self._up)

    async def tokens(
        self,
        path: str,
        body: bytes,
        parsed: ChatBody | CompletionBody | None,
        *,
        authorization: bytes | None = None,
    ) -> tuple[EngineTokens, str] | None:
        """Return the request's tokens and the server that made them, or None."""
        if path not in RENDER_PATHS:
            return None
        usable = sorted((url for url in self._calls if self._up[url]), key=self._calls.__getitem__)
        for url in usable[:ASKED_MAX]:
            self._calls[url] = self._calls.pop(url) + 1  # last among equals from now on
            try:
                found = await self._side.tokens(url, path, body, parsed, authorization=authorization)
            finally:
                self._calls[url] -= 1
            if found is not None:
                return found, url
        return None

    async def watch(self, healthy: Healthy) -> None:
        """Check all servers periodically, until cancelled."""
        while True:
            found = await asyncio.gather(*(healthy(url) for url in self._up))
            self._up = dict(zip(self._up, found, strict=True))
            await asyncio.sleep(HEALTH_CHECK_S)


# Tokens of a prompt that is not computed here: from a render server, else from an engine.
#
# Both receive the client's own body, within a time budget. Their tokens of images are cached, so that a next
# turn with the same images needs no call.


EngineUrl = Callable[[str | None, Frontend], str | None]


class Told(NamedTuple):
    """The tokens of a prompt, their source, and its address."""

    tokens: EngineTokens
    source: Literal["renderer", "engine"]
    by: str


class Asking:
    """Asks render servers first, then one engine. ``engine_url`` names an engine that serves a model behind a
    frontend (None: there is none)."""

    def __init__(self, renderers: Renderers, engine_side: EngineSide, engine_url: EngineUrl) -> None:
        self._renderers = renderers
        self._engine_side = engine_side
        self._engine_url = engine_url

    async def tokens(
        self, request: InboundRequest, path: str, parsed: Parsed | None, frontend: Frontend = "python"
    ) -> Told | None:
        """Return the request's tokens; None if they are unknown. Render servers have the Python frontend."""
        if isinstance(parsed, MessagesBody) and parsed.disables_thinking:
            return None
        authorization = next((value for name, value in request.headers if name == b"authorization"), None)
        known = parsed if isinstance(parsed, ChatBody | CompletionBody) else None
        rendered = None
        if frontend == "python":
            rendered = await self._renderers.tokens(path, request.body, known, authorization=authorization)
        if rendered is not None:
            return Told(rendered[0], "renderer", rendered[1])
        url = self._engine_url(request.model, frontend)
        if not url:
            return None
        found = await self._engine_side.tokens(
            url, path, request.body, known, authorization=authorization, frontend=frontend
        )
        return None if found is None else Told(found, "engine", url)


# Images seen before: the model's mark in the template's text, and the engine's tokens for it.
#
# A template writes a mark for each image; the engine replaces it by that image's tokens, and puts its hash
# into the block hashes. Both are learned from an answer of a render server or an engine: the rest of its
# tokens must equal the prompt made here without them, so that the mark is the remaining part. A next turn
# with the same images then needs no call.
#
# They are cached by the content of all images of a prompt in order, since some models give an image fewer
# tokens if there are more of them. One use in ``CHECK_EVERY`` is asked for comparison; after a first
# difference that model's images are always asked for.
#
# Invariant: the cache takes at most ``bytes_max``. Event-loop thread only.


CHECK_EVERY: Final = 64
_ITEM_BYTES: Final = 400


class _Images(msgspec.Struct, frozen=True):
    """The mark, and per image its identifier and tokens."""

    mark: Ids
    items: tuple[tuple[str, Ids], ...]


class MediaMemory:
    """Learned images, least recently used first."""

    def __init__(self, stats: PromptStats, bytes_max: int) -> None:
        self._stats = stats
        self._bytes_max = bytes_max
        self._known: OrderedDict[bytes, _Images] = OrderedDict()
        self._distrusted: set[str] = set()

    def expanded(self, model: str, media: tuple[bytes, ...], ids: Ids) -> EngineTokens | None:
        """The engine's tokens for ``ids``, which have marks for ``media`` (digests); None: ask for them."""
        key = _key(model, media)
        known = self._known.get(key)
        found = None if known is None or model in self._distrusted else _with_items(ids, known)
        if found is None:
            self._stats.media_misses += 1
            return None
        self._known.move_to_end(key)
        self._stats.media_hits += 1
        if self._stats.media_hits % CHECK_EVERY == 0:
            self._stats.media_checks += 1
            return None
        return found

    def learn(self, model: str, media: tuple[bytes, ...], ids: Ids, answer: EngineTokens) -> None:
        """Learn from an answer for a prompt with marks, if it is unambiguous."""
        if model in self._distrusted:
            return
        key = _key(model, media)
        learned = _learned(ids, answer, len(media))
        known = self._known.get(key)
        if known is not None and known != learned and _with_items(ids, known) != answer:
            self._stats.media_mismatches += 1
            self._distrusted.add(model)
        if known is not None or learned is None:
            return
        size = _size(learned)
        if size > self._bytes_max // SHARE:
            self._stats.oversized += 1
            return
        self._known[key] = learned
        self._stats.media_bytes += size
        while self._stats.media_bytes > self._bytes_max:
            self._stats.media_bytes -= _size(self._known.popitem(last=False)[1])
            self._stats.media_evictions += 1


def _key(model: str, media: tuple[bytes, ...]) -> bytes:
    return blake2b(b"".join((model.encode(), b"\0", *media)), digest_size=32).digest()


def _size(images: _Images) -> int:
    return _ITEM_BYTES + sum(_ITEM_BYTES + len(name) + 4 * len(ids) for name, ids in images.items)


def _places(ids: Ids, mark: Ids) -> list[int]:
    """Positions of the mark, from left to right."""
    data, wanted, found = ids.tobytes(), mark.tobytes(), []
    at = data.find(wanted)
    while at >= 0:
        whole = at % ids.itemsize == 0
        if whole:
            found.append(at // ids.itemsize)
        at = data.find(wanted, at + (len(wanted) if whole else 1))
    return found


def _with_items(ids: Ids, images: _Images) -> EngineTokens | None:
    """The prompt with every mark replaced; None if the numbers of marks and images differ."""
    places = _places(ids, images.mark)
    if len(places) != len(images.items):
        return None
    result: Ids = array("I")
    items, begin = [], 0
    for place, (identifier, tokens) in zip(places, images.items, strict=True):
        result += ids[begin:place]
        items.append(MultimodalItem(identifier, len(result), len(tokens)))
        result += tokens
        begin = place + len(images.mark)
    return EngineTokens(result + ids[begin:], tuple(items))


def _learned(ids: Ids, answer: EngineTokens, count: int) -> _Images | None:
    """Mark and items, if the answer is ``ids`` with each mark replaced and nothing else changed."""
    items = answer.multimodal
    left_over = len(ids) - (len(answer.ids) - sum(item.length for item in items))
    if len(items) != count or left_over <= 0 or left_over % count:
        return None
    begin = items[0].offset
    mark = ids[begin : begin + left_over // count]
    images = _Images(
        mark,
        tuple((item.identifier, answer.ids[item.offset : item.offset + item.length]) for item in items),
    )
    return images if _with_items(ids, images) == answer else None
