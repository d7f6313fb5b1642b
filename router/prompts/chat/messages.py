"""Request messages -> the conversation of a chat template, as vLLM builds it.

vLLM validates each message, keeps only the keys named here in this order, flattens or wraps content by the
template's content format ("string": one text, parts joined by newline; "openai": a list of part dicts), turns
tool-call arguments from JSON text into objects, and repeats ``reasoning`` as ``reasoning_content``. Source:
vllm/renderers/chat_utils.py and hf.py of 0.32.

Whatever is not reproduced raises ``NotLocalError``; nothing is approximated. Messages that the engine will
reject may come out in any form, since they are never computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final

from kvatlas.router.prompts.request import NotLocalError

Message = dict[str, Any]

MEDIA_KEYS: Final = frozenset({
    "input_image", "image_url", "image_embeds", "image_pil", "file",
    "audio_embeds", "audio_url", "input_audio", "video_embeds", "video_url",
})  # fmt: skip
_EMBEDS_KEYS: Final = frozenset({"prompt_embeds"})
# Part fields known to vLLM; all others are passed to the template unchanged in the openai format.
_PART_FIELDS: Final = frozenset({
    "type", "text", "uuid", "name", "data", "refusal", "thinking", "closed", "prompt_cache_breakpoint",
    "image_url", "image_pil", "image_embeds", "file",
    "audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds",
})  # fmt: skip
# A message of role and text alone, the usual case, is the same to the template.
_PLAIN_ROLES: Final = frozenset({"user", "assistant"})
# First line of system texts of some clients, which changes with every request: vLLM drops it.
_BILLING_HEADER: Final = "x-anthropic-billing-header"


def parse_message(
    message: Message,
    content_format: str,
    *,
    orders_calls: bool = True,
    images: list[bytes] | None = None,
) -> Message:
    """One validated message as the template sees it; ``content_format`` is "string" or "openai".

    ``orders_calls``: fields of tool calls come in the order of the engine's schema, else unchanged.
    ``images`` collects the digest of every image of a user; None: images are refused.
    """
    role = message["role"]
    wrap = content_format == "openai"
    if len(message) == 2 and role in _PLAIN_ROLES and isinstance(text := message.get("content"), str):
        return text_message(role, text, content_format)
    shown = images if wrap and role == "user" else None
    parts = list(_parts(role, message.get("content"), shown))
    result: Message = {"role": role}
    if wrap:
        result["content"] = [_wrapped(part) for part in parts]
    else:
        result["content"] = "\n".join(text for text in map(_text, parts) if text)  # empty ones leave no line
    if role == "assistant":
        _assistant_fields(message, result, _tool_call if orders_calls else _plain_call)
    elif role == "tool":
        _tool_fields(message, result)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        # A developer's own tools pass through the engine's validation, which reorders their fields.
        if message.get("tools") is not None:
            raise NotLocalError("message_shape")
        result["tools"] = None
    return result


def text_message(role: str, text: str, content_format: str) -> Message:
    """A message of a user or assistant that has a text and nothing else."""
    return {"role": role, "content": [{"type": "text", "text": text}] if content_format == "openai" else text}


def only_text(message: Message, content_format: str) -> str:
    """The text of a result of ``text_message``, of any role; empty for any other message."""
    content = message.get("content") if len(message) == 2 else None
    if content_format == "openai" and isinstance(content, list) and len(content) == 1:
        part = content[0]
        content = part["text"] if tuple(part) == ("type", "text") and part["type"] == "text" else None
    return content if type(content) is str else ""


def _parts(role: str, content: str | list[Any] | None, images: list[bytes] | None) -> Iterator[Any]:
    """Content parts: a string, text-like dicts, images. Raises ``NotLocalError`` for all else."""
    if content is None:
        return
    for part in [content] if isinstance(content, str) else content:
        kept = _without_billing_header(part) if role == "system" else part
        if kept is None:
            continue
        if images is not None and (data := _image_data(kept)):
            images.append(blake2b(data.encode(errors="replace"), digest_size=32).digest())
            yield _IMAGE
            continue
        _check_part(kept)
        yield kept


_IMAGE: Final[Message] = {"type": "image"}


def _image_data(part: Any) -> str | None:
    """The URL of an inline image; None for all other parts. Images at web addresses may change."""
    if not isinstance(part, dict) or set(part) != {"type", "image_url"} or part["type"] != "image_url":
        return None
    given = part["image_url"]
    url = given.get("url") if isinstance(given, dict) and set(given) <= {"url", "detail"} else None
    return url if isinstance(url, str) and url.startswith("data:") else None


def _check_part(part: Any) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise NotLocalError("message_shape")
    kind = part.get("type")
    if not isinstance(kind, str | None):
        raise NotLocalError("message_shape")
    if not MEDIA_KEYS.isdisjoint(part) or kind in MEDIA_KEYS:
        raise NotLocalError("multimodal")
    if not _EMBEDS_KEYS.isdisjoint(part) or kind in _EMBEDS_KEYS:
        raise NotLocalError("embeds")
    field = None if kind is None else _TEXT_FIELDS.get(kind)
    if field is None or not isinstance(part.get(field), str) or "uuid" in part:
        raise NotLocalError("message_shape")


# Part type -> the field that holds its text.
_TEXT_FIELDS: Final = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}


def _text(part: Any) -> str:
    text: str = part if isinstance(part, str) else part[_TEXT_FIELDS[part["type"]]]
    return text


def _wrapped(part: Any) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part is _IMAGE:
        return dict(_IMAGE)
    if part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": part["name"]}
    extra = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    return {"type": "text", "text": _text(part), **extra}


def _without_billing_header(part: Any) -> Any:
    """The part without that first line; None if nothing else is in it."""
    is_text = isinstance(part, dict) and part.get("type") == "text"
    text = part if isinstance(part, str) else part.get("text") if is_text else None
    if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _assistant_fields(message: Message, result: Message, tool_call: Callable[[Any], Message]) -> None:
    tool_calls = message.get("tool_calls")
    if tool_calls:
        result["tool_calls"] = [tool_call(call) for call in tool_calls]
    # The older name is moved to the newer one first.
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise NotLocalError("message_shape")
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _tool_call(call: Any) -> Message:
    """A tool call with its fields in the order of the engine's schema, arguments parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.get("type") != "function"
        or not isinstance(call.get("id"), str)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise NotLocalError("message_shape")
    ordered = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    ordered.update(_rest(function, ordered))
    result = {"id": call["id"], "function": ordered, "type": "function"}
    result.update(_rest(call, result))
    return result


def _plain_call(call: Message) -> Message:
    """A tool call that was made here, arguments parsed."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _rest(source: Message, known: Iterable[str]) -> Message:
    taken = set(known)
    return {key: value for key, value in source.items() if key not in taken}


def _arguments(text: str) -> Message:
    """Arguments as an object; the engine replaces all other values by an empty one."""
    try:
        parsed = json.loads(text) if text else {}
    except ValueError:
        return {}
    except RecursionError:
        raise NotLocalError("message_shape") from None
    return parsed if isinstance(parsed, dict) else {}


def _tool_fields(message: Message, result: Message) -> None:
    if "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    content = result["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        result["content"] = "\n".join(part["text"] for part in content)


def without_developer_role(conversation: list[Message]) -> list[Message]:
    """For templates without the role: developers become systems, all systems become one, first.

    Returns the same list if no message has that role.
    """
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    renamed = [_as_system(message) for message in conversation]
    systems = [message for message in renamed if message["role"] == "system"]
    if len(systems) == 1 and renamed[0]["role"] == "system":
        return renamed
    texts = [text for text in map(_joined, systems) if text]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in {**message, "role": "system"}.items() if key != "tools"}


def _joined(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
