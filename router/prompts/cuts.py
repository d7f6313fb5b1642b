"""Safe cuts of a text before tokenization, and the tokens that a tokenizer adds around every text.

``tokenizers`` cuts a text at added tokens before it normalizes, pre-tokenizes and models each piece
separately. A *barrier* is an added token whose every occurrence is such a cut, in any context: it is matched
on the raw text, strips no white space, and no other added token can overlap an occurrence of it from the left
(or, if that one is matched first, from the right) or be longer at the same place. So a text may be cut before
each barrier, and a piece's ids depend only on the piece: a next turn tokenizes only the text after the last
cut it shares with the previous turn. Long pieces are also cut between words, if the kind of tokenizer
separates them anyway. Both are tried on probe texts at load; if they change any ids, they are not used.

Probing depends on the tokenizer alone and takes up to a second, so its result is cached.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

# Barriers: added tokens before which a text may be cut; and the pattern that finds them.


def find_barriers(tokenizer: Tokenizer) -> list[str]:
    """The contents of all added tokens that are barriers."""
    if tokenizer.encode_special_tokens:
        return []
    added = list(tokenizer.get_added_tokens_decoder().values())
    raw = [token.content for token in added if not token.normalized]
    hidden = _hidden_by(raw)
    if _normalizes(tokenizer):
        candidates = [token for token in added if not token.normalized]
    else:
        # All are matched on the raw text, these ones first.
        candidates = added
        hidden_later, cut_short = _hidden_by([token.content for token in added]), _cut_short_by(raw)
    return [
        token.content
        for token in candidates
        # Such tokens depend on the text beside them, so a cut there could change the match.
        if not (token.lstrip or token.rstrip or token.single_word)
        and token.content.strip() == token.content != ""
        and not hidden(token.content)
        and not (token.normalized and (hidden_later(token.content) or cut_short(token.content)))
    ]


def _normalizes(tokenizer: Tokenizer) -> bool:
    """Whether text is changed before tokens that are not raw are searched."""
    if tokenizer.normalizer is None:
        return False
    state = msgspec.json.decode(tokenizer.normalizer.__getstate__())
    return bool(state != {"type": "Sequence", "normalizers": []})


def _hidden_by(others: list[str]) -> Callable[[str], bool]:
    """Return whether a match of one of ``others`` can keep an occurrence of a token from being matched.

    This holds for one that begins with the token and continues, contains it further inside, or ends with its
    beginning.
    """
    longer = {other[:end] for other in others for end in range(1, len(other))}
    tails = {other[start:] for other in others for start in range(1, len(other))}
    inside = "\0".join(other[1:] for other in others)

    def hidden(token: str) -> bool:
        beginnings = (token[:end] for end in range(1, len(token) + 1))
        return token in longer or token in inside or not tails.isdisjoint(beginnings)

    return hidden


def _cut_short_by(others: list[str]) -> Callable[[str], bool]:
    """The same for matches of ``others`` that begin inside the token; they are made first."""
    beginnings = {other[:end] for other in others for end in range(1, len(other) + 1)}
    whole = set(others)

    def cut_short(token: str) -> bool:
        starts = range(1, len(token))
        ends = any(token[start:] in beginnings for start in starts)
        return ends or any(token[a:b] in whole for a in starts for b in range(a + 1, len(token) + 1))

    return cut_short


def barrier_pattern(barriers: Iterable[str]) -> re.Pattern[str] | None:
    """Pattern for the longest barrier at a place; None without barriers, or if they are nested too deeply.

    Written as a tree: the common beginning of a thousand tokens is read once, not a thousand times.
    """
    tree: dict[str, Any] = {}
    for barrier in barriers:
        node = tree
        for char in barrier:
            node = node.setdefault(char, {})
        node[_END] = {}
    try:
        return re.compile(_alternatives(tree)) if tree else None
    except RecursionError:
        return None


_END = ""


def _alternatives(node: dict[str, Any]) -> str:
    begins = ""
    while len(node) == 1 and _END not in node:
        ((char, node),) = node.items()
        begins += re.escape(char)
    found = [re.escape(char) + _alternatives(below) for char, below in node.items() if char != _END]
    if not found:
        return begins
    return f"{begins}(?:{'|'.join(found)}){'?' if _END in node else ''}"


# Cuts between words: before a space that follows an ASCII letter, for tokenizers known to separate there.
#
# Why a text's ids are those of its two parts, in any context, by the steps of ``tokenizers``:
#
# 1. Added tokens: none has a letter and a space in this order, ends with a letter and strips white space, or
#    must stand alone. So no match spans the place or depends on the other side.
# 2. Normalizer: none, or NFC, which changes neither an ASCII letter nor a space that follows one, and joins
#    nothing to the text before a space.
# 3. Pre-tokenizer: a sequence of splits, each by an alternation of ``_BRANCHES``. In a match of any of these
#    a space is the first character or follows only white space: so none spans the place. None looks behind,
#    so matches that begin after the place are those of the second part. A match that begins before it sees,
#    in the text and in the first part, the same characters up to the letter, and then something that it
#    cannot take, a space or the end; the one look-ahead, for white space, sees the letter at most. So matches
#    are those of both parts, and pieces too, except an unmatched one that may continue over the place: the
#    next split gets it whole. A pattern with the branch ``\s+`` matches every space: after it no piece does.
#    ``Digits`` is a split by ``\p{N}``. ``ByteLevel`` without a prefix space only re-encodes each piece.
# 4. Model: BPE, each piece separately.
#
# Other kinds (SentencePiece, a pattern with another branch) are cut at added tokens only. At load the cuts
# are also tried on probe texts.


_PLACE: Final = re.compile(r" (?<=[A-Za-z] )")
# Shorter pieces are not cut: a cut costs 1 us when its text is first seen, a character after the last one
# that two turns share 5 ns.
PIECE_CHARS: Final = 1024
# A cut this near another one saves less than it costs: a template writes several marks around a message.
NEAR_CHARS: Final = 24
# Cuts are apart by at least this part of the text since the first start: 400 KB have a hundred, 8 MB two
# hundred.
_SPREAD: Final = 32

_MARKED: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_GPT2: Final = (
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s+(?!\S)",
    r"\s+",
)
_BRANCHES: Final = (
    *_GPT2,
    # cl100k, Llama 3, Qwen.
    _MARKED,
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    # Qwen 3.5.
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    # o200k, Llama 4; tekken has them without the contractions.
    *_O200K_WORDS,
    *(word + _MARKED + "?" for word in _O200K_WORDS),
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    # DeepSeek V3.
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
)
_BRANCH: Final = "|".join(map(re.escape, _BRANCHES))
_PATTERN: Final = re.compile(rf"(?:{_BRANCH})(?:\|(?:{_BRANCH}))*")
_ALL_SPACES: Final = r"\s+"
# Behaviours of a split, and whether it is inverted: both make a piece of every match.
_KEEPING_MATCHES: Final = (("Isolated", False), ("Removed", True))


def parts_words(tokenizer: Tokenizer) -> bool:
    """Whether its texts may be cut between words."""
    if tokenizer.encode_special_tokens:
        return False
    return (
        isinstance(tokenizer.model, BPE)
        and all(step["type"] == "NFC" for step in _steps(_state(tokenizer.normalizer), "normalizers"))
        and _splits_at_spaces(_steps(_state(tokenizer.pre_tokenizer), "pretokenizers"))
        and not any(
            _reaches_over(token, tokenizer) for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def word_cuts(text: str, starts: Sequence[int]) -> Iterator[int]:
    """Yield ``starts`` (of pieces) and further cuts in long pieces."""
    for start, end in pairwise([*starts, len(text)]):
        yield start
        at = start + PIECE_CHARS
        while at + PIECE_CHARS <= end:
            found = _PLACE.search(text, at, at + PIECE_CHARS)
            if found is not None:
                yield found.start()
            # Cuts grow apart with the text, so that their number stays small in long texts.
            at += max(PIECE_CHARS, (at - starts[0]) // _SPREAD)


def between_words(text: str, at: int) -> bool:
    """Whether the text may be cut here between words."""
    return at > 0 and _PLACE.match(text, at) is not None


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as in ``tokenizer.json``; a missing part is an empty sequence of steps."""
    return {"type": "Sequence"} if part is None else dict(msgspec.json.decode(part.__getstate__()))


def _steps(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return state.get(name, []) if state["type"] == "Sequence" else [state]


def _splits_at_spaces(steps: list[dict[str, Any]]) -> bool:
    *splits, last = steps or [{"type": ""}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return False
    patterns = [_pattern(step) for step in splits]
    if last["use_regex"]:
        patterns.append("|".join(_GPT2))
    known = all(_PATTERN.fullmatch(pattern) for pattern in patterns)
    return known and any(_ALL_SPACES in pattern.split("|") for pattern in patterns)


def _pattern(step: dict[str, Any]) -> str:
    """The regular expression of a split, with escapes for line ends; "" for other steps."""
    if step["type"] == "Digits":
        return r"\p{N}"
    if step["type"] != "Split" or (step["behavior"], step["invert"]) not in _KEEPING_MATCHES:
        return ""
    pattern: str = step["pattern"].get("Regex", "")
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _reaches_over(token: Any, tokenizer: Tokenizer) -> bool:
    """Whether an added token's match may span a place between words, or depend on the text behind it."""
    normalized = token.content
    if token.normalized and tokenizer.normalizer is not None:
        normalized = tokenizer.normalizer.normalize_str(token.content)
    contents = (token.content, normalized)
    if any(_PLACE.search(content) for content in contents) or token.single_word:
        return True
    return token.rstrip and any(content[-1:].isalpha() for content in contents)


# Compact token ids.


Ids: TypeAlias = "array[int]"
"""Token ids, an ``array`` of 4 bytes each."""


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """Separately tokenized texts: all ids, and per text the number of ids before it; then the total."""

    ids: Ids
    offsets: list[int]

    def piece(self, number: int) -> Ids:
        """The ids of one text."""
        return self.ids[self.offsets[number] : self.offsets[number + 1]]


# Scanned at once, about 1 ms: a regular expression holds the GIL.
_WINDOW_CHARS: Final = 1 << 17
_PLAIN_PROBES: Final = ("", "a", "Hello world", " leading", "trailing ", "日本 é\n\n", "1234 x")
_PROBE_PIECES: Final = (
    "",
    " ",
    "\n",
    "\t",
    "  two",
    "word",
    " word ",
    "\n\n x",
    "é",
    "e\u0301",
    "日本",
    "12345",
    "'s",
    "<|",
)
_BETWEEN_WORDS: Final = [
    (f"{left}x {right}", len(left) + 1) for left in _PROBE_PIECES for right in _PROBE_PIECES
]
# Barriers differ only by their text; more would only make loading slower.
_PROBED_BARRIERS_MAX: Final = 6


class Cuts(NamedTuple):
    """Cuts of one tokenizer. ``prefix`` and ``suffix``: tokens that ``add_special_tokens`` puts before and
    after any text; None, None if it does more. ``words``: texts may be cut between words."""

    barrier: re.Pattern[str] | None
    barrier_chars_max: int
    words: bool
    prefix: Ids | None
    suffix: Ids | None

    def split(self, text: str, begin: int = 0, near_chars: int = NEAR_CHARS) -> list[int]:
        """Cuts of ``text`` from ``begin`` on: ``begin`` itself, the character offsets of barriers that are at
        least ``near_chars`` behind the cut before, and places in long pieces."""
        starts, chars = [begin], len(text) - begin
        if self.barrier is not None and chars > _WINDOW_CHARS:
            starts += self._barrier_starts(self.barrier, text, begin + near_chars, near_chars)
        elif self.barrier is not None:
            near = begin + near_chars
            for match in self.barrier.finditer(text, near):
                start = match.start()
                if start >= near:
                    starts.append(start)
                    near = start + near_chars
        return list(word_cuts(text, starts)) if self.words and chars > PIECE_CHARS else starts

    def may_cut(self, text: str, at: int) -> bool:
        """Whether ``text`` may be cut before character ``at``, independently of other cuts."""
        if self.barrier is not None and self.barrier.match(text, at) is not None:
            return True
        return self.words and between_words(text, at)

    def _barrier_starts(
        self, barrier: re.Pattern[str], text: str, begin: int, near_chars: int
    ) -> Iterator[int]:
        """Starts of barriers from ``begin`` on; window by window, so that other threads can run."""
        overlap, near = self.barrier_chars_max - 1, begin
        # A regular expression holds the GIL: window by window, other threads can run.
        # Barriers never overlap each other, so a window may begin inside one.
        while begin < len(text):
            end = begin + _WINDOW_CHARS
            matches = barrier.finditer(text, begin, end + overlap)
            for match in matches:
                start = match.start()
                if near <= start < end:
                    yield start
                    near = start + near_chars
            begin = end


@lru_cache(maxsize=4)
def cuts_of(tokenizer: Tokenizer) -> Cuts:
    """Find barriers and special tokens, and try both on probe texts."""
    barriers = find_barriers(tokenizer)
    frame = _added_around(tokenizer)
    found = Cuts(
        barrier_pattern(barriers), max(map(len, barriers), default=0), parts_words(tokenizer), *frame
    )
    if not all(_is_same(tokenizer, text, found.split(text, 0, 1)) for text in _around_barriers(barriers)):
        found = found._replace(barrier=None)
    if not (found.words and all(_is_same(tokenizer, text, [0, at]) for text, at in _BETWEEN_WORDS)):
        found = found._replace(words=False)
    return found


def whole(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text in one piece."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def _is_same(tokenizer: Tokenizer, text: str, starts: list[int]) -> bool:
    cut = [token for a, b in pairwise([*starts, len(text)]) for token in whole(tokenizer, text[a:b])]
    return cut == whole(tokenizer, text)


def _added_around(tokenizer: Tokenizer) -> tuple[Ids | None, Ids | None]:
    frame = whole(tokenizer, "", special=True)
    # Which tokens come before and which after a text shows only with texts between them.
    for cut in range(len(frame) + 1):
        before, after = frame[:cut], frame[cut:]
        if all(
            before + whole(tokenizer, probe) + after == whole(tokenizer, probe, special=True)
            for probe in _PLAIN_PROBES
        ):
            return array("I", before), array("I", after)
    return None, None


def _around_barriers(barriers: list[str]) -> list[str]:
    """Texts with barriers between, before and after pieces that normalizers and splitters treat specially."""
    texts = []
    for number, barrier in enumerate(barriers[:_PROBED_BARRIERS_MAX]):
        other = barriers[(number + 1) % len(barriers)]
        texts += [f"{left}{barrier}{right}{other}{left}" for left in _PROBE_PIECES for right in _PROBE_PIECES]
    return texts
