"""Endpoints in the metadata of a gateway's message: the one that served, and those that are allowed."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from kvatlas.router.services.epp.protobuf import (
    ProtobufError,
    as_bytes,
    as_text,
    fields,
)

_REMEMBERED_BYTES_MAX: Final = 4096
# Nesting depth of lists in metadata; a list of endpoints has a depth of 1.
_DEPTH_MAX: Final = 8


def endpoints(metadata: bytes, namespace: str, key: str) -> tuple[str, ...] | None:
    """Return the text, or list of texts, that ``filter_metadata`` has under this name; None if it has none.
    Raises ``ProtobufError``."""
    if not metadata:
        return None
    # The endpoint that served, and the allowed subset: few values that recur.
    read = _endpoints_again if len(metadata) <= _REMEMBERED_BYTES_MAX else _endpoints
    return read(metadata, namespace, key)


def _endpoints(metadata: bytes, namespace: str, key: str) -> tuple[str, ...] | None:
    found = None
    for number, value in fields(metadata):
        if number == 1 and (struct := _entry(as_bytes(value), namespace)) is not None:
            for at, member in fields(struct):
                if at == 1 and (content := _entry(as_bytes(member), key)) is not None:
                    found = tuple(_texts(content))
    return found


_endpoints_again = lru_cache(maxsize=512)(_endpoints)


def _entry(message: bytes, key: str) -> bytes | None:
    """Return the value of a map's entry if it has this key."""
    found = dict(fields(message))
    content = as_bytes(found.get(2, b""))
    return content if as_text(found.get(1, b"")) == key else None


def _texts(message: bytes, depth: int = 0) -> list[str]:
    """Texts of a ``google.protobuf.Value``."""
    if depth > _DEPTH_MAX:
        raise ProtobufError(f"lists within lists in metadata, more than {_DEPTH_MAX} deep")
    found: list[str] = []
    for number, value in fields(message):
        # One text may be a list: gateways copy it from a header (lwepp, handlers/request.go).
        if number == 3:
            found = [each for part in as_text(value).split(",") if (each := part.strip())]
        elif number == 6:
            found = [
                each
                for at, item in fields(as_bytes(value))
                if at == 1
                for each in _texts(as_bytes(item), depth + 1)
            ]
    return found
