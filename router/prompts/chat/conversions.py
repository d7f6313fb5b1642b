"""Requests of other APIs as the chat completions that vLLM converts them to, message by message.

Each API has a module with one struct: its fields, and ``as_chat``, which returns a ``ChatBody``. Messages
are converted one at a time and cached by their bytes, so that a next turn converts only new ones, and gets
the same bytes for the rest: the prompt cache finds a conversation by them.

Invariants: the cache takes at most ``BYTES_MAX``; anything not converted exactly raises ``NotLocalError``.
Requests that the engine will reject may come out in any form, since they are never computed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

import msgspec
import xxhash

from kvatlas.router.prompts.request import SHARE, NotLocalError, kept_bytes, num_values

T = TypeVar("T")
BYTES_MAX: Final = 32 << 20
_ENTRY_BYTES: Final = 400
_ANY: Final = msgspec.json.Decoder()
_ENCODER: Final = msgspec.json.Encoder()
_Key = tuple[Callable[[Any], Any], int]


class TemplateTraits(msgspec.Struct, frozen=True):
    """Inputs of conversions besides the request, mostly vLLM's findings about a chat template.

    ``merge_system``: later system messages are merged into the first one. ``disabled_effort``: the reasoning
    effort for ``thinking: {"type": "disabled"}``.
    """

    merge_system: bool = False
    disabled_effort: str = "none"


class Memory(Protocol):
    """Makes conversions and caches them."""

    def get(self, convert: Callable[[Any], T], raw: msgspec.Raw) -> T:
        """Return ``convert(the value of raw)``, which must depend on nothing else. Raises
        ``NotLocalError``."""


class TooManyValuesError(Exception):
    """This conversion would block the event loop."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    """The conversion of some bytes."""

    raw: msgspec.Raw
    result: Any
    size_bytes: int


class Conversions:
    """Cached conversions by kind and bytes; the least recently used are evicted. Thread-safe."""

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
        """Return ``convert(the value of raw)``, which must depend on nothing else; the same object each time.
        ``announce`` is called before a conversion, and may raise. Raises ``NotLocalError``."""
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
            # references of the body's own values are released with the body
            self._keep(key, _Known(raw.copy(), result, size))
        return result

    def _keep(self, key: _Key, made: _Known) -> None:
        with self._lock:
            # Cached by another thread, or under an equal key.
            before = self._known.pop(key, None)
            self._known[key] = made
            self._bytes += made.size_bytes - (0 if before is None else before.size_bytes)
            while self._bytes > self._bytes_max:
                self._bytes -= self._known.popitem(last=False)[1].size_bytes


class InlineConversions:
    """The same for the event loop: ``TooManyValuesError`` is raised before more than the limit of lists and
    objects are converted. Cached conversions do not count."""

    def __init__(self, conversions: Conversions, values_max: int) -> None:
        self._conversions = conversions
        self._left = values_max

    def get(self, convert: Callable[[Any], T], raw: msgspec.Raw) -> T:
        """Implement ``Memory``."""
        return self._conversions.get(convert, raw, self._spend)

    def _spend(self, raw: msgspec.Raw) -> None:
        self._left -= num_values(raw)
        if self._left < 0:
            raise TooManyValuesError


def decoded(raw: bytes | msgspec.Raw) -> Any:
    """Decode a JSON value. Raises ``NotLocalError`` if only some parsers accept it."""
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
