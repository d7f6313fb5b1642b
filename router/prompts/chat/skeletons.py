"""Precompiled layouts: what a chat template writes around the texts of plain messages, rendered once.

Most chats are messages of a role and a text. For the same roles in the same order and the same other
arguments a template usually writes the same around every text. If one rendering by jinja2 with traced texts
(``watched.py``) shows that, its output is kept with the template's questions, and the next such chat is
assembled from it: 1 to 3 us instead of 7 to 17 by minijinja, and one copy of all texts instead of five. A
chat with another answer to a question is rendered, and kept separately.

Invariant: the layouts of one template take at most ``_KEPT_MAX`` times ``_WAYS_MAX`` times ``_CHARS_MAX``
characters. Any thread may call it.
"""

from __future__ import annotations

from typing import Any, Final

import jinja2
import msgspec

from kvatlas.router.prompts.chat.bounds import render
from kvatlas.router.prompts.chat.messages import Message, text_message
from kvatlas.router.prompts.chat.watched import (
    NotPlainError,
    Part,
    TemplateTracer,
    TracedText,
)

# Sequences of roles with other arguments; when full, all are dropped.
_KEPT_MAX: Final = 256
# Layouts of each, by the answers; a chat that needs one more is always rendered.
_WAYS_MAX: Final = 4
# Characters written by the template itself; longer output is not kept.
_CHARS_MAX: Final = 1 << 14
MESSAGES_MAX: Final = 64
"""Longer chats are always rendered."""

Key = tuple[bytes, str, tuple[str, ...]]
"""Equal only if all other arguments are; the content format; the roles of all messages."""


class PrecompiledLayout(msgspec.Struct, frozen=True, gc=False):
    """``spans``: what the template writes itself, and the parts of messages between. ``firsts[i]``: number of
    spans before the first one that depends on message ``i``, or a later one; the last is that of all."""

    spans: list[str | Part]
    answers: list[TracedText]
    firsts: list[int]

    def fits(self, texts: list[str]) -> bool:
        """Whether the answers to the template's questions are the same for these texts."""
        return not self.answers or all(one.holds(texts) for one in self.answers)

    def written(self, texts: list[str], first: int = 0) -> list[str]:
        """The spans of such a chat from number ``first`` on."""
        made: list[str] = []
        for span in self.spans[first:]:
            if isinstance(span, str):
                made.append(span)
            else:
                made.append(span.text_in(texts) if span.changes else texts[span.message])
        return made

    def num_alike(self, other: PrecompiledLayout, messages: int) -> int:
        """Number of leading spans that are the same in both if the first ``messages`` are."""
        end = min(self.firsts[messages], other.firsts[messages])
        if other is self or self.spans[:end] == other.spans[:end]:
            return end
        return next(at for at in range(end) if self.spans[at] != other.spans[at])


class Skeletons:
    """Layouts of one template; ``watching`` is compiled with ``watched.watching``, None: no layouts."""

    def __init__(self, watching: jinja2.Template | None) -> None:
        self._watching = watching
        self._kept: dict[Key, tuple[PrecompiledLayout, ...]] = {}

    def find(self, key: Key, texts: list[str]) -> PrecompiledLayout | None:
        """The layout of a chat whose messages are a role and a non-empty text alone. None: it must be
        rendered."""
        for skeleton in self._kept.get(key, ()):
            if skeleton.fits(texts):
                return skeleton
        return None

    def learn(self, key: Key, texts: list[str], names: dict[str, Any], rendered: str) -> None:
        """Keep the layout of a rendered chat, if it can be proven."""
        ways = self._kept.get(key, ())
        if self._watching is None or len(ways) >= _WAYS_MAX or len(texts) > MESSAGES_MAX:
            return
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        found = _watched(self._watching, key, texts, names)
        if found is None or "".join(found.written(texts)) != rendered:
            found = _NEVER
        self._kept[key] = (*ways, found)

    def forget(self) -> None:
        """Drop all layouts and keep no further ones."""
        self._watching, self._kept = None, {}


# Layout of a chat whose texts the template reads itself: never applies.
_NEVER: Final = PrecompiledLayout([], [TracedText(Part(0), "startswith", ("",), False)], [])


def text_messages(key: Key, texts: list[str]) -> list[Message]:
    """Messages with this key and these texts."""
    _, form, roles = key
    return [text_message(role, text, form) for role, text in zip(roles, texts, strict=True)]


def _watched(
    template: jinja2.Template, key: Key, texts: list[str], names: dict[str, Any]
) -> PrecompiledLayout | None:
    watch = TemplateTracer(texts)
    messages = text_messages(key, [watch.text(Part(at)) for at in range(len(texts))])
    try:
        pieces = watch.pieces(render(template, {**names, "messages": messages}))
    except (NotPlainError, Exception):  # noqa: BLE001  # templates can raise anything
        return None
    if sum([len(one) for one in pieces if isinstance(one, str)]) > _CHARS_MAX:
        return None
    # Parts may come in any order: of each message the first span that depends on it, or on a later one.
    firsts = [len(pieces)] * (len(texts) + 1)
    for at in reversed(range(len(pieces))):
        if isinstance(part := pieces[at], Part):
            firsts[: part.message + 1] = [at] * (part.message + 1)
    return PrecompiledLayout(pieces, list(watch.answers), firsts)
