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
from typing import Any, Final, Protocol, TypeVar

import msgspec
import xxhash

from router.prompts.request import NotLocalError
from router.prompts.sizes import SHARE, kept_bytes, num_values

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


class Memory(Protocol):
    """Where conversions are made and remembered."""

    def get(self, convert: Callable[[Any], T], raw: msgspec.Raw) -> T:
        """``convert(the value of raw)``, which must depend on nothing else. Raises ``NotLocalError``."""


class TooManyValuesError(Exception):
    """To convert this would hold the event loop."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What some bytes were converted to."""

    raw: msgspec.Raw
    result: Any
    size_bytes: int


class Conversions:
    """What was converted before, by kind and bytes; the least recently used go first. Thread-safe."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        self._lock = Lock()

    def get(
        self,
        convert: Callable[[Any], T],
        raw: msgspec.Raw,
        announce: Callable[[msgspec.Raw], None] | None = None,
    ) -> T:
        """``convert(the value of raw)``, which must depend on nothing else; the same object each time.
        ``announce`` is told of what has to be converted, and may raise. Raises ``NotLocalError``."""
        key = convert, xxhash.xxh3_64_intdigest(raw)
        with self._lock:
            found = self._known.get(key)
            if found is not None and found.raw == raw:  # the key only proposes
                self._known.move_to_end(key)
                kept: T = found.result
                return kept
        if announce is not None:
            announce(raw)
        result = convert(decoded(raw))
        size = _ENTRY_BYTES + len(raw) + kept_bytes(result)
        if size <= self._bytes_max // SHARE:
            self._keep(key, _Known(raw.copy(), result, size))  # what it is part of goes with the body
        return result

    def _keep(self, key: _Key, made: _Known) -> None:
        with self._lock:
            before = self._known.pop(key, None)  # another thread's, or of an equal key
            self._known[key] = made
            self._bytes += made.size_bytes - (0 if before is None else before.size_bytes)
            while self._bytes > self._bytes_max:
                self._bytes -= self._known.popitem(last=False)[1].size_bytes


class InlineConversions:
    """The same for the event loop: at most so many lists and objects are converted, ``TooManyValuesError`` is
    raised before more are. What was converted before is not counted."""

    def __init__(self, conversions: Conversions, values_max: int) -> None:
        self._conversions = conversions
        self._left = values_max

    def get(self, convert: Callable[[Any], T], raw: msgspec.Raw) -> T:
        """See ``Memory``."""
        return self._conversions.get(convert, raw, self._spend)

    def _spend(self, raw: msgspec.Raw) -> None:
        self._left -= num_values(raw)
        if self._left < 0:
            raise TooManyValuesError


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
