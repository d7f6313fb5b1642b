"""Constructs of a chat template that may be rendered with traced texts (``watched``).

Python's own functions would read a text without asking it, if a template could pass it to them. So only
constructs whose reads are recorded are allowed; templates with others are not traced.
"""

from __future__ import annotations

from typing import Final

from jinja2 import nodes

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
