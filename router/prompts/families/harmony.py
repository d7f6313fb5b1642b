"""gpt-oss: OpenAI's harmony format, by the package that vLLM uses (oss-harmony, or openai-harmony).

A system message (identity, date, effort), a developer message (the first system or developer message's
instructions, tools), then the turns, each on its channel. Reasoning before the last final answer is dropped.
oss-harmony contains its vocabulary; openai-harmony reads it from the folder in ``TIKTOKEN_ENCODINGS_BASE``.

The date is the engine's; here it is that of the configured time zone or this machine's, as with templates
that ask for the time. vLLM's ``VLLM_SYSTEM_START_DATE``, set for the router too, fixes both.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES
from kvatlas.router.prompts.chat.compiled import TemplateRejectsError
from kvatlas.router.prompts.chat.messages import Message
from kvatlas.router.prompts.chat.template import ChatContext
from kvatlas.router.prompts.families.base import Missing
from kvatlas.router.prompts.request import ChatBody, NotLocalError
from kvatlas.router.prompts.settings import local_time

try:
    import openai_harmony as library
except ImportError:
    library = None

_EFFORTS: Final = {"low": "Low", "medium": "Medium", "high": "High"}
_INSTALL: Final = "harmony (gpt-oss) needs a package; in a checkout: python -m pip install '.[harmony]'"


class Harmony:
    """Renders to ids. Raises ``Missing`` without the package or its vocabulary."""

    variables = frozenset({"reasoning_effort"})
    takes_defaults = False
    paths = frozenset({CHAT, COMPLETION, MESSAGES})

    def __init__(self, time_zone: str | None = None) -> None:
        self._time_zone = time_zone
        if library is None:
            raise Missing(_INSTALL)
        try:
            self._encoding = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
        except Exception as error:  # noqa: BLE001  # the package has one error for everything
            problem = (
                "its vocabulary cannot be loaded: set TIKTOKEN_ENCODINGS_BASE to the folder that has it, or "
            )
            raise Missing(f"harmony (gpt-oss): {problem}use oss-harmony ({error})") from None
        self.name = f"harmony ({_package()})"
        special = {"start": "<|start|>", "channel": "<|channel|>", "message": "<|message|>"}
        special["constrain"] = "<|constrain|>"
        self._marks = {key: self._special(text) for key, text in special.items()}

    def _special(self, text: str) -> int:
        (token,) = self._encoding.encode(text, allowed_special="all")
        return int(token)

    def stamp(self) -> bytes:
        return self._today().encode()

    def _today(self) -> str:
        return os.environ.get("VLLM_SYSTEM_START_DATE") or f"{local_time(self._time_zone):%Y-%m-%d}"

    def check(self, body: ChatBody) -> None:
        if body.truncate_prompt_tokens is not None:
            raise NotLocalError("truncation")
        if body.reasoning_effort not in (None, *_EFFORTS):
            raise NotLocalError("field")
        if body.chat_template_kwargs:
            raise NotLocalError("template_kwargs")

    def parse(self, message: Message) -> Message:
        """Flatten the parts of a message that harmony reads."""
        role = message["role"]
        result: Message = {"role": role, "texts": _texts(message.get("content"))}
        if role == "assistant":
            reasoning = message.get("reasoning")
            reasoning = message.get("reasoning_content") if reasoning is None else reasoning
            if not isinstance(reasoning, str | None):
                raise NotLocalError("message_shape")
            result["reasoning"] = reasoning
            result["calls"] = [_call(call) for call in message.get("tool_calls") or ()]
        elif message.get("tool_calls"):
            raise NotLocalError("message_shape")
        elif role == "tool":
            result["call_id"] = message.get("tool_call_id")
            if not isinstance(result["call_id"], str):
                raise NotLocalError("message_shape")
        elif role not in {"user", "system", "developer"}:
            raise NotLocalError("message_shape")
        return result

    def render(self, conversation: list[Message], context: ChatContext) -> list[int]:
        messages = _messages(conversation, context, self._today())
        finals = [n for n, m in enumerate(messages) if m.author.role == "assistant" and m.channel == "final"]
        kept = [m for n, m in enumerate(messages) if m.channel != "analysis" or not finals or n >= finals[-1]]
        try:
            ids = self._encoding.render_conversation_for_completion(
                library.Conversation.from_messages(kept),
                library.Role.ASSISTANT,
                config=library.RenderConversationConfig(auto_drop_analysis=False),
            )
        except Exception as error:  # noqa: BLE001  # the engine would fail too
            raise TemplateRejectsError(str(error)) from None
        return self._older_call_headers(ids)

    def _older_call_headers(self, ids: list[int]) -> list[int]:
        """Rewrite headers of tool calls to the form that gpt-oss was trained on: the recipient before the
        channel.

        oss-harmony writes ``assistant<|channel|>commentary to=NAME <|constrain|>TYPE``; vLLM rewrites that to
        ``assistant to=NAME<|channel|>commentary TYPE``.
        """
        start, message = self._marks["start"], self._marks["message"]
        result: list[int] = []
        at = 0
        while at < len(ids):
            end = _index(ids, message, at + 1) if ids[at] == start else -1
            header = self._older_header(ids[at + 1 : end]) if end > 0 else None
            if header is None:
                result.append(ids[at])
                at += 1
            else:
                result += [start, *header, message]
                at = end + 1
        return result

    def _older_header(self, header: list[int]) -> list[int] | None:
        channel = _index(header, self._marks["channel"])
        constrain = _index(header, self._marks["constrain"], channel + 1) if channel >= 0 else -1
        if constrain < 0:
            return None
        decode, encode = self._encoding.decode, self._encoding.encode
        name, _, recipient = decode(header[channel + 1 : constrain]).partition(" to=")
        kind = decode(header[constrain + 1 :])
        if decode(header[:channel]) != "assistant" or not recipient.endswith(" ") or not (name and kind):
            return None
        if not (recipient := recipient[:-1]):
            return None
        return [*encode(f"assistant to={recipient}"), self._marks["channel"], *encode(f"{name} {kind}")]


def _messages(conversation: list[Message], context: ChatContext, today: str) -> list[Any]:
    tools = context.names["tools"]
    system = library.SystemContent.new().with_conversation_start_date(today)
    effort = context.names.get("reasoning_effort")
    if effort is not None:
        system = system.with_reasoning_effort(library.ReasoningEffort(_EFFORTS[effort]))
    messages = [library.Message.from_role_and_content(library.Role.SYSTEM, system)]
    instructions, rest = None, conversation
    if conversation[0]["role"] in {"system", "developer"}:
        instructions, rest = _flat(conversation[0]), conversation[1:]
    if instructions or tools:
        messages.append(_developer(instructions, tools))
    called = {call["id"]: call["name"] for message in rest for call in message.get("calls") or ()}
    for message in rest:
        messages += _turn(message, called)
    return messages


def _developer(instructions: str | None, tools: list[Message] | None = None) -> Any:
    content = library.DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools([_tool(tool["function"]) for tool in tools])
    return library.Message.from_role_and_content(library.Role.DEVELOPER, content)


def _tool(function: Message) -> Any:
    return library.ToolDescription.new(
        name=function["name"],
        description=function["description"] or "",
        parameters=function["parameters"],
    )


def _turn(message: Message, called: dict[str, str]) -> list[Any]:
    role, text = message["role"], _flat(message)
    if role == "assistant":
        return _answer(message, text or "")
    if role == "tool":
        author = library.Author.new(library.Role.TOOL, f"functions.{called.get(message['call_id'], '')}")
        result = library.Message.from_author_and_content(author, text or "")
        return [result.with_channel("commentary").with_recipient("assistant")]
    if role == "user":
        return [library.Message.from_role_and_contents(library.Role.USER, _contents(message))]
    return [] if text is None else [_developer(text)]


def _answer(message: Message, text: str) -> list[Any]:
    def said(content: str, channel: str) -> Any:
        return library.Message.from_role_and_content(library.Role.ASSISTANT, content).with_channel(channel)

    thought = [said(message["reasoning"], "analysis")] if message["reasoning"] else []
    if not message["calls"]:
        parts = _contents(message)
        final = library.Message.from_role_and_contents(library.Role.ASSISTANT, parts).with_channel("final")
        return [*thought, *([final] if parts[0].text else [])]
    calls = [
        said(call["arguments"], "commentary")
        .with_recipient(f"functions.{call['name']}")
        .with_content_type("json")
        for call in message["calls"]
    ]
    return [*([said(text, "commentary")] if text else []), *thought, *calls]


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        raise NotLocalError("message_shape")
    fields = {"id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    if not all(isinstance(field, str) for field in fields.values()):
        raise NotLocalError("message_shape")
    return fields


def _texts(content: Any) -> list[str] | None:
    """The texts of a message; other content is not reproduced."""
    if isinstance(content, str | None):
        return None if content is None else [content]
    texts = []
    for part in content:
        if not (isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"):
            raise NotLocalError("multimodal" if _is_media(part) else "message_shape")
        if not isinstance(part["text"], str):
            raise NotLocalError("message_shape")
        texts.append(part["text"])
    return texts


def _flat(message: Message) -> str | None:
    return "".join(message["texts"]) if message["texts"] else None


def _contents(message: Message) -> list[Any]:
    return [library.TextContent(text=text) for text in message["texts"] or [""]]


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in {"text", "refusal", "thinking"}


def _index(ids: list[int], wanted: int, start: int = 0) -> int:
    try:
        return ids.index(wanted, start)
    except ValueError:
        return -1


def _package() -> str:
    for name in ("oss-harmony", "openai-harmony"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown version"
