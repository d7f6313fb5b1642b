"""Header fields on their way through: what ends at this hop, what is replaced, what is added.

Names are lower-case bytes. Kept fields keep order, value and repetition. RFC 9110 section 7.6.1: fields that
``Connection`` names are for this hop only, besides the known ones.
"""

from __future__ import annotations

import random

import msgspec

from router.pd.sidecar import PREFILLED, PREFILLERS

Header = tuple[bytes, bytes]

_HOP_BY_HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
_NOT_FORWARDED = frozenset(
    (
        *(*_HOP_BY_HOP, b"host", b"content-length", b"expect", b"x-forwarded-for", b"http2-settings"),
        PREFILLERS,  # a client's own would have a sidecar send its prompt anywhere
    )
)
_NOT_RETURNED = frozenset((*_HOP_BY_HOP, PREFILLED))
_NEVER_NAMED = frozenset((b"close", b"keep-alive", b"content-length", b"content-type", b"authorization"))
"""Connection options that are no fields, and fields that naming in ``Connection`` must not remove."""


class RequestHead(msgspec.Struct, gc=False):
    """A client's header fields, gone through once."""

    fields: list[Header]
    """The kept ones and the added ones."""
    request_id: bytes
    content_length: int | None
    """As declared; None without one."""
    encoding: bytes
    """The body's content encoding; empty where it has none."""


def read_request_headers(headers: list[Header], client_host: str | None) -> RequestHead:
    """Sort a request's header fields. Raises ``ValueError`` on a content-length that is no number."""
    kept: list[Header] = []
    request_id = b""
    forwarded_for = b""
    named: set[bytes] = set()
    content_length = None
    encoding = b""
    for name, value in headers:
        if name not in _NOT_FORWARDED:
            kept.append((name, value))
            if name == b"x-request-id":
                request_id = value
            elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                encoding = value
        elif name == b"content-length":
            content_length = int(value)
        elif name == b"x-forwarded-for":
            forwarded_for = forwarded_for + b", " + value if forwarded_for else value
        elif name == b"connection":
            named.update(token.strip() for token in value.lower().split(b","))
    named -= _NEVER_NAMED
    if named:
        kept = [field for field in kept if field[0] not in named]
    if not request_id or b"x-request-id" in named:
        request_id = b"%032x" % random.getrandbits(128)
        kept.append((b"x-request-id", request_id))
    if client_host:
        host = client_host.encode()
        forwarded_for = forwarded_for + b", " + host if forwarded_for else host
    if forwarded_for:
        kept.append((b"x-forwarded-for", forwarded_for))
    return RequestHead(kept, request_id, content_length, encoding)


def request_head(
    method: str,
    target: bytes,
    host: bytes,
    fields: list[Header],
    *,
    own: tuple[Header, ...],
    length: int | None,
) -> bytes:
    """The head of a forwarded request, with its blank line. ``length`` None: no body, no content-length.

    ``own`` fields (the placement's) replace the client's of the same name.
    """
    if own:
        names = {name.lower() for name, _ in own}
        fields = [field for field in fields if field[0] not in names]
        fields.extend(own)
    lines = b"\r\n".join([b": ".join(field) for field in fields])
    end = b"\r\n\r\n" if length is None else b"\r\ncontent-length: %d\r\n\r\n" % length
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b" % (method.encode(), target, host, lines, end)


class AnswerHead(msgspec.Struct, gc=False):
    """An engine's header fields, gone through once, as they are given to the client."""

    fields: list[Header]
    sse: bool
    encoded: bool
    """The body is compressed."""
    retry_after: bytes | None


def read_answer_headers(headers: list[Header], request_id: bytes, own: tuple[Header, ...]) -> AnswerHead:
    """Sort an answer's header fields; ``own`` (the placement's) are added."""
    fields: list[Header] = []
    named: set[bytes] = set()
    sse = encoded = has_request_id = has_buffering = False
    retry_after = None
    for header in headers:
        name, value = header
        if name in _NOT_RETURNED:
            if name == b"connection":
                named.update(token.strip() for token in value.lower().split(b","))
            continue
        fields.append(header)
        if name == b"content-type":
            sse = value.lower().startswith(b"text/event-stream")
        elif name == b"content-encoding":
            encoded = value.lower() != b"identity"
        elif name == b"x-request-id":
            has_request_id = True
        elif name == b"retry-after":
            retry_after = value
        elif name == b"x-accel-buffering":
            has_buffering = True
    named -= _NEVER_NAMED
    if named:
        fields = [field for field in fields if field[0] not in named]
    if not has_request_id:
        fields.append((b"x-request-id", request_id))
    if sse and not has_buffering:
        fields.append((b"x-accel-buffering", b"no"))
    fields.extend(own)
    return AnswerHead(fields, sse, encoded, retry_after)
