"""Numbers and texts that the two template engines write otherwise are written as jinja2 does, wherever they
stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minijinja
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.prompts.chat.compiled import by_reference, compile_template
from kvatlas.router.prompts.chat.messages import parse_message
from kvatlas.router.prompts.chat.template import (
    UNLIKE,
    ChatTemplate,
    chat_context,
    is_unlike,
    message_shape,
    parse_tools,
    value_kinds,
)
from kvatlas.router.prompts.request import ChatBody
from kvatlas.router.prompts.settings import PromptStats
from tests.support.examples import examples
from tests.support.prompts.readers import local_reader, model_dir, read_exact

ODD = (
    98277423282436.125,
    1.0,
    0.0,
    -0.0,
    1e16,
    1e22,
    1e-7,
    -3.0,
    2**64,
    -(2**63) - 1,
    10**40,
    "\xa0",
    "a\u2028b",
)
ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson }}/{{ v | string }}/{{ v }};{% endfor %}{% endfor %}{% endfor %}"
)
SCHEMAS = (
    "{% for t in tools or [] %}{% for k, v in t.function.parameters.properties.items() %}"
    "{{ v.default }} {{ v.default | tojson }} {{ v }}{% endfor %}{{ t | tojson }}{% endfor %}"
)
KWARGS = (
    "{% if x is defined %}{{ x | tojson }} {{ x }}{% if x is mapping %}"
    "{% for k, v in x.items() %}{{ v | tojson }}{% endfor %}{% endif %}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{{ p.extra }}{{ p.extra | default(0) | tojson }}"
    "{% endfor %}{% endfor %}"
)
SOURCES = {"arguments": ARGUMENTS, "schemas": SCHEMAS, "kwargs": KWARGS, "parts": PARTS}


def _call(value: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": json.dumps({"f": value})}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _tool(value: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"f": {"type": "number", "default": value}}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def _parts(value: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "hi", "extra": value}]}


_USER = {"role": "user", "content": "hi"}
BODIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "arguments": lambda value: {"messages": [_USER, _call(value)]},
    "schemas": lambda value: {"messages": [_USER], "tools": [_tool(value)]},
    "kwargs": lambda value: {"messages": [_USER], "chat_template_kwargs": {"x": value}},
    "parts": lambda value: {"messages": [_parts(value)]},
}


class _Both:
    """One template, and every body through the path that serves and through jinja2."""

    def __init__(self, source: str, defaults: dict[str, Any] | None = None) -> None:
        self.stats = PromptStats()
        self.template = ChatTemplate(source, self.stats)
        self._defaults = defaults or {}

    def check(self, given: dict[str, Any]) -> int:
        body = json.loads(json.dumps(given))
        chat = ChatBody(**{**body, "messages": [], "tools": json.dumps(body.get("tools")).encode()})
        tools = parse_tools(chat, exclude_when_none=False)
        context = chat_context(chat, self.template, tools=tools, special_tokens={}, defaults=self._defaults)
        messages = [parse_message(one, self.template.content_format) for one in body["messages"]]
        names = {**context.names, "messages": messages}
        shapes = {context.shape, *map(message_shape, messages)}
        expected = compile_template(self.template.source, ()).reference.render(names)
        assert self.template.render(names, shapes) == expected, given
        return UNLIKE in shapes


@pytest.mark.parametrize("where", SOURCES)
@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: [v], lambda v: {"a": {"b": [1.5, v]}}], ids=["bare", "list", "object"]
)
def test_values_of_the_same_shape_as_a_plain_one(where: str, odd: Any, wrap: Callable[[Any], Any]) -> None:
    plain: Any = {float: 1.5, int: 7, str: "a"}[type(odd)]
    both = _Both(SOURCES[where])
    assert both.template.engine == "minijinja"
    both.check(BODIES[where](wrap(plain)))
    assert both.check(BODIES[where](wrap(odd))), "jinja2 renders it"
    assert not both.check(BODIES[where](wrap(plain))), "and minijinja the others, as before"
    assert (both.stats.template_mismatches, both.template.engine) == (0, "minijinja")


@pytest.mark.parametrize("odd", [1.0, 1e22, 2**70, float("nan"), float("inf")])
def test_configured_arguments_are_values_too(odd: Any) -> None:
    both = _Both(KWARGS, {"x": {"y": odd}})
    assert both.check({"messages": [_USER]})
    assert not both.check({"messages": [_USER], "chat_template_kwargs": {"x": {"y": 1.5}}})


def test_contexts_that_differ_in_what_json_cannot_say_have_other_keys() -> None:
    template = ChatTemplate(KWARGS, PromptStats())
    keys = {
        chat_context(ChatBody(messages=[]), template, tools=None, special_tokens={}, defaults={"x": [x]}).key
        for x in (None, float("nan"), float("inf"), 1, 1.0, True, 2**70, "1")
    }
    assert len(keys) == 8


@pytest.mark.parametrize("odd", [1.0, 1e16, 1e22, 1e-7])
def test_tokens_of_a_float_after_another_one(tmp_path: Path, odd: float) -> None:
    """Whole requests: what is wrong here is wrong in every later block of the conversation."""
    kept, fresh = (local_reader(model_dir(tmp_path, None, chat_template=ARGUMENTS)) for _ in range(2))
    read_exact(kept, BODIES["arguments"](1.5))
    body = BODIES["arguments"](odd)
    assert read_exact(kept, body).token_ids == read_exact(fresh, body).token_ids
    assert kept.stats.template_mismatches == 0


NUMBERS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**70), 2**70),
    st.sampled_from([one for one in ODD if not isinstance(one, str)]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("where", SOURCES)
@settings(max_examples=examples(400))
@given(values=st.lists(JSON, min_size=1, max_size=4))
def test_any_values_are_written_as_jinja2_writes_them(where: str, values: list[Any]) -> None:
    """Shapes are kept between them; what is not odd is the same in minijinja itself, checked or not."""
    both = _Both(SOURCES[where])
    for value in values:
        both.check(BODIES[where](value))
    compiled = compile_template("{{ x }}{{ x | tojson }}{{ [x] | string }}", ())
    for value in values:
        if UNLIKE not in value_kinds(value):
            assert compiled.fast.render({"x": value}) == by_reference(compiled.reference, {"x": value})


@pytest.mark.parametrize(("value", "unlike"), [(98277423282436.125, True), (0.1, False), (1.5, False)])
def test_a_float_between_two_shortest_forms_is_written_by_jinja2(value: float, unlike: bool) -> None:
    assert is_unlike(value) is unlike
    assert unlike == (minijinja.Environment().render_str("{{ x }}", x=value) != repr(value))
