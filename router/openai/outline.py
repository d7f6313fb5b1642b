"""Chosen members of a large JSON object, without decoding it: one pass over its brackets and quotes.

A parser holds the GIL from a body's first byte to its last. Here the body is gone through in windows with
numpy, so that a thread can do it beside the event loop. What is inside strings is told by counting quotes,
what is nested by counting brackets; both are carried from window to window. Only the outline is checked
(one object, closed): the rest is the engine's to judge. Keys that are written with escapes are decoded, a
bounded number of them.

Measured on one shared core: 1 ms per megabyte of text, 10 ms per megabyte of empty lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

_WINDOW_BYTES: Final = 1 << 18
_VALUE_BYTES_MAX: Final = 4096
"""Longer values are cut: no model has such a name."""
_ESCAPED_MAX: Final = 10_000
"""Keys and short values of the object itself that are written with escapes: clients write a few."""
_ESCAPED_BYTES_MAX: Final = 256
"""Longer keys are none that are asked for: of 20 letters, six bytes each."""
_SPACES: Final = b" \t\n\r"
_SPACES_SKIPPED: Final = 64
"""White space behind a string that is skipped for all strings at once."""
_BACKSLASH: Final = b"\\"
_QUOTE: Final = 1
_OPENS: Final = 2
_CLOSES: Final = 3
_STRUCTURE: Final = {ord('"'): _QUOTE, **dict.fromkeys(b"[{", _OPENS), **dict.fromkeys(b"]}", _CLOSES)}
_KINDS: Final = bytes(_STRUCTURE.get(byte, 0) for byte in range(256))
"""By byte: what it is outside of strings."""
_SPACE: Final = rb"[ \t\n\r]{0,1048576}+"
_COLON: Final = re.compile(_SPACE + rb":" + _SPACE)
_VALUE: Final = re.compile(
    rb'("(?:[^"\\]|\\.){0,%d})("?)|([-+.\w]{1,64})|[\[{]' % _VALUE_BYTES_MAX, re.DOTALL
)
_ESCAPED: Final = re.compile(rb'"(?:[^"\\]|\\.){1,%d}+"' % _ESCAPED_BYTES_MAX, re.DOTALL)

Positions = npt.NDArray[np.int64]


class OutlineError(ValueError):
    """Not one closed JSON object; ``str()`` says why."""


class _State(msgspec.Struct, gc=False):
    """What one window tells the next: whether it ends inside a string, and how deep."""

    in_string: bool = False
    depth: int = 0
    closed_at: int | None = None
    """Where the object ends."""


def top_level(body: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """The raw values of these members, of lists and objects the first byte; of equal keys, the last one's.

    Raises ``OutlineError``.
    """
    if not body[:64].lstrip().startswith(b"{"):
        raise OutlineError("it does not begin with a brace")
    whole = np.frombuffer(body, np.uint8)
    state = _State()
    found: dict[str, bytes] = {}
    escaped = 0
    for start, window in _windows(body):
        if state.in_string and b'"' not in window:
            continue
        strings = _top_strings(np.frombuffer(window.translate(_KINDS), np.int8), start, state)
        ends: dict[str, int] = {}  # behind the last key of each name
        for name in names:
            key = f'"{name}"'.encode()
            end = _last_key(body, whole, _equal(whole, strings, key) + len(key))
            if end is not None:
                ends[name] = end
        for at in _with_escapes(window, start, strings):
            escaped += 1
            if escaped > _ESCAPED_MAX:
                raise OutlineError(f"more than {_ESCAPED_MAX} of its keys are written with escapes")
            name, end = _decoded(body, at)
            if name in names and end > ends.get(name, 0) and _COLON.match(body, end):
                ends[name] = end
        for name, end in ends.items():
            found[name] = _value(body, end)
        if state.closed_at is not None:
            break
    if state.closed_at is None or body[state.closed_at + 1 :].strip():
        raise OutlineError("its braces do not match")
    return found


def _windows(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Pieces with their starts, escape sequences overwritten; none is cut in two."""
    start = 0
    while start < len(body):
        window = body[start : start + _WINDOW_BYTES]
        if _BACKSLASH in window:
            backslashes = len(window) - len(window.rstrip(_BACKSLASH))
            if backslashes % 2 and len(window) > 1:
                window = window[:-1]
            length = len(window)
            yield start, window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            start += length
        else:
            yield start, window
            start += len(window)


def _top_strings(window: npt.NDArray[np.int8], start: int, state: _State) -> Positions:
    """Where in the body the strings begin that are the object's own: its keys and its plain values.

    ``window`` has the kinds of its bytes.
    """
    at = np.flatnonzero(window)
    kinds = window[at]
    is_quote = kinds == _QUOTE
    inside = np.logical_xor.accumulate(is_quote) if len(at) else is_quote  # after each of them
    if state.in_string:
        inside = ~inside
    outside = inside == is_quote  # before each of them
    steps = np.where(is_quote | ~outside, 0, 5 - 2 * kinds)
    depths = np.cumsum(steps, dtype=np.int32) + np.int32(state.depth)
    if len(at):
        state.in_string, state.depth = bool(inside[-1]), int(depths[-1])
        if depths.min() <= 0:
            end = int(np.argmax(depths <= 0))  # the first one
            state.closed_at = start + int(at[end])
            at, is_quote, outside, depths = at[:end], is_quote[:end], outside[:end], depths[:end]
    found: Positions = at[is_quote & outside & (depths == 1)] + start
    return found


def _equal(whole: npt.NDArray[np.uint8], at: Positions, text: bytes) -> Positions:
    """Those of the positions at which ``text`` stands."""
    at = at[at <= len(whole) - len(text)]
    for offset, byte in enumerate(text):
        at = at[whole[at + offset] == byte]
    return at


def _last_key(body: bytes, whole: npt.NDArray[np.uint8], ends: Positions) -> int | None:
    """The last of the positions, each behind a string, at which the string is a key; None where none is."""
    at, spaces = ends.copy(), np.frombuffer(_SPACES, np.uint8)
    for _ in range(_SPACES_SKIPPED):
        at, ends = at[at < len(whole)], ends[at < len(whole)]
        space = np.isin(whole[at], spaces)
        if not space.any():
            break
        at = at + space
    keys = (whole[at] == ord(":")) | np.isin(whole[at], spaces)
    for end, then in zip(ends[keys][::-1], at[keys][::-1], strict=True):
        if _COLON.match(body, int(then)):
            return int(end)
    return None


def _with_escapes(window: bytes, start: int, strings: Positions) -> list[int]:
    """Those of the strings, in this window of the body, that are short and may have a key's letters written
    as escapes, or that go on behind the window."""
    if not len(strings):
        return []
    chars = np.frombuffer(window, np.uint8)
    at = strings - start
    quotes, escapes = np.flatnonzero(chars == ord('"')), np.flatnonzero(chars == ord("\\"))
    behind = np.append(quotes, len(chars) + _ESCAPED_BYTES_MAX)[np.searchsorted(quotes, at + 1)]
    escape = np.append(escapes, len(chars))[np.searchsorted(escapes, at)]
    short = (escape < behind) & (behind - at <= _ESCAPED_BYTES_MAX)
    cut = (behind >= len(chars)) & (at >= len(chars) - _ESCAPED_BYTES_MAX)
    found: list[int] = strings[short | cut].tolist()
    return found


def _decoded(body: bytes, at: int) -> tuple[str, int]:
    """The short string at a position, and where it ends; "" where it is none."""
    match = _ESCAPED.match(body, at)
    try:
        return ("", at) if match is None else (str(json.loads(match[0])), match.end())
    except ValueError:
        return "", at


def _value(body: bytes, end: int) -> bytes:
    """The value of the key that ends here; empty for what is none."""
    colon = _COLON.match(body, end)
    match = None if colon is None else _VALUE.match(body, colon.end())
    if match is None:
        return b""
    text, closed, _ = match.groups()
    if text is None or closed:
        return match[0]
    return bytes(text.decode(errors="ignore").encode()) + b'"'
