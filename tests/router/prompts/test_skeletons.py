"""Chats put together from what a template wrote around others are what jinja2 renders."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.prompts.chat.compiled import TemplateRejectsError, compile_template
from kvatlas.router.prompts.chat.messages import only_text, text_message
from kvatlas.router.prompts.chat.skeletons import Key, Skeletons, text_messages
from kvatlas.router.prompts.chat.template import CHECK_EVERY, ChatTemplate
from kvatlas.router.prompts.settings import PromptStats
from tests.support.examples import examples
from tests.support.prompts.readers import TEMPLATES, template_text

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "critic"]), min_size=1, max_size=6)
TEXTS = st.one_of(
    st.sampled_from(
        [" hi ", "a", "abc", "</think>\n\nyes", "<tool_response>x</tool_response>", "\x1f a \x1c"]
    ),
    st.text(min_size=1, max_size=8),
)
ASKING = {
    "written as it is": ("{{ m.content }}", True),
    "put together": ("{{ '[' + m.content + ']' + m['role'] }}", True),
    "in a variable": ("{% set x = m.content %}{{ x }}{{ x }}", True),
    "in a namespace": ("{% set n = namespace(x=m.content) %}{{ n.x }}", True),
    "stripped": ("{{ m.content | trim }}{{ m.content.lstrip('a') }}", True),
    "stripped to nothing": ("{% if m.content | trim %}x{{ m.content }}{% endif %}", True),
    "how it begins and ends": ("{{ m.content.startswith('a') }}{{ m.content.endswith(('a', 'b')) }}", True),
    "what is in it": ("{{ m.content if 'a' in m.content else '' }}", True),
    "compared": ("{{ m.content == 'a' }}{{ m.content != 'b' }}{{ m.content in ['a', 'abc'] }}", True),
    "in a list": ("{% for x in [m.content, 'x'] %}{{ x }}{% endfor %}", True),
    "its type": ("{{ m.content is string }}{{ m.content is none }}{{ m.content is mapping }}", True),
    "its place": (
        "{{ loop.index0 % 2 }}{{ messages[loop.index0 - 1].content }}{{ messages[-1].content }}",
        True,
    ),
    "looked for": ("{{ m.content in 'abc' }}", False),
    "changed": ("{{ m.content | upper }}{{ m.content.title() }}", False),
    "its length": ("{{ m.content | length }}", False),
    "its letters": ("{{ m.content | first }}{{ m.content[0] }}", False),
    "a slice": ("{{ m.content[1:] }}", False),
    "is it a sequence": ("{{ m.content is sequence }}{{ m.content is iterable }}", True),
    "parted": ("{{ m.content.split('a')[0] }}", False),
    "put together, then asked": ("{{ (m.content + 'a').strip() }}", False),
    "put together, then looked at": ("{{ 'aa' in m.content + 'a' }}", False),
    "formatted": ("{{ '%s' % m.content }}", False),
    "formatted with others": ("{{ ('%s' % (m.content,)) | trim }}", False),
    "compared by order": ("{{ m.content < 'b' }}", False),
    "two texts compared": ("{{ m.content == messages[0].content }}", False),
    "joined": ("{{ ([m.content] | join).strip() }}", False),
    "a block's text": ("{% set x %}{{ m.content }}{% endset %}{{ x | trim }}", False),
    "a macro's text": ("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) | trim }}", False),
    "joined with a tilde": ("{{ (m.content ~ 'a') | length }}", False),
    "as JSON": ("{{ m | tojson }}{{ m.content | tojson }}", False),
    "the whole message": ("{{ m }}", False),
    "a key": ("{{ {'a': 1}[m.content] }}{{ {m.content: 1} | length }}", False),
    "an attribute's name": ("{{ messages[m.content] }}", False),
    "as a number": ("{{ m.content | int }}{{ m.content | list | length }}", False),
    "given to another text": ("{{ 'abc'.replace(m.content, 'x') }}{{ m.role.startswith(m.content) }}", False),
    "a choice by length": ("{{ 'x' if messages | length > 1 and m.content | length > 2 }}", False),
}


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """As the renderer does it."""
    form = template.content_format
    names, key = _names(template), (b"", form, tuple(message["role"] for message in messages))
    texts = [only_text(message, form) for message in messages]
    text = put_together(template, names, texts, key)
    if text is None:
        text = template.render({**names, "messages": messages}, frozenset({hash(str(messages))}))
        template.learn(names, texts, key, text)
    return text


def put_together(template: ChatTemplate, names: dict[str, Any], texts: list[str], key: Key) -> str | None:
    layout = template.layout_of(names, texts, key)
    return None if layout is None else "".join(layout.written(texts))


def _names(template: ChatTemplate) -> dict[str, Any]:
    return {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "add_generation_prompt": True}


def _expected(source: str, names: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
    try:
        return compile_template(source, ()).reference.render({**names, "messages": messages})
    except Exception:  # noqa: BLE001  # whatever the template raises
        return None


def _is_right(template: ChatTemplate, roles: list[str], texts: list[str]) -> None:
    said = zip(roles, texts, strict=True)
    messages = [text_message(role, text, template.content_format) for role, text in said]
    expected = _expected(template.source, _names(template), messages)
    if expected is None:
        with pytest.raises(TemplateRejectsError):
            _rendered(template, messages)
    else:
        assert _rendered(template, messages) == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_chats_are_what_jinja2_renders(name: str, data: st.DataObject) -> None:
    template = ChatTemplate(template_text(name), PromptStats())
    roles = data.draw(ROLES)
    for texts in data.draw(st.lists(st.lists(TEXTS, min_size=len(roles), max_size=len(roles)), max_size=5)):
        _is_right(template, roles, texts)


@pytest.mark.parametrize(("source", "kept"), ASKING.values(), ids=ASKING)
def test_whatever_a_template_asks_about_a_text(source: str, kept: bool) -> None:
    source = "{% for m in messages %}" + source + "{% endfor %}"
    texts = ("abc", "a", "b a", " ", "append", "'\u00e9\n", "</think>")
    for first in texts:
        template = ChatTemplate(source, PromptStats())
        for second in (first, *texts):
            _is_right(template, ["user", "assistant"], [first, second])
            _is_right(template, ["user", "assistant"], [second, first])
    template = ChatTemplate(source, PromptStats())
    key, both = (b"", "string", ("user", "assistant")), ["abc", "abc"]
    _rendered(template, text_messages(key, both))
    assert (put_together(template, _names(template), both, key) is not None) == kept


def test_texts_may_be_parts() -> None:
    parts = "{% for p in m.content %}{{ p.type + p['text'].strip() }}{% endfor %}"
    template = ChatTemplate("{% for m in messages %}" + parts + "{% endfor %}", PromptStats())
    assert template.content_format == "openai"
    _is_right(template, ["user"], [" hi"])
    assert put_together(template, {}, [" there "], (b"", "openai", ("user",))) == "textthere"


def test_a_template_that_looks_at_the_clock_is_always_rendered() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}{{ messages[0].content }}", PromptStats())
    _rendered(template, [{"role": "user", "content": "hi"}])
    assert put_together(template, _names(template), ["hi"], (b"", "string", ("user",))) is None


def test_other_arguments_are_another_chat() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ greeting }}", PromptStats())
    texts = ["hi"]
    template.learn({"greeting": "!"}, texts, (b"one", "string", ("user",)), "hi!")
    assert put_together(template, {}, texts, (b"one", "string", ("user",))) == "hi!"
    assert put_together(template, {}, texts, (b"two", "string", ("user",))) is None
    template.learn({"greeting": "?"}, texts, (b"two", "string", ("user",)), "something else")
    assert put_together(template, {}, texts, (b"two", "string", ("user",))) is None, (
        "it was rendered to another text"
    )


def test_a_difference_met_in_use_ends_putting_together() -> None:
    stats = PromptStats()
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", stats)
    key = (b"", "string", ("user",))
    template.learn({"bos_token": "wrong"}, ["hi"], key, "hiwrong")
    found = [put_together(template, {"bos_token": "right"}, ["hi"], key) for _ in range(CHECK_EVERY + 1)]
    assert found == ["hiwrong"] * (CHECK_EVERY - 1) + [None, None]
    assert stats.template_mismatches == 1


def test_memory_is_bounded() -> None:
    watching = compile_template("{{ messages[0].content }}{{ preface }}", ()).watching
    kept = Skeletons(watching)
    for number in range(1000):
        kept.learn((b"%d" % number, "string", ("user",)), ["hi"], {}, "hi")
        layout = kept.find((b"%d" % number, "string", ("user",)), ["you"])
        assert layout is not None
        assert layout.written(["you"]) == ["", "you", ""]
    assert len(kept._kept) <= 256
    kept.learn((b"long", "string", ("user",)), ["hi"], {"preface": "x" * 20_000}, "hi" + "x" * 20_000)
    assert kept.find((b"long", "string", ("user",)), ["you"]) is None
    many = ("user",) * 100
    kept.learn((b"", "string", many), ["hi"] * 100, {}, "hi")
    assert kept.find((b"", "string", many), ["hi"] * 100) is None
