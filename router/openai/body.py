"""A first look at a request body: what the proxy needs of it, without decoding the messages.

``peek`` reads ``model`` and ``stream`` only, and whether there is anything to be kept from engines;
everything else of the JSON is skipped by the parser. It is as lenient as the engine: fields of the wrong
type are left for the engine to reject, and what only Python's own JSON parser accepts (NaN, UTF-16) passes.
A body that is no JSON object at all is refused.

Invariants: the event loop is held for some 3 ms per megabyte at most and 15 ms in all: larger bodies
are scanned in a thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvatlas.router.openai.errors import ApiError, bad_request
from kvatlas.router.openai.guarded import GUARDED
from kvatlas.router.openai.numbers import lax_true, whole_number
from kvatlas.router.openai.request import Session
from kvatlas.router.openai.sessions import SESSION_MEMBERS, session_in_body

_WINDOW_BYTES: Final = 1 << 18
# Longer values are cut: no model has such a name.
_VALUE_BYTES_MAX: Final = 4096
# Keys and short values of the object itself that are written with escapes: clients write a few.
_ESCAPED_MAX: Final = 10_000
# No key that is searched for is longer: at most 40 letters, six bytes each if escaped.
_ESCAPED_BYTES_MAX: Final = 256
_SPACES: Final = b" \t\n\r"
# White space behind a string that is skipped for all strings at once.
_SPACES_SKIPPED: Final = 64
_BACKSLASH: Final = b"\\"
_QUOTE: Final = 1
_OPENS: Final = 2
_CLOSES: Final = 3
_STRUCTURE: Final = {ord('"'): _QUOTE, **dict.fromkeys(b"[{", _OPENS), **dict.fromkeys(b"]}", _CLOSES)}
# Structural meaning of each byte outside of strings.
_KINDS: Final = bytes(_STRUCTURE.get(byte, 0) for byte in range(256))
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
    """State carried between windows: whether one ends inside a string, and how deep."""

    in_string: bool = False
    depth: int = 0
    closed_at: int | None = None
    """Where the object ends."""


def top_level(body: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """The raw values of these members, of lists and objects the first byte; of equal keys, the last one's.

    Raises ``OutlineError``.

    Chosen members of a large JSON object, without decoding it: one pass over its brackets and quotes.

    A parser holds the GIL from a body's first byte to its last. Here the body is gone through in windows with
    numpy, so that a thread can do it beside the event loop. Strings are found by counting quotes, what is
    nested by counting brackets; both are carried from window to window. Only the outline is checked (one
    object, closed): the rest is the engine's to judge. Keys that are written with escapes are decoded, a
    bounded number of them.

    Measured on one shared core: 1 ms per megabyte of text, 10 ms per megabyte of empty lists.
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
        ends = _last_keys(body, whole, strings, names)
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


def _last_keys(
    body: bytes, whole: npt.NDArray[np.uint8], strings: Positions, names: Sequence[str]
) -> dict[str, int]:
    """Where the last key of each name ends, of the strings that begin at these positions."""
    found: dict[str, int] = {}
    strings = strings[strings < len(whole) - 1]
    letters = whole[strings + 1]
    # Many names share few first letters: each is looked for once.
    begin = {letter: strings[letters == letter] for letter in {ord(name[0]) for name in names}}
    for name in names:
        key, at = f'"{name}"'.encode(), begin[ord(name[0])]
        if not len(at) or not len(at := _equal(whole, at, key)):
            continue
        end = _last_key(body, whole, at + len(key))
        if end is not None:
            found[name] = end
    return found


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


_REASON_LENGTH_MAX = 200
# Above this size a body is only read by the fast parser: the slow one would hold the event loop.
_LENIENT_BYTES_MAX = 1 << 20
# Above this size even skipping holds the loop for too long: up to 4 ms per megabyte of empty lists.
_INLINE_BYTES_MAX: Final = 4 << 20


class Peek(msgspec.Struct, frozen=True, gc=False):
    """The model a request names (None: not named) and whether its answer is to be streamed."""

    model: str | None = None
    stream: bool = False
    guarded: bool = False
    """It has a field that ``kvatlas.router.proxy.screen`` looks into."""
    previous_response: str | None = None
    """The response that it goes on from (Responses API)."""
    request_id: str | None = None
    """The id that its own response is to get (vLLM's Responses API)."""
    priority: int | None = None
    """The whole number that it has there, for engines that schedule by it."""
    prioritized: bool = False
    """It has something there, which an engine may take for a number."""
    prompt: object | None = None
    """Parts of its prompt, where they were decoded with the rest."""
    session: Session | None = None
    """The session that its body names."""


_ABSENT = msgspec.Raw(b"null")
_SEEN = ("model", "stream", "previous_response_id", "priority", "request_id")
_ALL_SEEN = (*_SEEN, *SESSION_MEMBERS, *GUARDED)


class _Peek(msgspec.Struct, gc=False):
    """All stay raw: whatever else a client puts there is not worth decoding."""

    model: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT
    request_id: msgspec.Raw = _ABSENT
    priority: msgspec.Raw = _ABSENT
    session_id: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT


class _Metadata(msgspec.Struct, gc=False):
    user_id: msgspec.Raw = _ABSENT


_METADATA = msgspec.json.Decoder(_Metadata)
_PEEK = msgspec.json.Decoder(
    msgspec.defstruct(
        "_GuardedPeek",
        [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in GUARDED],
        bases=(_Peek,),
        gc=False,
    )
)
_UNGUARDED: Final = (msgspec.UNSET,) * len(GUARDED)
_TEXT = msgspec.json.Decoder(str)


async def peek_any_size(body: bytes) -> Peek:
    """``peek`` for what clients send: a large body is looked at in a thread."""
    if len(body) <= _INLINE_BYTES_MAX:
        return peek(body)
    try:
        found = await asyncio.to_thread(top_level, body, _ALL_SEEN)
    except OutlineError as error:
        raise invalid_json(error) from None
    guarded = not found.keys().isdisjoint(GUARDED)
    session = named_session(*(found.get(name, b"") for name in SESSION_MEMBERS))
    return _read(*(found.get(name, b"") for name in _SEEN), guarded=guarded, session=session)


def peek(body: bytes) -> Peek:
    """Model and stream of a JSON body. Raises ``ApiError`` 400 ``invalid_json`` if it is no JSON object."""
    try:
        seen = cast(_Peek, _PEEK.decode(body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        found = decode_leniently(body, error)
        return Peek(
            _plain_text(found.get("model")),
            lax_true(found.get("stream")),
            not found.keys().isdisjoint(GUARDED),
            _plain_text(found.get("previous_response_id")),
            _plain_text(found.get("request_id")),
            _whole(found.get("priority")),
            found.get("priority") is not None,
            session=_session_of(found),
        )
    guarded = msgspec.structs.astuple(seen)[-len(GUARDED) :] != _UNGUARDED
    rest = (seen.previous_response_id, seen.priority, seen.request_id)
    others = (b"" if raw is _ABSENT else bytes(raw) for raw in rest)
    session = None
    if not seen.session_id is seen.metadata is seen.prompt_cache_key is _ABSENT:
        session = named_session(bytes(seen.session_id), bytes(seen.prompt_cache_key), bytes(seen.metadata))
    return _read(bytes(seen.model), bytes(seen.stream), *others, guarded=guarded, session=session)


def _plain_text(value: Any) -> str | None:
    """Half a surrogate pair is a string in Python and text nowhere else."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


_CACHE_CONTROL: Final = re.compile(rb'"cache_control"[ \t\r\n]*:[ \t\r\n]*\{([^{}]{0,256})\}')
_HOUR: Final = re.compile(rb'"ttl"[ \t\r\n]*:[ \t\r\n]*"1h"')


def cache_control_s(body: bytes) -> float:
    """Seconds for which a request of the Messages API asks to keep its prompt; 0: it does not.

    The longest of its ``cache_control`` members: 5 minutes, or 1 hour with ``"ttl": "1h"`` (Anthropic's
    prompt caching). Quotes within texts are escaped, so that no text looks like a member. A large body is not
    searched.
    """
    found = 0.0
    if len(body) <= _INLINE_BYTES_MAX:
        for match in _CACHE_CONTROL.finditer(body):
            if _HOUR.search(match[1]):
                return 3600.0
            found = 300.0
    return found


def named_session(session_id: bytes, cache_key: bytes, metadata: bytes = b"") -> Session | None:
    """The session named by the raw values of these members. A value that cannot be read names none: engines
    judge it."""
    user_id = b""
    if b"session" in metadata:
        with suppress(msgspec.MsgspecError, RecursionError):
            user_id = bytes(_METADATA.decode(metadata).user_id)
    return session_in_body(*map(_lenient_text, (session_id, user_id, cache_key)))


def _session_of(found: dict[str, Any]) -> Session | None:
    metadata, (own, cache_key) = found.get("metadata"), map(found.get, SESSION_MEMBERS)
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    return session_in_body(*map(_plain_text, (own, user_id, cache_key)))


def _lenient_text(raw: bytes) -> str | None:
    try:
        return _text(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _read(
    model: bytes,
    stream: bytes,
    previous: bytes,
    priority: bytes,
    request_id: bytes,
    *,
    guarded: bool,
    session: Session | None,
) -> Peek:
    try:
        name, earlier, own = map(_text, (model, previous, request_id))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid_json(error) from None
    number = None if priority == b"" else whole_number(priority, "priority")
    prioritized = priority not in (b"", b"null")
    return Peek(name, _is_true(stream), guarded, earlier, own, number, prioritized, session=session)


def _text(raw: bytes) -> str | None:
    return _TEXT.decode(raw) if raw.startswith(b'"') else None


def _is_true(raw: bytes) -> bool:
    if raw in (b"true", b"false", b"null", b""):
        return raw == b"true"
    try:
        return lax_true(msgspec.json.decode(raw))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _whole(value: Any) -> int | None:
    return whole_number(str(value).encode(), "priority") if type(value) is int else None


def decode_leniently(body: bytes, first_error: Exception) -> dict[str, Any]:
    """The object in a body the fast parser refused. Raises ``ApiError`` if Python's refuses it too."""
    try:
        found = json.loads(body) if len(body) <= _LENIENT_BYTES_MAX else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    raise invalid_json(first_error) from None


def invalid_json(error: Exception) -> ApiError:
    """400 ``invalid_json``, with the parser's reason and what to send instead."""
    reason = str(error)[:_REASON_LENGTH_MAX]
    return bad_request(
        "invalid_json",
        f"The request body is not a JSON object: {reason}. "
        "Send one UTF-8 encoded JSON object with content-type application/json.",
    )
