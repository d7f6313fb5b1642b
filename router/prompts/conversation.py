"""A conversation: messages, cut text, tokens and block hashes of its newest turn, which a next turn extends.

Of a next turn only what comes behind the last cut that it shares with the turn before is looked at: its new
messages are decoded, their text is written, cut and tokenized, their blocks are hashed. A piece's tokens
depend only on the piece, so two texts that are equal up to a place at which both may be cut have the same
tokens before it.

A ``Turn`` is what a prompt keeps while its conversation goes on. Invariant: neither ``ids`` nor hashes that
were given out ever change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras, num_hash_blocks
from kvatlas.router.prompts.chat.compiled import PrecompiledLayout
from kvatlas.router.prompts.chat.messages import Message, text_message
from kvatlas.router.prompts.cuts import Ids

_raw_of: Final = attrgetter("raw")


class KnownMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a request and its converted form.

    ``role``, ``text``: of a message that a template sees as a role and a non-empty text, and nothing else;
    both empty for any other, which has its converted form in ``message``. ``shape``: its kind (0: not
    needed); ``num_values``: upper bound of its lists and objects; ``images``: digests; ``weight_bytes``: its
    whole memory.
    """

    raw: msgspec.Raw
    role: str
    text: str
    shape: int
    weight_bytes: int
    num_values: int = 1
    message: Message | None = None
    images: tuple[bytes, ...] = ()

    def as_message(self, content_format: str) -> Message:
        """The template's input."""
        return text_message(self.role, self.text, content_format) if self.message is None else self.message


class CutText(msgspec.Struct, frozen=True, gc=False):
    """A text that was tokenized in pieces: number ``i`` begins at character ``starts[i]``, with ``counts[i]``
    tokens before it.

    ``text`` is its end, from character ``begin`` on; what comes before is what ``layout`` writes before its
    span number ``span``.
    """

    text: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    begin: int = 0
    layout: PrecompiledLayout | None = None
    span: int = 0

    def num_shared(self, text: str, may_cut: Callable[[str, int], bool]) -> int:
        """Number of leading pieces that another text begins with and after which it may be cut; never the
        last one. ``text``: its end, from ``begin`` on; before, both are equal. 0 also if it cannot be cut
        behind ``begin``."""
        starts, begin = self.starts, self.begin
        shared = len(starts) - 1 if text.startswith(self.text) else self._num_equal(text)
        while shared and (starts[shared] < begin or not may_cut(text, starts[shared] - begin)):
            shared -= 1
        return shared

    def _num_equal(self, text: str) -> int:
        """Number of leading pieces that are equal in both, which differ; by bisection."""
        starts, own, begin = self.starts, self.text, self.begin
        low, high, at = bisect_right(starts, begin) - 1, len(starts), 0
        # Texts are equal up to character ``at``, maybe not up to starts[high].
        while high - low > 1:
            middle = (low + high) // 2
            end = starts[middle] - begin
            if text.startswith(own[at:end], at):
                low, at = middle, end
            else:
                high = middle
        return low

    def only_end(self, written: Sequence[str]) -> CutText:
        """Without what comes before the last cut in front of the last message: that is where a next turn
        goes on. ``written``: the spans of ``text``."""
        layout, text_at = self.layout, 0
        last = 0 if layout is None else layout.firsts[-2] - self.span
        if last <= 0:
            return self
        ends = list(accumulate(map(len, written[:last])))
        cut = self.starts[bisect_right(self.starts, self.begin + ends[-1]) - 1] - self.begin
        spans = bisect_right(ends, cut)
        if not spans:
            return self
        text_at = ends[spans - 1]
        return CutText(
            self.text[text_at:], self.starts, self.counts, self.begin + text_at, layout, self.span + spans
        )


class WrittenText(NamedTuple):
    """The text of a turn from where ``before`` begins (None: all of it), the text of the turn ``over``, of
    which it shares ``kept`` pieces; and how it was written, if its layout is known."""

    text: str
    over: Turn | None = None
    before: CutText | None = None
    kept: int = 0
    layout: PrecompiledLayout | None = None
    spans: Sequence[str] = ()


class Turn(msgspec.Struct, eq=False, gc=False):
    """Tokens and hashes of one prompt. ``media``: digests of all images, in order; with images, ``ids`` has
    the template's marks for them and is no prompt."""

    ids: Ids
    extras: PromptExtras
    media: tuple[bytes, ...] = ()
    chains: dict[HashScheme, HashChain] = {}
    shared_tokens: int = 0
    """Number of leading tokens that all workers find, with their hashes."""

    def inherit(self, other: Turn, num_tokens: int, *, last: bool) -> None:
        """Reuse the hashes of the first ``num_tokens`` tokens, which both share.

        ``last``: the other turn is over, so that nothing needs to be copied.
        """
        if other.extras != self.extras:
            return
        for scheme, chain in other.chains.items():
            known, shared = len(chain.hashes), num_hash_blocks(num_tokens, scheme)
            blocks = shared if shared < known else known  # noqa: FURB136  # a call less
            if last:
                chain.cut(blocks)
            self.chains[scheme] = chain if last else chain.fork(blocks)
        if last:
            other.chains = {}


class Conversation(msgspec.Struct, eq=False, gc=False):
    """One conversation, or prompt without messages. Thousands are kept, so it consists of objects that the
    garbage collector does not track.

    ``scope``: all inputs of text and hashes besides messages, in compact form. ``keys``: of its prefixes, the
    whole last.
    """

    scope: bytes
    keys: list[int]
    turn: Turn
    messages: list[KnownMessage] = []
    cut: CutText | None = None
    """None: the ids are not those of a text alone, or the family makes them."""
    messages_bytes: int = 0
    size_bytes: int = 0

    def begins_as(self, raws: list[msgspec.Raw]) -> bool:
        """Whether its first messages are these, byte by byte."""
        return list(map(_raw_of, self.messages[: len(raws)])) == raws

    def cut_before(self, layout: PrecompiledLayout, shared: int) -> CutText | None:
        """``cut`` for a turn of this layout that shares the first messages: with the whole text if it differs
        before ``begin``."""
        cut = self.cut
        if cut is None or cut.layout is None or layout.num_alike(cut.layout, shared) >= cut.span:
            return cut
        return self.whole_cut()

    def whole_cut(self) -> CutText | None:
        """``cut`` with the whole text."""
        cut = self.cut
        if cut is None or cut.layout is None or not cut.begin:
            return cut
        text = "".join(cut.layout.written([one.text for one in self.messages]))
        return CutText(text, cut.starts, cut.counts, 0, cut.layout)
