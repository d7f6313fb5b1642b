"""Header fields on their way through: what ends at this hop, what is replaced, what is added.

Names are lower-case bytes. Kept fields keep order, value and repetition. RFC 9110 section 7.6.1: fields that
``Connection`` names are for this hop only, besides the known ones.
"""

from __future__ import annotations

import random
import re
from typing import NoReturn

import msgspec

from kvatlas.router.http.client_head import ClientHead, Header
from kvatlas.router.openai.errors import bad_request, echoed
from kvatlas.router.openai.request import Session
from kvatlas.router.openai.sessions import SESSION_FIELDS, session_in_headers
from kvatlas.router.pd.settings import KV_SOURCE, PREFILLER

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
CONTINUE = b"x-kvatlas-continue"
"""A client's choice: its stream must not go on from another engine where it says ``off``."""
_NOT_FORWARDED = frozenset(
    (
        *_HOP_BY_HOP,
        b"host",
        b"content-length",
        b"expect",
        b"x-forwarded-for",
        b"http2-settings",
        b"accept-encoding",  # see IDENTITY
        # A client's own would have a sidecar send its prompt anywhere.
        PREFILLER,
        KV_SOURCE,
        CONTINUE,
        # They stand for fields of the body (SGLang's SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES).
        *(
            b"x-override-" + name
            for name in (
                b"rid",
                b"bootstrap-host",
                b"bootstrap-port",
                b"bootstrap-room",
                b"conversation-id",
                b"routed-dp-rank",
                b"disagg-prefill-dp-rank",
                b"priority",
            )
        ),
    )
)
# Asked of engines in place of the client's wish: neither the usage nor the end of a packed answer can be read
# here, and without the field any coding may come (RFC 9110, section 12.5.3).
IDENTITY = (b"accept-encoding", b"identity")
# May hold the engine's address, or a path that only the engine has.
NAMES_ENGINE = (b"location", b"content-location", b"refresh")
_NOT_RETURNED = frozenset(
    (
        *_HOP_BY_HOP,
        *NAMES_ENGINE,
        b"via",
        # They would hold for all engines, or for whatever else has the router's host name.
        b"set-cookie",
        b"set-cookie2",
        b"clear-site-data",
        b"strict-transport-security",
        b"alt-svc",
    )
)
SERVER_TIMING = b"server-timing"
# What the router says itself, in ``own``.
_OWN_PREFIXES = (b"x-kvatlas-", b"x-ratelimit-")
_HAS_OWN = re.compile(b"^(?:%b)" % b"|".join(map(re.escape, _OWN_PREFIXES)), re.MULTILINE).search
# Connection options that are no fields, and fields that naming in ``Connection`` must not remove.
_NEVER_NAMED = frozenset((b"close", b"keep-alive", b"content-length", b"content-type", b"authorization"))
_NOTHING: frozenset[bytes] = frozenset()
_LENGTH_DIGITS_MAX = 18


class RequestHead(msgspec.Struct, gc=False):
    """A client's header fields, gone through once."""

    fields: list[Header]
    """The kept ones and the added ones."""
    request_id: bytes
    content_length: int | None
    """As declared; None without one."""
    encoding: bytes
    """The body's content encoding; empty where it has none."""
    forwarded_for: bytes
    """Addresses on the way here, the latest last; a client may have made up all but those that a trusted
    gateway and this hop added."""
    session: Session | None


def read_request_headers(head: ClientHead, peer: bytes) -> RequestHead:
    """Sort a request's header fields; ``peer``: the client's address, empty if unknown. Raises ``ApiError``
    400 on a content-length that is no number of bytes."""
    told: RequestHead | None = head.sorted
    if told is None:
        told = head.sorted = _sort(head.fields, head.by_name)
    fields, request_id, forwarded_for = told.fields.copy(), told.request_id, told.forwarded_for
    # Engines log this id, so both logs can be joined.
    if not request_id:
        request_id = b"%032x" % random.getrandbits(128)
        fields.append((b"x-request-id", request_id))
    if peer:
        forwarded_for = forwarded_for + b", " + peer if forwarded_for else peer
    if forwarded_for:
        fields.append((b"x-forwarded-for", forwarded_for))
    return RequestHead(fields, request_id, told.content_length, told.encoding, forwarded_for, told.session)


def _sort(headers: list[Header], by_name: dict[bytes, bytes]) -> RequestHead:
    """The part that requests of equal heads have in common: without an address, and without an id that the
    client did not give."""
    kept = [field for field in headers if field[0] not in _NOT_FORWARDED]
    length = by_name.get(b"content-length")
    if length is not None and len(length) > _LENGTH_DIGITS_MAX:
        _no_length(length)
    encoding = forwarded_for = b""
    if b"content-encoding" in by_name:
        values = _values(headers, b"content-encoding")
        # A second field could hide a compressed body from the reader.
        encoding = next((one for one in values if one.strip().lower() not in (b"", b"identity")), b"")
    if b"x-forwarded-for" in by_name:
        forwarded_for = b", ".join(_values(headers, b"x-forwarded-for"))
    named = _named(headers) if b"connection" in by_name else _NOTHING
    if named:
        # A hop removes what ``Connection`` names (RFC 9110, section 7.6.1).
        kept = [field for field in kept if field[0] not in named]
    return RequestHead(
        [*kept, IDENTITY],
        b"" if b"x-request-id" in named else by_name.get(b"x-request-id", b""),
        None if length is None else int(length) if length.isdigit() else _no_length(length),
        encoding,
        forwarded_for,
        None if by_name.keys().isdisjoint(SESSION_FIELDS) else session_in_headers(by_name),
    )


def _no_length(value: bytes) -> NoReturn:
    # A gateway's streams come without the checks of an HTTP/1.1 parser.
    text = echoed(value.decode("latin-1"))
    raise bad_request("invalid_content_length", f"content-length: {text} is no number of bytes.")


def _values(headers: list[Header], name: bytes) -> list[bytes]:
    return [value for named, value in headers if named == name]


def _named(headers: list[Header]) -> frozenset[bytes]:
    """The fields that ``Connection`` names."""
    options = b",".join(_values(headers, b"connection")).lower().split(b",")
    return frozenset(option.strip() for option in options) - _NEVER_NAMED


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
        # A client must not overrule the placement, e.g. the data-parallel rank.
        names = {name.lower() for name, _ in own}
        fields = [field for field in fields if field[0] not in names]
        fields.extend(own)
    lines = b"\r\n".join(map(b": ".join, fields))
    end = b"\r\n\r\n" if length is None else b"\r\ncontent-length: %d\r\n\r\n" % length
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b" % (method.encode(), target, host, lines, end)


# Statuses that send a client elsewhere (RFC 9110 section 15.4).
REDIRECTS = frozenset({300, 301, 302, 303, 307, 308})


class AnswerHead(msgspec.Struct, gc=False):
    """An engine's header fields, gone through once, as they are given to the client."""

    fields: list[Header]
    sse: bool
    json: bool
    encoded: bool
    """The body is compressed."""
    retry_after: bytes | None
    length: bytes
    """As declared; empty without one."""


def as_json(fields: list[Header]) -> list[Header]:
    """The fields of an event stream's head for an answer that is one JSON object."""
    kept = [field for field in fields if field[0] not in (b"content-type", b"x-accel-buffering")]
    return [(b"content-type", b"application/json"), *kept]


def read_answer_headers(headers: list[Header], request_id: bytes, own: tuple[Header, ...]) -> AnswerHead:
    """Sort an answer's header fields; ``own`` (the placement's) are added."""
    by_name = dict(headers)
    # The usual answer has none of them: no list comprehension per answer.
    if by_name.keys().isdisjoint(_NOT_RETURNED):
        fields = list(headers)
    else:
        fields = [field for field in headers if field[0] not in _NOT_RETURNED]
    # One search over all names: a call for each of them costs more than the rest.
    if _HAS_OWN(b"\n".join(by_name)):
        fields = [field for field in fields if not field[0].startswith(_OWN_PREFIXES)]
    if b"connection" in by_name and (named := _named(headers)):
        fields = [field for field in fields if field[0] not in named]
    kind = by_name.get(b"content-type", b"").lower()
    sse, json = kind.startswith(b"text/event-stream"), kind.startswith(b"application/json")
    encoding = by_name.get(b"content-encoding")
    encoded = encoding is not None and encoding.lower() != b"identity"
    if b"x-request-id" not in by_name:
        fields.append((b"x-request-id", request_id))
    # nginx buffers a stream unless this says otherwise.
    if sse and b"x-accel-buffering" not in by_name:
        fields.append((b"x-accel-buffering", b"no"))
    fields.extend(own)
    length = by_name.get(b"content-length", b"")
    return AnswerHead(fields, sse, json, encoded, by_name.get(b"retry-after"), length)
