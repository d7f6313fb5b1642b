"""DeepSeek V3.2's chat format, as vLLM's renderer ``deepseek_v32`` writes it, and its parts that V4 has too.

Turns are ``<User>...<Assistant>`` followed by a thinking mark; tools are shown in a first system
message; calls and results are written in DeepSeek's markup language (DSML). In thinking mode only the text
after the last user message keeps its reasoning.
"""

from __future__ import annotations

import json
from typing import Any, Final

from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, MESSAGES, RESPONSES
from kvatlas.router.prompts.chat.compiled import TemplateRejectsError
from kvatlas.router.prompts.chat.messages import Message, parse_message
from kvatlas.router.prompts.chat.template import ChatContext
from kvatlas.router.prompts.request import ChatBody

BAR: Final = "\uff5c"
BOS: Final = f"<{BAR}begin\u2581of\u2581sentence{BAR}>"
EOS: Final = f"<{BAR}end\u2581of\u2581sentence{BAR}>"
USER: Final = f"<{BAR}User{BAR}>"
ASSISTANT: Final = f"<{BAR}Assistant{BAR}>"
DSML: Final = f"{BAR}DSML{BAR}"
THINK, THOUGHT = "<think>", "</think>"
_CALLS: Final = f"{DSML}function_calls"
INVOKE: Final = f"{DSML}invoke"
PARAMETER: Final = f"{DSML}parameter"
_TOOLS: Final = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{_CALLS}>" block like the following as part of your reply to the user:
<{_CALLS}>
<{INVOKE} name="$FUNCTION_NAME">
<{PARAMETER} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{PARAMETER}>
...
</{INVOKE}>
<{INVOKE} name="$FUNCTION_NAME2">
...
</{INVOKE}>
</{_CALLS}>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and \
objects should use JSON format. The "string" attribute should be set to "true" for string type parameters \
and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a \
thinking block. Here is an example:
<{_CALLS}>
...
</{_CALLS}>
<function_results>
...
</function_results>
{THINK}...thinking about results{THOUGHT}
Here are the functions available in JSONSchema format:
<functions>
"""


class Deepseek:
    """Common part of both versions."""

    takes_defaults = True
    paths = frozenset({CHAT, COMPLETION, MESSAGES, RESPONSES, BATCH})

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> None:
        """All fields that reach the text are arguments."""


class DeepseekV32(Deepseek):
    """Renders to text."""

    name = "deepseek_v32"
    variables = frozenset({"thinking", "enable_thinking"})

    def parse(self, message: Message) -> Message:
        return parse_message(message, "string")

    def render(self, conversation: list[Message], context: ChatContext) -> str:
        names = context.names
        messages = conversation
        if names["tools"]:
            messages = [{"role": "system", "content": "", "tools": names["tools"]}, *conversation]
        thinking = bool(names.get("thinking") or names.get("enable_thinking"))
        return _Chat(messages, thinking=thinking).text()


class _Chat:
    """One conversation; ``last_user`` is the index of the last user or developer message, or -1."""

    def __init__(self, messages: list[Message], *, thinking: bool) -> None:
        self._messages = messages
        self._thinking = thinking
        users = (n for n, message in enumerate(messages) if message["role"] in {"user", "developer"})
        self._last_user = max(users, default=-1)

    def text(self) -> str:
        if self._thinking and self._messages[-1]["role"] == "user":
            # The engine drops reasoning of earlier turns, and with it unknown roles: then it fails.
            early = self._messages[: self._last_user]
            if not all(message["role"] in {"user", "system", "tool", "assistant"} for message in early):
                raise TemplateRejectsError("a role that is dropped")
        return BOS + "".join(self._message(n, message) for n, message in enumerate(self._messages))

    def _message(self, index: int, message: Message) -> str:
        content = message.get("content") or ""
        role = message["role"]
        if role == "system":
            return content + (f"\n\n{_tools(message['tools'])}" if message.get("tools") else "")
        if role == "user":
            return self._asked(index, content)
        if role == "developer":
            if not content:
                raise TemplateRejectsError("an empty developer message")
            return self._asked(index, f"\n\n# The user's message is: {content}")
        if role == "tool":
            return self._result(index, content)
        if role == "assistant":
            return self._answer(index, message, content)
        raise TemplateRejectsError(f"role {role}")

    def _asked(self, index: int, text: str) -> str:
        opens = self._thinking and index == self._last_user
        return f"{USER}{text}{ASSISTANT}{THINK if opens else THOUGHT}"

    def _result(self, index: int, content: str) -> str:
        """A tool's result; the first and the last of one call's results open and close their block."""
        caller = index - 1
        while caller >= 0 and self._messages[caller]["role"] == "tool":
            caller -= 1
        if index and (caller < 0 or self._messages[caller]["role"] != "assistant"):
            raise TemplateRejectsError("a tool result that follows no assistant")
        number, calls = index - caller, self._messages[caller].get("tool_calls") or []
        if len(calls) < number:
            raise TemplateRejectsError("a tool result without a call")
        text = "\n\n<function_results>" if number == 1 else ""
        text += f"\n<result>{content}</result>"
        if number == len(calls):
            opens = self._thinking and index >= self._last_user
            text += f"\n</function_results>\n\n{THINK if opens else THOUGHT}"
        return text

    def _answer(self, index: int, message: Message, content: str) -> str:
        calls, reasoning = message.get("tool_calls"), message.get("reasoning")
        thought = ""
        if self._thinking and index > self._last_user:
            if not (reasoning or calls):
                raise TemplateRejectsError("an assistant message without the reasoning it must have")
            thought = (reasoning or "") + THOUGHT
        called = ""
        if calls:
            called = f"\n\n<{_CALLS}>\n" + "\n".join(map(call_text, calls)) + f"\n</{_CALLS}>"
        return f"{thought}{content}{called}{EOS}"


def _tools(tools: list[Message]) -> str:
    return _TOOLS + "\n".join(json_text(tool["function"]) for tool in tools) + "\n</functions>\n"


def call_text(call: Message) -> str:
    """A tool call in DSML."""
    function = call["function"]
    arguments = "\n".join(_argument(key, value) for key, value in function["arguments"].items())
    return f'<{INVOKE} name="{function["name"]}">\n{arguments}\n</{INVOKE}>'


def _argument(key: str, value: Any) -> str:
    plain = isinstance(value, str)
    text = value if plain else json_text(value)
    return f'<{PARAMETER} name="{key}" string="{"true" if plain else "false"}">{text}</{PARAMETER}>'


def json_text(value: Any) -> str:
    """JSON as Python's own module writes it."""
    return json.dumps(value, ensure_ascii=False)
