"""A chat template compiled for jinja2, the reference, and for minijinja where that is proven to agree.

Compiling and probing take tens of milliseconds and depend on the text and the special tokens only, so what is
found is kept: worker processes, models that share a template and a reload take it from the one who did it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import minijinja
from jinja2 import meta, nodes, sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.tests import test_iterable, test_sequence

from router.prompts.chat.content_format import detect_content_format
from router.prompts.chat.probes import PROBES
from router.prompts.chat.watched import may_be_watched, watching
from router.prompts.clock import local_time

_COMPILED_MAX: Final = 16
"""Templates kept; a fleet has a handful."""
_CASES: Final = frozenset({"upper", "lower", "title", "capitalize", "isalpha", "isalnum"})
_UNLIKE: Final = frozenset({
    "e", "escape", "forceescape", "indent", "splitlines", "urlencode", "urlize", "xmlattr",
})  # fmt: skip
"""Filters and methods that give something else for a common character: quotes, line separators."""
_MAKE_NUMBERS: Final = frozenset({"float", "round"})
"""Filters whose results may be whole floats, which minijinja gives to ``tojson`` as integers."""

_VALUE_TESTS: Final = frozenset({"iterable", "sequence"})
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
        # A call block, not the bare body: what is set inside must not be seen outside.
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
    """Hugging Face's filter: plain JSON, nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _clock(time_zone: str | None) -> Callable[[str], str]:
    return lambda form: local_time(time_zone).strftime(form)


def reference_environment(time_zone: str | None = None) -> jinja2.Environment:
    """The jinja2 environment engines compile chat templates with."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _clock(time_zone)
    return environment


def _fast_environment(
    source: str, parsed: nodes.Template, time_zone: str | None
) -> minijinja.Environment | None:
    """The same for minijinja, or None where it cannot even parse the template, or is known to differ."""
    if not _UNLIKE.isdisjoint(_called(parsed)) or _joins_safe_text(parsed) or _makes_numbers(parsed):
        return None
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.auto_escape_callback = lambda _name: False
    environment.add_filter("tojson", tojson)
    environment.add_global("raise_exception", raise_exception)
    environment.add_global("strftime_now", _clock(time_zone))
    environment.add_test("iterable", test_iterable)
    environment.add_test("sequence", test_sequence)
    try:
        environment.add_template("chat", _for_minijinja(source))
    except minijinja.TemplateError:
        return None
    return environment


def _called(parsed: nodes.Template) -> set[str]:
    """The names of all filters, and of all attributes: methods are such."""
    return {node.name for node in parsed.find_all(nodes.Filter)} | {
        node.attr for node in parsed.find_all(nodes.Getattr)
    }


def _joins_safe_text(parsed: nodes.Template) -> bool:
    """Whether a text marked as safe may be joined with others, other than by ``~``: jinja2 escapes those.

    Names it was assigned to count wherever they stand, so this errs towards jinja2 only.
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
    for _ in assigned:  # each may make another one's value safe
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
    """What these join with something else: their operands, arguments, and the text whose method it is."""
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
    """Whether the template computes floats, or has one that minijinja writes otherwise."""
    constants = any(isinstance(node.value, float) for node in parsed.find_all(nodes.Const))
    divides = next(parsed.find_all((nodes.Div, nodes.Pow)), None) is not None
    return constants or divides or not _MAKE_NUMBERS.isdisjoint(_called(parsed))


def _for_minijinja(source: str) -> str:
    """The template as minijinja reads it with the same result.

    It gives undefined values to tests as None; jinja2 takes them for iterable, and None not: an empty text
    stands for them. A ``generation`` block writes what its body does and keeps to itself what is set in it,
    as a ``with`` block.
    """
    if "\r" in source:
        return source  # the words below have other line ends
    written: list[str] = []
    before = ["", ""]  # the last two words
    at = tested_at = 0  # in ``source``; in ``written``, the ``is`` of a test
    for _, kind, word in _LEXER.tokeniter(source, None):
        start = source.index(word, at)  # white space that the template itself removes may stand before
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
    """What a template's text is compiled to. ``variables`` are the names it reads from outside;
    ``changes_case``: the engines may differ about letters beyond ASCII."""

    reference: jinja2.Template
    fast: minijinja.Environment | None
    """None where it cannot read the template, or gives another text for a probe."""
    variables: frozenset[str]
    content_format: str
    changes_case: bool
    watching: jinja2.Template | None
    """The reference for texts that note what they are asked; None where one could be read without that."""


@lru_cache(maxsize=_COMPILED_MAX)
def compile_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], time_zone: str | None = None
) -> CompiledTemplate:
    """Compile and probe. Raises ``ValueError`` where ``source`` is no Jinja text.

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
    written = environment.parse(source)  # as it is: the other one was worked on
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
    fast: minijinja.Environment,
    content_format: str,
    special_tokens: dict[str, str],
) -> bool:
    for probe in PROBES[content_format]:
        context = {**special_tokens, **probe}
        try:
            expected = by_reference(reference, context)
        except TemplateRejectsError:
            continue  # engines refuse this chat: its text is of no account
        if by_fast(fast, context) != expected:
            return False
    return True


def by_fast(fast: minijinja.Environment, context: Context) -> str | None:
    """minijinja's text; None where it fails."""
    try:
        return fast.render_template("chat", **context)
    except Exception:  # noqa: BLE001  # whatever it is, the reference decides
        return None


def by_reference(reference: jinja2.Template, context: Context) -> str:
    """jinja2's text. Raises ``TemplateRejectsError``."""
    try:
        return reference.render(**context)
    except Exception as error:  # noqa: BLE001  # templates can raise anything; the engine answers 400
        raise TemplateRejectsError(str(error)) from None
