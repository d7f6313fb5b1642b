"""Where the members of a JSON object lie in its text, found without decoding it.

Reads all that Python's own parser reads (``NaN``, any depth), and works in steps: the generators yield
``None`` every few milliseconds, so that their caller can let others go on (``at_leisure``), and raise
``TooManyStepsError`` for a text of more values than ``STEPS_MAX``. Strings are passed over at the speed of
memory, so a body of images costs next to nothing. What is not JSON at all raises ``MalformedError``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator
from typing import TypeVar

import msgspec

T = TypeVar("T")

STEPS_MAX = 1_000_000
"""Strings, lists and objects of one text; about a second of work, in steps."""
_PAUSE_STEPS = 4096
_SLICE = 256 * 1024
_SLICE_STEPS = 1024  # what searching a slice costs, in steps
_KEY_BYTES_MAX = 256  # longer keys are none that anybody asks for, however they are escaped

_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,\]}\"\[{ \t\n\r]*+")
_MARK = re.compile(rb'["\[\]{}]')
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
            name = _name(text[start:at])
            at = self._space(at)
            if text[at : at + 1] != b":":
                raise MalformedError
            value = self._space(at + 1)
            at = yield from self._value_end(value)
            yield BodyMember(name, start, value, at)
            at = self._space(at)
            sign = text[at : at + 1]
            if sign == b"}":
                return
            if sign != b",":
                raise MalformedError
            at = self._space(at + 1)

    def _space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        return at if found is None else found.end()

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
            found = _SCALAR.match(text, at)
            if found is None or found.end() == at:
                raise MalformedError
            return found.end()
        depth, size = 0, len(text)
        while at < size:
            mark = _MARK.search(text, at, at + _SLICE)
            if mark is None:
                at += _SLICE
                if self._step(_SLICE_STEPS):
                    yield
                continue
            if self._step():
                yield
            at = mark.end()
            sign = mark[0]
            if sign == b'"':
                at = yield from self._string_end(at - 1)
            elif sign in (b"[", b"{"):
                depth += 1
            else:
                depth -= 1
                if not depth:
                    return at
        raise MalformedError

    def _string_end(self, at: int) -> Generator[None, None, int]:
        """Behind the string whose opening quote is at ``at``."""
        text = self.text
        at += 1
        quote = text.find(b'"', at)
        if quote < 0:
            raise MalformedError
        if self._step((quote - at) // 4096):
            yield
        if text.find(b"\\", at, quote) < 0:
            return quote + 1
        while True:
            found = _STRING_PART.match(text, at, at + _SLICE)
            end = at if found is None else found.end()
            if text[end : end + 1] == b'"':
                return end + 1
            if end == at:
                raise MalformedError
            at = end
            if self._step(_SLICE_STEPS):
                yield


def _name(key: bytes) -> bytes:
    """The decoded key, ``b""`` for a long one."""
    if len(key) > _KEY_BYTES_MAX:
        return b""
    if b"\\" not in key:
        return bytes(key[1:-1])
    try:
        return str(json.loads(key.decode("utf-8", "surrogatepass"))).encode("utf-8", "surrogatepass")
    except ValueError:
        raise MalformedError from None


async def at_leisure(steps: Generator[None, None, T]) -> T:
    """The result of a generator that pauses; other tasks go on in its pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


def at_once(steps: Generator[None, None, T]) -> T:
    """The same without letting anybody else go on."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
