"""Images seen before: the model's mark in the template's text, and the engine's tokens for it.

A template writes a mark for each image; the engine replaces it by that image's tokens, and puts its hash
into the block hashes. Both are learned from an answer of a render server or an engine: the rest of its
tokens must equal the prompt made here without them, so that the mark is the remaining part. A next turn
with the same images then needs no call.

They are cached by the content of all images of a prompt in order, since some models give an image fewer
tokens if there are more of them. One use in ``CHECK_EVERY`` is asked for comparison; after a first
difference that model's images are always asked for.

Invariant: the cache takes at most ``bytes_max``. Event-loop thread only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

import msgspec

from kvatlas.publisher.block_hash import MultimodalItem
from kvatlas.router.prompts.cuts import Ids
from kvatlas.router.prompts.remote import EngineTokens
from kvatlas.router.prompts.request import (
    SHARE,
)
from kvatlas.router.prompts.settings import PromptStats

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
