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
from jinja2 import meta, nodes, sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.tests import test_iterable, test_sequence

from kvatlas.router.prompts.chat.bounds import BoundedEnvironment, FastTemplate, render
from kvatlas.router.prompts.chat.content_format import detect_content_format
from kvatlas.router.prompts.chat.growth import may_explode
from kvatlas.router.prompts.chat.probe_chats import PROBES
from kvatlas.router.prompts.chat.watchable import may_be_watched
from kvatlas.router.prompts.chat.watched import watching
from kvatlas.router.prompts.settings import local_time

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
