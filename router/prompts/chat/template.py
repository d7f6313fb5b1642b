"""One chat template, rendered by minijinja if that is proven equal to jinja2, else by jinja2.

jinja2 in Hugging Face's sandbox is the reference, which engines run. minijinja renders the same template
several times faster. At load, probe conversations are rendered with both, and minijinja is used only if every
result is equal. Probes cannot cover everything, so in use the two are compared again for every message shape
(role, keys, value types) not seen before and for every ``CHECK_EVERY``-th rendering. A difference always
returns jinja2's text. If one shape is new, jinja2 renders that shape from then on; if all were known to
agree, minijinja is not used for that template any more: shapes do not describe it well enough.

If the two are known to differ by the value and not by its shape, jinja2 renders: numbers that minijinja
writes differently and texts within lists and objects that it quotes differently (``is_unlike``), a text with
one of the four separators that only Python considers white space (an engine strips them, minijinja does not),
letters beyond ASCII in a template that changes their case, and any template that ``compiled.py`` excludes.

Chats of plain messages are mostly not rendered at all, but assembled from a precompiled layout; of these
every ``CHECK_EVERY``-th is rendered by jinja2 too.

Measured on one shared core: a 30 KB, 10-message ChatML chat renders in 11-20 us with minijinja, in 34-60 us
with jinja2.

Invariant: ``render`` returns jinja2's text, or a text that was equal to it on every shape and sample checked.
Thread-safe: rendering shares no changing state but counters and a set of shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Set
from typing import Any, Final

from router.prompts.chat.compiled import (
    Context,
    Key,
    Skeletons,
    TemplateRejectsError,
    by_fast,
    by_reference,
    compile_template,
    text_messages,
)
from router.prompts.chat.messages import Message
from router.prompts.request import NotLocalError
from router.prompts.stats import PromptStats

CHECK_EVERY: Final = 256
"""One rendering in this many is compared although its shape is known; costs under 1 us each on average."""
_SHAPES_MAX: Final = 4096
"""Known shapes; when full, all are dropped and checked again."""
_DIFFERING_MAX: Final = 256
"""Shapes for which minijinja differs; when full, all are dropped and checked again."""
UNLIKE: Final = 0
"""The shape of all values that minijinja is known to write differently: jinja2 renders it."""
_INTEGER_MIN: Final = -(1 << 63)
_INTEGER_MAX: Final = (1 << 63) - 1
_CHECKED_CHARS_MAX: Final = 1 << 16
"""Known shapes above this length are not sampled: the check would cost more than it shows."""


class ChatTemplate:
    """A compiled template. ``source`` is Jinja text; raises ``ValueError`` if it is not.

    ``variables``: names it reads from outside; ``content_format``: "string" or "openai"; ``time_zone``: that
    of the engines' clock, None: this machine's.
    """

    def __init__(
        self,
        source: str,
        stats: PromptStats,
        special_tokens: dict[str, str] | None = None,
        time_zone: str | None = None,
    ) -> None:
        compiled = compile_template(source, tuple(sorted((special_tokens or {}).items())), time_zone)
        self._reference, self._fast = compiled.reference, compiled.fast
        self.variables, self.content_format = compiled.variables, compiled.content_format
        self._changes_case = compiled.changes_case
        self.source = source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.depends_on_time = "strftime_now" in source
        self._stats = stats
        self._shapes: set[int] = set()
        self._differing: set[int] = set()
        self._skeletons = Skeletons(None if self.depends_on_time else compiled.watching)

    @property
    def engine(self) -> str:
        """The current renderer: "minijinja" or "jinja2"."""
        return "jinja2" if self._fast is None else "minijinja"

    def render(self, context: Context, shapes: Set[int]) -> str:
        """The prompt text. ``shapes``: kinds of value in ``context`` (``message_shape``).

        Raises ``TemplateRejectsError`` if the template refuses the conversation.
        """
        self._stats.rendered += 1
        if self._fast is None or UNLIKE in shapes or not self._differing.isdisjoint(shapes):
            self._stats.rendered_jinja2 += 1
            return self._by_reference(context)
        text = self._by_fast(context)
        if text is not None and self._is_odd(text):
            self._stats.rendered_jinja2 += 1
            return self._by_reference(context)
        new = not shapes <= self._shapes
        sampled = self._stats.rendered % CHECK_EVERY == 0
        if text is None or new or (sampled and len(text) <= _CHECKED_CHARS_MAX):
            return self._checked(text, context, shapes)
        return text

    def put_together(self, names: Context, texts: list[str], key: Key) -> str | None:
        """Assemble the text of messages that are a role and a non-empty text alone from a known layout; None:
        it must be rendered."""
        text = self._skeletons.text(key, texts)
        if text is None:
            return None
        self._stats.rendered += 1
        if self._stats.rendered % CHECK_EVERY == 0 and len(text) <= _CHECKED_CHARS_MAX:
            self._stats.template_checks += 1
            expected = self._by_reference({**names, "messages": text_messages(key, texts)})
            if text != expected:
                self._stats.template_mismatches += 1
                self._skeletons.forget()
            return expected
        return text

    def learn(self, names: Context, texts: list[str], key: Key, text: str) -> None:
        """Keep the layout of such messages, for others with the same key."""
        self._skeletons.learn(key, texts, names, text)

    def _is_odd(self, text: str) -> bool:
        """Whether the two are known to differ about characters of this text."""
        if "\x1c" in text or "\x1d" in text or "\x1e" in text or "\x1f" in text:
            return True  # white space to Python's strip, trim and split, but not to Rust's
        return self._changes_case and not text.isascii()

    def _checked(self, text: str | None, context: Context, shapes: Set[int]) -> str:
        self._stats.template_checks += 1
        new = shapes - self._shapes
        try:
            expected = self._by_reference(context)
            if text != expected and self.depends_on_time:  # the clock may have changed in between
                text, expected = self._by_fast(context), self._by_reference(context)
        except TemplateRejectsError:
            if text is not None:  # the engine refuses this chat: its text does not matter, its shape may
                self._differs(new)
            raise
        if text == expected:
            self._agrees(new)
        else:
            self._differs(new)
            if text is not None and not new:
                self._stats.templates_distrusted += 1
                self._fast = None
        return expected

    def _agrees(self, new: Set[int]) -> None:
        if len(self._shapes) + len(new) > _SHAPES_MAX:
            self._shapes.clear()
        if len(new) <= _SHAPES_MAX:
            self._shapes |= new

    def _differs(self, new: Set[int]) -> None:
        """With several new shapes at once, the differing one is found when the others occur without it."""
        self._stats.template_mismatches += 1
        if len(new) != 1:
            return
        if len(self._differing) >= _DIFFERING_MAX:
            self._stats.template_shapes_forgotten += len(self._differing)
            self._differing.clear()
        self._differing |= new

    def _by_fast(self, context: Context) -> str | None:
        fast = self._fast
        return None if fast is None else by_fast(fast, context)

    def _by_reference(self, context: Context) -> str:
        return by_reference(self._reference, context)


def continue_final(conversation: list[Message], source: str, render: Callable[[list[Message]], str]) -> str:
    """Render so that the text ends inside the last message, for ``continue_final_message``.

    Hugging Face's way: a tag is put after the last text, and everything from the tag on is cut off.
    """
    tag = "CONTINUE_FINAL_MESSAGE_TAG "
    last = dict(conversation[-1])
    content = last.get("content")
    if content is None or "content" not in source:
        raise NotLocalError("template_rejected")
    if isinstance(content, list):
        at = max((i for i, part in enumerate(content) if "text" in part), default=-1)
        if at < 0:
            raise NotLocalError("template_rejected")
        final = content[at]["text"]
        tagged: Message = {**content[at], "text": final + tag}
        last["content"] = [*content[:at], tagged, *content[at + 1 :]]
    else:
        final = content
        last["content"] = content + tag
    text = render([*conversation[:-1], last])
    if final.strip() not in text or tag.strip() not in text:
        raise NotLocalError("template_rejected")
    cut = text.rindex(tag.strip())
    exact = text[cut : cut + len(tag)] == tag
    return text[:cut] if exact else text[:cut].rstrip()


def message_shape(message: Message) -> int:
    """Shape of a message: role, keys, types of values and of their contents; ``UNLIKE`` if a value is.

    Hashed, since clients choose names.
    """
    outside = (message["role"], tuple(message), tuple(map(type, message.values())))
    inside: list[Hashable] = []
    for key, value in message.items():
        if isinstance(value, str) or value is None:
            continue
        if key == "content":
            kinds = [(tuple(part), part["type"], value_kinds(_besides_text(part))) for part in value]
        elif key == "tool_calls":
            kinds = [(tuple(call), tuple(call["function"]), value_kinds(call)) for call in value]
        else:
            kinds = [((), "", value_kinds(value))]
        if any(UNLIKE in found for *_, found in kinds):
            return UNLIKE
        inside.append(frozenset(kinds))
    return hash((outside, *inside))


def _besides_text(part: Message) -> list[Any]:
    return [value for key, value in part.items() if key != "text"]


def value_kinds(value: Any) -> frozenset[Hashable]:
    """The types of all parts of a JSON value; includes ``UNLIKE`` if ``is_unlike`` holds for one."""
    kinds: set[Hashable] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        kinds.add(UNLIKE if is_unlike(current) else type(current).__name__)
        if isinstance(current, dict):
            waiting.extend(current)
            waiting.extend(current.values())
        elif isinstance(current, list):
            waiting.extend(current)
    return frozenset(kinds)


def is_unlike(value: Any) -> bool:
    """Whether minijinja is known to write this otherwise than jinja2 (3.0.5 of its package; all code points
    were compared).

    It gives a whole float to ``tojson`` as an integer, writes large and small ones without exponent and large
    integers as floats. In lists that a template makes and prints, it leaves characters as they are that
    Python does not print.
    """
    kind = type(value)
    if kind is float:
        return value.is_integer() or not math.isfinite(value) or "e" in repr(value)
    if kind is int:
        return not _INTEGER_MIN <= value <= _INTEGER_MAX
    if kind is str and not value.isascii():
        return not value.replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    return False
