"""A model's tokenizer: its directory, and prompt text to token ids by fastokens if that is proven equal.

Every ``CHECK_EVERY``-th job of fastokens is compared with ``tokenizers`` on a short piece of its own text;
after the first difference fastokens is not used any more (``name`` says so, ``tokenizer_mismatches`` counts).

Texts are cut at safe places (``cuts.py``). Invariant: ``encode`` returns exactly
``Tokenizer.encode(text).ids``, or was equal to it on every probe and sample. Encoding releases the GIL.

The directory has Hugging Face's layout: ``tokenizer.json``, ``tokenizer_config.json``,
``special_tokens_map.json``, ``chat_template.jinja``, ``additional_chat_templates/*.jinja``,
``chat_template.json`` and ``config.json`` are read with the precedence of transformers 5 and vLLM 0.32. If
the engine would not use these files (its own renderer for some architectures, Mistral's tokenizer),
``load_model_dir`` sets ``renderer`` instead of loading them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvatlas.router.prompts.cuts import Encoded, Ids, cuts_of, whole
from kvatlas.router.prompts.fast_tokenizer import FastEncoder, NoFastEncoder, fast_encoder
from kvatlas.router.prompts.settings import PromptStats

# One job of fastokens in this many is compared; costs 1-2 us each on average.
CHECK_EVERY: Final = 1024
_CHECKED_CHARS: Final = 1024


class PromptTokenizer:
    """One model's tokenizer. ``fast``: use fastokens if it agrees. Any thread may call it.

    ``name``: the library in use, and why not fastokens.
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
        """The cuts of a text from ``begin`` on, and the ids of its pieces."""
        starts = self.cuts.split(text, begin)
        texts: list[str] = []
        for end in starts[1:]:
            texts.append(text[begin:end])
            begin = end
        texts.append(text[begin:])
        return starts, self.encode_pieces(texts)

    def encode_pieces(self, texts: list[str]) -> Encoded:
        """The ids of every text separately."""
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
        """Compare both on one of the texts, or on a part of a long one."""
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

    def decode(self, ids: Sequence[int], *, skips_special: bool) -> str | None:
        """The text of these ids, as engines read them; None: not known here."""
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skips_special))
        except (TypeError, OverflowError):
            return None

    @property
    def adds_nothing(self) -> bool:
        """Whether texts have no special tokens around them."""
        return self.prefix is not None and self.suffix is not None and not self.prefix and not self.suffix
