"""Heads of messages that were parsed before, found by their bytes.

Clients and engines repeat their heads byte by byte, but for the length of the body. Invariant: a line of a
head that was parsed is its ``content-length``, and the parser refuses another one, or a ``transfer-encoding``
beside it; so its body is what follows, and nothing else of the head depends on the number.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Head = TypeVar("Head")
_KNOWN_MAX = 1024
_KNOWN_BYTES_MAX = 4096
"""Of one head."""
_SEEN_MAX = 8192
_LENGTH_DIGITS_MAX = 12
_LENGTH_NAME_BYTES = len(b"\r\nContent-Length: ")


class KnownHeads(Generic[Head]):
    """Heads that came more than once, without their ``content-length``."""

    __slots__ = ("_by_bytes", "_seen")

    def __init__(self) -> None:
        self._by_bytes: dict[bytes, Head] = {}
        # Hashes of those that came once: heads that are all different, as with a trace's id, push out none.
        self._seen: set[int] = set()

    def find(self, data: bytes, bytes_max: int) -> tuple[bytes, Head | None, int]:
        """Return the key of the head of a message that came whole and alone, the head if it is known, and
        where the body begins; no key: it did not, or its length is not to be seen."""
        end = data.find(b"\r\n\r\n", 0, min(bytes_max, _KNOWN_BYTES_MAX))
        if end < 0:
            return b"", None, 0
        at = data.find(b"\r\ncontent-length: ", 0, end)
        if at < 0 and (at := data.find(b"\r\nContent-Length: ", 0, end)) < 0:
            return b"", None, 0
        at += _LENGTH_NAME_BYTES
        behind = data.index(b"\r\n", at)
        digits = data[at:behind]
        end += 4
        if not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX or len(data) - end != int(digits):
            return b"", None, 0
        key = data[:at] + data[behind:end]
        return key, self._by_bytes.get(key), end

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
        if len(self._by_bytes) >= _KNOWN_MAX:
            del self._by_bytes[next(iter(self._by_bytes))]
        self._by_bytes[key] = head


def without_length(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Fields of a head that is kept."""
    return [field for field in fields if field[0] != b"content-length"]
