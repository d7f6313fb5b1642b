"""Docstrings of the fields of a stats struct: HELP of the metric, and its row in the reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from functools import cache

import msgspec


@cache
def field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> its text, of inherited ones too, if it has one. Empty if the source is not available."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base not in {object, msgspec.Struct} and issubclass(base, msgspec.Struct):
            found |= _own_texts(base)
    return found


def _own_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    try:
        # ``inspect`` finds a class by parsing its whole module, which holds the event loop for 10 ms.
        module = inspect.getsource(sys.modules[struct.__module__])
        source = re.search(rf"^class {struct.__name__}\b.*?(?=^[^\s)]|\Z)", module, re.MULTILINE | re.DOTALL)
        tree = ast.parse(source[0] if source else textwrap.dedent(inspect.getsource(struct)))
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
            text = " ".join(below.value.value.split()).replace("``", "`")
            if text:
                found[node.target.id] = text[0].upper() + text[1:]
    return found
