"""Numbers and truth values of clients, bounded where they are read: JSON allows thousands of digits."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvatlas.router.openai.errors import bad_request, echoed

_WHOLE = re.compile(rb"-?[0-9]{1,18}")
# What an engine may take for a number of more digits, also as a text.
_TOO_LONG = re.compile(rb'"?[-+]?[0-9]{19}')


def whole_number(raw: bytes | msgspec.Raw, name: str) -> int | None:
    """A priority without fraction, by its text; None for anything that engines judge themselves. Raises
    ``ApiError`` 400 for more than 18 digits: engines hand priorities on as 64 bits, and fail (vLLM 0.32)."""
    if _WHOLE.fullmatch(raw):
        return int(bytes(raw))
    if _TOO_LONG.match(raw):
        raise bad_request(
            "invalid_priority",
            f"{name}: {echoed(bytes(raw)[:64].decode('latin-1'))} is out of range; "
            "send a whole number of at most 18 digits.",
            param=name,
        )
    return None


_DIGITS = re.compile(r"[-+]?[0-9](?:_?[0-9]){0,17}(?:\.0{1,18})?")


def lax_whole(value: Any) -> int | None:
    """A decoded value as pydantic's lax mode reads a whole number, so as engines do: also ``128.0``,
    ``"128"``, ``" +1_28.0 "`` and ``true``. None for what it refuses."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and len(value) <= 64 and _DIGITS.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    return None


_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})


def lax_true(value: Any) -> bool:
    """Whether pydantic's lax mode, and so engines, read a decoded value as true: also 1 and ``"true"``."""
    if isinstance(value, str):
        return len(value) <= 64 and value.strip().lower() in _TRUE
    return isinstance(value, int | float) and value == 1
