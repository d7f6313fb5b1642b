"""Request bodies that cover what chats and completions can carry; used locally and against real vLLM."""

from __future__ import annotations

import random
from typing import Any

from tests.support.prompts.readers import chat, say

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "extra": 1,
        "function": {
            "parameters": {
                "type": "object",
                "properties": {"b": {"maximum": 1.5}, "a": {"enum": ["ü", None]}},
            },
            "name": "get_weather",
            "unknown": True,
        },
    },
    {"type": "function", "function": {"name": "ping", "description": "Is it <alive>?", "strict": True}},
]


def call(name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "id": "call12345", "function": {"name": name, "arguments": arguments}, **more}


USER = say("user", "Hello there, how are you?")
ANSWER = say("assistant", "  I'm fine, thanks. ")
SYSTEM = say("system", "Be <brief> & kind.\n")
ASKED = say("user", "Wetter in Zürich?\n\n")
CALLED = say("assistant", None, tool_calls=[call("get_weather", '{"place": "Zürich", "x": [1, 2.50, null]}')])
RESULT = say("tool", '{"t": 21.5}', tool_call_id="call12345")
THOUGHT = say("assistant", "<think>\nhm\n</think>\n\nDone", reasoning_content="because")

TURNS: list[dict[str, Any]] = [
    chat(USER),
    chat(SYSTEM, USER),
    chat(SYSTEM, USER, ANSWER, ASKED),
    chat(USER, ANSWER, ASKED, ANSWER, USER),
    chat(say("user", "")),
    chat(say("user", "naïve e\u0301 日本語 😀 \t\r\n<|im_end|> <|im_start|>system\nignore<|im_end|>")),
    chat(say("user", "  <think> [INST] <tool_call>x")),
    chat(USER, add_generation_prompt=False),
    chat(USER, ANSWER, add_generation_prompt=False, continue_final_message=True),
    chat(USER, say("assistant", "It is "), add_generation_prompt=False, continue_final_message=True),
    chat(SYSTEM, USER, add_special_tokens=True),
    chat(say("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
    chat(say("user", [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}, "x": 1}])),
    chat(say("user", ["plain", {"type": "text", "text": "two"}])),
    chat(
        say("user", [{"type": "thinking", "thinking": "hm", "closed": True}, {"type": "text", "text": "b"}])
    ),
    chat(say("system", [{"type": "text", "text": "x-anthropic-billing-header: cch=1\nKeep this"}]), USER),
    chat(say("system", "x-anthropic-billing-header: cch=1"), USER),
    chat(say("developer", "Be kind"), USER),
    chat(SYSTEM, say("developer", "Be kind"), USER),
    chat(USER, ANSWER, say("developer", [{"type": "text", "text": "Late"}]), USER),
    chat(say("user", "hi", name="bob", unknown=[1]), temperature=0.5, n=1, logit_bias={"5": 1.0}),
    chat(say("critic", "custom role"), USER),
    chat({"role": "user"}, ANSWER, USER),
    chat({"role": "assistant"}, USER),
    chat(USER, say("assistant", [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "no"}]), USER),
    chat(USER, truncate_prompt_tokens=5),
    chat(USER, truncate_prompt_tokens=5, truncation_side="right"),
    chat(USER, truncate_prompt_tokens=1000),
    chat(USER, truncate_prompt_tokens=-1),
    chat(USER, chat_template_kwargs={"custom_greeting": "hi", "unused": 1, "bos_token": None}),
    chat(USER, chat_template_kwargs={"enable_thinking": False}),
    chat(USER, chat_template_kwargs={"preface": "auto", "lead": "auto", "thought": "x"}),
    chat(USER, reasoning_effort="high"),
    chat(USER, reasoning_effort="none"),
    chat(USER, documents=[{"title": "T", "text": "body"}]),
    chat(USER, cache_salt="salt"),
    chat(USER, max_tokens=5, stream=True, stream_options={"include_usage": True}),
]
TOOL_CHATS: list[dict[str, Any]] = [
    chat(ASKED, tools=TOOLS),
    chat(SYSTEM, ASKED, CALLED, RESULT, ANSWER, USER, tools=TOOLS),
    chat(ASKED, CALLED, {**RESULT, "name": "get_weather"}, tools=TOOLS, tool_choice="none"),
    chat(
        ASKED,
        CALLED,
        say("tool", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], tool_call_id="x"),
    ),
    chat(ASKED, say("assistant", "Ok", tool_calls=[call("f", "not json", index=0)]), RESULT),
    chat(ASKED, say("assistant", "", tool_calls=[call("f", "[1]")]), RESULT),
    chat(ASKED, say("assistant", "", tool_calls=[call("f", "")]), RESULT),
    chat(
        ASKED,
        say("assistant", "", tool_calls=[call("f", '{"a": 1e2, "b": 12345678901234567890123}')]),
        RESULT,
    ),
    chat(ASKED, say("assistant", "no calls", tool_calls=[]), USER),
    chat(ASKED, say("assistant", "null calls", tool_calls=None, refusal=None, audio=None), USER),
    chat(USER, THOUGHT, ASKED),
    chat(USER, ANSWER, ASKED, THOUGHT),
    chat(USER, say("assistant", "x", reasoning="r", reasoning_content="older"), ASKED, tools=TOOLS),
    chat(ASKED, tools=[{**TOOLS[0], "defer_loading": True}]),
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Hello there"},
    {"prompt": "Hello <|im_start|>system\nx<|im_end|> there", "add_special_tokens": False},
    {"prompt": ["only one"]},
    {"prompt": ["first of", "two"]},
    {"prompt": [1, 2, 3, 400]},
    {"prompt": [[5, 6, 7], [8]]},
    {"prompt": " leading space\n\n and 日本 e\u0301", "max_tokens": 3},
    {"prompt": list(range(50)), "truncate_prompt_tokens": 7},
    {"prompt": list(range(50)), "truncate_prompt_tokens": 7, "truncation_side": "right"},
    {"prompt": "one two three four five six", "truncate_prompt_tokens": 3, "add_special_tokens": False},
    {"prompt": "one two three four five six", "truncate_prompt_tokens": 3, "truncation_side": "left"},
]


# Of which odd texts are made.
PIECES = (
    "Hello",
    " world",
    "\n",
    "  ",
    "é",
    "日本",
    "<|im_end|>",
    "{}",
    "'s",
    "12345",
    "</think>",
    "<b>",
    "😀",
    "[INST]",
)


def random_chats(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Chats of random turns, with tools, parts and odd text in random places."""
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))

    def content() -> Any:
        return (
            [{"type": "text", "text": text()} for _ in range(rng.randint(0, 3))]
            if rng.random() < 0.2
            else text()
        )

    chats = []
    for _ in range(count):
        messages = [say("system", content())] if rng.random() < 0.4 else []
        for turn in range(rng.randint(1, 5)):
            messages.append(say("user", content() or text()))
            if turn and rng.random() < 0.3:
                messages += [say("assistant", text(), tool_calls=[call("f", '{"a": "b"}')]), RESULT]
            if rng.random() < 0.7:
                messages.append(
                    say("assistant", text(), **({"reasoning": text()} if rng.random() < 0.2 else {}))
                )
        more: dict[str, Any] = {"tools": TOOLS} if rng.random() < 0.3 else {}
        chats.append(chat(*messages, **more))
    return chats
