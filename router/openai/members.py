"""Where the members of a JSON object lie in its text, found without decoding it.

Reads all that Python's own parser reads (``NaN``, any depth), and works in steps: the generators yield
``None`` every few milliseconds, so that their caller can let others go on (``run_cooperatively``), and raise
``TooManyStepsError`` for a text that takes more than ``STEPS_MAX``. Strings are passed over at the speed of
memory, so a body of images costs next to nothing. What is not JSON at all raises ``MalformedError``.

Invariants: between two pauses lie 15 ms of work at most, and one look at a text of any size takes less than
half a second in all, whatever stands in it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

T = TypeVar("T")

# Steps of one search of a text. A step takes about 0.35 us (measured on one core of 2.5 GHz). A bracket of a
# nested value is one step; other work is scored by the constants below.
STEPS_MAX = 1_000_000
_PAUSE_STEPS = 4096
_MEMBER_STEPS = 8
_DECODED_STEPS = 8  # of a text with escapes
# A step for each 256 bytes that a pattern goes through.
_BYTES_SHIFT = 8
# And for each 4 KiB that memchr does.
_FOUND_SHIFT = 12
# For each eight strings without escapes.
_QUOTES_SHIFT = 4
_ESCAPES_SHIFT = 4  # for each 16 backslashes
_SLICE = 256 * 1024
# Of white space, or of a number: no client writes more.
_RUN_BYTES_MAX = 1 << 20
_COPIED_BYTES = 4 << 20
_HINT_WINDOW_BYTES = 1 << 20
_DECODED_BYTES_MAX = 64 * 1024
# Longer keys are none that anybody asks for, however they are escaped.
_KEY_BYTES_MAX = 256

_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,\]}\"\[{ \t\n\r]*+")
_FLAT = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+")*+')
_STRING_PART = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class MalformedError(ValueError):
    """The text is no JSON object."""


class TooManyStepsError(ValueError):
    """The text has more values than are looked at."""


class BodyMember(msgspec.Struct, gc=False):
    """``start`` is the key's first byte, ``value`` the value's, ``end`` behind its last."""

    name: bytes
    """Decoded; empty for a key too long to be asked for."""
    start: int
    value: int
    end: int


class Scan:
    """One text (bytes, or a bytearray) that is looked through; counts the steps."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._steps = 0
        self._pause_at = _PAUSE_STEPS

    def start(self) -> int | None:
        """Where the object begins; None: the text is something else. A byte-order mark is skipped."""
        text = self.text
        at = self._space(3 if text[:3] == b"\xef\xbb\xbf" else 0)
        return at if text[at : at + 1] == b"{" else None

    def members(self, at: int) -> Generator[BodyMember | None, None, None]:
        """The members of the object at ``at``, in order, as often as they occur."""
        text = self.text
        at = self._space(at + 1)
        if text[at : at + 1] == b"}":
            return
        while True:
            start = at
            if text[at : at + 1] != b'"':
                raise MalformedError
            at = yield from self._string_end(at)
            name = self._name(start, at)
            at = self._space(at)
            if text[at : at + 1] != b":":
                raise MalformedError
            value = self._space(at + 1)
            at = yield from self._value_end(value)
            if self._step(_MEMBER_STEPS):
                yield None
            yield BodyMember(name, start, value, at)
            at = self._space(at)
            sign = text[at : at + 1]
            if sign == b"}":
                return
            if sign != b",":
                raise MalformedError
            at = self._space(at + 1)

    def objects(self) -> Generator[list[BodyMember] | None, None, None]:
        """The members of every object in the text, outer ones before those within them."""
        start = self.start()
        todo = [] if start is None else [start]
        while todo:
            at, found = todo.pop(), []
            in_list = self.text[at : at + 1] == b"["
            for member in self.items(at) if in_list else self.members(at):
                if member is None:
                    yield None
                    continue
                found.append(member)
                if self.text[member.value : member.value + 1] in (b"[", b"{"):
                    todo.append(member.value)
            if not in_list:
                yield found

    def items(self, at: int) -> Generator[BodyMember | None, None, None]:
        """The items of the list at ``at``, without names."""
        text = self.text
        at = self._space(at + 1)
        while text[at : at + 1] != b"]":
            value = at
            at = yield from self._value_end(value)
            if self._step():
                yield None
            yield BodyMember(b"", value, value, at)
            at = self._space(at)
            sign = text[at : at + 1]
            if sign not in (b",", b"]"):
                raise MalformedError
            at = self._space(at + (sign == b","))

    def decoded(self, member: BodyMember) -> bytes:
        """The text that is this member's value. Raises ``MalformedError``, and ``TooManyStepsError`` where it
        is longer than any that is looked into."""
        if member.end - member.value > _DECODED_BYTES_MAX:
            raise TooManyStepsError
        return self._decoded(self.text[member.value : member.end])

    def _name(self, start: int, end: int) -> bytes:
        """The decoded key, ``b""`` for a long one."""
        return b"" if end - start > _KEY_BYTES_MAX else self._decoded(self.text[start:end])

    def _decoded(self, quoted: bytes) -> bytes:
        if b"\\" not in quoted:
            return bytes(quoted[1:-1])
        self._steps += _DECODED_STEPS + (len(quoted) >> _ESCAPES_SHIFT)
        try:
            return str(json.loads(quoted.decode("utf-8", "surrogatepass"))).encode("utf-8", "surrogatepass")
        except ValueError:
            raise MalformedError from None

    def _space(self, at: int) -> int:
        return self._run_end(_SPACE, at)

    def _run_end(self, run: re.Pattern[bytes], at: int) -> int:
        """Behind the white space, or the number, at ``at``: the pattern matches any bytes of it."""
        found = run.match(self.text, at, at + _RUN_BYTES_MAX)
        if found is None or (end := found.end()) == at:
            return at
        if end - at >= _RUN_BYTES_MAX:
            raise TooManyStepsError
        self._steps += (end - at) >> _BYTES_SHIFT
        return end

    def _step(self, steps: int = 1) -> bool:
        """Count; True when it is time for a pause."""
        self._steps += steps
        if self._steps < self._pause_at:
            return False
        self._pause_at = self._steps + _PAUSE_STEPS
        if self._steps > STEPS_MAX:
            raise TooManyStepsError
        return True

    def _value_end(self, at: int) -> Generator[None, None, int]:
        text = self.text
        first = text[at : at + 1]
        if first == b'"':
            return (yield from self._string_end(at))
        if first not in (b"[", b"{"):
            end = self._run_end(_SCALAR, at)
            if end == at:
                raise MalformedError
            return end
        depth, size = 0, len(text)
        while at < size:
            sign = text[at : at + 1]
            if sign in (b"[", b"{"):
                depth += 1
                at += 1
            elif sign in (b"]", b"}"):
                depth -= 1
                at += 1
                if not depth:
                    return at
            elif sign == b'"':
                # It has escapes, or goes on behind the slice.
                at = yield from self._string_end(at)
            found = _FLAT.match(text, at, at + _SLICE)
            end = at if found is None else found.end()
            strings = text.count(b'"', at, end) >> _QUOTES_SHIFT if end - at > 1 else 0
            if self._step(1 + ((end - at) >> _BYTES_SHIFT) + strings):
                yield
            at = end
        raise MalformedError

    def _string_end(self, at: int) -> Generator[None, None, int]:
        """Behind the string whose opening quote is at ``at``."""
        text = self.text
        at += 1
        quote = text.find(b'"', at)
        if quote < 0:
            raise MalformedError
        if self._step(1 + ((quote - at) >> _FOUND_SHIFT)):
            yield
        if text.find(b"\\", at, quote) < 0:
            return quote + 1
        while True:
            found = _STRING_PART.match(text, at, at + _SLICE)
            end = at if found is None else found.end()
            escapes = text.count(b"\\", at, end)
            if self._step(2 + ((end - at) >> _BYTES_SHIFT) + (escapes >> _ESCAPES_SHIFT)):
                yield
            if text[end : end + 1] == b'"':
                return end + 1
            if end == at:
                raise MalformedError
            at = end


def has_any(text: bytes, needles: Sequence[bytes]) -> Generator[None, None, bool]:
    """Steps to whether one of these, each shorter than 64 bytes, is somewhere in the text."""
    for start in range(0, len(text), _HINT_WINDOW_BYTES):
        end = start + _HINT_WINDOW_BYTES + 64
        if any(text.find(needle, start, end) >= 0 for needle in needles):
            return True
        yield
    return False


def with_value(
    body: bytes,
    name: bytes,
    value: str | int | msgspec.Raw | Callable[[bytes], str | msgspec.Raw],
    *,
    adds: bool = False,
) -> Generator[None, None, bytes]:
    """Steps to the body with this value of a member of its own: of the last one, which is what engines read.

    ``value`` may be made of the JSON value that is there (empty: none). ``adds``: also where there is none.
    Returns the same object where the text is no JSON object, or the member is absent.
    """
    scan = Scan(body)
    start = scan.start()
    found, empty = None, True
    try:
        for member in scan.members(start) if start is not None else ():
            empty = False
            if member is None:
                yield
            elif member.name == name:
                found = member
    except MalformedError:
        return body
    if start is None or (found is None and not adds):
        return body
    if callable(value):
        value = value(b"" if found is None else bytes(body[found.value : found.end]))
    view, text = memoryview(body), msgspec.json.encode(value)
    if found is not None:
        return (yield from joined((view[: found.value], text, view[found.end :])))
    comma = b"" if empty else b","
    return (yield from joined((view[: start + 1], b'"%b":%b%b' % (name, text, comma), view[start + 1 :])))


_FIRST_MEMBER = re.compile(rb'(?:\xef\xbb\xbf)?[ \t\n\r]*+\{(?=[ \t\n\r]*+")')


def with_first(body: bytes, name: bytes, value: bytes) -> Generator[None, None, bytes]:
    """Steps to the body with a member, which it must not have, before its others; ``value`` is JSON.

    Returns the same object where the text is no JSON object with members.
    """
    begin, rest = before_others(body, name, value)
    return (yield from joined((begin, rest))) if begin else body


def before_others(body: bytes, name: bytes, value: bytes) -> tuple[bytes, bytes | memoryview]:
    """The body with a member before its others, in two parts of which the second is not copied; the first is
    empty, and the second the same object, where the text is no JSON object with members."""
    start = _FIRST_MEMBER.match(body, 0, _RUN_BYTES_MAX)
    if start is None:
        return b"", body
    at = start.end()
    return b'%b"%b":%b,' % (bytes(body[:at]), name, value), memoryview(body)[at:]


def joined(pieces: Sequence[bytes | memoryview]) -> Generator[None, None, bytes]:
    """Steps to all pieces in one; a large one is a bytearray."""
    if sum(map(len, pieces)) <= _COPIED_BYTES:
        return b"".join(pieces)
    # Made in its whole size it would be cleared first, in one hold.
    out, paused_at = bytearray(), 0
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _COPIED_BYTES):
            out += view[start : start + _COPIED_BYTES]
            if len(out) - paused_at >= _COPIED_BYTES:
                paused_at = len(out)
                yield
    return cast(bytes, out)


async def run_cooperatively(steps: Generator[None, None, T]) -> T:
    """The result of a generator that pauses; other tasks go on in its pauses, and of all that pause one goes
    on in each turn of the loop: many at a time hold it no longer than one.
    """
    try:
        next(steps)
        loop = asyncio.get_running_loop()
        turn = _TURNS.get(loop) or _TURNS.setdefault(loop, asyncio.Lock())
        while True:
            async with turn:
                await asyncio.sleep(0)
                next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def at_once(steps: Generator[None, None, T]) -> T:
    """The same without letting anybody else go on."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
