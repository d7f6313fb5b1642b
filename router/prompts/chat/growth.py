"""minijinja: whether values of a template can grow by themselves.

Variables depend on those whose values become a part of theirs. A variable that depends on itself in one
way grows by what is added in each turn; in two ways, it doubles. Without a circle it grows by the number of
ways that lead to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from jinja2 import nodes

from kvatlas.router.prompts.chat.bounds import WIDE

_GROWING: Final = frozenset({
    "batch", "center", "expandtabs", "format", "indent", "join", "ljust", "replace", "rjust", "slice",
    "wordwrap", "xmlattr", "zfill",
})  # fmt: skip
_WAYS_MAX: Final = 64


def may_explode(parsed: nodes.Template) -> bool:
    """Whether a value may grow by more than what is added to it, turn after turn. Errs towards True."""
    for const in parsed.find_all(nodes.Const):
        value = const.value
        if isinstance(value, int) and abs(value) > 10_000:
            return True
        if isinstance(value, str) and WIDE.search(value):
            return True
    return next(parsed.find_all(nodes.Pow), None) is not None or _ways(_edges(parsed)) > _WAYS_MAX


def _edges(parsed: nodes.Template) -> dict[str, Counter[str]]:
    """Variables, and those whose values become a part of theirs."""
    edges: dict[str, Counter[str]] = {}

    def add(names: Iterable[str], parts: Counter[str]) -> None:
        for name in names:
            edges.setdefault(name, Counter()).update(parts)

    macros = {one.name: one for one in parsed.find_all(nodes.Macro)}
    for assign in parsed.find_all(nodes.Assign):
        add(_targets(assign.target), _parts(assign.node))
    for block in parsed.find_all(nodes.AssignBlock):
        add(_targets(block.target), _written(block))
    for loop in parsed.find_all(nodes.For):
        add(_targets(loop.target), _parts(loop.iter))
    for name, macro in macros.items():
        add((name,), _written(macro))
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            names = [one.name for one in macros[call.node.name].args]
            for key, value in zip(names, call.args, strict=False):
                add((key,), _parts(value))
            for given in call.kwargs:
                add((given.key,), _parts(given.value))
    return edges


def _targets(node: nodes.Node) -> list[str]:
    if isinstance(node, nodes.NSRef):
        return [f"{node.name}.{node.attr}"]
    return [one.name for one in (node, *node.find_all(nodes.Name)) if isinstance(one, nodes.Name)]


def _written(node: nodes.Node) -> Counter[str]:
    found: Counter[str] = Counter()
    for output in node.find_all(nodes.Output):
        for one in output.nodes:
            found.update(_parts(one))
    return found


def _parts(node: nodes.Node) -> Counter[str]:
    """Variables whose values become a part of this expression's, by how often; twice: it may double."""
    if isinstance(node, nodes.Name):
        return Counter((node.name,))
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return Counter((node.node.name, f"{node.node.name}.{node.attr}"))
    if isinstance(node, nodes.Const | nodes.TemplateData | nodes.Compare | nodes.Test | nodes.Not):
        return Counter()
    if isinstance(node, nodes.Getitem | nodes.Getattr):
        return _parts(node.node)
    if isinstance(node, nodes.CondExpr):
        return _parts(node.expr1) | (Counter() if node.expr2 is None else _parts(node.expr2))
    if isinstance(node, nodes.And | nodes.Or):
        return _parts(node.left) | _parts(node.right)
    found: Counter[str] = Counter()
    for child in node.iter_child_nodes():
        found.update(_parts(child))
    name = node.name if isinstance(node, nodes.Filter) else ""
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        name = node.node.attr
    grows = name in _GROWING or isinstance(node, nodes.Mul | nodes.Pow)
    return found + found if grows else found


def _ways(edges: dict[str, Counter[str]]) -> int:
    """The most ways that lead from one variable to another; many where there are two within a circle."""
    reach = {name: _reached(name, edges) for name in edges}
    counted: dict[str, int] = {}

    def count(name: str) -> int:
        if name in counted:
            return counted[name]
        counted[name] = 1
        total = 0
        circle = {one for one in reach.get(name, ()) if name in reach.get(one, ())}
        if sum([edges[name][one] for one in circle if one in edges[name]]) > 1:
            return 1 << 30
        for one, times in edges.get(name, Counter()).items():
            if one not in circle:
                total += times * count(one)
        counted[name] = max(1, total)
        return counted[name]

    return max(map(count, edges), default=0)


def _reached(start: str, edges: dict[str, Counter[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges.get(name, ()))
    return found
