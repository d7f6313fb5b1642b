"""What a chat template writes around the texts of plain messages: rendered once, then only put together.

Most chats are messages of a role and a text. For the same roles in the same order and the same other
arguments a template mostly writes the same around every text. Where one rendering by jinja2 with texts that
note what is asked about them (``watched.py``) shows that, what it wrote is kept, with the questions, and the
next such chat is put together from it: 1 to 3 us instead of 7 to 17 by minijinja, and a copy of all texts
instead of five. A chat for which a question has another answer is rendered, and kept beside.

Always true: what is kept of one template takes at most ``_KEPT_MAX`` times ``_WAYS_MAX`` times ``_CHARS_MAX``
characters. Any thread may call it.
"""

from __future__ import annotations

from typing import Any, Final

import jinja2
import msgspec

from router.prompts.chat.messages import Message, text_message
from router.prompts.chat.watched import Noted, NotPlainError, Part, Watch

_KEPT_MAX: Final = 256
"""Sequences of roles with other arguments; when full, all are forgotten."""
_WAYS_MAX: Final = 4
"""Kept of each, by the answers; a chat that needs one more is always rendered."""
_CHARS_MAX: Final = 1 << 14
"""That the template itself wrote; more is not kept."""
_MESSAGES_MAX: Final = 64

Key = tuple[bytes, str, tuple[str, ...]]
"""What is equal only where all other arguments are; the content format; the roles of all messages."""


class Skeleton(msgspec.Struct, frozen=True, gc=False):
    """``pieces`` with nothing in the ``places`` of whole texts (index of the message, and where) and in
    ``changed``, the places of others."""

    pieces: list[str]
    places: list[tuple[int, int]]
    changed: list[tuple[int, Part]]
    answers: list[Noted]

    def around(self, texts: list[str]) -> str | None:
        """The whole text of such a chat; None where the template would be told something else."""
        if self.answers and not all(one.holds(texts) for one in self.answers):
            return None
        pieces = self.pieces.copy()
        for at, index in self.places:
            pieces[at] = texts[index]
        for at, part in self.changed:
            pieces[at] = part.of(texts)
        return "".join(pieces)


class Skeletons:
    """Those of one template; ``watching`` is compiled with ``watched.watching``, None: nothing is kept."""

    def __init__(self, watching: jinja2.Template | None) -> None:
        self._watching = watching
        self._kept: dict[Key, tuple[Skeleton, ...]] = {}

    def text(self, key: Key, texts: list[str]) -> str | None:
        """The text of a chat whose messages are a role and a text alone, none empty. None: it is to be
        rendered."""
        for skeleton in self._kept.get(key, ()):
            text = skeleton.around(texts)
            if text is not None:
                return text
        return None

    def learn(self, key: Key, texts: list[str], names: dict[str, Any], rendered: str) -> None:
        """Keep what was rendered for such a chat, if that can be shown."""
        ways = self._kept.get(key, ())
        if self._watching is None or len(ways) >= _WAYS_MAX or len(texts) > _MESSAGES_MAX:
            return
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        found = _watched(self._watching, key, texts, names)
        if found is None or found.around(texts) != rendered:
            found = _NEVER
        self._kept[key] = (*ways, found)

    def forget(self) -> None:
        """Keep nothing any more."""
        self._watching, self._kept = None, {}


_NEVER: Final = Skeleton([], [], [], [Noted(Part(0), "startswith", ("",), False)])
"""Of a chat whose texts the template reads itself: fits none."""


def text_messages(key: Key, texts: list[str]) -> list[Message]:
    """The messages with this key and these texts."""
    _, form, roles = key
    return [text_message(role, text, form) for role, text in zip(roles, texts, strict=True)]


def _watched(template: jinja2.Template, key: Key, texts: list[str], names: dict[str, Any]) -> Skeleton | None:
    watch = Watch(texts)
    messages = text_messages(key, [watch.text(Part(at)) for at in range(len(texts))])
    try:
        pieces = watch.pieces(template.render({**names, "messages": messages}))
    except (NotPlainError, Exception):  # noqa: BLE001  # templates can raise anything
        return None
    written = [one if isinstance(one, str) else "" for one in pieces]
    if sum(map(len, written)) > _CHARS_MAX:
        return None
    parts = [(at, one) for at, one in enumerate(pieces) if isinstance(one, Part)]
    whole = [(at, part.message) for at, part in parts if not part.changes]
    return Skeleton(written, whole, [(at, part) for at, part in parts if part.changes], list(watch.answers))
