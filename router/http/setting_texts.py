"""Texts about a setting that is unknown or does not fit: what was probably meant, and what is expected."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

_NEAR = 0.75
# ``url`` for ``base_url``.
_IS_A_PART = 0.8
_BESIDE_BEST = 0.08
_NAMES_MAX = 3
_PLAIN = re.compile(r"[^a-z0-9]")
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a table",
    type(None): "",
}


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that were probably meant, the most likely first.

    Case and separators do not count (``ops-port``, ``server__port``), and the section may be missing or
    another one (``port``, ``tls.cert_file``).
    """
    wanted = _PLAIN.sub("", name.lower())
    last = _PLAIN.sub("", name.lower().rpartition(".")[2])
    scores = {}
    for each in known:
        whole, key = (_PLAIN.sub("", part.lower()) for part in (each, each.rpartition(".")[2]))
        alike = max(_alike(wanted, whole), _alike(wanted, key), 0.95 * _alike(last, key))
        if last in each.rpartition(".")[2].lower().split("_"):
            alike = max(alike, _IS_A_PART)
        if alike >= _NEAR:
            scores[each] = alike
    best = max(scores.values(), default=0.0)
    found = sorted((each for each in scores if scores[each] >= best - _BESIDE_BEST), key=lambda n: -scores[n])
    return found[:_NAMES_MAX]


def _alike(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio() if left and right else 0.0


def meant(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return ``; did you mean ...?``, or "" if no known name is similar. A prefix common to all names does
    not count as similarity."""
    names = near_names(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known])
    return f"; did you mean {' or '.join(f'{prefix}{each}' for each in names)}?" if names else ""


def misfit(value: Any, kind: Any) -> str:
    """Describe the expected values for one of the wrong type, with the choices if there are some."""
    hint = meant(value, _choices(kind)) if isinstance(value, str) else ""
    return f"expected {expected(kind)}{hint}"


def expected(kind: Any) -> str:
    """Describe the type of a setting."""
    if choices := tuple(_choices(kind)):
        others = [
            word for part in _parts(kind) if get_origin(part) is not Literal and (word := expected(part))
        ]
        return " or ".join([*others, f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"])
    parts = _parts(kind)
    if len(parts) > 1:
        return " or ".join(word for part in parts if (word := expected(part)))
    origin, args = get_origin(kind), get_args(kind)
    if origin in {tuple, list, frozenset}:
        return f"a list of {_plural(args[0])}"
    if origin is dict and args[1] is not Any:
        return f"a table of {_plural(args[1])}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "a table"
    return _WORDS.get(origin or kind, "another value")


def _plural(kind: Any) -> str:
    words = {int: "whole numbers", float: "numbers", str: "texts"}
    return words.get(kind, "tables" if not get_args(kind) else "values")


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, types.UnionType} else (kind,)


def _choices(kind: Any) -> Iterable[str]:
    for part in _parts(kind):
        if get_origin(part) is Literal:
            yield from (str(choice) for choice in get_args(part))
