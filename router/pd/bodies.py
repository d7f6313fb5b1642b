"""The bodies of both requests, cut out of the client's: every other byte stays, and nothing is encoded again.

The prefill engine is asked for one token and no stream, so the values of the fields that say otherwise are
replaced where they stand, each time they occur; the decode engine gets the client's own body with the
parameters put in front. Which requests stay whole is read on the way.

Fields are found by the fast JSON parser, and their places by the text; the parser then tells whether these
were the right ones. Where they were not (a key that also occurs elsewhere, or is written with escapes), and
in large bodies, the text is looked through (``members``).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any, Final

import msgspec

from router.openai.apis import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from router.openai.members import MalformedError, Scan

_LENGTHS: Final = {
    CHAT: b"max_tokens",
    COMPLETION: b"max_tokens",
    MESSAGES: b"max_tokens",
    RESPONSES: b"max_output_tokens",
    GENERATE: b"",
}
"""The field of each API that bounds the answer; in ``sampling_params`` where it is empty."""
_REPLACED: Final = {
    b"stream": b"false",
    b"stream_options": b"null",
    b"max_tokens": b"1",
    b"max_completion_tokens": b"1",
    b"max_output_tokens": b"1",
    b"min_tokens": b"0",
    b"store": b"false",
}
_ABSENT: Final = frozenset({b"null", b""})
_MUST_BE: Final = {
    b"n": _ABSENT | {b"1"},
    b"best_of": _ABSENT | {b"1"},
    b"use_beam_search": _ABSENT | {b"false"},
    b"prompt_logprobs": _ABSENT,
    b"background": _ABSENT | {b"false"},
    b"kv_transfer_params": frozenset({b""}),
}
"""Values with which a request may go to two engines; with any other one it stays whole, for this field."""
_WANTED: Final = _REPLACED.keys() | _MUST_BE.keys()
_SAMPLING: Final = b"sampling_params"
_SCANNED_BYTES: Final = 1 << 20
_NEAR_BYTES: Final = 1024
WHOLE_REASONS: Final = (*(name.decode() for name in _MUST_BE), "api", "body")

_Spans = dict[bytes, list[tuple[int, int]]]
_Fields = msgspec.defstruct(
    "_Fields",
    [(name.decode(), msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in sorted(_WANTED)],
    gc=False,
)
_NAMES: Final = tuple(sorted(_WANTED))
_DECODER: Final = msgspec.json.Decoder(_Fields)
_MEMBER: Final = {name: re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*' % name) for name in _WANTED}
_END: Final = re.compile(rb"[ \t\r\n]*\}")
_START: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")


class SplitBody(msgspec.Struct, frozen=True):
    """A client's body, and where it is to be changed. ``whole``: why it is for one engine; "": it is not."""

    text: bytes
    whole: str = ""
    start: int = 0
    """Behind the object's opening brace."""
    lengths_at: int = 0
    """Where the field that bounds the answer goes, if there is none."""
    missing: bytes = b""
    """Name of that field; empty where there is one."""
    edits: tuple[tuple[int, int, bytes], ...] = ()
    """Start, end and new text, in order."""

    def prefill(self, asks: bytes) -> bytes:
        """For the prefill engine, with these ``kv_transfer_params``."""
        edits: Sequence[tuple[int, int, bytes]] = self.edits
        if self.missing:
            comma = b"" if _END.match(self.text, self.lengths_at) else b","
            edits = sorted([*edits, (self.lengths_at, self.lengths_at, b'"%b":1%b' % (self.missing, comma))])
        view, done = memoryview(self.text), self.start
        pieces: list[bytes | memoryview] = [view[:done], b'"kv_transfer_params":%b,' % asks]
        for start, end, new in edits:
            pieces += (view[done:start], new)
            done = end
        pieces.append(view[done:])
        return b"".join(pieces)

    def decode(self, params: bytes) -> bytes:
        """For the decode engine, with what the prefill engine handed over."""
        view = memoryview(self.text)
        return b"".join((view[: self.start], b'"kv_transfer_params":%b,' % params, view[self.start :]))


def split_body(path: str, body: bytes) -> Generator[None, None, SplitBody]:
    """Steps (see ``members``) to what both engines would get of a request of this API."""
    length = _LENGTHS.get(path)
    if length is None:
        return SplitBody(body, "api")
    if length and len(body) <= _SCANNED_BYTES:
        found = _quick(body, length)
        if found is not None:
            return found
    try:
        return (yield from _scanned(body, length))
    except MalformedError:
        return SplitBody(body, "body")


def _quick(body: bytes, length: bytes) -> SplitBody | None:
    """None: it is not certain where everything is."""
    start = _START.match(body)
    fields = _decoded(body)
    if start is None or fields is None:
        return None
    for name, allowed in _MUST_BE.items():
        if fields.get(name, b"") not in allowed:
            return SplitBody(body, name.decode())
    spans: _Spans = {}
    for name in _REPLACED.keys() & fields.keys():
        value, place = fields[name], _place(body, name)
        if not body.startswith(value, place):
            return None
        spans[name] = [(place, place + len(value))]
    found = _made(body, start.end(), spans, length, start.end())
    after = _decoded(found.prefill(b"{}"))
    right = after is not None and all(after.get(name) == _REPLACED[name] for name in (*spans, length))
    return found if right else None


def _place(body: bytes, name: bytes) -> int:
    """Where the value of a member of this name begins, at whatever depth: most clients send such fields
    before their texts or behind them."""
    quoted = b'"%b"' % name
    first = body.find(quoted, 0, _NEAR_BYTES)
    member = _MEMBER[name].match(body, first if first >= 0 else max(0, body.rfind(quoted)))
    return -1 if member is None else member.end()


def _decoded(body: bytes) -> dict[bytes, bytes] | None:
    try:
        fields: Any = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found: dict[bytes, bytes] = {}
    for name, value in zip(_NAMES, msgspec.structs.astuple(fields), strict=True):
        if value is not msgspec.UNSET:
            found[name] = bytes(value)
    return found


def _scanned(body: bytes, length: bytes) -> Generator[None, None, SplitBody]:
    scan = Scan(body)
    start = scan.start()
    if start is None:
        return SplitBody(body, "body")
    spans: _Spans = {}
    inner = -1
    for member in scan.members(start):
        if member is None:
            yield
        elif member.name == _SAMPLING and not length:
            inner = member.value
        elif member.name in _WANTED:
            spans.setdefault(member.name, []).append((member.value, member.end))
    if length:
        return _made(body, start + 1, spans, length, start + 1)
    if inner < 0 or body[inner : inner + 1] != b"{":
        return SplitBody(body, "body")
    for member in scan.members(inner):
        if member is None:
            yield
        elif member.name in _WANTED:
            spans.setdefault(member.name, []).append((member.value, member.end))
    return _made(body, start + 1, spans, b"max_tokens", inner + 1)


def _made(body: bytes, start: int, spans: _Spans, length: bytes, lengths_at: int) -> SplitBody:
    edits: list[tuple[int, int, bytes]] = []
    whole: list[bytes] = []
    for name, places in spans.items():
        new = _REPLACED.get(name)
        for at, end in places:
            if new is not None:
                edits.append((at, end, new))
            elif bytes(body[at:end]) not in _MUST_BE[name]:
                whole.append(name)
    if whole:
        return SplitBody(body, next(name for name in _MUST_BE if name in whole).decode())
    missing = b"" if length in spans else length
    return SplitBody(body, "", start, lengths_at, missing, tuple(sorted(edits)))
