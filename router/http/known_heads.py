"""Heads of messages that were parsed before, found by their bytes.

Clients and engines repeat their heads byte by byte, but for the length of the body, and engines the time.
Invariant: a line of a head that was parsed is its ``content-length``, and the parser refuses another one, or
a ``transfer-encoding`` beside it; so its body is what follows, and nothing else of the head depends on the
number.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

Head = TypeVar("Head")
_KNOWN_MAX = 1024
_KNOWN_BYTES_MAX = 4096
"""Of one head."""
_SEEN_MAX = 8192
_LENGTH_DIGITS_MAX = 12
_LENGTH_NAME_BYTES = len(b"\r\nContent-Length: ")
_DATE_NAME_BYTES = len(b"\r\nDate: ")
_DATE = re.compile(rb"[A-Za-z0-9:, ]{1,40}")


def head_key(data: bytes, bytes_max: int) -> tuple[bytes, int]:
    """Return the head of a message that came whole and alone, without the number of ``content-length``, and
    where the body begins; no key: it did not, or its length is not to be seen."""
    most = bytes_max if bytes_max < _KNOWN_BYTES_MAX else _KNOWN_BYTES_MAX  # noqa: FURB136
    end = data.find(b"\r\n\r\n", 0, most)
    if end < 0:
        return b"", 0
    at = data.find(b"\r\ncontent-length: ", 0, end)
    if at < 0 and (at := data.find(b"\r\nContent-Length: ", 0, end)) < 0:
        return b"", 0
    at += _LENGTH_NAME_BYTES
    behind = data.index(b"\r\n", at)
    digits = data[at:behind]
    end += 4
    if not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX or len(data) - end != int(digits):
        return b"", 0
    return data[:at] + data[behind:end], end


def without_date(key: bytes) -> tuple[bytes, bytes]:
    """Return the key of an answer without the time in its ``date``, and that time; empty: it has none that
    any parser takes."""
    at = key.find(b"\r\ndate: ")
    if at < 0 and (at := key.find(b"\r\nDate: ")) < 0:
        return key, b""
    at += _DATE_NAME_BYTES
    behind = key.index(b"\r\n", at)
    date = key[at:behind]
    return (key[:at] + key[behind:], date) if _DATE.fullmatch(date) else (key, b"")


class KnownHeads(Generic[Head]):
    """Heads that came more than once, by key."""

    __slots__ = ("_seen", "by_key")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Head] = {}
        # Hashes of those that came once: heads that are all different, as with a trace's id, push out none.
        self._seen: set[int] = set()

    def again(self, key: bytes) -> bool:
        """Whether this head came before, and is to be kept."""
        if (seen := hash(key)) in self._seen:
            return True
        if len(self._seen) >= _SEEN_MAX:
            self._seen.clear()
        self._seen.add(seen)
        return False

    def keep(self, key: bytes, head: Head) -> None:
        """Keep a head, in place of the oldest if there are too many."""
        if len(self.by_key) >= _KNOWN_MAX:
            del self.by_key[next(iter(self.by_key))]
        self.by_key[key] = head


def without_fields(fields: list[tuple[bytes, bytes]], *names: bytes) -> list[tuple[bytes, bytes]]:
    """Fields of a head that is kept."""
    return [field for field in fields if field[0] not in names]
