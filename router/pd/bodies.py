"""Derive both requests' bodies from the client's body by edits in place: all other bytes stay.

The prefill engine gets a request for one token without a stream: the values of conflicting fields are
replaced at each occurrence. The decode engine gets the client's body with the transfer parameters inserted at
the start. ``SplitBody.whole`` is the only rule for which requests stay on one engine, in the router, the
endpoint picker.

The fast JSON parser finds the fields and a text search finds their positions; the parser then confirms the
positions. If they are wrong (a key that also occurs elsewhere, or is written with escapes), and in large
bodies, the text is scanned (``members``). A chat's messages have been read already and are skipped: the rest
of the body is small and mostly equal from one request to the next, so its analysis is cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from kvatlas.router.openai.apis import CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.members import MalformedError, Scan, at_once, joined

# Field of each API that bounds the answer; "": the one in ``sampling_params``.
_LENGTHS: Final = {
    CHAT: b"max_tokens",
    COMPLETION: b"max_tokens",
    MESSAGES: b"max_tokens",
    RESPONSES: b"max_output_tokens",
    GENERATE: b"",
}
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
# Values with which a request may be split; with any other value it stays on one engine, and this field is
# the reason.
_MUST_BE: Final = {
    b"n": _ABSENT | {b"1"},
    b"best_of": _ABSENT | {b"1"},
    b"use_beam_search": _ABSENT | {b"false"},
    b"prompt_logprobs": _ABSENT,
    b"background": _ABSENT | {b"false"},
    b"kv_transfer_params": frozenset({b""}),
    b"previous_response_id": _ABSENT,
    b"prompt_embeds": _ABSENT,
    b"echo": _ABSENT | {b"false"},
}
# Types of tools that the client runs (vllm/entrypoints/openai/responses/utils.py, 0.32). After a tool that
# vLLM runs, the next turn reuses the sampling parameters of the first one, ``kv_transfer_params`` included
# (serving.py), and would fetch the blocks of the first prompt again.
_OWN_TOOLS: Final = frozenset({"function", "custom", "namespace"})
_SAMPLING: Final = b"sampling_params"
_SCANNED_BYTES: Final = 1 << 20
# Size of a body without its messages; larger ones are not cached.
_REST_BYTES_MAX: Final = 2048
_NEAR_BYTES: Final = 1024

_Edit = tuple[int, int, bytes]
# Name, start and end of a value.
_Found = tuple[bytes, int, int]
_Bound = tuple[bytes, _Edit]
_UNSAID: Final = msgspec.Raw(b"")
_NAMES: Final = (*_MUST_BE, *_REPLACED, b"prompt", b"tools")
_Fields = msgspec.defstruct("_Fields", [(name.decode(), msgspec.Raw, _UNSAID) for name in _NAMES], gc=False)
_DECODER: Final = msgspec.json.Decoder(_Fields)
# Fields of a request that sets none of the fields that decide about splitting.
_FREE: Final = (_UNSAID,) * len(_MUST_BE)
_AT: Final = {name: place for place, name in enumerate(_NAMES)}
_EDITED: Final = tuple((_AT[name], name, new, msgspec.Raw(new)) for name, new in _REPLACED.items())
_ONE, _NO_PARAMS = msgspec.Raw(b"1"), msgspec.Raw(b"{}")
_MEMBER: Final = {
    name: re.compile(rb'"%b"[ \t\r\n]*:[ \t\r\n]*' % name) for name in (*_REPLACED, b"messages")
}
_END: Final = re.compile(rb"[ \t\r\n]*\}")
_START: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")


class SplitBody(msgspec.Struct, frozen=True, gc=False):
    """A client's body and its edits. ``whole``: why it stays on one engine; "" if it may be split."""

    text: bytes
    whole: str = ""
    start: int = 0
    """Position after the object's opening brace."""
    edits: tuple[_Edit, ...] = ()
    """Start, end and new text, in order."""

    def prefill(self, params: bytes, hint: bytes = b"") -> Generator[None, None, bytes]:
        """Steps to the prefill engine's body, with these ``kv_transfer_params`` and this retention hint."""
        view, done = memoryview(self.text), self.start
        pieces: list[bytes | memoryview] = [view[:done], _member(params, hint)]
        for start, end, new in self.edits:
            pieces += (view[done:start], new)
            done = end
        pieces.append(view[done:])
        return joined(pieces)

    def decode(self, params: bytes, hint: bytes = b"") -> Generator[None, None, bytes]:
        """Steps to the decode engine's body, with the parameters that the prefill engine returned."""
        view = memoryview(self.text)
        return joined((view[: self.start], _member(params, hint), view[self.start :]))


def hint_params(hint: bytes) -> bytes:
    """Return ``kv_transfer_params`` that hold a retention hint alone."""
    return b'{"retention_hint":%b}' % hint


def _member(params: bytes, hint: bytes) -> bytes:
    # Behind the others: of two members with one name, parsers take the last.
    if hint:
        params = b"%b,%b" % (params[:-1], hint_params(hint)[1:])
    return b'"kv_transfer_params":%b,' % params


def split_body(
    path: str, body: bytes, messages: Sequence[msgspec.Raw] = ()
) -> Generator[None, None, SplitBody]:
    """Steps to the edits of a request of this API, run by ``members``. ``messages``: a chat's messages as
    they stand in its body, if known."""
    length = _LENGTHS.get(path)
    if length is None:
        return SplitBody(body, "api")
    if length and len(body) <= _SCANNED_BYTES:
        found = (messages and _around(body, messages, length)) or _quick(body, length, path)
        if found:
            return found
    try:
        return (yield from _scanned(body, length, path))
    except MalformedError:
        return SplitBody(body, "body")


def _around(body: bytes, messages: Sequence[msgspec.Raw], length: bytes) -> SplitBody | None:
    """Analyse the body without its messages. None: it is not certain that they stand there, separated by
    single commas. Replacing them by values of a list keeps the nesting depth of the rest."""
    start = _place(body, b"messages") + 1
    if not start or body[start - 1 : start] != b"[":
        return None
    first = start + len(memoryview(messages[0]))
    cut = (b", " if body[first : first + 2] == b", " else b",").join(messages)
    if not body.startswith(cut, start):
        return None
    rest, size = body[:start] + body[start + len(cut) :], len(cut)
    found = _remembered(rest, length) if len(rest) <= _REST_BYTES_MAX else _quick(rest, length, CHAT)
    if found is None:
        return None
    edits = [(at + size * (at >= start), end + size * (end >= start), new) for at, end, new in found.edits]
    return SplitBody(body, found.whole, found.start, tuple(edits))


@lru_cache(maxsize=256)
def _remembered(body: bytes, length: bytes) -> SplitBody | None:
    return _quick(body, length, CHAT)


def _one_prompt(value: bytes) -> bool:
    """Whether this is one text or one flat list of ids. Of several prompts, vLLM gives all of them the
    transfer parameters of the first (entrypoints/openai/completion/serving.py, 0.32)."""
    flat = value[:1] == b"[" and value.find(b"[", 1) < 0 and value.find(b'"') < 0
    return flat or value[:1] == b'"'


def _client_runs_tools(value: bytes) -> bool:
    try:
        tools = _TOOLS.decode(value) if value else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return all(tool.type in _OWN_TOOLS for tool in tools or ())


class _Tool(msgspec.Struct, gc=False):
    type: str


_TOOLS: Final = msgspec.json.Decoder(list[_Tool] | None)
# By API: a field, the value it must have in a split request, and the reason for staying whole otherwise.
_CHECKED: Final[dict[str, tuple[bytes, Callable[[bytes], bool], str]]] = {
    COMPLETION: (b"prompt", _one_prompt, "prompts"),
    RESPONSES: (b"tools", _client_runs_tools, "tools"),
}


def _quick(body: bytes, length: bytes, path: str) -> SplitBody | None:
    """Fast path; None if the positions are not certain."""
    opening = _START.match(body)
    fields = _decoded(body)
    if opening is None or fields is None:
        return None
    if fields[: len(_FREE)] != _FREE:
        for name, value in zip(_MUST_BE, fields, strict=False):
            if bytes(value) not in _MUST_BE[name]:
                return SplitBody(body, name.decode())
    if path in _CHECKED:
        name, holds, why = _CHECKED[path]
        if not holds(bytes(fields[_AT[name]])):
            return SplitBody(body, why)
    start, edits, wanted = opening.end(), [], list(fields)
    for place, name, new, edited in _EDITED:
        if fields[place] is _UNSAID:
            continue
        text, at = bytes(fields[place]), _place(body, name)
        if not body.startswith(text, at):
            return None
        edits.append((at, at + len(text), new))
        wanted[place] = edited
    if fields[_AT[length]] is _UNSAID:
        edits.append(_bound(body, start, length)[1])
        wanted[_AT[length]] = _ONE
    wanted[_AT[b"kv_transfer_params"]] = _NO_PARAMS
    edits.sort()
    found = SplitBody(body, "", start, tuple(edits))
    return found if _decoded(at_once(found.prefill(b"{}"))) == tuple(wanted) else None


def _place(body: bytes, name: bytes) -> int:
    """Position of the value of a member of this name, at any depth: most clients send such fields before or
    after their texts."""
    quoted = b'"%b"' % name
    first = body.find(quoted, 0, _NEAR_BYTES)
    member = _MEMBER[name].match(body, first if first >= 0 else max(0, body.rfind(quoted)))
    return -1 if member is None else member.end()


def _decoded(body: bytes) -> tuple[msgspec.Raw, ...] | None:
    """Return the values of all ``_NAMES``; of a repeated one, the last."""
    try:
        return msgspec.structs.astuple(_DECODER.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _scanned(body: bytes, length: bytes, path: str) -> Generator[None, None, SplitBody]:
    scan = Scan(body)
    start = scan.start()
    if start is None:
        return SplitBody(body, "body")
    found: list[_Found] = []
    inner = -1
    for member in scan.members(start):
        if member is None:
            yield
        elif member.name == _SAMPLING and not length:
            inner = member.value
        elif member.name in _AT:
            found.append((member.name, member.value, member.end))
    if length:
        made = _made(body, start + 1, found, _bound(body, start + 1, length))
        if made.whole or path not in _CHECKED:
            return made
        name, holds, why = _CHECKED[path]
        values = [bytes(body[at:end]) for known, at, end in found if known == name] or [b""]
        return made if all(map(holds, values)) else SplitBody(body, why)
    if inner < 0 or body[inner : inner + 1] != b"{":
        return SplitBody(body, "body")
    for member in scan.members(inner):
        if member is None:
            yield
        elif member.name in _AT:
            found.append((member.name, member.value, member.end))
    return _made(body, start + 1, found, _bound(body, inner + 1, b"max_tokens"))


def _made(body: bytes, start: int, found: list[_Found], bound: _Bound) -> SplitBody:
    for wanted, allowed in _MUST_BE.items():
        if any(name == wanted and bytes(body[at:end]) not in allowed for name, at, end in found):
            return SplitBody(body, wanted.decode())
    edits = [(at, end, _REPLACED[name]) for name, at, end in found if name in _REPLACED]
    length, edit = bound
    if length not in {name for name, _, _ in found}:
        edits.append(edit)
    return SplitBody(body, "", start, tuple(sorted(edits)))


def _bound(body: bytes, at: int, length: bytes) -> _Bound:
    """Return the field that bounds the answer, as inserted if there is none."""
    return length, (at, at, b'"%b":1%b' % (length, b"" if _END.match(body, at) else b","))
