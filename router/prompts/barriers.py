"""Barriers: added tokens before which a text may be cut; and the pattern that finds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from tokenizers import Tokenizer


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
