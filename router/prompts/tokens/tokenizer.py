"""Prompt text -> token ids, cut where that is safe (``cuts.py``), by fastokens where that is proven equal.

Every ``CHECK_EVERY``-th job of fastokens is compared with ``tokenizers`` on a short piece of its own text;
the first difference takes fastokens out of use for good (``name`` says so, ``tokenizer_mismatches`` counts).

Always true: ``encode`` returns exactly ``Tokenizer.encode(text).ids``, or was equal to it on every probe and
sample. Encoding releases the GIL.
"""

from __future__ import annotations

import os
from array import array
from typing import Final

from tokenizers import Tokenizer

from router.prompts.stats import PromptStats
from router.prompts.tokens.cuts import cuts_of, whole
from router.prompts.tokens.fast import FastEncoder, NoFastEncoder, fast_encoder
from router.prompts.tokens.ids import Encoded, Ids

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""The library's own threads gain nothing for one text and burn more CPU waiting than the text costs."""

CHECK_EVERY: Final = 1024
"""One job of fastokens in so many is compared; costs 1-2 us each on average."""
_CHECKED_CHARS: Final = 1024


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
        self.cuts = cuts_of(tokenizer)
        self.may_cut, self.prefix, self.suffix = self.cuts.may_cut, self.cuts.prefix, self.cuts.suffix

    @property
    def is_fast(self) -> bool:
        """Whether fastokens is in use."""
        return self._fast is not None

    def encode_cut(self, text: str, begin: int = 0) -> tuple[list[int], Encoded]:
        """The cuts of a text from ``begin`` on, where it may be cut, and the ids of its pieces."""
        starts = self.cuts.split(text, begin)
        texts: list[str] = []
        for end in starts[1:]:
            texts.append(text[begin:end])
            begin = end
        texts.append(text[begin:])
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
        if fast.encode([sample]).ids.tolist() == whole(self._tokenizer, sample):
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
