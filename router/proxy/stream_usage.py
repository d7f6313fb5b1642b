"""Usage of streams whose clients did not ask for it: the router asks, and takes the answer out again.

Engines report what a stream cost in an event of its own, before the end, if ``stream_options.include_usage``
says so (vLLM and SGLang; OpenAI's API). Tenants are billed by it, whatever their clients ask for. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, Final

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.members import with_first, with_value
from kvatlas.router.openai.numbers import lax_true
from kvatlas.router.proxy.events import blocks, data_of, ends_line_of

ASKED: Final = frozenset({CHAT, COMPLETION})
"""APIs with ``stream_options``; the others report usage unasked."""
_NAME: Final = b'"stream_options"'
_ASK: Final = b'{"include_usage":true}'
# How a letter of the name may be written too: in hexadecimal digits.
_LETTERS: Final = (b"\\u005", b"\\u006", b"\\u007")


class _AsksItselfError(Exception):
    """The client's own options ask for usage."""


class _Options(msgspec.Struct, gc=False):
    include_usage: Any = None


class _Event(msgspec.Struct, gc=False):
    choices: list[msgspec.Raw] | None = None
    usage: Any = None
    system_fingerprint: msgspec.Raw = msgspec.Raw(b"")


_OPTIONS: Final = msgspec.json.Decoder(_Options)
_EVENT: Final = msgspec.json.Decoder(_Event)


def with_usage(body: bytes) -> Generator[None, None, bytes]:
    """Steps to the body of a stream that asks for usage; the same object if its client asks already: if the
    last of its own members of this name, which engines read, says so. Any other one is replaced."""
    if body.find(_NAME) < 0 and all(body.find(letter) < 0 for letter in _LETTERS):
        return (yield from with_first(body, b"stream_options", _ASK))
    try:
        return (yield from with_value(body, b"stream_options", _asking, adds=True))
    except _AsksItselfError:
        return body


def _asking(own: bytes) -> msgspec.Raw:
    try:
        asks = lax_true(_OPTIONS.decode(own).include_usage)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        asks = False
    if asks:
        raise _AsksItselfError
    return msgspec.Raw(_ASK)


class UsageFilter:
    """Takes the event of the usage out of one stream that was asked for it.

    Engines that are not asked name their fingerprint in the last event of each answer instead (vLLM 0.32), so
    these wait for the usage, which follows at once. Several answers may end in another order than they came.
    """

    __slots__ = ("_ended", "_last")

    def __init__(self) -> None:
        self._ended: list[bytes] = []
        # The last event, if it was not passed on: the end of its line may come with the next piece.
        self._last = b""

    def feed(self, data: bytes) -> bytes:
        """The events to be passed on now, of whole ones."""
        passed: list[bytes] = []
        for block in blocks(data):
            last, self._last = self._last, b""
            if ends_line_of(block, last):
                if self._ended:
                    self._ended[-1] += block
                continue
            value = data_of(block)
            if (
                value is not None
                and block.find(b'"usage"') >= 0
                and (found := _usage_alone(value)) is not None
            ):
                passed.append(self.rest(found))
                self._last = block
            elif value is not None and _FINISHED.search(value) is not None:
                self._ended.append(block)
                self._last = block
            elif value is not None and value.strip() == b"[DONE]":
                passed += (self.rest(), block)
            else:
                passed.append(block)
        return b"".join(passed)

    def rest(self, fingerprint: bytes = b"") -> bytes:
        """The events that waited."""
        ended, self._ended = self._ended, []
        return b"".join([_with_fingerprint(block, fingerprint) for block in ended])


_FINISHED: Final = re.compile(rb'"finish_reason":[ ]?"')


def _usage_alone(data: bytes) -> bytes | None:
    """The fingerprint in an event that says nothing but the usage, empty if it has none; None: it is no such
    event."""
    try:
        event = _EVENT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if event.choices != [] or event.usage is None:
        return None
    return bytes(event.system_fingerprint)


def _with_fingerprint(block: bytes, fingerprint: bytes) -> bytes:
    end = block.rfind(b"}")
    if not fingerprint.startswith(b'"') or end < 0 or block.find(b'"system_fingerprint"') >= 0:
        return block
    return b'%b,"system_fingerprint":%b%b' % (block[:end], fingerprint, block[end:])
