"""A chat template that would never end, or make too much, is stopped by both engines; usual ones are not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvatlas.router.prompts.chat import bounds
from kvatlas.router.prompts.chat.bounds import FUEL
from kvatlas.router.prompts.chat.compiled import (
    TemplateRejectsError,
    by_fast,
    by_reference,
    compile_template,
    reference_environment,
)
from kvatlas.router.prompts.chat.growth import may_explode

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
CHAT = [{"role": "user", "content": "hello"}]
MACRO = "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set s = 'ab' %}"
MANY = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"
DOUBLING = {
    "itself": "{% set n = namespace(s='ab') %}" + "{% set n.s = n.s ~ n.s %}" * 60 + "{{ n.s }}",
    "plus": "{% set n = namespace(s='ab') %}" + "{% set n.s = n.s + n.s %}" * 60 + "{{ n.s }}",
    "in a row": "{% set s = 'ab' %}" + "{% set s = s ~ s %}" * 60 + "{{ s }}",
    "another name": "{% set a = 'ab' %}" + "{% set b = a %}{% set a = a ~ b %}" * 60 + "{{ a }}",
    "times": "{% set s = 'ab' %}" + "{% set s = s * 9 %}" * 60 + "{{ s }}",
    "replace": "{% set s = 'aa' %}" + "{% set s = s.replace('a', 'aa') %}" * 60 + "{{ s }}",
    "filter": "{% set s = 'aa' %}" + "{% set s = s|replace('a', 'aa') %}" * 60 + "{{ s }}",
    "join": "{% set s = 'aa' %}" + "{% set s = s.join([s, s, s]) %}" * 60 + "{{ s }}",
    "lists": "{% set s = ['a'] %}" + "{% set s = [s, s] %}" * 60 + "{{ s|tojson }}",
    "more lists": "{% set s = ['a'] %}" + "{% set s = s + s %}" * 60 + "{{ s|tojson }}",
    "block": "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60 + "{{ s }}",
    "macro": MACRO + "{% set s = f(s) %}" * 60 + "{{ s }}",
}
WIDE = {
    "center": "{{ 'a'|center(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format('a') }}",
    "format by a value": "{{ '{:{}}'.format('a', 10000000000) }}",
    "format by an item": "{{ '{:{x[0]}}'.format('a', x=[10000000000]) }}",
    "format map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "percent by a value": "{{ '%*d' % (10000000000, 1) }}",
    "percent filter": "{{ '%*d'|format(10000000000, 1) }}",
    "many fields": "{% set a = 'a' * 100000 %}{{ ('{0}' * 10000).format(a) }}",
    "many fields of a list": "{% set a = 'a' * 100000 %}{{ ('{0}' * 10000).format([a]) }}",
    "many percents": "{% set a = 'a' * 100000 %}{{ ('%(a)s' * 10000) % {'a': a} }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "join of made items": "{{ ('a' * 1000000).join(range(99999)|map('string')) }}",
    "join of made items, by filter": "{{ range(99999)|map('string')|join('a' * 1000000) }}",
    "join of keys": "{{ ('a' * 1000000).join(dict.fromkeys(range(99999)|map('string')|list)) }}",
    "bytes": "{{ 'a'.encode().ljust(10000000000) }}",
    "number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "product": "{{ 'a' * 10000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
}
ENDLESS = {
    "loops": MANY + "{% set c = b %}" + END,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "text": MANY + "{{ messages[0].content }}" + END,
    "long values": MANY + "{% set x = 'a' * 60000 %}" + END,
    "long lists": "{% set n = namespace(l=[]) %}" + MANY + "{% set n.l = n.l + [a] %}" + END,
    "literal text": MANY + "a" * 5000 + END,
    "literal text as a value": "{% set s %}" + MANY + "a" * 5000 + END + "{% endset %}",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "FUEL", FUEL // 50)
    monkeypatch.setattr(bounds, "TEXT_MAX", 1 << 20)


@pytest.mark.parametrize("source", [*DOUBLING.values(), *WIDE.values()], ids=[*DOUBLING, *WIDE])
def test_values_that_grow_are_refused_before_they_are_made(source: str) -> None:
    environment = reference_environment()
    assert may_explode(environment.parse(source)), "minijinja, which knows no sizes, must not run it"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateRejectsError, match="chat template"):
        by_reference(environment.from_string(source), {"messages": CHAT})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 1 << 20


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_goes_on_for_ever_is_stopped(source: str) -> None:
    source = "{% if messages[0].content == 'now' %}" + source + "{% endif %}"
    compiled = compile_template(source, ())
    now = {"messages": [{"role": "user", "content": "now"}]}
    with pytest.raises(TemplateRejectsError, match=r"chat template|recursion"):
        by_reference(compiled.reference, now)
    if compiled.fast is not None:
        assert by_fast(compiled.fast, now) is None
    assert by_reference(compiled.reference, {"messages": CHAT}) == "", "the next one has its own fuel"


@pytest.mark.parametrize("file", sorted(TEMPLATES.rglob("*.jinja")), ids=lambda file: file.name)
def test_usual_templates_are_rendered_fast_and_long_chats_fit(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    source = file.read_text()
    assert not may_explode(reference_environment().parse(source))
    compiled = compile_template(source, ())
    assert compiled.fast is not None
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} " * 50} for n in range(2001)]
    if compiled.content_format == "openai":
        turns = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in turns]  # type: ignore[dict-item]
    for count in (3, 65, 129, 2001):
        context = {
            "eos_token": "</s>",
            "bos_token": "<s>",
            "messages": turns[:count],
            "tools": None,
            "add_generation_prompt": True,
            "documents": None,
        }
        expected = by_reference(compiled.reference, context)
        assert "turn 2" in expected
        assert by_fast(compiled.fast, context) == expected
