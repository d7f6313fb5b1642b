"""Chat templates render as Hugging Face's jinja2 does; minijinja is used only while that is so."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import datetime

import minijinja
import pytest

from kvatlas.router.prompts.chat.bounds import FastTemplate
from kvatlas.router.prompts.chat.compiled import TemplateRejectsError, reference_environment, tojson
from kvatlas.router.prompts.chat.content_format import detect_content_format
from kvatlas.router.prompts.chat.messages import parse_message
from kvatlas.router.prompts.chat.template import CHECK_EVERY, ChatTemplate, message_shape
from kvatlas.router.prompts.settings import PromptStats
from tests.support.prompts import cases
from tests.support.prompts.readers import TEMPLATES, template_text

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
LOOP = "{% for m in messages %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}"
MACRO = "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def context(messages: list[dict[str, object]], **more: object) -> dict[str, object]:
    return {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True, **more}


def shapes(messages: list[dict[str, object]]) -> frozenset[object]:
    return frozenset(message_shape(message) for message in messages)


@pytest.mark.parametrize("name", NAMES)
def test_rendering_equals_jinja2(name: str) -> None:
    stats = PromptStats()
    template = ChatTemplate(template_text(name), stats)
    reference = reference_environment().from_string(template.source)
    compared = 0
    for body in (*cases.TURNS, *cases.TOOL_CHATS, *cases.random_chats(40, seed=3)):
        messages = [parse_message({**m}, template.content_format) for m in body["messages"]]
        names = context(messages, bos_token="<|bos|>", eos_token="<|eos|>", tools=body.get("tools"))
        try:
            expected = reference.render(**names)
        except Exception:  # noqa: BLE001  # whatever the template raises
            with pytest.raises(TemplateRejectsError):
                template.render(names, shapes(messages))
            continue
        compared += 1
        assert template.render(names, shapes(messages)) == expected
    assert compared > 30
    assert stats.template_mismatches == 0
    assert template.engine == "minijinja"


@pytest.mark.parametrize(
    "source",
    [
        "{% print 'x' %}" + PLAIN,  # minijinja cannot parse it
        "{{ '%s' % messages[0].content }}",  # minijinja cannot run it
    ],
)
def test_jinja2_takes_over_what_minijinja_cannot_do(source: str) -> None:
    stats = PromptStats()
    template = ChatTemplate(source, stats)
    messages = [{"role": "user", "content": "hi"}]
    assert template.engine == "jinja2"
    assert "hi" in template.render(context(messages), shapes(messages))
    assert stats.rendered_jinja2 == 1


def differing(source: str) -> FastTemplate:
    """In place of the real one: some values come out otherwise."""

    def make(_: object) -> minijinja.Environment:
        other = minijinja.Environment()
        other.add_template("chat", source)
        return other

    return FastTemplate(make)


def test_a_known_shape_that_differs_ends_minijinja_for_that_template() -> None:
    stats = PromptStats()
    template = ChatTemplate(PLAIN, stats)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(context(messages), shapes(messages)) == "user: hi\n"
    assert template.engine == "minijinja"
    template._fast = differing("something else")
    for _ in range(CHECK_EVERY):
        template.render(context(messages), shapes(messages))
    assert template.engine == "jinja2"
    assert template.render(context(messages), shapes(messages)) == "user: hi\n"
    assert stats.template_mismatches == stats.templates_distrusted == 1


def test_one_unusual_request_does_not_make_everybody_pay() -> None:
    stats = PromptStats()
    template = ChatTemplate(PLAIN, stats)
    template._fast = differing(PLAIN + "{% if messages[-1].name %}wrong{% endif %}")
    plain = [{"role": "user", "content": "hi"}]
    odd = [{"role": "user", "content": "hi", "name": "bob"}]
    assert template.render(context(plain + odd), shapes(plain + odd)) == "user: hi\nuser: hi\n"
    assert not template._differing, "two shapes were new: it may have been either"
    template.render(context(plain), shapes(plain))
    for _ in range(10):
        assert template.render(context(plain + odd), shapes(plain + odd)) == "user: hi\nuser: hi\n"
    assert (stats.template_mismatches, stats.templates_distrusted) == (2, 0)
    slower = stats.rendered_jinja2
    for _ in range(10):
        template.render(context(plain), shapes(plain))
    assert template.engine == "minijinja"
    assert stats.rendered_jinja2 == slower


def test_shapes_that_differ_are_bounded() -> None:
    stats = PromptStats()
    template = ChatTemplate(PLAIN, stats)
    template._fast = differing("wrong")
    for number in range(1000):
        messages = [{"role": f"role {number}", "content": "hi"}]
        assert template.render(context(messages), shapes(messages)) == f"role {number}: hi\n"
    assert len(template._differing) <= 256
    assert stats.template_shapes_forgotten == 1000 - len(template._differing)
    assert stats.templates_distrusted == 0


def test_a_refusal_by_the_engine_ends_nothing() -> None:
    stats = PromptStats()
    source = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    template = ChatTemplate(source, stats)
    template._fast = differing(PLAIN)
    for text in ("yes", *["no"] * CHECK_EVERY):
        messages = [{"role": "user", "content": text}]
        with suppress(TemplateRejectsError):
            template.render(context(messages), shapes(messages))
    assert stats.template_mismatches == 1, "one was sampled"
    assert template.engine == "minijinja"


GENERATION = "{% set x = 'a' %}{%- generation -%} {% set x = 'b' %}{{ x }} {%- endgeneration %}{{ x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ none is iterable }}{{ none is not iterable }}{{ x is iterable }}{{ x is not sequence }}",
        "{{ messages is iterable }}{{ messages[0] is sequence }}{{ messages[0].role is sequence }}",
        "{% for m in messages %}{{ m.a is iterable and m.role is string }}{{ 1 is sequence }}{% endfor %}",
        "{{ (messages[0].role | upper) is iterable }}{{ 'is iterable' }}{# is iterable #}",
        GENERATION,
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(a=1) %}{% generation %}{% set n.a = 2 %}{% endgeneration %}{{ n.a }}",
        "{{ 'x' }}:{\n  {%- if none is iterable %}y{% endif %}\n\n",  # where white space is removed
    ],
)
def test_permitted_template_functions_keep_minijinja(source: str) -> None:
    template = ChatTemplate(source, PromptStats())
    messages = [{"role": "user", "content": "hi"}]
    assert template.engine == "minijinja"
    assert template._by_fast(context(messages)) == template._by_reference(context(messages))


@pytest.mark.parametrize(
    ("source", "safe"),
    [
        ("{{ x | tojson | safe }}{{ 'a' ~ (x | safe) ~ '<' }}{{ (x | safe) if x else '<' }}", True),
        ("{% set a = x | safe if x is mapping else x | string %}{{ a }}{{ '<' ~ a }}", True),
        ("{{ '<' + (x | safe) }}", False),
        ("{% set a = x | safe %}{% set b = a[1:] %}{{ b + '<' }}", False),
        ("{% set n.a = x | safe %}{{ '<' + n.a }}", False),
        ("{{ (x | safe).replace('a', '<') }}", False),
        ("{% for a in [x | safe] %}{{ '<' + a }}{% endfor %}", False),
        ("{{ '%s<' | format(x | safe) }}", False),
        ("{% macro f(a) %}{{ '<' + a }}{% endmacro %}{{ f(x | safe) }}", False),
    ],
)
def test_safe_texts_that_are_joined_are_for_jinja2(source: str, safe: bool) -> None:
    """jinja2 escapes what is joined to a text marked as safe, with any value but the probes'."""
    template = ChatTemplate(
        "{% set n = namespace(a='') %}{% if x is defined %}" + source + "{% endif %}", PromptStats()
    )
    assert (template.engine == "minijinja") == safe
    names = context([], x="a<b")
    assert template.render(names, frozenset()) == template._by_reference(names)
    assert template.engine == ("minijinja" if safe else "jinja2")


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        ("m.content | trim", ["hi\x1f", "\x1c hi", "\n\x1d\n", "\x1e\x1e"]),
        ("m.content.strip()", ["hi\x1f", "a\x1cb"]),
        ("m.content.split() | join(',')", ["a\x1fb"]),
        ("m.content | title", ["\N{GREEK CAPITAL LETTER SIGMA}"]),
        ("m.content | upper", ["\N{LATIN SMALL LETTER LAMBDA WITH STROKE}"]),
        ("m.content | capitalize", ["\N{LATIN SMALL LETTER DZ WITH CARON}"]),
        ("m.content | e", ["'a/b'"]),
        ("m.content.splitlines() | join(',')", ["a\x0bb", "a\rb"]),
        ("m.content | indent", ["a\x0cb"]),
    ],
)
def test_characters_that_minijinja_knows_otherwise(shown: str, texts: list[str]) -> None:
    """Models write any byte; their answers come back in the next turn."""
    stats = PromptStats()
    source = "{% for m in messages %}[{{ " + shown + " }}]{% endfor %}"
    template = ChatTemplate(source, stats)
    reference = reference_environment().from_string(source)
    for text in ("plain", *texts, "plain again"):
        names = context([{"role": "user", "content": text}])
        assert template.render(names, shapes(names["messages"])) == reference.render(**names), repr(text)
    assert stats.template_mismatches == 0
    assert stats.rendered_jinja2 in {len(texts), len(texts) + 2}, "plain text by minijinja, where it may"


def test_known_shapes_are_checked_only_now_and_then() -> None:
    stats = PromptStats()
    template = ChatTemplate(PLAIN, stats)
    for number in range(200):
        messages = [{"role": "user", "content": f"number {number}"}]
        template.render(context(messages), shapes(messages))
    assert stats.template_checks == 1
    messages = [{"role": "user", "content": "hi", "name": "bob"}]
    template.render(context(messages), shapes(messages))
    assert stats.template_checks == 2


def test_a_generation_block_keeps_its_variables_to_itself() -> None:
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, PromptStats()).render(context([]), frozenset()) == "ba"


def test_tojson_is_plain_json() -> None:
    value = {"b": "<ü&'>", "a": [1.0, None, True]}
    assert tojson(value) == '{"b": "<ü&\'>", "a": [1.0, null, true]}'
    assert tojson(value, indent=2).startswith('{\n  "b"')
    assert tojson(value, separators=(",", ":"), sort_keys=True) == '{"a":[1.0,null,true],"b":"<ü&\'>"}'
    source = "{{ tools | tojson(ensure_ascii=True, indent=1) }}"
    names = context([], tools=[value])
    assert ChatTemplate(source, PromptStats()).render(names, frozenset()) == tojson([value], True, 1)


def test_strftime_now_gives_local_time_and_is_noticed() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", PromptStats())
    assert template.depends_on_time
    year = time.localtime().tm_year
    assert template.render(context([]), frozenset()) in {str(year), str(year + 1)}


def test_the_clock_may_be_that_of_another_time_zone() -> None:
    hours = []
    for zone in ("Pacific/Kiritimati", "UTC", "Pacific/Honolulu"):
        template = ChatTemplate("{{ strftime_now('%s %Y-%m-%d %H:%M%z') }}", PromptStats(), None, zone)
        shown = template.render(context([]), frozenset())
        hours.append(datetime.strptime(shown.partition(" ")[2], "%Y-%m-%d %H:%M"))  # noqa: DTZ007  # %z wrote nothing
    offsets = [round((hour - hours[1]).total_seconds() / 3600) for hour in hours]
    assert offsets == [14, 0, -10]


def test_no_jinja_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=re.escape("chat template is no valid Jinja")):
        ChatTemplate("{% for %}", PromptStats())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, "string"),
        (LOOP, "openai"),
        (LOOP.replace("messages", "messages[1:]").replace("m.content", "m['content'] | list"), "openai"),
        ("{% set a = messages %}{% set b = a[1:] %}" + LOOP.replace("messages", "b"), "openai"),
        (LOOP.replace("m.content", "content"), "openai"),
        (MACRO + "{% for m in messages %}{{ show(m.content) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}", "openai"),
        (MACRO + "{% for m in messages %}{{ show(m.role) }}{% endfor %}", "string"),
        (LOOP.replace("m.content", "m.tool_calls"), "string"),
        ("{% for a, b in messages %}{% endfor %}", "string"),
        ("{% for", "string"),
    ],
)
def test_content_format_is_read_from_the_loops(source: str, expected: str) -> None:
    assert detect_content_format(source, reference_environment()) == expected
