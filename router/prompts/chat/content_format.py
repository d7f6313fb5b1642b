"""Whether a chat template takes message content as text ("string") or as a list of parts ("openai").

vLLM decides by the template's syntax tree: it is "openai" if some loop iterates over the content of a
message. Loops are followed through renamed message lists, renamed messages and macro parameters. The rule
is vLLM's (vllm/renderers/hf.py of 0.32), with its limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment, TemplateError, nodes


class _UnfollowableError(Exception):
    """A loop or assignment target that is no plain name: the engine stops there."""


def detect_content_format(source: str, environment: Environment) -> str:
    """ "string" or "openai"; "string" too if the template cannot be parsed or followed."""
    try:
        tree = environment.parse(source)
        return "openai" if _loops_over_content(tree) else "string"
    except (TemplateError, _UnfollowableError):
        return "string"


def _loops_over_content(tree: nodes.Template) -> bool:
    messages = list(_message_names(tree))
    parameters, inside_macros = _content_parameters(tree, messages)
    for loop in tree.find_all(nodes.For):
        if any(_is_content(loop.iter, name) for name in messages):
            _name(loop.target)
            return True
        if not isinstance(loop.iter, nodes.Name):
            continue
        from_macro = loop.iter.name in parameters.get(id(loop), ())
        if from_macro or (id(loop) not in inside_macros and loop.iter.name == "content"):
            _name(loop.target)
            return True
    return False


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Loop variables that iterate over the messages, also over a renamed list."""
    lists = _renamings(tree, "messages")
    for loop in tree.find_all(nodes.For):
        if any(_is_variable(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _renamings(tree: nodes.Template, start: str) -> list[str]:
    """Variables that were assigned ``start``, a slice or filter of it, directly or through others."""
    found, queue = [start], [start]
    while queue:
        current = queue.pop(0)
        for assign in tree.find_all(nodes.Assign):
            if _is_variable(assign.node, current):
                name = _name(assign.target)
                if name not in found:
                    found.append(name)
                    queue.append(name)
    return found


def _content_parameters(tree: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Per loop inside a macro: the parameters that receive a message's content; and all such loops."""
    parameters: dict[int, set[str]] = {}
    inside: set[int] = set()
    calls = list(tree.find_all(nodes.Call))
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        received: set[str] = set()
        for call in calls:
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            given = [*zip(names, call.args, strict=False)]
            given += [(item.key, item.value) for item in call.kwargs if item.key in names]
            received |= {key for key, value in given if any(_is_content(value, name) for name in messages)}
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if received:
                parameters[id(loop)] = received
    return parameters, inside


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    """``name`` itself, or a filter, test or slice of it."""
    core = _unwrapped(node)
    return isinstance(core, nodes.Name) and core.ctx == "load" and core.name == name


def _is_content(node: nodes.Node | None, name: str) -> bool:
    """``name.content`` or ``name['content']``, or a filter, test or slice of it."""
    core = _unwrapped(node)
    if isinstance(core, nodes.Getattr):
        return core.attr == "content" and _is_plain(core.node, name)
    if isinstance(core, nodes.Getitem) and isinstance(core.arg, nodes.Const):
        return core.arg.value == "content" and _is_plain(core.node, name)
    return False


def _is_plain(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Strip the filters, tests and slices around an expression."""
    current = node
    while isinstance(current, nodes.Filter | nodes.Test | nodes.Getitem):
        # An index selects one message, so the result is no list of messages any more.
        if isinstance(current, nodes.Getitem) and not isinstance(current.arg, nodes.Slice):
            break
        current = current.node
    return current


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnfollowableError
    return target.name
