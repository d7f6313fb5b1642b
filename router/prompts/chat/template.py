"""One chat template and its inputs, rendered by minijinja if that is proven equal to jinja2, else by jinja2.

jinja2 in Hugging Face's sandbox is the reference, which engines run. minijinja renders the same template
several times faster (a 30 KB, 10-message ChatML chat on one shared core: 11-20 us instead of 34-60 us). At
load, probe conversations are rendered with both, and minijinja is used only if every result is equal.

Chats of plain messages are mostly not rendered at all, but assembled from a precompiled layout.

Invariant: ``render`` returns jinja2's text, or a text that was equal to it on every shape and sample checked.
Thread-safe: rendering shares no changing state but counters and a set of shapes.

Inputs besides the messages follow vLLM 0.32: tools are dumped from their schema (fixed field order, absent
fields filled in, unknown fields dropped), the request's ``chat_template_kwargs`` override server defaults,
its own fields override those, None and "auto" count as absent, and only names that the template reads are
passed on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Set
from decimal import Decimal
from threading import Lock
from typing import Any, Final, Protocol

import msgspec
import xxhash

from kvatlas.router.prompts.chat.compiled import (
    Context,
    TemplateRejectsError,
    by_fast,
    by_reference,
    compile_template,
)
from kvatlas.router.prompts.chat.messages import Message
from kvatlas.router.prompts.chat.skeletons import Key, PrecompiledLayout, Skeletons, text_messages
from kvatlas.router.prompts.request import SHARE, ChatBody, NotLocalError, compact, decode_any, kept_bytes
from kvatlas.router.prompts.settings import PromptStats

# One rendering in this many is compared although its shape is known; costs under 1 us each on average.
CHECK_EVERY: Final = 256
# Known shapes; when full, all are dropped and checked again.
_SHAPES_MAX: Final = 4096
# Shapes for which minijinja differs; when full, all are dropped and checked again.
_DIFFERING_MAX: Final = 256
# The shape of all values that minijinja is known to write differently: jinja2 renders it.
UNLIKE: Final = 0
_INTEGER_MIN: Final = -(1 << 63)
_INTEGER_MAX: Final = (1 << 63) - 1
# Known shapes above this length are not sampled: the check would cost more than it shows.
_CHECKED_CHARS_MAX: Final = 1 << 16


class ChatTemplate:
    """A compiled template. ``source`` is Jinja text; raises ``ValueError`` if it is not.

    ``variables``: names it reads from outside; ``content_format``: "string" or "openai", "auto": as engines
    detect it; ``time_zone``: that of the engines' clock, None: this machine's.
    """

    def __init__(
        self,
        source: str,
        stats: PromptStats,
        special_tokens: dict[str, str] | None = None,
        time_zone: str | None = None,
        content_format: str = "auto",
    ) -> None:
        compiled = compile_template(source, tuple(sorted((special_tokens or {}).items())), time_zone)
        self._reference, self._fast = compiled.reference, compiled.fast
        self.variables = compiled.variables
        self.content_format = compiled.content_format if content_format == "auto" else content_format
        self._changes_case = compiled.changes_case
        self.source = source
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.depends_on_time = "strftime_now" in source
        self._stats = stats
        self._shapes: set[int] = set()
        self._differing: set[int] = set()
        # A layout with a date in it would be wrong tomorrow.
        self._skeletons = Skeletons(None if self.depends_on_time else compiled.watching)

    @property
    def engine(self) -> str:
        """The current renderer: "minijinja" or "jinja2"."""
        return "jinja2" if self._fast is None else "minijinja"

    def render(self, context: Context, shapes: Set[int]) -> str:
        """The prompt text. ``shapes``: kinds of value in ``context`` (``message_shape``).

        Raises ``TemplateRejectsError`` if the template refuses the conversation.
        """
        self._stats.rendered += 1
        # Values that the two are known to write differently (numbers, quoted texts in lists), whatever the
        # shape says.
        if self._fast is None or UNLIKE in shapes or not self._differing.isdisjoint(shapes):
            self._stats.rendered_jinja2 += 1
            return self._by_reference(context)
        text = self._by_fast(context)
        if text is not None and self._is_odd(text):
            self._stats.rendered_jinja2 += 1
            return self._by_reference(context)
        # Probes cannot cover everything: the two are compared for every new message shape (role, keys, value
        # types), and for a sample of the known ones.
        new = not shapes <= self._shapes
        sampled = self._stats.rendered % CHECK_EVERY == 0
        if text is None or new or (sampled and len(text) <= _CHECKED_CHARS_MAX):
            return self._checked(text, context, shapes)
        return text

    def layout_of(self, names: Context, texts: list[str], key: Key) -> PrecompiledLayout | None:
        """The layout of messages that are a role and a non-empty text alone, if it is known; None: they must
        be rendered."""
        layout = self._skeletons.find(key, texts)
        if layout is None:
            return None
        self._stats.rendered += 1
        # A sample is rendered by jinja2 too.
        if self._stats.rendered % CHECK_EVERY == 0:
            text = "".join(layout.written(texts))
            if len(text) <= _CHECKED_CHARS_MAX:
                self._stats.template_checks += 1
                if text != self._by_reference({**names, "messages": text_messages(key, texts)}):
                    self._stats.template_mismatches += 1
                    self._skeletons.forget()
                    return None
        return layout

    def learn(self, names: Context, texts: list[str], key: Key, text: str) -> None:
        """Keep the layout of such messages, for others with the same key."""
        self._skeletons.learn(key, texts, names, text)

    def _is_odd(self, text: str) -> bool:
        """Whether the two are known to differ about characters of this text."""
        if "\x1c" in text or "\x1d" in text or "\x1e" in text or "\x1f" in text:
            # White space to Python's strip, trim and split, but not to Rust's.
            return True
        # Python and Rust have different tables for the case of letters beyond ASCII.
        return self._changes_case and not text.isascii()

    def _checked(self, text: str | None, context: Context, shapes: Set[int]) -> str:
        self._stats.template_checks += 1
        new = shapes - self._shapes
        try:
            expected = self._by_reference(context)
            # The clock may have changed in between.
            if text != expected and self.depends_on_time:
                text, expected = self._by_fast(context), self._by_reference(context)
        except TemplateRejectsError:
            # The engine refuses this chat: its text does not matter, its shape may.
            if text is not None:
                self._differs(new)
            raise
        if text == expected:
            self._agrees(new)
        else:
            self._differs(new)
            if text is not None and not new:
                self._stats.templates_distrusted += 1
                # All shapes were known to agree, so shapes do not describe this template: jinja2 from now on.
                self._fast = None
        return expected

    def _agrees(self, new: Set[int]) -> None:
        if len(self._shapes) + len(new) > _SHAPES_MAX:
            self._shapes.clear()
        if len(new) <= _SHAPES_MAX:
            self._shapes |= new

    def _differs(self, new: Set[int]) -> None:
        """With several new shapes at once, the differing one is found when the others occur without it."""
        self._stats.template_mismatches += 1
        # Which of several new shapes differs is unknown: those that agree are learned as they occur alone.
        if len(new) != 1:
            return
        if len(self._differing) >= _DIFFERING_MAX:
            self._stats.template_shapes_forgotten += len(self._differing)
            self._differing.clear()
        self._differing |= new

    def _by_fast(self, context: Context) -> str | None:
        fast = self._fast
        return None if fast is None else by_fast(fast, context)

    def _by_reference(self, context: Context) -> str:
        return by_reference(self._reference, context)


def continue_final(conversation: list[Message], source: str, render: Callable[[list[Message]], str]) -> str:
    """Render so that the text ends inside the last message, for ``continue_final_message``."""
    # Hugging Face's way: a tag is put after the last text, and everything from the tag on is cut off.
    tag = "CONTINUE_FINAL_MESSAGE_TAG "
    last = dict(conversation[-1])
    content = last.get("content")
    if content is None or "content" not in source:
        raise NotLocalError("template_rejected")
    if isinstance(content, list):
        at = max((i for i, part in enumerate(content) if "text" in part), default=-1)
        if at < 0:
            raise NotLocalError("template_rejected")
        final = content[at]["text"]
        tagged: Message = {**content[at], "text": final + tag}
        last["content"] = [*content[:at], tagged, *content[at + 1 :]]
    else:
        final = content
        last["content"] = content + tag
    text = render([*conversation[:-1], last])
    if final.strip() not in text or tag.strip() not in text:
        raise NotLocalError("template_rejected")
    # The template may strip the text, and the blank of the tag with it: then the cut text is stripped too.
    cut = text.rindex(tag.strip())
    exact = text[cut : cut + len(tag)] == tag
    return text[:cut] if exact else text[:cut].rstrip()


def message_shape(message: Message) -> int:
    """Shape of a message: role, keys, types of values and of their contents; ``UNLIKE`` if a value is."""
    # Hashed, since clients choose names.
    outside = (message["role"], tuple(message), tuple(map(type, message.values())))
    inside: list[Hashable] = []
    for key, value in message.items():
        if isinstance(value, str) or value is None:
            continue
        if key == "content":
            kinds = [(tuple(part), part["type"], value_kinds(_besides_text(part))) for part in value]
        elif key == "tool_calls":
            kinds = [(tuple(call), tuple(call["function"]), value_kinds(call)) for call in value]
        else:
            kinds = [((), "", value_kinds(value))]
        if any(UNLIKE in found for *_, found in kinds):
            return UNLIKE
        inside.append(frozenset(kinds))
    return hash((outside, *inside))


def _besides_text(part: Message) -> list[Any]:
    return [value for key, value in part.items() if key != "text"]


def value_kinds(value: Any) -> frozenset[Hashable]:
    """The types of all parts of a JSON value; includes ``UNLIKE`` if ``is_unlike`` holds for one."""
    kinds: set[Hashable] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        kinds.add(UNLIKE if is_unlike(current) else type(current).__name__)
        if isinstance(current, dict):
            waiting.extend(current)
            waiting.extend(current.values())
        elif isinstance(current, list):
            waiting.extend(current)
    return frozenset(kinds)


def is_unlike(value: Any) -> bool:
    """Whether minijinja is known to write this otherwise than jinja2 (3.0.5 of its package; all code points
    were compared)."""
    # It gives a whole float to ``tojson`` as an integer, writes large and small ones without exponent and
    # large integers as floats. In lists that a template makes and prints, it leaves characters as they are
    # that Python does not print.
    kind = type(value)
    if kind is float:
        text = repr(value)
        return value.is_integer() or not math.isfinite(value) or "e" in text or _is_tie(value, text)
    if kind is int:
        return not _INTEGER_MIN <= value <= _INTEGER_MAX
    if kind is str and not value.isascii():
        return not value.replace("\n", "").replace("\t", "").replace("\r", "").isprintable()
    return False


def _is_tie(value: float, shortest: str) -> bool:
    """Whether it lies between two shortest forms: Python takes the even one, Rust the larger one
    (98277423282436.125 is ``98277423282436.12`` or ``.13``)."""
    exact = format(Decimal(value), "f")
    return len(exact) == len(shortest) + 1 and exact.endswith("5")


# Template arguments that affect more than the template in the engine, or shadow functions of templates.
_RESERVED: Final = frozenset({
    "chat_template", "conversation", "max_length", "messages", "model_config", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer",
    "tokenizer_kwargs", "tools", "truncation",
    "cycler", "dict", "joiner", "lipsum", "namespace", "raise_exception", "range", "strftime_now",
})  # fmt: skip
_UNSET: Final = (None, "auto")


# Size of a context besides its names: its keys, the structure, the cache's own.
_ENTRY_BYTES: Final = 2000

ContextKey = tuple[object, ...]


class ReadsArguments(Protocol):
    """A template, or a family's code: the arguments that it reads."""

    @property
    def variables(self) -> Container[str]: ...


class ChatContext(msgspec.Struct, frozen=True):
    """``names``: the template's variables; ``key``: equal exactly if all of them are (compact), ``shape``: if
    they are of the same kinds."""

    names: dict[str, Any]
    continue_final: bool
    key: bytes
    shape: int


class ContextCache:
    """Templates and contexts of plain requests, which are usually the same ones: saves 15 us.

    Invariant: all entries take at most ``bytes_max`` together; one above a quarter of it is not cached. Any
    thread may call it.
    """

    def __init__(self, stats: PromptStats, bytes_max: int) -> None:
        self._stats = stats
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[ContextKey, tuple[Any, ChatContext, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: ContextKey) -> tuple[Any, ChatContext] | None:
        """Return the cached entry, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
        return found[0], found[1]

    def put(self, key: ContextKey, template: ReadsArguments, context: ChatContext) -> None:
        """Cache a context; the least recently used ones are evicted."""
        size = _ENTRY_BYTES + kept_bytes(context.names)
        if size > self._bytes_max // SHARE:
            self._stats.oversized += 1
            return
        with self._lock:
            # cached by another thread, for an equal request
            _, _, before = self._entries.pop(key, (None, None, 0))
            self._entries[key] = template, context, size
            self._count(size - before)
            while self._bytes > self._bytes_max:
                _, (_, _, old) = self._entries.popitem(last=False)
                self._count(-old)
                self._stats.context_evictions += 1

    def clear(self) -> None:
        """Clear the cache: the model is not served any more."""
        with self._lock:
            self._entries.clear()
            self._count(-self._bytes)

    def _count(self, size: int) -> None:
        self._bytes += size
        self._stats.context_bytes += size


def context_key(body: ChatBody) -> ContextKey | None:
    """Inputs of the context of a plain request; None for a request that is not plain."""
    if not (body.chat_template_kwargs is None and body.documents is None and body.chat_template is None):
        return None
    return (
        compact(bytes(body.tools)),
        body.tool_choice == "none",
        _plain(body.add_generation_prompt),
        _plain(body.continue_final_message),
        _plain(body.reasoning_effort),
    )


def _plain(value: Any) -> object:
    """A key that distinguishes True from 1 and from "True"."""
    if value is True or value is False or value is None:
        return value
    return type(value).__name__, compact(str(value).encode(errors="replace"))


def chat_context(
    body: ChatBody,
    template: ReadsArguments,
    *,
    tools: list[dict[str, Any]] | None,
    special_tokens: dict[str, str],
    defaults: dict[str, Any],
) -> ChatContext:
    """Everything but the messages. Raises ``NotLocalError`` for arguments that are not reproduced."""
    _check_fields(body)
    own = _request_arguments(body)
    given: dict[str, Any] = {**(body.chat_template_kwargs or {})}
    given.update((key, value) for key, value in own.items() if not _unset(value))
    merged = {**defaults, **{key: value for key, value in given.items() if not _unset(value)}}
    if not _RESERVED.isdisjoint(merged):
        raise NotLocalError("template_kwargs")
    continue_final = merged.pop("continue_final_message", False)
    arguments = {key: value for key, value in merged.items() if key in template.variables}
    arguments["documents"] = merged.get("documents")
    arguments["add_generation_prompt"] = merged["add_generation_prompt"]
    if continue_final and arguments["add_generation_prompt"]:
        raise NotLocalError("template_rejected")
    shape = _shape(arguments, bytes(body.tools), tools)
    # Tools by their raw form, unless they are left out: the choice of the template depends on that.
    depends_on = [arguments, continue_final, None if tools is None else bytes(body.tools)]
    try:
        # JSON has no NaN, which configured arguments may contain: it would become null.
        if shape == UNLIKE:
            key = b"~" + repr(depends_on).encode(errors="backslashreplace")
        else:
            key = _ENCODER.encode(depends_on)
    except (TypeError, ValueError, RecursionError):
        raise NotLocalError("template_kwargs") from None
    names = {**special_tokens, **arguments, "tools": tools}
    return ChatContext(names, continue_final, compact(key), shape)


_ENCODER: Final = msgspec.json.Encoder()


def _unset(value: Any) -> bool:
    return any(value is unset or (isinstance(value, str) and value == unset) for unset in _UNSET)


def _request_arguments(body: ChatBody) -> dict[str, Any]:
    arguments = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "documents": body.documents,
        "reasoning_effort": body.reasoning_effort,
    }
    if body.reasoning_effort is not None and "enable_thinking" not in (body.chat_template_kwargs or {}):
        arguments["enable_thinking"] = body.reasoning_effort != "none"
    return arguments


def _check_fields(body: ChatBody) -> None:
    """Refuse types that the engine would coerce or reject."""
    if body.chat_template is not None:
        raise NotLocalError("request_template")
    flags = (body.add_generation_prompt, body.continue_final_message)
    if not all(isinstance(flag, bool) for flag in flags):
        raise NotLocalError("field")
    if body.chat_template_kwargs is not None and not isinstance(body.chat_template_kwargs, dict):
        raise NotLocalError("field")
    if body.reasoning_effort is not None and not isinstance(body.reasoning_effort, str):
        raise NotLocalError("field")
    if body.documents is not None and not _are_documents(body.documents):
        raise NotLocalError("field")


def _are_documents(documents: Any) -> bool:
    return isinstance(documents, list) and all(
        isinstance(item, dict) and all(isinstance(value, str) for value in item.values())
        for item in documents
    )


def _shape(arguments: dict[str, Any], raw_tools: bytes, tools: list[dict[str, Any]] | None) -> int:
    """Every tool set is its own shape: templates read parameter schemas. ``UNLIKE`` if a value is."""
    kinds = [(k, v if isinstance(v, bool) else value_kinds(v)) for k, v in arguments.items()]
    if UNLIKE in value_kinds([arguments, tools]):
        return UNLIKE
    return hash((tuple(kinds), xxhash.xxh3_128_intdigest(raw_tools)))


def parse_tools(body: ChatBody, *, exclude_when_none: bool) -> list[dict[str, Any]] | None:
    """Tools as the engine dumps them; ``exclude_when_none``: leave them out for ``tool_choice="none"``.

    Raises ``NotLocalError`` for a tool the engine would coerce or reject.
    """
    tools = decode_any(body.tools)
    if tools is None or (exclude_when_none and body.tool_choice == "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise NotLocalError("tools_shape")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise NotLocalError("tools_shape")
    outer = tool.get("defer_loading")
    inner = function.get("defer_loading")
    inner = outer if inner is None else inner
    fields = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    optional = {"strict": function.get("strict"), "defer_loading": inner}
    if not (
        isinstance(fields["name"], str)
        and isinstance(fields["description"], str | None)
        and isinstance(fields["parameters"], dict | None)
        and all(isinstance(flag, bool | None) for flag in (*optional.values(), outer))
    ):
        raise NotLocalError("tools_shape")
    fields.update((key, value) for key, value in optional.items() if value is not None)
    result: dict[str, Any] = {"type": "function", "function": fields}
    if outer is not None:
        result["defer_loading"] = outer
    return result
