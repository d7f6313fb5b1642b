"""Header fields between a gateway and the proxy: what came as HTTP/2 has it, and what is to change of it.

Pure. Invariants: the client's own destination never reaches the proxy nor an engine's choice; framing
(length, connection, host) stays the gateway's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvatlas.router.http.client_head import ClientHead, Header, head_error, target_parts
from kvatlas.router.openai.errors import bad_request, head_too_large

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
SERVED_KEY: Final = "x-gateway-destination-endpoint-served"
_DESTINATION: Final = DESTINATION.encode()
_FIELD_SIGNS: Final = 4
# Fields of the gateway's own connections.
_HOP_FIELDS: Final = frozenset(
    (
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"x-forwarded-for",
    )
)


def head_of(headers: list[Header], header_bytes_max: int) -> ClientHead:
    """The head of a request. Raises ``ApiError`` for one that no client of the proxy could send."""
    size, pseudo, kept = 0, {}, []
    for field in headers:
        name, value = field
        size += len(name) + len(value) + _FIELD_SIGNS
        if name[:1] == b":":
            pseudo[name] = value
        elif name != _DESTINATION:
            kept.append(field)
    if size > header_bytes_max:
        raise head_too_large(header_bytes_max)
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    problem = head_error("2", path, 0)
    if problem or not method.isalpha() or not (path.startswith(b"/") or path == b"*"):
        raise bad_request("invalid_http", problem or "The gateway sent no valid method or path.")
    host = pseudo.get(b":authority", b"")
    if host and not any(name == b"host" for name, _ in kept):
        kept.append((b"host", host))
    return ClientHead(method.decode("ascii"), *target_parts(path), kept, dict(kept), "2")


def status_of(headers: list[Header]) -> tuple[int, list[Header]]:
    """An answer's status, 0 where there is none, and its fields."""
    status = next((value for name, value in headers if name == b":status"), b"")
    return int(status) if status.isdigit() else 0, [field for field in headers if field[0][:1] != b":"]


def own_fields(headers: Iterable[Header]) -> list[Header]:
    """Fields of an answer that the router gives itself, as the gateway takes them."""
    return [field for field in headers if field[0] not in _HOP_FIELDS]


def changes(before: list[Header], after: Iterable[Header]) -> tuple[list[Header], list[bytes]]:
    """Fields to set and names to remove, so that ``before`` becomes ``after``; both without those that HTTP/2
    begins with a colon."""
    fields = [field for field in after if field[0] not in _HOP_FIELDS]
    kept = [field for field in before if field[0] not in _HOP_FIELDS]
    if fields == kept:
        return [], []
    had = set(kept)
    changed = {name for name, value in fields if (name, value) not in had}
    changed |= _counts_differ(before, fields)
    names = {name for name, _ in fields}
    return [f for f in fields if f[0] in changed], sorted({name for name, _ in had} - names)


def _counts_differ(before: list[Header], after: list[Header]) -> set[bytes]:
    """Names that are in both, but not as often."""
    ours = [name for name, _ in after]
    theirs = [name for name, _ in before]
    return {name for name in {*ours} & {*theirs} if ours.count(name) != theirs.count(name)}
