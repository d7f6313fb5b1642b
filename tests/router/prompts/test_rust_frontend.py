"""Prompts behind vLLM's Rust frontend; tests/vllm/test_rust_frontend.py compares them with vLLM's own."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvatlas.router.fleet.status import Frontend, ModelCard
from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader
from kvatlas.router.prompts.settings import ModelPrompts, PromptSettings
from tests.support.prompts.cases import call
from tests.support.prompts.readers import (
    byte_level_tokenizer,
    chat,
    model_dir,
    read,
    read_affinity,
    read_prompt,
    reader,
    say,
)

PARTS = [
    {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "two"},
]
SHOWS = (
    "{{ extra | tojson if extra }}"
    "{% for m in messages %}[{{ m.role }}{{ m.name }}|{{ m.content }}|"
    "{{ m.tool_calls | tojson if m.tool_calls }}]{% endfor %}"
)


def behind(folder: Path, *frontends: Frontend, template: str = SHOWS, **options: Any) -> PromptReader:
    model_dir(folder, "chatml", tokenizer=byte_level_tokenizer())
    models = {"m": ModelPrompts(tokenizer_dir=str(folder), chat_template=template, **options)}
    return reader(models, frontends=lambda _model: frontends)


def text(found: Any) -> str:
    assert isinstance(found, Prompt), found
    tokenizer = Tokenizer.from_str(byte_level_tokenizer())
    return tokenizer.decode(list(found.token_ids), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (say("user", PARTS), "[user|onetwo|]"),
        (say("developer", "Be kind"), "[developer|Be kind|]"),
        (say("user", "hi", name="bob"), "[user|hi|]"),
        (say("system", "x-anthropic-billing-header: a\nb"), "[system|x-anthropic-billing-header: a\nb|]"),
        (say("user", None), "[user||]"),
        (
            say("assistant", "", tool_calls=[call("f", "[1]", index=0)]),
            (
                '[assistant||[{"id": "call12345", "type": "function", '
                '"function": {"name": "f", "arguments": [1]}}]]'
            ),
        ),
    ],
)
def test_a_message_is_what_that_frontend_makes_of_it(message: Any, shown: str, tmp_path: Path) -> None:
    assert text(read(behind(tmp_path, "rust"), chat(message))) == shown


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (say("critic", "a role that it does not know"), {}),
        (say("user", [{"type": "thinking", "thinking": "hm"}]), {}),
        (say("developer", "a", tools=[{"type": "function", "function": {"name": "f"}}]), {}),
        (say("assistant", "", tool_calls=[call("f", '{"a": 1e2}')]), {}),
        (say("assistant", "", tool_calls=[call("f", "no JSON")]), {}),
        (say("assistant", "", tool_calls=[call("f", '{"at": 1732867200.1234567}')]), {}),
        (say("assistant", "", tool_calls=[call("f", '{"a": [{"b": 0.10000000000000001}]}')]), {}),
        (say("assistant", "", tool_calls=[call("f", '{"a": -0}')]), {}),
        (say("assistant", "x", thinking="hm"), {}),
        (say("user", "a", extra=1), {}),
        (say("user", "a"), {"tools": [_tool({"maximum": 870675.03527538405})]}),
        (say("user", "a"), {"chat_template_kwargs": {"add_generation_prompt": False}}),
        (say("user", "a"), {"chat_template_kwargs": {"extra": 0.5}}),
        (say("user", "a"), {"chat_template_kwargs": {"extra": [{"a": 0}]}}),
        (say("user", "a"), {"truncate_prompt_tokens": 3}),
        (say("assistant", "a"), {"continue_final_message": True, "add_generation_prompt": False}),
        (say("user", "a"), {"chat_template_kwargs": {"bos_token": None}}),
        (say("user", "a"), {"tools": [_tool({"a": json.loads("[" * 128 + "]" * 128)})]}),
    ],
)
def test_uncompared_shapes_are_refused(message: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    rust = behind(tmp_path, "rust")
    read_affinity(rust, chat(message, **fields))
    assert rust.stats.not_local["frontend"] == 1


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (say("user", 5), {}),
        (say("user", [5, None, {"type": "text", "text": 1}]), {}),
        (say("assistant", "a", tool_calls=5), {}),
        (say("assistant", "a", tool_calls=[5]), {}),
        (say("assistant", "a", tool_calls=[{"function": {"arguments": {}}}]), {}),
        (say("assistant", "a", reasoning={"a": 1}), {}),
        (say("user", "a"), {"chat_template_kwargs": [None]}),
        (say("user", "a"), {"tools": [_tool({"a": json.loads("[" * 900 + "]" * 900)})]}),
        (say("user", "a"), {"tools": [{"type": "function", "function": {"name": 1}}]}),
    ],
)
def test_bodies_of_another_shape_raise_nothing_else(
    message: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    with suppress(ApiError):
        read_affinity(behind(tmp_path, "rust"), chat(message, **fields))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }}",
        "{{ messages[0] }}",
        "{{ 'x' ~ messages[0] }}",
        "{{ messages | string }}",
        "{{ [1, 'a'] }}",
        "{{ messages[0].content | e }}",
    ],
)
def test_templates_that_print_values_are_refused(template: str, tmp_path: Path) -> None:
    read_affinity(behind(tmp_path, "rust", template=template), chat(say("user", "a")))


@pytest.mark.parametrize("number", ["0.5", "1700000000.12345", "-123456789012345", "0.000123456789012345"])
def test_numbers_that_both_write_alike_are_made_here(number: str, tmp_path: Path) -> None:
    message = say("assistant", "", tool_calls=[call("f", f'{{"a": {number}}}')])
    assert f'{{"a": {number}}}' in text(read(behind(tmp_path, "rust"), chat(message)))


@pytest.mark.parametrize(
    ("template", "made"),
    [
        (r"{{ messages[0].content ~ '\n' }}", True),
        (r"{{ messages[0].content }}\n", False),
        (r"{{ messages[0].content ~ '\\n' }}", False),
        (r"{% raw %}\n{% endraw %}{{ messages[0].content }}", False),
        ("{{ extra is number }}", False),
        ("{{ extra is string }}", True),
    ],
)
def test_templates_that_rust_reads_otherwise_are_left_to_it(
    template: str, made: bool, tmp_path: Path
) -> None:
    body = chat(say("user", "a"), chat_template_kwargs={"extra": True})
    found = read(behind(tmp_path, "rust", template=template), body)
    assert isinstance(found, Prompt) is made
    assert isinstance(read(behind(tmp_path, "python", template=template), body), Prompt)


def test_texts_with_tokens_that_its_tokenizer_lacks_are_left_to_it(tmp_path: Path) -> None:
    model_dir(tmp_path, "chatml", tokenizer=byte_level_tokenizer(), extra_special_tokens=["<|more|>"])
    models = {"m": ModelPrompts(tokenizer_dir=str(tmp_path))}
    rust = reader(models, frontends=lambda _model: ("rust",))
    python = reader(models, frontends=lambda _model: ("python",))
    for path, plain, more in (
        (CHAT, chat(say("user", "a <|im_end|> b")), chat(say("user", "a <|more|> b"))),
        (COMPLETION, {"model": "m", "prompt": "a"}, {"model": "m", "prompt": "a<|more|>"}),
    ):
        assert isinstance(read(rust, plain, path), Prompt)
        assert read_affinity(rust, more, path).reason == "frontend"
        assert isinstance(read(python, more, path), Prompt)


def test_absent_tools_and_documents_are_undefined(tmp_path: Path) -> None:
    template = "{% if tools is defined %}T{% endif %}{% if documents is defined %}D{% endif %}."
    assert text(read(behind(tmp_path, "python", template=template), chat(say("user", "a")))) == "TD."
    assert text(read(behind(tmp_path, "rust", template=template), chat(say("user", "a")))) == "."


def test_a_model_with_another_template_for_tools_is_left_to_its_engines(tmp_path: Path) -> None:
    model_dir(tmp_path, None, tokenizer=byte_level_tokenizer())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("other")
    models = {"m": ModelPrompts(tokenizer_dir=str(tmp_path))}
    assert (
        read_affinity(reader(models, frontends=lambda _model: ("rust",)), chat(say("user", "a"))).reason
        == "renderer"
    )


def test_a_fleet_with_both_frontends_has_a_prompt_for_each(tmp_path: Path) -> None:
    both = behind(tmp_path, "python", "rust")
    found = read(both, chat(say("user", PARTS)))
    assert text(found) == "[user|one\ntwo|]"
    assert isinstance(found, Prompt)
    rust = found.behind("rust")
    assert text(rust) == "[user|onetwo|]"
    assert rust.behind("python") is found

    only = read_prompt(both, chat(say("user", [{"type": "thinking", "thinking": "hm"}])))
    assert (only.behind("python"), only.behind("rust")) == (only, None)


def test_a_next_turn_reuses_the_tokens_of_its_own_frontend_only(tmp_path: Path) -> None:
    both = behind(tmp_path, "python", "rust")
    first, answer = say("user", PARTS), say("assistant", "three")
    read(both, chat(first))
    turn = read_prompt(both, chat(first, answer))
    assert text(turn.behind("python")) == "[user|one\ntwo|][assistant|three|]"
    assert text(turn.behind("rust")) == "[user|onetwo|][assistant|three|]"


def test_render_servers_are_not_asked_for_the_other_frontend(tmp_path: Path) -> None:
    """They have the Python frontend; an engine of the model has the right one."""
    asked: list[str] = []

    async def post(url: str, _body: bytes, _headers: Any, _timeout_s: float) -> tuple[int, bytes]:
        asked.append(url)
        return 200, b'{"token_ids": [1, 2, 3]}'

    model_dir(tmp_path, "chatml", tokenizer=byte_level_tokenizer())
    rust = reader(
        {"m": ModelPrompts(tokenizer_dir=str(tmp_path))},
        PromptSettings(renderers=("http://renderer:1",)),
        post=post,
        engine_url=lambda _model, _frontend: "http://engine:1",
        frontends=lambda _model: ("rust",),
    )
    found = read_prompt(rust, chat(say("critic", "a")))
    assert (list(found.token_ids), found.source, found.frontend) == ([1, 2, 3], "engine", "rust")
    assert asked == ["http://engine:1/v1/chat/completions/render"]


def test_the_owner_of_the_model_card_says_which_frontend_it_is() -> None:
    assert ModelCard("m").frontend == "python"
    assert ModelCard("m", owned_by="sglang").frontend == "sglang"
    assert ModelCard("m", owned_by="vllm-frontend-rs").frontend == "rust"
