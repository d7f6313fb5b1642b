"""A chat template compiled for jinja2, the reference, and for minijinja where that is proven to agree.

Compiling and probing take tens of milliseconds and depend on the text and the special tokens only, so what is
found is kept: worker processes, models that share a template and a reload take it from the one who did it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import minijinja
from jinja2 import meta, nodes, sandbox
from jinja2.ext import Extension
from jinja2.parser import Parser

from router.prompts.chat.content_format import detect_content_format
from router.prompts.chat.probes import PROBES
from router.prompts.chat.watched import may_be_watched, watching

_COMPILED_MAX: Final = 16
"""Templates kept; a fleet has a handful."""
_CASES: Final = frozenset({"upper", "lower", "title", "capitalize", "isalpha", "isalnum"})
_UNLIKE: Final = frozenset({"e", "escape", "forceescape", "indent", "splitlines", "urlencode"})
"""Filters and methods that give something else for a common character: quotes, line separators."""

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


def strftime_now(form: str) -> str:
    """Local time, as the engine's own function gives it."""
    return datetime.now().strftime(form)  # noqa: DTZ005  # the engine uses naive local time


def reference_environment() -> jinja2.Environment:
    """The jinja2 environment engines compile chat templates with."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _fast_environment(source: str) -> minijinja.Environment | None:
    """The same for minijinja, or None where it cannot even parse the template."""
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.auto_escape_callback = lambda _name: False
    environment.add_filter("tojson", tojson)
    environment.add_global("raise_exception", raise_exception)
    environment.add_global("strftime_now", strftime_now)
    try:
        environment.add_template("chat", source)
    except minijinja.TemplateError:
        return None
    return environment


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
def compile_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> CompiledTemplate:
    """Compile and probe. Raises ``ValueError`` where ``source`` is no Jinja text."""
    environment = reference_environment()
    try:
        reference = environment.from_string(source)
        parsed = environment.parse(source)
        variables = frozenset(meta.find_undeclared_variables(parsed))
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template is no valid Jinja: {error}") from None
    content_format = detect_content_format(source, environment)
    called = {node.name for node in parsed.find_all(nodes.Filter)}
    called |= {node.attr for node in parsed.find_all(nodes.Getattr)}
    fast = _fast_environment(source) if called.isdisjoint(_UNLIKE) else None
    if fast is not None and not _probes_agree(reference, fast, content_format, dict(special_tokens)):
        fast = None
    harmless = may_be_watched(environment.parse(source))  # as it is written: the other one was worked on
    watched = watching(reference_environment()).from_string(source) if harmless else None
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
            expected: str | None = by_reference(reference, context)
        except TemplateRejectsError:
            expected = None
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
