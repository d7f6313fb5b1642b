"""A chat template compiled for jinja2, the reference, and for minijinja if that is proven to agree.

Compiling and probing take tens of milliseconds and depend on the text and the special tokens only, so the
result is cached: worker processes, models that share a template and a reload reuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import minijinja
import msgspec
from jinja2 import Environment, TemplateError, meta, nodes, sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.tests import test_iterable, test_sequence

from kvatlas.router.prompts.chat.bounds import BoundedEnvironment, FastTemplate, may_explode, render
from kvatlas.router.prompts.chat.messages import Message, text_message
from kvatlas.router.prompts.chat.watched import (
    NotPlainError,
    Part,
    TemplateTracer,
    TracedText,
    may_be_watched,
    watching,
)
from kvatlas.router.prompts.settings import local_time

# Whether a chat template takes message content as text ("string") or as a list of parts ("openai").
#
# vLLM decides by the template's syntax tree: it is "openai" if some loop iterates over the content of a
# message. Loops are followed through renamed message lists, renamed messages and macro parameters. The rule
# is vLLM's (vllm/renderers/hf.py of 0.32), with its limits.


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


# Probe conversations, rendered at load by both template engines.
#
# They cover what templates treat differently: system text or none, several turns, tool definitions, calls and
# results, reasoning, empty and odd text, the generation prompt on and off, and template switches.


# Python quotes these in a list, minijinja does not: reveals templates that print lists of texts.
_UNPRINTED = "\xa0\xad"
_ODD = f" <b>&\"'\\ \t{{{{ x }}}} {{% y %}} é 漢字 😀 {_UNPRINTED}\n\n</think> a\n"
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, <now> & 'later'",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Zürich", "b"], "default": None},
                    "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 1.5},
                },
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": None, "parameters": None}},
]
_CALL: Final = {
    "id": "call00001",
    "function": {"arguments": {"place": "Zürich", "days": 2, "x": [1.0, None, True]}, "name": "get_weather"},
    "type": "function",
}


def _chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


_SYSTEM: Final = {"role": "system", "content": f"You are brief. <&>{_UNPRINTED}"}
_USER: Final = {"role": "user", "content": "Hello"}
_ASSISTANT: Final = {"role": "assistant", "content": f" Hi {_UNPRINTED} there. "}
_THINKING: Final = {
    "role": "assistant",
    "content": "<think>\nhm\n</think>\n\nDone",
    "reasoning": f"because{_UNPRINTED}",
    "reasoning_content": f"because{_UNPRINTED}",
}
_CALLING: Final = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_CALLING_TWICE: Final = {"role": "assistant", "content": "Both:", "tool_calls": [_CALL, _CALL]}
_RESULT: Final = {"role": "tool", "content": f'{{"t": 21.5}}{_UNPRINTED}', "tool_call_id": "call00001"}
_ODD_USER: Final = {"role": "user", "content": _ODD, "name": "bob"}

_CONVERSATIONS: Final = (
    _chat(_USER),
    _chat(_SYSTEM, _USER),
    _chat(_ODD_USER),
    _chat({"role": "user", "content": ""}),
    _chat(_USER, _ASSISTANT, _ODD_USER),
    _chat(_SYSTEM, _USER, _ASSISTANT, _USER, _THINKING, _ODD_USER),
    _chat(_SYSTEM, _USER, _CALLING, _RESULT, _ASSISTANT, _USER),
    _chat(_USER, _CALLING_TWICE, _RESULT, {**_RESULT, "name": "get_weather"}),
    _chat(_USER, _ASSISTANT),
    _chat({"role": "developer", "content": "Be kind", "tools": None}, _USER),
    _chat(_USER, _USER),
    _chat({"role": "critic", "content": "custom role"}, _USER),
)
_SWITCHES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "high", "thinking": True},
    {"documents": [{"title": "T", "text": "body"}]},
)


def _contexts(content_format: str) -> list[dict[str, Any]]:
    contexts = []
    for conversation in _CONVERSATIONS:
        # As vLLM passes them: a list of parts for templates that loop over the content.
        messages = [_as_parts(m) for m in conversation] if content_format == "openai" else conversation
        for tools in (None, _TOOLS):
            for prompt in (True, False):
                for switches in _SWITCHES:
                    base = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
                    contexts.append({**base, "documents": None, **switches})
    return contexts


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


PROBES: Final = {"string": _contexts("string"), "openai": _contexts("openai")}


# Cached templates; a fleet has a handful.
_COMPILED_MAX: Final = 16
_CASES: Final = frozenset({"upper", "lower", "title", "capitalize", "isalpha", "isalnum"})
# Filters and methods with another result for a common character: quotes, line separators.
_UNLIKE: Final = frozenset({
    "e", "escape", "forceescape", "indent", "splitlines", "urlencode", "urlize", "xmlattr",
})  # fmt: skip
# Filters whose results may be whole floats, which minijinja passes to ``tojson`` as integers.
_MAKE_NUMBERS: Final = frozenset({"float", "round"})

_VALUE_TESTS: Final = frozenset({"iterable", "sequence"})
# minijinja has no ``generation`` block; ``with`` has the same scope and renders its body.
_GENERATION: Final = {"generation": "with", "endgeneration": "endwith"}
_LEXER: Final = sandbox.SandboxedEnvironment(keep_trailing_newline=True).lexer

Context = dict[str, Any]


class TemplateRejectsError(Exception):
    """The template itself raised an error: the engine refuses this conversation."""


class _Generation(Extension):
    """Hugging Face's ``{% generation %}`` block: marks assistant text for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body: variables set inside must not be visible outside.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter: plain JSON, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """Called by templates to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _clock(time_zone: str | None) -> Callable[[str], str]:
    return lambda form: local_time(time_zone).strftime(form)


def reference_environment(time_zone: str | None = None) -> jinja2.Environment:
    """The jinja2 environment with which engines compile chat templates."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.bound_filters()
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _clock(time_zone)
    return environment


def template_fault(source: str) -> str:
    """Return why jinja2 cannot compile this template; "" if it can."""
    try:
        reference_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def _fast_environment(source: str, parsed: nodes.Template, time_zone: str | None) -> FastTemplate | None:
    """The same for minijinja, or None if it cannot parse the template, or is known to differ."""
    # Known differences are excluded here, since a probe may not contain the character that shows them.
    if not _UNLIKE.isdisjoint(_called(parsed)) or _joins_safe_text(parsed) or _makes_numbers(parsed):
        return None
    if may_explode(parsed):
        return None
    try:
        literal = max([len(one.data) for one in parsed.find_all(nodes.TemplateData)], default=1)
        return FastTemplate(partial(_minijinja, _for_minijinja(source), time_zone), literal)
    except minijinja.TemplateError:
        return None


def _minijinja(
    source: str, time_zone: str | None, seen: Callable[[Any], Any] | None
) -> minijinja.Environment:
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, finalizer=seen)
    # Engines render without escaping: a prompt is no HTML.
    environment.auto_escape_callback = lambda _name: False
    environment.add_filter("tojson", tojson)
    environment.add_global("raise_exception", raise_exception)
    environment.add_global("strftime_now", _clock(time_zone))
    # jinja2's own: minijinja's answer differs for texts and undefined values.
    environment.add_test("iterable", test_iterable)
    environment.add_test("sequence", test_sequence)
    environment.add_template("chat", source)
    return environment


def _called(parsed: nodes.Template) -> set[str]:
    """Names of all filters, and of all attributes, which include methods."""
    return {node.name for node in parsed.find_all(nodes.Filter)} | {
        node.attr for node in parsed.find_all(nodes.Getattr)
    }


def _joins_safe_text(parsed: nodes.Template) -> bool:
    """Whether a text marked as safe may be joined with others, except by ``~``: jinja2 escapes those.

    Names it was assigned to count everywhere, so this errs towards jinja2 only.
    """
    names: set[str] = set()

    def is_safe(node: nodes.Node) -> bool:
        return (
            (isinstance(node, nodes.Filter) and node.name == "safe")
            or (isinstance(node, nodes.Name) and node.name in names)
            or (isinstance(node, nodes.Getattr) and node.attr in names)
            or any(map(is_safe, node.iter_child_nodes()))
        )

    assigned: list[tuple[nodes.Node, nodes.Node]] = []
    assigned += [(one.target, one.node) for one in parsed.find_all(nodes.Assign)]
    assigned += [(one.target, one.iter) for one in parsed.find_all(nodes.For)]
    # Each may make the value of another safe.
    for _ in assigned:
        known = len(names)
        for target, value in assigned:
            if is_safe(value):
                names |= {one.name for one in (target, *target.find_all(nodes.Name)) if hasattr(one, "name")}
                names |= {target.attr} if isinstance(target, nodes.NSRef) else set()
        if len(names) == known:
            break
    joining = parsed.find_all((nodes.Add, nodes.Mul, nodes.Mod, nodes.Call, nodes.Filter))
    return any(map(is_safe, _joined(joining)))


def _joined(joining: Iterable[nodes.Node]) -> Iterator[nodes.Node]:
    """Values that these join: their operands, arguments, and the text whose method it is."""
    for node in joining:
        if isinstance(node, nodes.Call):
            yield from (*node.args, *node.kwargs)
            if isinstance(node.node, nodes.Getattr):
                yield node.node.node
        elif isinstance(node, nodes.BinExpr):
            yield from (node.left, node.right)
        elif isinstance(node, nodes.Filter) and node.name == "format":
            yield node


def _makes_numbers(parsed: nodes.Template) -> bool:
    """Whether the template computes floats, or has one that minijinja writes differently."""
    constants = any(isinstance(node.value, float) for node in parsed.find_all(nodes.Const))
    divides = next(parsed.find_all((nodes.Div, nodes.Pow)), None) is not None
    return constants or divides or not _MAKE_NUMBERS.isdisjoint(_called(parsed))


def _for_minijinja(source: str) -> str:
    """Convert the template so that minijinja gives the same result."""
    # Minijinja passes undefined values to tests as None; jinja2 considers them iterable, and None not: an
    # empty text replaces them. A ``generation`` block writes what its body does and keeps variables set in it
    # local, like a ``with`` block.
    if "\r" in source:
        # The words below have other line ends.
        return source
    written: list[str] = []
    before = ["", ""]  # the last two words
    # In ``source``; in ``written``, the ``is`` of a test.
    at = tested_at = 0
    for _, kind, word in _LEXER.tokeniter(source, None):
        # Preceded by white space that the template itself removes.
        start = source.index(word, at)
        written.append(source[at:start])
        at = start + len(word)
        if kind == "name" and word == "is":
            tested_at = len(written)
        elif kind == "name" and word in _VALUE_TESTS and (before[1] == "is" or before == ["is", "not"]):
            written.insert(tested_at, "|default('') ")
        is_tag = kind == "name" and before[1].startswith("{%")
        written.append(_GENERATION.get(word, word) if is_tag else word)
        if kind != "whitespace":
            before = [before[1], word]
    return "".join((*written, source[at:]))


class CompiledTemplate(NamedTuple):
    """A compiled template. ``variables``: names it reads from outside; ``changes_case``: the engines may
    differ about letters beyond ASCII."""

    reference: jinja2.Template
    fast: FastTemplate | None
    """None if it cannot read the template, or gives another text for a probe."""
    variables: frozenset[str]
    content_format: str
    changes_case: bool
    watching: jinja2.Template | None
    """The reference for traced texts; None if a text could be read without being traced."""


@lru_cache(maxsize=_COMPILED_MAX)
def compile_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], time_zone: str | None = None
) -> CompiledTemplate:
    """Compile and probe. Raises ``ValueError`` if ``source`` is no Jinja text.

    ``time_zone``: that of ``strftime_now``, None: this machine's.
    """
    environment = reference_environment(time_zone)
    try:
        reference = environment.from_string(source)
        parsed = environment.parse(source)
        variables = frozenset(meta.find_undeclared_variables(parsed))
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template is no valid Jinja: {error}") from None
    content_format = detect_content_format(source, environment)
    # Parsed again: the other tree was changed.
    written = environment.parse(source)
    called = _called(written)
    fast = _fast_environment(source, written, time_zone)
    if fast is not None and not _probes_agree(reference, fast, content_format, dict(special_tokens)):
        fast = None
    harmless = may_be_watched(written)
    watched = watching(reference_environment(time_zone)).from_string(source) if harmless else None
    return CompiledTemplate(
        reference, fast, variables, content_format, not called.isdisjoint(_CASES), watched
    )


def _probes_agree(
    reference: jinja2.Template,
    fast: FastTemplate,
    content_format: str,
    special_tokens: dict[str, str],
) -> bool:
    for probe in PROBES[content_format]:
        context = {**special_tokens, **probe}
        try:
            expected = by_reference(reference, context)
        except TemplateRejectsError:
            # Engines refuse this chat: its text does not matter.
            continue
        for environment in (fast.plain, fast.counted):
            try:
                if fast.render_with(environment, context) != expected:
                    return False
            except Exception:  # noqa: BLE001  # whatever it is, it is no equal text
                return False
    return True


def by_fast(fast: FastTemplate, context: Context) -> str | None:
    """minijinja's text; None if it fails."""
    try:
        return fast.render(context)
    except Exception:  # noqa: BLE001  # whatever it is, the reference decides
        return None


def by_reference(reference: jinja2.Template, context: Context) -> str:
    """jinja2's text. Raises ``TemplateRejectsError``."""
    try:
        return render(reference, context)
    except Exception as error:  # noqa: BLE001  # templates can raise anything; the engine answers 400
        raise TemplateRejectsError(str(error)) from None


# Precompiled layouts: what a chat template writes around the texts of plain messages, rendered once.
#
# Most chats are messages of a role and a text. For the same roles in the same order and the same other
# arguments a template usually writes the same around every text. If one rendering by jinja2 with traced texts
# (``watched.py``) shows that, its output is kept with the template's questions, and the next such chat is
# assembled from it: 1 to 3 us instead of 7 to 17 by minijinja, and one copy of all texts instead of five. A
# chat with another answer to a question is rendered, and kept separately.
#
# Invariant: the layouts of one template take at most ``_KEPT_MAX`` times ``_WAYS_MAX`` times ``_CHARS_MAX``
# characters. Any thread may call it.


# Sequences of roles with other arguments; when full, all are dropped.
_KEPT_MAX: Final = 256
# Layouts of each, by the answers; a chat that needs one more is always rendered.
_WAYS_MAX: Final = 4
# Characters written by the template itself; longer output is not kept.
_CHARS_MAX: Final = 1 << 14
MESSAGES_MAX: Final = 64
"""Longer chats are always rendered."""

Key = tuple[bytes, str, tuple[str, ...]]
"""Equal only if all other arguments are; the content format; the roles of all messages."""


class PrecompiledLayout(msgspec.Struct, frozen=True, gc=False):
    """``spans``: what the template writes itself, and the parts of messages between. ``firsts[i]``: number of
    spans before the first one that depends on message ``i``, or a later one; the last is that of all."""

    spans: list[str | Part]
    answers: list[TracedText]
    firsts: list[int]

    def fits(self, texts: list[str]) -> bool:
        """Whether the answers to the template's questions are the same for these texts."""
        return not self.answers or all(one.holds(texts) for one in self.answers)

    def written(self, texts: list[str], first: int = 0) -> list[str]:
        """The spans of such a chat from number ``first`` on."""
        made: list[str] = []
        for span in self.spans[first:]:
            if isinstance(span, str):
                made.append(span)
            else:
                made.append(span.text_in(texts) if span.changes else texts[span.message])
        return made

    def num_alike(self, other: PrecompiledLayout, messages: int) -> int:
        """Number of leading spans that are the same in both if the first ``messages`` are."""
        end = min(self.firsts[messages], other.firsts[messages])
        if other is self or self.spans[:end] == other.spans[:end]:
            return end
        return next(at for at in range(end) if self.spans[at] != other.spans[at])


class Skeletons:
    """Layouts of one template; ``watching`` is compiled with ``watched.watching``, None: no layouts."""

    def __init__(self, watching: jinja2.Template | None) -> None:
        self._watching = watching
        self._kept: dict[Key, tuple[PrecompiledLayout, ...]] = {}

    def find(self, key: Key, texts: list[str]) -> PrecompiledLayout | None:
        """The layout of a chat whose messages are a role and a non-empty text alone. None: it must be
        rendered."""
        for skeleton in self._kept.get(key, ()):
            if skeleton.fits(texts):
                return skeleton
        return None

    def learn(self, key: Key, texts: list[str], names: dict[str, Any], rendered: str) -> None:
        """Keep the layout of a rendered chat, if it can be proven."""
        ways = self._kept.get(key, ())
        if self._watching is None or len(ways) >= _WAYS_MAX or len(texts) > MESSAGES_MAX:
            return
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        found = _watched(self._watching, key, texts, names)
        if found is None or "".join(found.written(texts)) != rendered:
            found = _NEVER
        self._kept[key] = (*ways, found)

    def forget(self) -> None:
        """Drop all layouts and keep no further ones."""
        self._watching, self._kept = None, {}


# Layout of a chat whose texts the template reads itself: never applies.
_NEVER: Final = PrecompiledLayout([], [TracedText(Part(0), "startswith", ("",), False)], [])


def text_messages(key: Key, texts: list[str]) -> list[Message]:
    """Messages with this key and these texts."""
    _, form, roles = key
    return [text_message(role, text, form) for role, text in zip(roles, texts, strict=True)]


def _watched(
    template: jinja2.Template, key: Key, texts: list[str], names: dict[str, Any]
) -> PrecompiledLayout | None:
    watch = TemplateTracer(texts)
    messages = text_messages(key, [watch.text(Part(at)) for at in range(len(texts))])
    try:
        pieces = watch.pieces(render(template, {**names, "messages": messages}))
    except (NotPlainError, Exception):  # noqa: BLE001  # templates can raise anything
        return None
    if sum([len(one) for one in pieces if isinstance(one, str)]) > _CHARS_MAX:
        return None
    # Parts may come in any order: of each message the first span that depends on it, or on a later one.
    firsts = [len(pieces)] * (len(texts) + 1)
    for at in reversed(range(len(pieces))):
        if isinstance(part := pieces[at], Part):
            firsts[: part.message + 1] = [at] * (part.message + 1)
    return PrecompiledLayout(pieces, list(watch.answers), firsts)
