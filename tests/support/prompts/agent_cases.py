"""Requests of agents' APIs, by hand and at random; used locally and against real vLLM."""

from __future__ import annotations

import random
from typing import Any

from tests.support.prompts import cases

Body = dict[str, Any]

WEATHER: Body = {
    "name": "get_weather",
    "description": "Weather of a place, <now> & 'later'",
    "input_schema": {
        "properties": {"b": {"maximum": 1.50}, "a": {"enum": ["ü", None, 12345678901234567890123]}},
        "required": ["a"],
    },
}
PING: Body = {"name": "ping", "input_schema": {"type": "object", "properties": {}}, "strict": True}
USER: Body = {"role": "user", "content": "Wetter in Zürich?\n\n"}
ANSWER: Body = {"role": "assistant", "content": "  I'm fine, thanks. "}
CALLS: Body = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "thinking", "thinking": " and more"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"b": 2.50, "a": "Zürich\n"}},
        {"type": "tool_use", "id": "toolu_2", "name": "ping", "input": {}},
    ],
}
RESULTS: Body = {
    "role": "user",
    "content": [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [{"type": "text", "text": "21.5"}, {"type": "text", "text": "°C"}],
        },
        {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
        {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}},
    ],
}
SYSTEM_BLOCKS = [
    {"type": "text", "text": "x-anthropic-billing-header: cch=123"},
    {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": " <And> kind.\n"},
]


def messages(*turns: Body, **fields: Any) -> Body:
    return {"model": "m", "max_tokens": 64, "messages": list(turns), **fields}


def blocks(role: str, *parts: Body) -> Body:
    return {"role": role, "content": list(parts)}


def text(words: str, **more: Any) -> Body:
    return {"type": "text", "text": words, **more}


INLINE: Body = {"role": "system", "content": "Remember the <rules>."}
MESSAGES: list[Body] = [
    messages(USER),
    messages(USER, system="Be kind."),
    messages(USER, system="x-anthropic-billing-header: cch=1\nKeep this"),
    messages(USER, system="x-anthropic-billing-header: cch=1"),
    messages(USER, system=SYSTEM_BLOCKS),
    messages(USER, system=[]),
    messages(USER, system=[text("x-anthropic-billing-header: a\nlost with its block"), text("")]),
    messages(USER, ANSWER, USER),
    messages(blocks("user", text("one"), text("two"))),
    messages(blocks("user", text("one", citations=[], zzz=1))),
    messages(blocks("user", text(""), text("b"))),
    messages(blocks("user"), USER),
    messages(USER, blocks("assistant"), USER),
    messages(USER, CALLS, RESULTS, tools=[WEATHER, PING]),
    messages(USER, CALLS, RESULTS, ANSWER, USER, tools=[WEATHER], system=SYSTEM_BLOCKS),
    messages(USER, CALLS, RESULTS, tools=[WEATHER, PING], tool_choice={"type": "none"}),
    messages(USER, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}),
    messages(USER, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}),
    messages(USER, tools=[{**WEATHER, "defer_loading": True}, {**PING, "type": "custom", "zzz": 1}]),
    messages(USER, tools=[]),
    messages(USER, INLINE, ANSWER, USER),
    messages(INLINE, USER, system="First."),
    messages(USER, blocks("system", text("x-anthropic-billing-header: 1"), text("Late.")), ANSWER, USER),
    messages(USER, blocks("system", text("x-anthropic-billing-header: 1")), USER),
    messages(USER, {"role": "system", "content": "x-anthropic-billing-header: 1"}, USER),
    messages(USER, {"role": "system", "content": ""}, USER),
    messages(
        USER,
        CALLS,
        blocks(
            "user",
            text("before"),
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {"type": "tool_reference", "tool_name": "ping"},
                    text("x"),
                    "odd",
                    {"type": "zz"},
                ],
            },
        ),
        tools=[PING],
    ),
    messages(USER, blocks("user", {"type": "tool_result", "content": "plain"}), USER),
    messages(USER, blocks("assistant", {"type": "tool_result", "content": [text("it's")]}), USER),
    messages(USER, blocks("assistant", {"type": "tool_result", "tool_use_id": "x"}), USER),
    messages(USER, blocks("assistant", {"type": "thinking", "thinking": "only"}), USER),
    messages(USER, blocks("assistant", {"type": "thinking", "thinking": ""}, text("t")), USER),
    messages(USER, blocks("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": None}), RESULTS),
    messages(USER, blocks("assistant", {"type": "tool_use", "name": "f", "input": {}}), RESULTS),
    messages(
        USER, blocks("assistant", {"type": "tool_use", "id": "a", "input": {"x": [1e2, -0.0]}}), RESULTS
    ),
    messages(USER, blocks("user", {"type": "tool_reference", "tool_name": "x"}, text("b"))),
    messages(USER, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
    messages(USER, thinking={"type": "disabled"}),
    messages(USER, thinking={"type": "adaptive"}, output_config={"effort": "max"}),
    messages(USER, thinking={"type": "disabled"}, output_config={"effort": "low"}),
    messages(USER, output_config={"effort": "high"}, chat_template_kwargs={"enable_thinking": False}),
    messages(USER, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}),
    messages(USER, chat_template_kwargs={"enable_thinking": False, "unused": 1}),
    messages(USER, cache_salt="salt", stream=True, metadata={"user_id": "u"}, stop_sequences=["x"]),
    messages(USER, ANSWER),
    messages(blocks("user", {"type": "image", "source": {"type": "url", "url": "http://x"}}, text("what?"))),
    messages(blocks("user", {"type": "image"}, text("what?"))),
    messages(blocks("user", {"type": "document", "source": {}}, text("what?"))),
    messages({"role": "tool", "content": "x"}),
    messages({"role": "user", "content": None}),
    messages(
        USER,
        blocks("system", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ping"}}),
        USER,
        tools=[PING, WEATHER],
    ),
]

FUNCTION: Body = {
    "type": "function",
    "name": "get_weather",
    "description": "Is it <warm>?",
    "parameters": {"type": "object", "properties": {"b": {"maximum": 1.5}, "a": {"enum": ["ü", None]}}},
    "strict": None,
}
CUSTOM: Body = {"type": "custom", "name": "shell", "description": "Runs it"}
NAMESPACE: Body = {
    "type": "namespace",
    "name": "crm",
    "description": "d",
    "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "hidden"},
        {"type": "function", "name": "ping", "defer_loading": True, "description": "p"},
    ],
}
THOUGHT: Body = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "in short"}],
    "content": [{"type": "reasoning_text", "text": "at length"}, {"type": "reasoning_text", "text": "lost"}],
}
CALL: Body = {
    "type": "function_call",
    "call_id": "c1",
    "name": "get_weather",
    "arguments": '{"b": 2.50, "a": "ü"}',
}
OUTPUT: Body = {"type": "function_call_output", "call_id": "c1", "output": "21.5 °C"}
SAID: Body = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [
        {"type": "output_text", "text": " I look. ", "annotations": []},
        {"type": "output_text", "text": "x"},
    ],
}


def responses(*items: Body | str, **fields: Any) -> Body:
    given: Any = items[0] if len(items) == 1 and isinstance(items[0], str) else list(items)
    return {"model": "m", "input": given, **fields}


def says(role: str, content: Any, **more: Any) -> Body:
    return {"role": role, "content": content, **more}


def input_text(words: str, **more: Any) -> Body:
    return {"type": "input_text", "text": words, **more}


RESPONSES: list[Body] = [
    responses("Hello there"),
    responses("Hello there", instructions="Be <brief>."),
    responses("Hello", instructions=""),
    responses(USER),
    responses(USER, ANSWER, USER, instructions="Be kind"),
    responses(says("system", "s"), says("developer", [input_text("d")]), USER),
    responses(
        says(
            "user", [input_text("one"), input_text("two", cache_control={"type": "x"}, zzz=1)], type="message"
        )
    ),
    responses(says("user", [])),
    responses(says("user", "hi", name="bob", task="t", extra=[1])),
    responses(says("developer", "hi", tools=[FUNCTION]), USER),
    responses(USER, SAID, USER),
    responses(USER, THOUGHT, SAID, CALL, OUTPUT, USER, tools=[FUNCTION]),
    responses(
        USER, SAID, CALL, {**CALL, "call_id": "c2", "namespace": "crm"}, OUTPUT, {**OUTPUT, "call_id": "c2"}
    ),
    responses(USER, THOUGHT, THOUGHT, CALL, OUTPUT),
    responses(USER, CALL, SAID, OUTPUT, USER),
    responses(USER, CALL, SAID, ANSWER, THOUGHT, OUTPUT, USER),
    responses(USER, ANSWER, SAID, USER),
    responses(
        USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}, ANSWER, USER
    ),
    responses(USER, {"type": "reasoning", "summary": []}, ANSWER, USER),
    responses(USER, {"type": "reasoning", "content": []}, ANSWER, USER),
    responses(USER, {**THOUGHT, "encrypted_content": "zzz"}, USER),
    responses(USER, CALL, {**OUTPUT, "output": [input_text("a"), input_text("b")]}, USER),
    responses(USER, CALL, {"type": "function_call_output", "output": "x"}, USER),
    responses(USER, CALL, {**OUTPUT, "id": "fco_1", "status": "completed"}, USER),
    responses(
        USER, CALL, {**OUTPUT, "id": "fco_1", "status": "completed", "output": [input_text("a")]}, USER
    ),
    responses(
        USER,
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": 'ls "ü"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a b"},
        tools=[CUSTOM],
    ),
    responses(
        USER,
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [input_text("x")]},
    ),
    responses(USER, tools=[FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search_preview"}]),
    responses(USER, tools=[{"type": "web_search_preview"}]),
    responses(USER, tools=[]),
    responses(USER, tools=[FUNCTION], tool_choice="none"),
    responses(USER, tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False),
    responses(USER, tools=[FUNCTION], tool_choice={"type": "function", "name": "get_weather"}),
    responses(USER, tool_choice="none"),
    responses(USER, reasoning={"effort": "low", "summary": "auto"}),
    responses(USER, reasoning={"effort": "none"}),
    responses(USER, reasoning={"effort": "high"}, chat_template_kwargs={"enable_thinking": False}),
    responses(USER, reasoning={}),
    responses(USER, chat_template_kwargs={"custom_greeting": "hi", "thought": "x"}),
    responses(USER, truncation="auto", max_output_tokens=5),
    responses(USER, truncation=None),
    responses(USER, cache_salt="salt", stream=True, store=False, metadata={"a": "b"}),
    responses(USER, text={"format": {"type": "json_object"}}),
    responses(USER, {**SAID, "status": "in_progress"}),
    responses(USER, {**SAID, "status": "incomplete", "content": [SAID["content"][0]]}),
    responses(USER, says("assistant", "It is", status="in_progress")),
    responses(says("user", "It is", status="incomplete")),
    responses(USER, {**THOUGHT, "status": "in_progress"}),
    responses(USER, {**SAID, "content": [{"type": "refusal", "refusal": "no"}]}, USER),
    responses(USER, {**SAID, "content": []}, USER),
    responses(USER, {**SAID, "status": "weird"}, USER),
    responses(USER, says("assistant", [{"type": "output_text", "text": "no type"}]), USER),
    responses(USER, says("assistant", [input_text("as input")], type="message"), USER),
    responses(says("user", [{"type": "input_image", "image_url": "http://x"}, input_text("what?")])),
    responses(says("user", [{"type": "text", "text": "of the other API"}])),
    responses(says("critic", "custom role"), USER),
    responses({"type": "item_reference", "id": "msg_1"}, USER),
    responses({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}, USER),
    responses(USER, previous_response_id="resp_1"),
    responses(USER, prompt={"id": "pmpt_1"}),
    responses(),
]

BATCHES: list[Body] = [
    {"model": "m", "messages": [[USER], [USER, ANSWER, USER]]},
    {
        "model": "m",
        "messages": [[says("system", "s"), USER]],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "model": "m",
        "messages": [[USER, ANSWER]],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"model": "m", "messages": [[USER]], "reasoning_effort": "low", "add_special_tokens": True},
    {"model": "m", "messages": [[USER]], "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"model": "m", "messages": [[USER], [ANSWER]], "truncate_prompt_tokens": 5},
    {"model": "m", "messages": [[]]},
    {"model": "m", "messages": []},
]

PIECES = (*cases.PIECES, "x-anthropic-billing-header")


def _words(rng: random.Random, most: int = 10) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, most)))


def _value(rng: random.Random) -> Any:
    return rng.choice([None, True, 1, -2.5, 1e100, 10**30, "", _words(rng), [1, "é"], {"k": [None]}])


def _texts(rng: random.Random) -> list[Body]:
    return [text(_words(rng), **({"x": 1} if rng.random() < 0.2 else {})) for _ in range(rng.randint(0, 3))]


def random_messages(count: int, seed: int = 7) -> list[Body]:
    """Agent-like conversations: tools, results, thinking, blocks or plain text, inline system messages."""
    rng = random.Random(seed)
    return [_random_messages(rng) for _ in range(count)]


def _random_messages(rng: random.Random) -> Body:
    turns: list[Body] = []
    for index in range(rng.randint(1, 4)):
        turns.append(blocks("user", *_texts(rng)) if rng.random() < 0.3 else says("user", _words(rng)))
        if rng.random() < 0.15:
            inline = _words(rng) if rng.random() < 0.5 else _texts(rng)
            turns.append(says("system", inline))
        if rng.random() < 0.4:
            turns += _tool_turn(rng, index)
        if rng.random() < 0.7:
            turns.append(says("assistant", _words(rng)))
    more: Body = {}
    if rng.random() < 0.5:
        more["system"] = _words(rng) if rng.random() < 0.5 else _texts(rng)
    if rng.random() < 0.4:
        more["tools"] = rng.sample([WEATHER, PING], rng.randint(1, 2))
    if rng.random() < 0.2:
        more["thinking"] = {"type": rng.choice(["disabled", "adaptive"])}
    if rng.random() < 0.2:
        more["output_config"] = {"effort": rng.choice(["low", "medium", "high", "xhigh", "max"])}
    return messages(*turns, **more)


def _tool_turn(rng: random.Random, index: int) -> list[Body]:
    names = [f"toolu_{index}_{n}" for n in range(rng.randint(1, 2))]
    asked: list[Body] = [{"type": "thinking", "thinking": _words(rng)}] if rng.random() < 0.5 else []
    asked += _texts(rng)
    given: list[Body] = []
    for name in names:
        values = {key: _value(rng) for key in rng.sample(["a", "b", "é", "c"], rng.randint(0, 3))}
        asked.append({"type": "tool_use", "id": name, "name": "get_weather", "input": values})
        content = rng.choice([None, "", _words(rng), _texts(rng)])
        given.append({"type": "tool_result", "tool_use_id": name, "content": content})
    given += _texts(rng)
    return [blocks("assistant", *asked), blocks("user", *given)]


def random_responses(count: int, seed: int = 7) -> list[Body]:
    """The same for the Responses API, as items."""
    rng = random.Random(seed)
    return [_random_responses(rng) for _ in range(count)]


def _random_responses(rng: random.Random) -> Body:
    items: list[Body] = []
    for index in range(rng.randint(1, 4)):
        content: Any = _words(rng)
        if rng.random() < 0.4:
            content = [input_text(_words(rng)) for _ in range(rng.randint(0, 2))]
        items.append(says(rng.choice(["user", "user", "user", "system", "developer"]), content))
        choices = [
            {**THOUGHT, "content": [{"type": "reasoning_text", "text": _words(rng)}]},
            {**SAID, "content": [{"type": "output_text", "text": _words(rng)}]},
            {**CALL, "call_id": f"c{index}", "arguments": rng.choice(["{}", "", "not json", '{"a": 1e2}'])},
            says("assistant", _words(rng)),
        ]
        items += rng.sample(choices, rng.randint(0, 4))
        if any(item.get("type") == "function_call" for item in items) and rng.random() < 0.8:
            items.append({**OUTPUT, "call_id": f"c{index}", "output": _words(rng)})
    more: Body = {}
    if rng.random() < 0.4:
        more["instructions"] = _words(rng)
    if rng.random() < 0.4:
        more["tools"] = rng.sample([FUNCTION, CUSTOM, NAMESPACE], rng.randint(1, 3))
    if rng.random() < 0.3:
        more["reasoning"] = {"effort": rng.choice(["none", "low", "medium", "high"])}
    return responses(*items, **more)


DOCUMENT: Body = {"id": "d1", "data": {"title": "Tides <&>", "n": 1.50}}
