"""Cohere's formats (cmd3, cmd4), as engines started with ``--tokenizer-mode cohere`` write them.

The text is made by cohere-melody, the package that vLLM uses too; this module makes its inputs from messages,
tools and template arguments like vLLM (vllm/renderers/cohere.py of 0.32). Every argument that is not one of
the package's own options is a variable of its template. The format changes with the package's version, which
``name`` gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from router.openai.request import BATCH, CHAT, COHERE, COMPLETION, MESSAGES, RESPONSES
from router.prompts.chat.compiled import TemplateRejectsError
from router.prompts.chat.messages import Message, parse_message
from router.prompts.chat.template import ChatContext
from router.prompts.families.base import Missing
from router.prompts.request import ChatBody, NotLocalError
from router.prompts.tokenizer import load_chat_template

try:
    import cohere_melody as library
except ImportError:
    library = None  # type: ignore[assignment]

_ROLES: Final = {"assistant": "chatbot", "developer": "system"}
_KNOWN_ROLES: Final = frozenset({"system", "user", "chatbot", "tool"})
_GROUNDING: Final = {
    **dict.fromkeys(("fast", "accurate", "on", "enabled"), "enabled"),
    **dict.fromkeys(("off", "disabled"), "disabled"),
    "unknown": "unknown",
}
# Arguments that vLLM's Cohere API passes to its renderer; clients must not send them.
_INTERNAL: Final = frozenset({"_messages_citations", "_position_to_source", "_tool_message_v2_content"})
_TEMPLATES: Final = frozenset({"template_jinja", "template"})
# Arguments that are no variables of the template.
_OPTIONS: Final = frozenset({
    *_TEMPLATES, *_INTERNAL, "cohere_format", "template_id", "use_jinja", "documents", "available_tools",
    "tools", "reasoning_type", "thinking", "dev_instruction", "response_format", "json_schema", "json_mode",
    "safety_mode", "citation_quality", "citation_options", "skip_preamble", "grounding",
    "platform_instruction",
})  # fmt: skip


class _AnyName:
    """Contains all names: the template may read any argument."""

    def __contains__(self, _name: object) -> bool:
        return True


class Cohere:
    """Renders to text; ``template`` is the engines' ``--chat-template``. Raises ``Missing`` without the
    package."""

    variables = _AnyName()
    takes_defaults = True
    paths = frozenset({CHAT, COMPLETION, MESSAGES, RESPONSES, BATCH, COHERE})

    def __init__(self, template: str | None) -> None:
        if library is None:
            raise Missing("Cohere's formats need a package; in a checkout: python -m pip install '.[cohere]'")
        self._template = None if template is None else load_chat_template(template)
        self.name = f"cohere (cohere-melody {version('cohere-melody')})"

    def stamp(self) -> bytes:
        return b""

    def check(self, body: ChatBody) -> None:
        if isinstance(body.chat_template_kwargs, dict) and not _INTERNAL.isdisjoint(
            body.chat_template_kwargs
        ):
            raise NotLocalError("template_kwargs")

    def parse(self, message: Message) -> Message:
        """Convert the message for the package."""
        content = message.get("content")
        if message["role"] == "tool" and isinstance(content, list) and any(map(_is_document, content)):
            # Comes from a result in Cohere's API, which has no other parts; engines refuse a chat that has
            # them.
            return {"role": "tool", "content": content, "tool_calls": [], **_call_id(message)}
        parsed = parse_message(message, "openai")
        role = _ROLES.get(parsed["role"].lower(), parsed["role"].lower())
        blocks = _blocks(parsed["content"])
        if role == "chatbot" and parsed.get("reasoning"):
            blocks.insert(0, {"type": "thinking", "thinking": parsed["reasoning"]})
        calls = [_call(call) for call in parsed.get("tool_calls") or ()]
        return {"role": role, "content": blocks, "tool_calls": calls, **_call_id(parsed)}

    def render(self, conversation: list[Message], context: ChatContext) -> str:
        for message in conversation:
            if message["role"] not in _KNOWN_ROLES:
                raise TemplateRejectsError(f"role {message['role']}")
        try:
            write, options = _options(context.names)
            text: str = write({"messages": conversation, "use_jinja": True, **self._own(), **options})
        except Exception as error:  # noqa: BLE001  # the engine runs the same code and answers 400
            raise TemplateRejectsError(str(error)) from None
        return text

    def _own(self) -> Message:
        return {"template_jinja": self._template} if self._template else {}


def _options(given: Message) -> tuple[Callable[[Message], str], Message]:
    """The rendering function, and its configuration besides the messages."""
    form = given.get("cohere_format", "cmd4")
    if form not in {"cmd3", "cmd4"} or any(given.get(key) is not None for key in _TEMPLATES):
        raise TemplateRejectsError("cohere_format, or a template among the arguments")
    found: Message = {}
    if given.get("template_id"):
        found["template_id"] = given["template_id"]
    if documents := given.get("documents"):
        found["documents"] = [_document(document) for document in documents]
    if tools := given.get("available_tools") or given.get("tools"):
        found["available_tools"] = [_tool(tool) for tool in tools]
    found |= _reasoning(given)
    if (instruction := given.get("dev_instruction")) is not None:
        found["dev_instruction"] = str(instruction)
    found |= _json_output(given)
    found |= _cmd3(given) if form == "cmd3" else _cmd4(given)
    if variables := {key: value for key, value in given.items() if key not in _OPTIONS}:
        found["additional_template_fields"] = variables
    return (library.render_cmd3 if form == "cmd3" else library.render_cmd4), found


def _reasoning(given: Message) -> Message:
    if (kind := given.get("reasoning_type")) is not None:
        return {"reasoning_type": str(kind)}
    thinking = given.get("thinking")
    kind = thinking.get("type") if isinstance(thinking, dict) else thinking
    return {"reasoning_type": kind} if kind in ("enabled", "disabled") else {}


def _json_output(given: Message) -> Message:
    found: Message = {}
    wanted = given.get("response_format")
    if wanted is not None:
        wanted = dict(wanted)
        if wanted.get("type") == "json_object":
            found["json_mode"] = True
        elif wanted.get("type") in ("json_schema", "json"):
            schema = wanted.get("schema") or wanted.get("json_schema")
            if isinstance(schema, dict) and "schema" in schema:
                schema = schema["schema"]
            if schema is not None:
                found["json_schema"] = _json_text(schema)
    if given.get("json_schema") is not None:
        found["json_schema"] = _json_text(given["json_schema"])
    if "json_mode" in given:
        found["json_mode"] = bool(given["json_mode"])
    return found


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cmd3(given: Message) -> Message:
    found: Message = {}
    if given.get("safety_mode") is not None:
        found["safety_mode"] = str(given["safety_mode"]).lower()
    quality = given.get("citation_quality")
    mode = _citation_mode(given)
    if quality is None and mode is not None:
        quality = "off" if str(mode).lower() == "off" else "on"
    if quality is not None:
        found["citation_quality"] = str(quality).lower()
    if "skip_preamble" in given:
        found["skip_preamble"] = bool(given["skip_preamble"])
    return found


def _cmd4(given: Message) -> Message:
    found: Message = {}
    mode = given.get("grounding")
    mode = _citation_mode(given) if mode is None else mode
    if mode is not None:
        found["grounding"] = _GROUNDING[mode.lower()]
    if given.get("platform_instruction") is not None:
        found["platform_instruction"] = str(given["platform_instruction"])
    return found


def _citation_mode(given: Message) -> Any:
    options = given.get("citation_options")
    return options.get("mode") if isinstance(options, dict) else None


def _document(document: Any) -> Message:
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data")
    if not isinstance(data, dict):
        return dict(document)
    outer = document.get("id")
    return dict(data) if outer is None or "id" in data else {**data, "id": outer}


def _tool(tool: Any) -> Message:
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    return {
        "name": function.get("name", ""),
        "description": function.get("description", "") or "",
        "parameters": function.get("parameters") or {},
    }


def _is_document(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "document"


def _blocks(content: str | list[Message]) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": part.get("text") or part.get("name") or ""} for part in content]


def _call(call: Message) -> Message:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    name = function["name"] or call.get("name") or ""
    return {"id": call["id"], "name": name, "parameters": arguments}


def _call_id(message: Message) -> Message:
    return {"tool_call_id": message["tool_call_id"]} if message.get("tool_call_id") else {}
