"""DeepSeek V4's chat format, as vLLM's renderer ``deepseek_v4`` writes it.

Results of tools are blocks within user messages, in the order of their calls; consecutive user messages are
merged. Tools are shown in the first system message. Thinking is on unless it is switched off, and dropped
from earlier turns unless there are tools.
"""

from __future__ import annotations

from typing import Any, Final

from kvatlas.router.prompts.chat.compiled import TemplateRejectsError
from kvatlas.router.prompts.chat.messages import Message, parse_message
from kvatlas.router.prompts.chat.template import ChatContext
from kvatlas.router.prompts.families.deepseek import (
    ASSISTANT,
    BAR,
    BOS,
    DSML,
    EOS,
    INVOKE,
    PARAMETER,
    THINK,
    THOUGHT,
    USER,
    Deepseek,
    call_text,
    json_text,
)

_V4_CALLS: Final = f"{DSML}tool_calls"
_REMINDER: Final = f"<{BAR}latest_reminder{BAR}>"
_TASKS: Final = ("action", "query", "authority", "domain", "title", "read_url")
_KEPT_ROLES: Final = frozenset({"user", "system", "latest_reminder", "direct_search_results"})
_EFFORTS: Final = {
    "low": "",
    "high": "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n",
    "max": "Reasoning Effort: Beyond maximum \u2014 exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
    "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
    "resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n",
}
_V4_TOOLS: Final = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{_V4_CALLS}>" block like the following:

<{_V4_CALLS}>
<{INVOKE} name="$TOOL_NAME">
<{PARAMETER} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{PARAMETER}>
...
</{INVOKE}>
<{INVOKE} name="$TOOL_NAME2">
...
</{INVOKE}>
</{_V4_CALLS}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{THOUGHT} BEFORE any tool calls or final response.

Otherwise, output directly after {THOUGHT} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END: Final = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)


class DeepseekV4(Deepseek):
    """Renders to text."""

    name = "deepseek_v4"
    variables = frozenset({"thinking", "enable_thinking", "reasoning_effort", "drop_thinking"})

    def parse(self, message: Message) -> Message:
        return parse_message(message, "openai")

    def render(self, conversation: list[Message], context: ChatContext) -> str:
        names = context.names
        thinking, effort = _mode(names)
        messages = _sorted_results(_merged(_with_tools(conversation, names["tools"])))
        drops = bool(names.get("drop_thinking", True)) and not names["tools"]
        if thinking and drops:
            messages = _without_old_thinking(messages)
        chat = _V4Chat(messages, thinking=thinking, drops=drops)
        begin = BOS + (_EFFORTS[effort] if thinking and messages else "")
        return begin + "".join(map(chat.message, range(len(messages))))


def _mode(names: dict[str, Any]) -> tuple[bool, str]:
    """Whether the model thinks, and the effort."""
    given = "thinking" in names or "enable_thinking" in names
    thinking = not given or bool(names.get("thinking")) or bool(names.get("enable_thinking"))
    effort = names.get("reasoning_effort")
    if effort == "none":
        return False, "low"
    if not isinstance(effort, str):
        return thinking, "high"
    if effort in {"low", "minimal", "medium"}:
        return thinking, "low"
    return thinking, "max" if effort == "max" else "high"


def _with_tools(conversation: list[Message], tools: list[Message] | None) -> list[Message]:
    if not tools:
        return conversation
    first = next((n for n, message in enumerate(conversation) if message["role"] == "system"), None)
    if first is None:
        return [{"role": "system", "tools": tools}, *conversation]
    shown = {**conversation[first], "tools": tools}
    return [*conversation[:first], shown, *conversation[first + 1 :]]


def _merged(messages: list[Message]) -> list[Message]:
    """Merge user messages into blocks (id of the call or None for text, text), with results of tools among
    them."""
    made: list[Message] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        last = made[-1] if made and "blocks" in made[-1] else None
        if role == "tool":
            block = (message.get("tool_call_id", ""), _result(content))
            if last is None:
                made.append({"role": "user", "blocks": [block]})
            else:
                last["blocks"].append(block)
        elif role != "user":
            made.append({**message, "content": _flat(content)})
        elif last is not None and last.get("task") is None:
            last["blocks"].append((None, _flat(content)))
        else:
            task = {"task": message["task"]} if "task" in message else {}
            made.append({"role": "user", "blocks": [(None, _flat(content))], **task})
    return made


def _flat(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise TemplateRejectsError("a content part that is no text")
    return "\n\n".join(part["text"] for part in content)


def _result(content: Any) -> str:
    if isinstance(content, list):
        content = "\n\n".join(
            part["text"] if part["type"] == "text" else f"[Unsupported {part['type']}]" for part in content
        )
    return f"<tool_result>{content}</tool_result>"


def _sorted_results(messages: list[Message]) -> list[Message]:
    """Sort results by the calls of the last assistant before them; text keeps its place."""
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {call["id"]: n for n, call in enumerate(message["tool_calls"]) if call.get("id")}
        blocks = message.get("blocks")
        if blocks and order:
            results = (block for block in blocks if block[0] is not None)
            ordered = iter(sorted(results, key=lambda block: order.get(block[0], 0)))
            message["blocks"] = [block if block[0] is None else next(ordered) for block in blocks]
    return messages


def _last_asked(messages: list[Message]) -> int:
    asked = (n for n, message in enumerate(messages) if message["role"] in {"user", "developer"})
    return max(asked, default=-1)


def _without_old_thinking(messages: list[Message]) -> list[Message]:
    """Drop reasoning before the last question, and developers and unknown roles."""
    last, kept = _last_asked(messages), []
    for number, message in enumerate(messages):
        if message["role"] in _KEPT_ROLES or number >= last:
            kept.append(message)
        elif message["role"] == "assistant":
            kept.append({**message, "reasoning": None})
    return kept


class _V4Chat:
    """Writes one merged conversation."""

    def __init__(self, messages: list[Message], *, thinking: bool, drops: bool) -> None:
        self._messages = messages
        self._thinking = thinking
        self._drops = drops
        self._last_asked = _last_asked(messages)

    def message(self, index: int) -> str:
        """One message, and the opening of the answer if one follows."""
        message = self._messages[index]
        return self._said(index, message) + self._opening(index, message)

    def _said(self, index: int, message: Message) -> str:
        role, content = message["role"], message.get("content") or ""
        if role == "system":
            return content + (f"\n\n{_v4_tools(message['tools'])}" if message.get("tools") else "")
        if role == "user":
            return USER + "\n\n".join(text for _, text in message["blocks"])
        if role == "developer" and content:
            return f"{USER}{content}"
        if role == "latest_reminder":
            return f"{_REMINDER}{content}"
        if role == "assistant":
            return self._answer(index, message, content)
        raise TemplateRejectsError(f"role {role}, or an empty developer message")

    def _answer(self, index: int, message: Message, content: str) -> str:
        thought = called = ""
        of_task = index > 0 and self._messages[index - 1].get("task") is not None
        if self._thinking and not of_task and (not self._drops or index > self._last_asked):
            thought = (message.get("reasoning") or "") + THOUGHT
        if message.get("tool_calls"):
            calls = "\n".join(map(call_text, message["tool_calls"]))
            called = f"\n\n<{_V4_CALLS}>\n{calls}\n</{_V4_CALLS}>"
        return f"{thought}{content}{called}{EOS}"

    def _opening(self, index: int, message: Message) -> str:
        last = index == len(self._messages) - 1
        follows = None if last else self._messages[index + 1]["role"]
        if not last and follows not in {"assistant", "latest_reminder"}:
            return ""
        task = message.get("task")
        if task is not None:
            if task not in _TASKS:
                raise TemplateRejectsError(f"task {task}")
            opened = ASSISTANT + (THINK if self._thinking else THOUGHT) if task == "action" else ""
            return f"{opened}<{BAR}{task}{BAR}>"
        role = message["role"]
        if role in {"user", "developer"} or (role == "system" and (last or follows == "assistant")):
            thinks = self._thinking and (not self._drops or index >= self._last_asked)
            return ASSISTANT + (THINK if thinks else THOUGHT)
        return ""


def _v4_tools(tools: list[Message]) -> str:
    return _V4_TOOLS + "\n".join(json_text(tool["function"]) for tool in tools) + _TOOLS_END
