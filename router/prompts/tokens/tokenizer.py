"""Prompt text -> token ids, cut where cuts are provably safe, by fastokens where that is proven equal.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece by
itself. A *barrier* is an added token whose every occurrence is such a cut, whatever stands around it: it
is matched on the raw text, takes no white space along, and no other added token can overlap an
occurrence of it from the left (or, where that one is matched first, from the right) or be longer at the same
place. So a text may be cut before each barrier, and a piece's ids depend on nothing outside it: a next turn
tokenizes only what follows the last barrier it shares with the turn before. At load this is checked with
probe texts as well; where they differ there are no barriers.

Every ``CHECK_EVERY``-th job of fastokens is compared with ``tokenizers`` on a short piece of its own text;
the first difference takes fastokens out of use for good (``name`` says so, ``tokenizer_mismatches`` counts).

Always true: ``encode`` returns exactly ``Tokenizer.encode(text).ids``, or was equal to it on every probe and
sample. Encoding releases the GIL.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from tokenizers import Tokenizer

from router.prompts.request import NotLocalError
from router.prompts.stats import PromptStats
from router.prompts.tokens.barriers import barrier_pattern, find_barriers
from router.prompts.tokens.fast import FastEncoder, NoFastEncoder, fast_encoder
from router.prompts.tokens.ids import Encoded, Ids

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library's own threads gain nothing for one text and burn more CPU waiting than the text costs."""

CHECK_EVERY: Final = 1024
"""One job of fastokens in so many is compared; costs 1-2 us each on average."""
_CHECKED_CHARS: Final = 1024
_WINDOW_CHARS: Final = 1 << 17
"""Scanned in one go, about 1 ms: a regular expression holds the GIL."""


class PromptTokenizer:
    """One model's tokenizer. ``fast``: use fastokens where it agrees. Any thread may call it.

    ``name`` says which library tokenizes, and why not fastokens.
    """

    def __init__(self, tokenizer: Tokenizer, stats: PromptStats, *, fast: bool = True) -> None:
        self._tokenizer = tokenizer
        self._stats = stats
        self._jobs = 0
        if getattr(tokenizer.model, "dropout", None):
            raise ValueError("the tokenizer's model has dropout: its tokens are random")
        found = fast_encoder(tokenizer) if fast else NoFastEncoder("prompts.fast_tokenizer is off")
        self._fast = found if isinstance(found, FastEncoder) else None
        self.name = found.name if isinstance(found, FastEncoder) else f"tokenizers ({found.reason})"
        barriers = find_barriers(tokenizer)
        self.barrier = barrier_pattern(barriers)
        self._barrier_chars_max = max(map(len, barriers), default=0)
        if self.barrier is not None and not self._probes_agree(barriers):
            self.barrier = None
        self.prefix, self.suffix = self._added_around()

    @property
    def is_fast(self) -> bool:
        """Whether fastokens is in use."""
        return self._fast is not None

    def split(self, text: str) -> list[int]:
        """Where ``text`` may be cut: 0, and the character offset of every barrier."""
        return [0] if self.barrier is None else [0, *self._barrier_starts(text)]

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, whatever it was cut at so far."""
        return self.barrier is not None and self.barrier.match(text, at) is not None

    def _barrier_starts(self, text: str) -> Iterator[int]:
        """Where barriers begin, but for one at 0; window by window, so that other threads get their turn."""
        assert self.barrier is not None  # noqa: S101  # asked by ``split`` only
        begin, overlap = 1, self._barrier_chars_max - 1
        while begin < len(text):  # barriers never overlap each other, so a window may begin inside one
            end = begin + _WINDOW_CHARS
            matches = self.barrier.finditer(text, begin, end + overlap)
            yield from (match.start() for match in matches if match.start() < end)
            begin = end

    def encode_cut(self, text: str) -> tuple[list[int], Encoded]:
        """The cuts of a text, and the ids of its pieces."""
        starts = self.split(text)
        texts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
        return starts, self.encode_pieces(texts)

    def encode_pieces(self, texts: list[str]) -> Encoded:
        """The ids of every text by itself."""
        fast = self._fast
        if fast is None:
            return self._by_reference(texts)
        found = fast.encode(texts)
        self._jobs += 1
        if self._jobs % CHECK_EVERY == 0 and not self._agrees(fast, texts):
            return self._by_reference(texts)
        self._stats.tokens_fast += len(found.ids)
        return found

    def _agrees(self, fast: FastEncoder, texts: list[str]) -> bool:
        """Compare both on one of the texts, or on a part of it where it is long."""
        text = texts[self._jobs // CHECK_EVERY % len(texts)]
        begin = self._jobs % max(1, len(text) - _CHECKED_CHARS)
        sample = text[begin : begin + _CHECKED_CHARS]
        self._stats.tokenizer_checks += 1
        if fast.encode([sample]).ids.tolist() == self._whole(sample):
            return True
        self._stats.tokenizer_mismatches += 1
        self._fast, self.name = None, "tokenizers (fastokens gave other tokens for a prompt)"
        return False

    def _by_reference(self, texts: list[str]) -> Encoded:
        ids, offsets = array("I"), [0]
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids.extend(encoding.ids)
            offsets.append(len(ids))
        return Encoded(ids, offsets)

    def encode(self, text: str) -> Ids:
        """Ids of a whole text, at once; for small texts and tests."""
        return self.encode_cut(text)[1].ids

    @property
    def adds_nothing(self) -> bool:
        """Texts have no special tokens around them."""
        return self.prefix is not None and self.suffix is not None and not self.prefix and not self.suffix

    def with_special_tokens(self, ids: Ids) -> Ids:
        """As ``add_special_tokens=True`` has it. Raises ``NotLocalError`` where that is no plain frame."""
        if self.prefix is None or self.suffix is None:
            raise NotLocalError("field")
        return self.prefix + ids + self.suffix

    def _whole(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def _probes_agree(self, barriers: list[str]) -> bool:
        for text in _probe_texts(barriers):
            cut = [
                token for a, b in pairwise([*self.split(text), len(text)]) for token in self._whole(text[a:b])
            ]
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
