"""Keeps ``kv_cache_report_mode`` of clients away from engines, where the operator says so.

With ``{"vllm_xargs": {"kv_cache_report_mode": "full"}}`` a client makes an engine report blocks again that it
holds already, which spoils every index that counts copies. ``refuse`` answers 400; ``strip`` takes the one
key out and leaves every byte outside that object as it is. A body that only Python's lenient parser reads
cannot be cut with certainty and is refused in both cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from router.openai.errors import ApiError, bad_request

ReportMode = Literal["pass", "strip", "refuse"]

_FIELD, _KEY = "vllm_xargs", "kv_cache_report_mode"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)
_HINTS = (b"report_mode", b"\\u", b"\x00")
"""Without one of these the key cannot be there, however it is written."""


class _Body(msgspec.Struct, gc=False):
    vllm_xargs: Any = None


_BODY = msgspec.json.Decoder(_Body)


def screen(body: bytes, mode: ReportMode) -> bytes:
    """The body to be forwarded. Raises ``ApiError`` 400 ``kv_cache_report_mode_refused``."""
    if mode == "pass" or not any(hint in body for hint in _HINTS):
        return body
    try:
        found = _asks(_BODY.decode(body).vllm_xargs)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        if _asks_leniently(body):
            raise _refused() from None
        return body
    # A key may occur twice; the last counts, so the parsed one is looked at, and all are cut.
    if mode == "strip":
        return _stripped(body)
    if found:
        raise _refused()
    return body


def _asks(value: object) -> bool:
    if isinstance(value, str):  # form fields carry it as a JSON text
        return _KEY in value
    return isinstance(value, dict) and _KEY in value


def _asks_leniently(body: bytes) -> bool:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the engine will refuse it, too
    return isinstance(found, dict) and _asks(found.get(_FIELD))


def _refused() -> ApiError:
    return bad_request(
        "kv_cache_report_mode_refused",
        f"{_FIELD}.{_KEY} is not accepted by this router; remove it.",
        param=f"{_FIELD}.{_KEY}",
    )


def _stripped(body: bytes) -> bytes:
    """The body with the key taken out of every top-level ``vllm_xargs`` object."""
    pieces, done = [], 0
    for start, end in list(_members(body, 0, _FIELD)):
        value = body[start:end]
        cut = _without(value) if value[:1] == b"{" else value
        pieces += [body[done:start], cut]
        done = end
    return b"".join((*pieces, body[done:]))


def _without(value: bytes) -> bytes:
    """An object's text without the key: re-written, since a comma must go with it."""
    members = msgspec.json.decode(value)
    if _KEY not in members:
        return value
    del members[_KEY]
    return msgspec.json.encode(members)


def _members(text: bytes, start: int, name: str) -> Iterator[tuple[int, int]]:
    """Where the values of an object's members of that name lie. ``text`` is valid JSON."""
    depth, key, begin = 0, "", -1
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text, start):
        sign = token[0]
        if sign in {b"{", b"["}:
            depth += 1
        elif depth == 1 and sign == b":" and last is not None:
            key, begin = json.loads(text[last[0] : last[1]]), token.end()
        elif depth == 1 and sign in {b",", b"}"} and begin >= 0:
            if key == name:
                value = text[begin : token.start()]
                lead = len(value) - len(value.lstrip())
                yield begin + lead, begin + len(value.rstrip())
            begin = -1
        if sign in {b"}", b"]"}:
            depth -= 1
        if sign[:1] == b'"':
            last = token.span()
