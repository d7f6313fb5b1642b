"""The conversation a template sees, written out: what vLLM 0.32 makes of each kind of message."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.router.prompts.chat.messages import parse_message, without_developer_role
from tests.support.prompts.readers import say

TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
CALL = {"type": "function", "id": "1", "index": 0, "function": {"name": "f", "arguments": '{"b": 1}', "z": 2}}
PARSED_CALL = {
    "id": "1",
    "function": {"arguments": {"b": 1}, "name": "f", "z": 2},
    "type": "function",
    "index": 0,
}


@pytest.mark.parametrize(
    ("message", "text", "parts"),
    [
        (say("user", "a", unknown=1), "a", [{"type": "text", "text": "a"}]),
        (say("user", [TEXT, "b"]), "a\nb", [TEXT, {"type": "text", "text": "b"}]),
        (say("user", ["", "b", ""]), "b", [{"type": "text", "text": t} for t in ("", "b", "")]),
        (
            say("user", [{"type": "tool_reference", "name": "t", "x": 1}]),
            "t",
            [{"type": "tool_reference", "name": "t"}],
        ),
        (say("assistant", None), "", []),
        (say("system", "x-anthropic-billing-header: 1\nKeep"), "Keep", [{"type": "text", "text": "Keep"}]),
        (say("system", "x-anthropic-billing-header: 1"), "", []),
        (say("user", "x-anthropic-billing-header: 1"), "x-anthropic-billing-header: 1", None),
        (say("tool", ["a", "b"]), "a\nb", "a\nb"),
    ],
)
def test_content(message: dict[str, Any], text: str, parts: Any) -> None:
    assert parse_message(message, "string") == {"role": message["role"], "content": text}
    if parts is not None:
        assert parse_message(message, "openai") == {"role": message["role"], "content": parts}


def test_keys_come_in_the_engines_order() -> None:
    message = say(
        "assistant", "x", name="n", reasoning_content="r", tool_calls=[CALL], task="t", tool_call_id="i"
    )
    parsed = parse_message(message, "string")
    assert list(parsed.items()) == [
        ("role", "assistant"),
        ("content", "x"),
        ("tool_calls", [PARSED_CALL]),
        ("reasoning", "r"),
        ("reasoning_content", "r"),
        ("name", "n"),
        ("task", "t"),
    ]
    assert list(parsed["tool_calls"][0]) == list(PARSED_CALL)
    assert list(parsed["tool_calls"][0]["function"]) == ["arguments", "name", "z"]
    assert parse_message(say("tool", "x", tool_call_id=None), "string")["tool_call_id"] is None


@pytest.mark.parametrize("arguments", ["", "no json", "[1]", "5", "null"])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    parsed = parse_message(say("assistant", "", tool_calls=[call]), "string")
    assert parsed["tool_calls"][0]["function"]["arguments"] == {}


def test_developers_become_one_system_message() -> None:
    user, first, late = say("user", "u"), say("system", "a"), say("developer", "b", tools=None)
    assert without_developer_role([first, user]) == [first, user]
    assert without_developer_role([late, user]) == [say("system", "b"), user]
    assert without_developer_role([first, user, late, user]) == [say("system", "a\n\nb"), user, user]
    parts = say("developer", [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}])
    assert without_developer_role([user, parts]) == [say("system", "b\nc"), user]
