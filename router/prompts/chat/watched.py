"""Traced texts: they stand for message texts and record a chat template's questions while jinja2 renders it.

A template that only inserts a text, and asks a few questions about it that are recorded, writes the same
around every other text with the same answers. So one rendering with such texts proves the output for all of
them (``compiled.py``).

Invariant: everything that a template learns about such a text is recorded, or ends the rendering.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
from jinja2.tests import test_iterable, test_sequence

_QUESTIONS: Final[dict[str, Callable[..., bool]]] = {
    "in": str.__contains__,
    "==": str.__eq__,
    "bool": bool,
    "startswith": str.startswith,
    "endswith": str.endswith,
}
_CHANGES: Final = {"strip": str.strip, "lstrip": str.lstrip, "rstrip": str.rstrip}
# Random, so that no client can put it into a text.
_MARK: Final = secrets.token_hex(16)
_PLACE: Final = re.compile(f"{_MARK}:([0-9]+):")


# Not an ``Exception``: jinja2 catches these in places, and would render a default instead.
class NotPlainError(BaseException):
    """The template does more with a text than can be recorded."""


class Part(NamedTuple):
    """The text of message number ``message``, changed by string methods in this order."""

    message: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def text_in(self, texts: list[str]) -> str:
        """Return the part for these messages."""
        text = texts[self.message]
        for name, given in self.changes:
            text = _CHANGES[name](text, *given)
        return text


class TracedText(NamedTuple):
    """A template's question about a text, and the answer."""

    part: Part
    question: str
    given: tuple[Any, ...]
    answer: bool

    def holds(self, texts: list[str]) -> bool:
        """Whether the answer is the same for these messages."""
        return _QUESTIONS[self.question](self.part.text_in(texts), *self.given) is self.answer


class TemplateTracer:
    """One rendering: the real texts, none of them empty, and the recorded questions."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._parts: list[Part] = []
        self.answers: dict[TracedText, None] = {}

    def text(self, part: Part) -> WatchedText:
        """Return a traced text."""
        self._parts.append(part)
        return WatchedText.watching(f"{_MARK}:{len(self._parts) - 1}:", self, part)

    def ask(self, part: Part, question: str, *given: Any) -> bool:
        """Return the real answer and record it; it is implied that a message's whole text is not empty."""
        # Layouts are used for non-empty texts only, so this needs no record. A stripped text may be empty.
        if question == "bool" and not part.changes:
            return True
        # A traced text as the argument would be read by Python without a record.
        if not all(type(one) in {str, tuple} for one in given):
            raise NotPlainError
        # Asked of the real text, so that the rendering takes the branch that the engine would take.
        answer = _QUESTIONS[question](part.text_in(self._texts), *given)
        self.answers[TracedText(part, question, given, answer)] = None
        return answer

    def pieces(self, rendered: str) -> list[str | Part]:
        """Split a rendered text into the template's output, at even positions, and parts of messages."""
        found = _PLACE.split(rendered)
        return [self._parts[int(one)] if at % 2 else one for at, one in enumerate(found)]


class WatchedText(str):
    """A traced text. One that stands for several texts at once can be written, and nothing else."""

    __slots__ = ("_part", "_watch")
    _part: Part | None
    _watch: TemplateTracer

    @classmethod
    def watching(cls, raw: str, watch: TemplateTracer, part: Part | None) -> WatchedText:
        """``part``: the part of a message; None: it is assembled."""
        made = cls(raw)
        made._watch, made._part = watch, part
        return made

    def __getattribute__(self, name: str) -> Any:
        # Python's own; the sandbox does not let templates call it.
        if name.startswith("__"):
            return str.__getattribute__(self, name)
        watch, part = _own(self)
        if part is None:
            raise NotPlainError
        if name in _CHANGES:
            return lambda *given: watch.text(Part(part.message, (*part.changes, (name, _checked(given)))))
        if name in {"startswith", "endswith"}:
            return lambda *given: watch.ask(part, name, *given)
        raise NotPlainError

    def __add__(self, other: Any) -> WatchedText:
        return _joined(self, other, lambda ours, theirs: ours + theirs)

    def __radd__(self, other: Any) -> WatchedText:
        return _joined(self, other, lambda ours, theirs: theirs + ours)

    def __bool__(self) -> bool:
        return _asked(self, "bool")

    def __contains__(self, other: Any) -> bool:
        return _asked(self, "in", other)

    def __eq__(self, other: object) -> bool:
        return _asked(self, "==", other)

    def __ne__(self, other: object) -> bool:
        return not _asked(self, "==", other)

    def _refuse(self, *_given: Any) -> NoReturn:
        raise NotPlainError

    # Used as a key, a text would be compared by the dictionary, unrecorded.
    def __hash__(self) -> int:
        raise NotPlainError

    __len__ = __iter__ = __getitem__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __format__ = __repr__ = __getnewargs__ = _refuse


def _own(text: WatchedText) -> tuple[TemplateTracer, Part | None]:
    return str.__getattribute__(text, "_watch"), str.__getattribute__(text, "_part")


def _asked(text: WatchedText, question: str, *given: Any) -> bool:
    watch, part = _own(text)
    if part is None:
        raise NotPlainError
    return watch.ask(part, question, *given)


def _joined(text: WatchedText, other: Any, join: Callable[[str, str], str]) -> WatchedText:
    if not isinstance(other, str):
        raise NotPlainError
    return WatchedText.watching(join(str.__str__(text), str.__str__(other)), _own(text)[0], None)


def _checked(given: tuple[Any, ...]) -> tuple[Any, ...]:
    if not all(one is None or type(one) is str for one in given):
        raise NotPlainError
    return given


def refuse_watched(value: Any) -> None:
    """Raise if a traced text is in a value that is about to be read untraced."""
    if isinstance(value, WatchedText):
        raise NotPlainError
    if isinstance(value, dict):
        for pair in value.items():
            refuse_watched(pair)
    elif isinstance(value, list | tuple):
        for one in value:
            refuse_watched(one)


def watching(environment: jinja2.Environment) -> jinja2.Environment:
    """The environment, with filters that refuse traced texts they would read without asking."""
    # Every text is iterable and a sequence: templates may test that without reading it.
    tojson = environment.filters["tojson"]

    def refusing(value: Any, *given: Any, **named: Any) -> Any:
        refuse_watched((value, given, named))
        return tojson(value, *given, **named)

    # The filter reads texts deep inside values, where no method of the traced text is called.
    environment.filters["tojson"] = refusing
    environment.tests["iterable"] = lambda value: isinstance(value, WatchedText) or test_iterable(value)
    environment.tests["sequence"] = lambda value: isinstance(value, WatchedText) or test_sequence(value)
    return environment
