"""Requests of other APIs as the chat completions that vLLM makes of them, message by message.

Each API has a module with one struct: its fields, and ``as_chat``, which gives a ``ChatBody``. Messages are
converted one at a time and remembered by their bytes, so that a next turn converts only what is new, and gets
the very same bytes for the rest: the prompt cache finds a conversation by them.

Always true: what is remembered takes at most ``BYTES_MAX``; what is not converted exactly raises
``NotLocalError``. What the engine will reject may come out in any form: nobody computes it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec
import xxhash

from router.prompts.request import NotLocalError
from router.prompts.sizes import SHARE, kept_bytes

T = TypeVar("T")
BYTES_MAX: Final = 32 << 20
_ENTRY_BYTES: Final = 400
_ANY: Final = msgspec.json.Decoder()
_ENCODER: Final = msgspec.json.Encoder()
_Key = tuple[Callable[[Any], Any], int]


class TemplateTraits(msgspec.Struct, frozen=True):
    """What conversions depend on besides the request, mostly what vLLM finds out about a chat template.

    ``merge_system``: later system messages go into the first one. ``disabled_effort``: the reasoning effort
    that ``thinking: {"type": "disabled"}`` stands for. ``keeps_documents``: tool results in Cohere's API
    stay the documents that they are.
    """

    merge_system: bool = False
    disabled_effort: str = "none"
    keeps_documents: bool = False


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What some bytes were converted to."""

    raw: bytes
    result: Any
    size_bytes: int


class Conversions:
    """What was converted before, by kind and bytes; the least recently used go first. Thread-safe."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        self._lock = Lock()

    def get(self, convert: Callable[[Any], T], raw: bytes) -> T:
        """``convert(the value of raw)``, which must depend on nothing else. Raises ``NotLocalError``."""
        key = convert, xxhash.xxh3_64_intdigest(raw)
        with self._lock:
            found = self._known.get(key)
            if found is not None and found.raw == raw:  # the key only proposes
                self._known.move_to_end(key)
                kept: T = found.result
                return kept
        result = convert(decoded(raw))
        size = _ENTRY_BYTES + len(raw) + kept_bytes(msgspec.to_builtins(result, builtin_types=(bytes,)))
        if size <= self._bytes_max // SHARE:
            self._keep(key, _Known(raw, result, size))
        return result

    def _keep(self, key: _Key, made: _Known) -> None:
        with self._lock:
            before = self._known.pop(key, None)  # another thread's, or of an equal key
            self._known[key] = made
            self._bytes += made.size_bytes - (0 if before is None else before.size_bytes)
            while self._bytes > self._bytes_max:
                self._bytes -= self._known.popitem(last=False)[1].size_bytes


def decoded(raw: bytes | msgspec.Raw) -> Any:
    """A JSON value. Raises ``NotLocalError`` where only some parsers read it."""
    try:
        return _ANY.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise NotLocalError("unusual_json") from None


def encoded(value: Any) -> msgspec.Raw:
    """A converted value as JSON."""
    try:
        return msgspec.Raw(_ENCODER.encode(value))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise NotLocalError("unusual_json") from None


def dumped(value: Any, *, ascii_only: bool = True) -> str:
    """JSON text as Python's own module writes it."""
    try:
        return json.dumps(value, ensure_ascii=ascii_only)
    except RecursionError:
        raise NotLocalError("message_shape") from None


def text_of(value: Any) -> str:
    """A field that must be a string."""
    if not isinstance(value, str):
        raise NotLocalError("message_shape")
    return value


def items_of(value: Any) -> list[dict[str, Any]]:
    """A field that must be a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotLocalError("message_shape")
    return value
