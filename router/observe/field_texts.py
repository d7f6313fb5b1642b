"""The sentence written below a field of a stats struct: HELP of its metric, and its row in the reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from functools import cache

import msgspec


@cache
def field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> its text, of inherited ones too; without what has none. Empty where the source is not at
    hand."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base not in {object, msgspec.Struct} and issubclass(base, msgspec.Struct):
            found |= _own_texts(base)
    return found


def _own_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for node, below in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            text = re.sub(r"^Gauge(: |\.$)", "", " ".join(below.value.value.split())).replace("``", "`")
            if text:
                found[node.target.id] = text[0].upper() + text[1:]
    return found
