"""Bounds of rendering: a chat template is a program that somebody else wrote, and runs with each request.

jinja2 renders with fuel: turns of loops, calls, and the sizes of what is made. Every value that a template
makes is bounded in size before or when it is made, and so is the text. minijinja counts instructions; it
cannot bound values, so it renders only templates whose values cannot grow by themselves (``may_explode``),
and the text that it writes is counted where its parts are long. A chat beyond a bound is rendered by the
engine.

Invariants: no render takes more than ``FUEL`` turns and calls, where what is made costs by its size, or
writes more than ``TEXT_MAX`` characters; all values that it makes together have at most
``FUEL << _CHARS_SHIFT`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from threading import local
from typing import Any, Final

import jinja2
import minijinja
from jinja2 import nodes, sandbox

FUEL: Final = 5_000_000
"""A conversation of 8,192 messages takes some hundred turns and calls for each."""
_SHORT_FUEL: Final = 100_000
"""Of a short conversation, which is rendered on the event loop: some 40 ms at most."""
# Of a value: this many characters (as a power of two), or items, cost as much as a turn.
_CHARS_SHIFT: Final = 5
_ITEMS_SHIFT: Final = 3
TEXT_MAX: Final = 64 << 20
"""Characters of a text or of the whole prompt; bodies have at most ``PromptSettings.prompt_bytes_max``."""
_ITEMS_MAX: Final = 1_000_000
# Numbers as arguments: widths, counts.
_NUMBER_MAX: Final = 1_000_000
_POWER_MAX: Final = 64
_NUMBER_BITS_MAX: Final = 4096
WIDE: Final = re.compile(r"%[^a-zA-Z]*\d{5,}|\{[^}]*\d{5,}")
# Widths that come from values.
_WIDE_BY_VALUE: Final = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_ESCAPED: Final = re.compile(r"\{\{|\}\}")
_DIGITS: Final = re.compile(r"\d+")
# Types whose methods no template needs, and may make values of any size.
_UNUSUAL: Final = (bytes, bytearray, int, float, complex)


# Texts of blocks and macros are written twice, or more often.
_WRITTEN_MAX: Final = 4
# Longer literal texts are counted each time they are written.
_LITERAL_CHARS: Final = 64
_TOO_MUCH: Final = "the chat template writes too much"
_TOO_LONG: Final = "the chat template makes a text that is too long"


class TooMuchError(jinja2.TemplateError):
    """A template goes beyond a bound."""


class _Left(local):
    fuel = FUEL
    chars = 0
    """Written so far, also into blocks and macros whose text becomes a value."""


_left = _Left()


def _spend(units: int = 1) -> None:
    _left.fuel -= units
    if _left.fuel < 0:
        raise TooMuchError("the chat template takes too many steps")


class _Turns:
    """The items of a loop; each spends fuel."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # jinja2 counts what has no length


def _length(value: Any) -> int:
    if isinstance(value, str):
        return str.__len__(value)  # a traced text answers no ``len``
    return len(value) if isinstance(value, list | tuple | dict) else 0


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        size = _length(value)
        if size > TEXT_MAX:
            raise TooMuchError(_TOO_LONG)
        if size >> _CHARS_SHIFT:
            _spend(size >> _CHARS_SHIFT)
    elif isinstance(value, list | tuple | dict):
        size = len(value)
        if size > _ITEMS_MAX:
            raise TooMuchError("the chat template makes a list that is too long")
        if size >> _ITEMS_SHIFT:
            _spend(size >> _ITEMS_SHIFT)
    return value


def _nested(value: Any) -> Any:
    """Check a list or dict with all that it has: lists may have one another many times."""
    left, waiting = _ITEMS_MAX, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
        left -= 1
        if left < len(waiting):
            raise TooMuchError("the chat template makes a value that is too large")
    return value


def _check_arguments(name: str, given: tuple[Any, ...]) -> None:
    """Refuse what would be too large before it is made."""
    if name in _WIDTHS and any(isinstance(one, int) and one > _NUMBER_MAX for one in given[1:]):
        raise TooMuchError(_TOO_LONG)
    size = _SIZES.get(name)
    if size is not None and size(given, [one for one in given if isinstance(one, str)]) > TEXT_MAX:
        raise TooMuchError(_TOO_LONG)


_WIDTHS: Final = frozenset({
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "truncate", "wordwrap", "zfill",
})  # fmt: skip


def _replaced(_: tuple[Any, ...], texts: list[str]) -> int:
    if len(texts) < len(("text", "old", "new")):
        return 0
    text, old, new = texts[:3]
    size, more = _length(text), _length(new)
    if more <= _length(old) or size * (more + 1) <= TEXT_MAX:
        return size
    return size + more * (str.count(text, old) if old else size + 1)


def _joined(given: tuple[Any, ...], texts: list[str]) -> int:
    items = next((one for one in given if isinstance(one, list | tuple | dict)), ())
    return sum(map(_length, items)) + len(items) * max(map(_length, texts), default=0)


def _indented(given: tuple[Any, ...], texts: list[str]) -> int:
    widths = [one if isinstance(one, int) else _length(one) for one in given[1:]]
    return str.count(texts[0], "\n") * max(widths, default=0) if texts else 0


def _formatted(given: tuple[Any, ...], _: list[str]) -> int:
    form, values = given[0], given[1:]
    if not isinstance(form, str):
        return 0
    form = _ESCAPED.sub("", str(form))
    if WIDE.search(form) or _WIDE_BY_VALUE.search(form):
        return TEXT_MAX + 1
    longest = max(map(int, _DIGITS.findall(form)), default=0)
    for value in values:
        longest = max(longest, _length_of_all(value))
    return len(form) + (form.count("%") + form.count("{")) * longest


def _length_of_all(value: Any) -> int:
    """Length of the texts in a value, and of what stands between them."""
    total, waiting, left = 0, [value], _ITEMS_MAX
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += _length(one)
        elif isinstance(one, dict):
            waiting += (*one, *one.values())
        elif isinstance(one, list | tuple):
            waiting += one
        total += _BETWEEN
        left -= 1
        if left < len(waiting):
            return TEXT_MAX + 1
    return total


# Of a number or a literal, and of quotes and commas.
_BETWEEN: Final = 32


def _translated(given: tuple[Any, ...], _: list[str]) -> int:
    return _length(given[0]) * max(1, *map(_length_of_all, given[1:]), 1)


_SIZES: Final[dict[str, Callable[[tuple[Any, ...], list[str]], int]]] = {
    "replace": _replaced,
    "join": _joined,
    "indent": _indented,
    "format": _formatted,
    "format_map": _formatted,
    "translate": _translated,
    "%": _formatted,
}


def _listed(value: Any) -> Any:
    """The items of an iterator that are still to be made, each with its bound."""
    if not isinstance(value, Iterator | range):
        return value
    items = []
    for item in value:
        _spend()
        items.append(_sized(item))
    return items


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(work)
    def filtered(*given: Any, **named: Any) -> Any:
        if name == "join":
            given = tuple(map(_listed, given))
        _check_arguments(name, (*given, *named.values()))
        return _sized(work(*given, **named))

    return filtered


def _count(value: Any) -> Any:
    _left.chars += _length(value) if isinstance(value, str) else 0
    if _left.chars > _WRITTEN_MAX * TEXT_MAX:
        raise TooMuchError(_TOO_MUCH)
    return value


@jinja2.pass_context  # so that jinja2 does not work it out when it compiles
def _literal(_: Any, value: str) -> str:
    return str(_count(value))


class BoundedEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's sandbox, with bounds. Filters that are set later are not bounded: ``bound_filters``."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_count, **options)
        del self.globals["lipsum"]  # text of any length, by chance

    def bound_filters(self) -> None:
        """Bound every filter that is there now."""
        self.filters = {name: _bounded(name, work) for name, work in self.filters.items()}
        self.filters |= {"_turns": _Turns, "_sized": _sized, "_nested": _nested, "_literal": _literal}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Implement ``SandboxedEnvironment``."""
        if operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and times * _length(value) > TEXT_MAX:
                    raise TooMuchError(_TOO_LONG)
            numbers = isinstance(left, int) and isinstance(right, int)
            if numbers and (left | right).bit_length() > _NUMBER_BITS_MAX:
                raise TooMuchError("the chat template makes a number that is too large")
        elif operator == "**" and not (abs(left) <= _NUMBER_MAX and abs(right) <= _POWER_MAX):
            raise TooMuchError("the chat template makes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_arguments("%", (left, right))
        return _sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as in jinja2
        """Implement ``SandboxedEnvironment``."""
        _spend()
        # jinja2 wraps ``format`` and ``format_map``.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name == "join":
                args = tuple(map(_listed, args))
            _check_arguments(name, (owner, *args, *kwargs.values()))
        elif isinstance(owner, _UNUSUAL):
            raise TooMuchError("the chat template calls a method of a number or of bytes")
        found = _sized(super().call(__context, __obj, *args, **kwargs))
        return _nested(found) if __obj is dict else found

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile: loops spend fuel, and what is joined or listed is bounded."""
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno)
        _wrap(source)
        return super()._generate(source, *args, **kwargs)


def _wrap(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_wrapped(one) for one in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _wrapped(value))


def _wrapped(node: Any) -> Any:
    if not isinstance(node, nodes.Node):
        return node
    _wrap(node)
    how = "_sized" if isinstance(node, nodes.Concat) else ""
    if isinstance(node, nodes.TemplateData) and len(node.data) > _LITERAL_CHARS:
        node, how = nodes.Const(node.data, lineno=node.lineno), "_literal"
    if isinstance(node, nodes.List | nodes.Dict) and _names_in(node):
        how = "_nested"
    return nodes.Filter(node, how, [], [], None, None, lineno=node.lineno) if how else node


def _names_in(node: nodes.Node) -> bool:
    return next(node.find_all(nodes.Name), None) is not None


def render(template: jinja2.Template, context: dict[str, Any]) -> str:
    """Render with fuel, and a bound of the text. Raises whatever the template raises."""
    _left.fuel, _left.chars = _SHORT_FUEL if _is_short(context) else FUEL, 0
    pieces, size = [], 0
    for piece in template.generate(context):
        pieces.append(piece)
        size += str.__len__(piece)
        if size > TEXT_MAX:
            raise TooMuchError(_TOO_MUCH)
    return "".join(pieces)


# Beyond these a conversation is rendered with every part counted; below, what the instructions can write is
# bounded: a third of them write one part each.
_PLAIN_FUEL: Final = 50_000
_PLAIN_MESSAGES_MAX: Final = 128
_PLAIN_CHARS_MAX: Final = 1 << 14
_COUNTED_FUEL: Final = 50_000_000


class _Written(local):
    chars = 0


_written_now = _Written()


def _count_part(value: Any) -> Any:
    if isinstance(value, str):
        _written_now.chars += len(value)
        if _written_now.chars > TEXT_MAX:
            raise TooMuchError(_TOO_MUCH)
    return NotImplemented  # it is written as always


class FastTemplate:
    """A template in minijinja, with fuel. ``make`` makes its environment, with a function that sees every
    part that is written, or without; ``literal``: characters of its longest literal text."""

    def __init__(
        self, make: Callable[[Callable[[Any], Any] | None], minijinja.Environment], literal: int = 1
    ) -> None:
        self.plain, self.counted = make(None), make(_count_part)
        # Literal texts are not seen: what the instructions could write of them is bounded instead.
        most = 2 * _WRITTEN_MAX * TEXT_MAX // max(1, literal)
        self.plain.fuel, self.counted.fuel = min(_PLAIN_FUEL, most), min(_COUNTED_FUEL, most)

    def render(self, context: dict[str, Any]) -> str:
        """Raises whatever minijinja raises."""
        return self.render_with(self.plain if _is_short(context) else self.counted, context)

    def render_with(self, environment: minijinja.Environment, context: dict[str, Any]) -> str:
        """Render in one of both environments."""
        _written_now.chars = 0
        return environment.render_template("chat", **context)


def _is_short(context: dict[str, Any]) -> bool:
    """Whether these are few messages of short texts, and nothing else that could be written."""
    size = 0
    for name, value in context.items():
        if name == "messages":
            if len(value) > _PLAIN_MESSAGES_MAX:
                return False
            for message in value:
                for part in message.values():
                    if type(part) is str:
                        size += len(part)
                    elif part:
                        return False
        elif type(value) is str:
            size += len(value)
        elif value and value is not True:
            return False
    return size <= _PLAIN_CHARS_MAX
