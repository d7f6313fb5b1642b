"""Forms that clients send (audio uploads): where each field lies in the body, found without copying it.

What is read here must be what the engine reads, or a field could be hidden from one of the two. So only the
plain form that clients write is taken (RFC 7578, as browsers, curl, httpx and aiohttp write it), and what
parsers read differently is refused: other bytes before, between and behind the parts, bare line ends, folded
headers, escaped or repeated parameters, other charsets, transfer encodings.

Invariants: at most ``FIELDS_MAX`` fields, heads and values that are read are bounded, and the loop is given
back after each megabyte.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from itertools import pairwise
from typing import Final, NamedTuple
from urllib.parse import quote_plus, unquote_to_bytes

from kvatlas.router.openai.body import Peek
from kvatlas.router.openai.errors import ApiError, bad_request, echoed
from kvatlas.router.openai.members import joined

# Starlette's limit, and so vLLM's.
FIELDS_MAX: Final = 1000
# Longer values are not read.
VALUE_BYTES_MAX: Final = 64 * 1024
_HEAD_BYTES_MAX: Final = 8 * 1024
# Files are sent in parts; what is left is short.
_URLENCODED_BYTES_MAX: Final = 1 << 20
_WINDOW_BYTES: Final = 1 << 20
_MULTIPART, _URLENCODED = b"multipart/form-data", b"application/x-www-form-urlencoded"
# Texts that pydantic takes for true.
_TRUE: Final = frozenset({"true", "1", "on", "t", "y", "yes"})
_PARAMETER: Final = re.compile(
    rb'[ \t]*;[ \t]*([A-Za-z*]+)=(?:"((?:[^"\\\r\n]|\\[^\\\r\n])*)"|([^\s";,\\]+))'
)
# Of other unquoted values (RFC 9110, section 5.6.6). Boundaries are sent unquoted with more characters.
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{1,70}")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
_PLAIN_ENCODINGS: Final = frozenset({b"7bit", b"8bit", b"binary"})

Fields = list[tuple[bytes, bytes]]


class FormField(NamedTuple):
    """``start`` and ``end`` of its value in the body."""

    name: str
    start: int
    end: int
    is_file: bool = False


class Form:
    """A form's fields in its body."""

    def __init__(self, body: bytes, fields: list[FormField], *, urlencoded: bool) -> None:
        self.body = body
        self.fields = fields
        self._urlencoded = urlencoded

    def value(self, name: str) -> str | None:
        """The text of a field; None where there is none. Raises ``ApiError`` (400) where it can be read in
        several ways."""
        found = self._only(name)
        if found is None:
            return None
        if found.is_file or found.end - found.start > VALUE_BYTES_MAX:
            raise _refused(f"field {name!r} must be a text of at most {VALUE_BYTES_MAX} bytes")
        raw = bytes(self.body[found.start : found.end])
        return _text(_unquoted(raw) if self._urlencoded else raw, f"the value of {name!r}")

    def flag(self, name: str) -> bool:
        """Whether a field says true."""
        return (self.value(name) or "").strip().lower() in _TRUE

    def with_value(self, name: str, value: str) -> Generator[None, None, bytes]:
        """Steps to the body with another value of a field, where it has that."""
        found = self._only(name)
        if found is None:
            return self.body
        text = quote_plus(value).encode() if self._urlencoded else value.encode()
        view = memoryview(self.body)
        return (yield from joined((view[: found.start], text, view[found.end :])))

    def look(self) -> Peek:
        """The fields that the proxy reads."""
        priority = self.value("priority")
        return Peek(
            self.value("model"),
            self.flag("stream"),
            previous_response=self.value("previous_response_id"),
            request_id=self.value("request_id"),
            prioritized=priority is not None,
        )

    def _only(self, name: str) -> FormField | None:
        found = [field for field in self.fields if field.name.strip().lower() == name]
        if len(found) > 1 or (found and found[0].name != name):
            raise _refused(f"field {name!r} must be given once, in this spelling")
        return found[0] if found else None


def form_type(fields: Fields) -> bytes | None:
    """The content type of a request with these header fields where it is a form's. Raises ``ApiError``."""
    types = [value.strip() for name, value in fields if name == b"content-type"]
    forms = [one for one in types if _media_type(one) in (_MULTIPART, _URLENCODED)]
    if forms and len(set(types)) > 1:
        raise _refused("more than one content-type is given")
    return forms[0] if forms else None


def read_form(content_type: bytes, body: bytes) -> Generator[None, None, Form]:
    """Steps to the form, for ``run_cooperatively``. Raises ``ApiError`` (400)."""
    options = _parameters(content_type[len(_media_type(content_type)) :], "content-type")
    if options.pop(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise _refused("its charset is not UTF-8")
    if _media_type(content_type) == _URLENCODED:
        if options:
            raise _refused("its content-type has unknown parameters")
        return Form(body, _pairs(body), urlencoded=True)
    boundary = options.pop(b"boundary", b"")
    if options or not _BOUNDARY.fullmatch(boundary):
        raise _refused("its content-type must have one boundary and nothing else")
    marks = yield from _marks(body, b"--" + boundary)
    fields = []
    for start, end in pairwise(marks):
        fields.append(_part(body, start + len(boundary) + 4, end - 2))
    return Form(body, fields, urlencoded=False)


def _marks(body: bytes, delimiter: bytes) -> Generator[None, None, list[int]]:
    """Where the delimiters stand, the first at the body's start, the last closing it."""
    found: list[int] = []
    size, width = len(body), len(delimiter)
    for start in range(0, size, _WINDOW_BYTES):
        at = body.find(delimiter, start, start + _WINDOW_BYTES + width - 1)
        while at >= 0:
            found.append(at)
            if len(found) > FIELDS_MAX + 1:
                raise _refused(f"it has more than {FIELDS_MAX} fields")
            at = body.find(delimiter, at + 1, start + _WINDOW_BYTES + width - 1)
        yield
    if len(found) < 2 or found[0] != 0:
        raise _refused("it must begin with its boundary and have a field")
    last = found[-1]
    if size - last - width > 4 or body[last + width :] not in (b"--", b"--\r\n"):
        raise _refused("it must end with its closing boundary")
    for at in found:
        before, behind = body[max(0, at - 2) : at], body[at + width : at + width + 2]
        if (at and before != b"\r\n") or (at != last and behind != b"\r\n"):
            raise _refused("its boundary stands within a field")
    return found


def _part(body: bytes, start: int, end: int) -> FormField:
    """The field whose head begins at ``start`` and whose value ends at ``end``."""
    at = body.find(b"\r\n\r\n", start, min(end + 2, start + _HEAD_BYTES_MAX))
    if at < 0 or at + 4 > end:
        raise _refused(f"a field must have a head of at most {_HEAD_BYTES_MAX} bytes and a value")
    disposition: bytes | None = None
    for line in bytes(body[start:at]).split(b"\r\n"):
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _refused("a field's header is malformed")
        name, value = header[1].lower(), header[2].strip()
        if name == b"content-disposition":
            if disposition is not None or not value[:9].lower() == b"form-data":
                raise _refused("a field must have one content-disposition, form-data")
            disposition = value[9:]
        elif name == b"content-transfer-encoding" and value.lower() not in _PLAIN_ENCODINGS:
            raise _refused("a field has a content-transfer-encoding")
    options = _parameters(disposition or b"", "content-disposition")
    named = options.pop(b"name", None)
    files = {option for option in options if option in (b"filename", b"filename*")}
    if named is None or options.keys() - files or re.search(rb"[\\%;\0]", named):
        raise _refused("a field's content-disposition must have a plain name and at most a filename")
    return FormField(_text(named, "a field's name"), at + 4, end, bool(files))


def _pairs(body: bytes) -> list[FormField]:
    if len(body) > _URLENCODED_BYTES_MAX:
        raise _refused(f"an urlencoded form may have {_URLENCODED_BYTES_MAX} bytes")
    # Of visible characters all but the semicolon, which some split at.
    if re.search(rb"[^!-:<-~]", body):
        raise _refused("an urlencoded form has characters that must be percent-encoded")
    if body[:1] == b"{":
        raise _refused("its content-type says form, and it looks like JSON")
    pairs = bytes(body).split(b"&") if body else []
    if len(pairs) > FIELDS_MAX:
        raise _refused(f"it has more than {FIELDS_MAX} fields")
    fields, at = [], 0
    for pair in pairs:
        name, equals, value = pair.partition(b"=")
        start = at + len(name) + len(equals)
        fields.append(FormField(_text(_unquoted(name), "a field's name"), start, start + len(value)))
        at += len(pair) + 1
    return fields


def _parameters(text: bytes, where: str) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            if text[at:].strip(b" \t") in (b"", b";"):
                break
            raise _refused(f"its {where} is malformed")
        name = match[1].lower()
        if match[3] is not None and name != b"boundary" and not _TOKEN.fullmatch(match[3]):
            raise _refused(f"its {where} has a value that must be in quotes")
        if name in found:
            raise _refused(f"its {where} says {name.decode()!r} twice")
        found[name] = match[2] if match[3] is None else match[3]
        at = match.end()
    return found


def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].rstrip(b" \t").lower()


def _unquoted(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _refused(f"{what} is not UTF-8: {echoed(raw[:64].decode('latin-1'))}") from None


def _refused(why: str) -> ApiError:
    return bad_request(
        "invalid_form",
        f"The form cannot be read with certainty: {why}. Send it as multipart/form-data as HTTP clients "
        "write it, or JSON with content-type application/json.",
    )
