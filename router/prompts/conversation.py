"""A conversation: messages, cut text, tokens and block hashes of its newest turn, which a next turn extends.

Of a next turn only what comes behind the last cut that it shares with the turn before is looked at: its new
messages are decoded, their text is written, cut and tokenized, their blocks are hashed. A piece's tokens
depend only on the piece, so two texts that are equal up to a place at which both may be cut have the same
tokens before it.

A ``Turn`` is what a prompt keeps while its conversation goes on. Invariant: neither ``ids`` nor hashes that
were given out ever change.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras
from kvatlas.router.prompts.chat.messages import Message, text_message
from kvatlas.router.prompts.chat.skeletons import PrecompiledLayout
from kvatlas.router.prompts.cuts import Ids


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
        starts, own, begin = self.starts, self.text, self.begin
        shared = high = len(starts) - 1
        if not text.startswith(own):
            at, end = 0, starts[high] - begin
            # Mostly a last message was replaced, or what the template writes behind it.
            if high and text.startswith(own[end:], end):
                high -= 1
            shared = bisect_right(starts, begin) - 1
            # By bisection: texts are equal up to character ``at``, maybe not up to starts[high + 1].
            while shared < high:
                middle = (shared + high + 1) // 2
                end = starts[middle] - begin
                if text.startswith(own[at:end], at):
                    shared, at = middle, end
                else:
                    high = middle - 1
        while shared and (starts[shared] < begin or not may_cut(text, starts[shared] - begin)):
            shared -= 1
        return shared

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


class WrittenText(msgspec.Struct, frozen=True, gc=False):
    """The text of a turn from where ``before`` begins (None: all of it), the text of the turn ``over``, of
    which it shares ``kept`` pieces; and how it was written, if its layout is known."""

    text: str
    over: Turn | None = None
    before: CutText | None = None
    kept: int = 0
    layout: PrecompiledLayout | None = None
    spans: Sequence[str] = ()


_NOTHING: Final[Ids] = array("I")


class Turn(msgspec.Struct, eq=False, gc=False):
    """Tokens and hashes of one prompt: the first ``at`` ids of ``head``, which only grows and may belong to
    other turns too, and ``tail``. ``media``: digests of all images, in order; with images, the ids have the
    template's marks for them and are no prompt."""

    tail: Ids
    extras: PromptExtras
    media: tuple[bytes, ...] = ()
    head: Ids = _NOTHING
    at: int = 0
    chains: dict[HashScheme, HashChain] = {}
    shared_tokens: int = 0
    """Number of leading tokens that all workers find, with their hashes."""

    @property
    def num_tokens(self) -> int:
        """Number of all ids."""
        return self.at + len(self.tail)

    @property
    def ids(self) -> Ids:
        """All ids, in one array from then on; must not be changed."""
        if self.at:
            self.tail, self.at = self.head[: self.at] + self.tail, 0
        return self.tail

    def end(self, start: int) -> Ids:
        """The ids from number ``start`` on."""
        at = self.at
        return self.tail[start - at :] if start >= at else self.head[start:at] + self.tail

    def beginning(self, tokens: int) -> Ids:
        """An array with these first ids, and maybe others behind them: the ``head`` of a next turn."""
        head, at = self.head, self.at
        if not at:
            return self.tail[:tokens]
        if tokens <= at:
            return head if 2 * tokens >= len(head) else head[:tokens]
        if len(head) > at:  # another turn went on from here
            head = head[:at]
        head.extend(self.tail[: tokens - at])
        return head

    def common(self, other: Turn) -> int:
        """Number of equal leading ids of a turn whose ``head`` is this one's ``beginning``."""
        at = other.at
        return at + common_tokens(self.end(at), other.tail)

    def inherit(self, other: Turn, num_tokens: int, *, last: bool) -> None:
        """Reuse the hashes of the first ``num_tokens`` tokens, which both share.

        ``last``: the other turn is over, so that nothing needs to be copied.
        """
        if other.extras != self.extras:
            return
        for scheme, chain in other.chains.items():
            blocks = (num_tokens - scheme.lookahead) // scheme.hash_block_size
            known = len(chain.hashes)
            blocks = known if known < blocks else blocks  # noqa: FURB136
            blocks = 0 if blocks < 0 else blocks  # noqa: FURB136
            if last:
                chain.cut(blocks)
            self.chains[scheme] = chain if last else chain.fork(blocks)
        if last:
            other.chains = {}


_COMPARED: Final = 64
"""Number of ids compared bit by bit."""
_ID_BITS: Final = 32


def common_tokens(left: Ids, right: Ids) -> int:
    """Number of equal leading ids. Usually few are given, so this avoids numpy, whose code is no longer in
    the processor's caches."""
    low, high = 0, len(left) if len(left) < len(right) else len(right)  # noqa: FURB136
    while high - low > _COMPARED:  # they are equal up to low, maybe not up to high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    one, two = left[low:high], right[low:high]
    if one == two:
        return high
    differ = int.from_bytes(one, "little") ^ int.from_bytes(two, "little")
    return low + ((differ & -differ).bit_length() - 1) // _ID_BITS  # where the lowest bit is


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
    fixed_bytes: int = 0
    size_bytes: int = 0

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
