"""Text -> token ids, reusing the ids of text pieces seen before, provably as if tokenized whole.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece by
itself. A *barrier* is an added token whose every occurrence is such a cut, whatever stands around it: it
is matched on the raw text, takes no white space along, and no other added token can overlap an
occurrence of it from the left or be longer at the same place. So a text may be cut before each barrier,
and a segment's ids depend on nothing outside it. Long pieces between barriers are cut again at soft cuts
(``soft_cuts.py``), so that text with a new end tokenizes only its end. At load this is checked with probe
texts as well; where they differ there are no barriers, or no soft cuts.

Measured on one shared core: new text costs 0.2-0.4 us per character, a known segment 0.1-0.3 us.

Always true: ``encode`` returns exactly ``Tokenizer.encode(text).ids``. Encoding releases the GIL only
in batches; ``encode`` in a thread would hold it.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec
from tokenizers import Tokenizer

from router.prompts.request import NotLocalError
from router.prompts.sizes import SHARE
from router.prompts.stats import PromptStats
from router.prompts.tokens.soft_cuts import is_cut, next_cut, soft_cuts_hold

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library's own threads gain nothing for one text and burn more CPU waiting than the text costs."""

Ids: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""
_WINDOW_CHARS: Final = 1 << 17
"""Scanned in one go, about 1 ms: a regular expression holds the GIL."""
_ENTRY_BYTES: Final = 250
"""Python's overhead of one cached segment: two objects, a dictionary slot, a list node."""


class Segments(msgspec.Struct, frozen=True):
    """A text cut before its barriers: ``starts`` are character offsets, the first one 0."""

    texts: list[str]
    starts: list[int]


class SegmentTokenizer:
    """A tokenizer with a cache of segments, bounded by ``cache_bytes_max``.

    ``split``, ``encode_missing`` are free of side effects and may run in a worker thread; ``known`` and
    ``remember`` belong to the event loop's thread.
    """

    def __init__(self, tokenizer: Tokenizer, stats: PromptStats, cache_bytes_max: int) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._cache_bytes_max = cache_bytes_max
        self._cache_bytes = 0
        self._cache: OrderedDict[str, Ids] = OrderedDict()
        if getattr(tokenizer.model, "dropout", None):
            raise ValueError("the tokenizer's model has dropout: its tokens are random")
        self._soft = soft_cuts_hold(tokenizer)
        barriers = find_barriers(tokenizer)
        self.barrier = _barrier_pattern(barriers)
        self._barrier_chars_max = max(map(len, barriers), default=0)
        if self.barrier is not None and not self._probes_agree(barriers):
            self.barrier = None
        self.prefix, self.suffix = self._added_around()

    def split(self, text: str) -> Segments:
        """Cut before every barrier, and long pieces between barriers at soft cuts."""
        starts = [0] if self.barrier is None else [0, *self._barrier_starts(text)]
        if self._soft:
            ends = [*starts[1:], len(text)]
            starts = [at for a, b in zip(starts, ends, strict=True) for at in self._soft_starts(text, a, b)]
        ends = [*starts[1:], len(text)]
        return Segments([text[a:b] for a, b in zip(starts, ends, strict=True)], starts)

    @staticmethod
    def _soft_starts(text: str, begin: int, end: int) -> Iterator[int]:
        """``begin``, and the soft cuts up to ``end``."""
        at: int | None = begin
        while at is not None:
            yield at
            at = next_cut(text, at, end)

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, whatever it was cut at so far."""
        if self.barrier is not None and self.barrier.match(text, at):
            return True
        return self._soft and is_cut(text, at)

    def _barrier_starts(self, text: str) -> Iterator[int]:
        """Where barriers begin, but for one at 0; window by window, so that other threads get their turn."""
        assert self.barrier is not None  # noqa: S101  # asked by ``split`` only
        begin, overlap = 1, self._barrier_chars_max - 1
        while begin < len(text):  # barriers never overlap each other, so a window may begin inside one
            end = begin + _WINDOW_CHARS
            matches = self.barrier.finditer(text, begin, end + overlap)
            yield from (match.start() for match in matches if match.start() < end)
            begin = end

    def known(self, texts: list[str]) -> list[Ids | None]:
        """The cached ids of each segment, None where there are none."""
        cache, found = self._cache, []
        for text in texts:
            ids = cache.get(text)
            if ids is not None:
                cache.move_to_end(text)
                self._stats.segment_hits += 1
            else:
                self._stats.segment_misses += 1
            found.append(ids)
        return found

    def encode_missing(self, texts: list[str], known: list[Ids | None]) -> list[Ids]:
        """The ids of every segment, tokenizing those not known."""
        missing = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        fresh = iter(self._tokenizer.encode_batch_fast(missing, add_special_tokens=False))
        return [array("I", next(fresh).ids) if ids is None else ids for ids in known]

    def remember(self, texts: list[str], ids: list[Ids]) -> None:
        """Keep these segments; the least recently used go when the cache is full."""
        before, largest = self._cache_bytes, self._cache_bytes_max // SHARE
        for text, tokens in zip(texts, ids, strict=True):
            if text in self._cache:
                continue
            size = _size(text, tokens)
            if size > largest:
                self._stats.not_kept += 1
                continue
            self._cache[text] = tokens
            self._cache_bytes += size
        while self._cache_bytes > self._cache_bytes_max:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))
            self._stats.segment_evictions += 1
        self._stats.segment_bytes += self._cache_bytes - before

    def clear(self) -> None:
        """Forget all segments."""
        self._cache.clear()
        self._stats.segment_bytes -= self._cache_bytes
        self._cache_bytes = 0

    def with_special_tokens(self, ids: Ids) -> Ids:
        """As ``add_special_tokens=True`` has it. Raises ``NotLocalError`` where that is no plain frame."""
        if self.prefix is None or self.suffix is None:
            raise NotLocalError("field")
        return self.prefix + ids + self.suffix

    def encode(self, text: str) -> Ids:
        """Ids of a whole text through the cache, at once; for small texts and tests."""
        parts = self.split(text)
        ids = self.encode_missing(parts.texts, self.known(parts.texts))
        self.remember(parts.texts, ids)
        return joined(ids)

    def _whole(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def _probes_agree(self, barriers: list[str]) -> bool:
        for text in _probe_texts(barriers):
            parts = self.split(text)
            cut = [token for part in parts.texts for token in self._whole(part)]
            if cut != self._whole(text):
                return False
        return True

    def _added_around(self) -> tuple[Ids | None, Ids | None]:
        """What ``add_special_tokens`` puts before and after any text; None, None where it does more."""
        frame = self._whole("", special=True)
        for cut in range(len(frame) + 1):
            before, after = frame[:cut], frame[cut:]
            if all(before + self._whole(p) + after == self._whole(p, special=True) for p in _PLAIN_PROBES):
                return array("I", before), array("I", after)
        return None, None


def joined(parts: list[Ids]) -> Ids:
    """One array of all ids."""
    result: Ids = array("I")
    for part in parts:
        result += part
    return result


def find_barriers(tokenizer: Tokenizer) -> list[str]:
    """The contents of all added tokens that are barriers."""
    if tokenizer.encode_special_tokens:
        return []
    added = list(tokenizer.get_added_tokens_decoder().values())
    on_raw_text = [token.content for token in added if not token.normalized]
    return [
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and token.content.strip() == token.content != ""
        and not any(_may_hide(other, token.content) for other in on_raw_text)
    ]


def _may_hide(other: str, barrier: str) -> bool:
    """Whether a match of ``other`` can keep an occurrence of ``barrier`` from being matched as itself."""
    if other != barrier and other.startswith(barrier):
        return True
    tails = (other[start:] for start in range(1, len(other)))
    return any(barrier.startswith(tail) or tail.startswith(barrier) for tail in tails)


def _barrier_pattern(barriers: list[str]) -> re.Pattern[str] | None:
    if not barriers:
        return None
    return re.compile("|".join(re.escape(barrier) for barrier in sorted(barriers, key=len, reverse=True)))


_PLAIN_PROBES: Final = ("", "a", "Hello world", " leading", "trailing ", "日本 é\n\n", "1234 x")
_PROBE_PIECES: Final = (
    *("", " ", "\n", "\t", "  two", "word", " word ", "\n\n x"),
    *("é", "e\u0301", "日本", "12345", "'s", "<|"),
)
_PROBED_BARRIERS_MAX: Final = 6
"""Barriers differ only by their text; more would only make loading slower."""


def _probe_texts(barriers: list[str]) -> list[str]:
    """Texts with barriers between, before and after pieces that normalizers and splitters care about."""
    texts = []
    for number, barrier in enumerate(barriers[:_PROBED_BARRIERS_MAX]):
        other = barriers[(number + 1) % len(barriers)]
        texts += [f"{left}{barrier}{right}{other}{left}" for left in _PROBE_PIECES for right in _PROBE_PIECES]
    return texts


def _size(text: str, ids: Ids) -> int:
    return len(text) * (1 if text.isascii() else 4) + 4 * len(ids) + _ENTRY_BYTES
