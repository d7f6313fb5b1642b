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
from jinja2 import nodes
from jinja2.tests import test_iterable, test_sequence

# Python's own functions would read a text without asking it, if a template could pass it to them. So only
# constructs whose reads are recorded are allowed; templates with others are not traced.
_NODES: Final = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Const,
    nodes.Name,
    nodes.NSRef,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.CondExpr,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Operand,
    nodes.Add,
    nodes.Sub,
    nodes.Mod,
    nodes.Neg,
    nodes.List,
    nodes.Tuple,
    nodes.Dict,
    nodes.Pair,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Compare,
    nodes.Test,
    nodes.Filter,
    nodes.Call,
    nodes.Keyword,
    nodes.Slice,
    nodes.Break,
    nodes.Continue,
)
_FILTERS: Final = frozenset({"trim", "tojson", "length", "count", "default", "d", "list", "first"})
_TESTS: Final = frozenset({
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number",
    "integer", "true", "false",
})  # fmt: skip
_FUNCTIONS: Final = frozenset({"raise_exception", "namespace", "range"})
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


def may_be_watched(parsed: nodes.Template) -> bool:
    """Whether a template has no construct that could read a text without recording it."""
    return all(map(_is_harmless, _all_nodes(parsed)))


def _all_nodes(parsed: nodes.Node) -> list[nodes.Node]:
    found: list[nodes.Node] = [parsed]
    for node in found:
        found.extend(node.iter_child_nodes())
    return found


def _is_harmless(node: nodes.Node) -> bool:
    if type(node) not in _NODES:
        return False
    if isinstance(node, nodes.Filter):
        # ``trim`` without arguments is ``str.strip``, which is recorded; with arguments it reads characters.
        return node.name in _FILTERS and not (node.name == "trim" and (node.args or node.kwargs))
    if isinstance(node, nodes.Test):
        return node.name in _TESTS
    if isinstance(node, nodes.Getitem):
        return _is_number(node.arg) or isinstance(node.arg, nodes.Const | nodes.Slice)
    if isinstance(node, nodes.Mod):
        # ``%`` formats if its left side is a text: harmless only with a constant.
        return isinstance(node.right, nodes.Const)
    if isinstance(node, nodes.Compare):
        return all(_compares(left, right) for left, right in _pairs(node))
    if isinstance(node, nodes.Call):
        return _is_harmless_call(node)
    return True


def _is_number(index: nodes.Node) -> bool:
    """Whether the index is literally a number: it cannot be a text."""
    if isinstance(index, nodes.Neg):
        return isinstance(index.node, nodes.Const)
    if isinstance(index, nodes.Add | nodes.Sub):
        return any(
            isinstance(side, nodes.Const) and type(side.value) is int for side in (index.left, index.right)
        )
    return (
        isinstance(index, nodes.Getattr) and isinstance(index.node, nodes.Name) and index.node.name == "loop"
    )


def _pairs(node: nodes.Compare) -> list[tuple[nodes.Node, nodes.Operand]]:
    lefts = [node.expr, *[operand.expr for operand in node.ops[:-1]]]
    return list(zip(lefts, node.ops, strict=True))


def _compares(left: nodes.Node, operand: nodes.Operand) -> bool:
    """A text is searched in lists only: another text would not ask it."""
    if operand.op not in {"in", "notin"}:
        return True
    return isinstance(left, nodes.Const) or isinstance(operand.expr, nodes.List | nodes.Tuple)


def _is_harmless_call(node: nodes.Call) -> bool:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if isinstance(node.node, nodes.Name):
        return node.node.name in _FUNCTIONS
    # Methods with constant arguments only: the recorded question must mean the same for other messages.
    constant = all(map(_is_constant, node.args)) and not node.kwargs
    return isinstance(node.node, nodes.Getattr) and constant


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


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
