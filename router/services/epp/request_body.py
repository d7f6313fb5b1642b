"""The body of a gateway's request: collected as it arrives, counted while it is held.

Held bytes count towards the router's body capacity until ``free``. The router receives every byte once, and
the end once.
"""

from __future__ import annotations

from kvatlas.router.http.listener import Capacity


class RequestBody:
    """Body of a request. ``expected``: there is one; ``trailers``: it had trailers; ``latest``: the bytes
    last given to the router (the whole body if it came in one piece)."""

    __slots__ = ("_capacity", "_ended", "_held_bytes", "_pieces", "expected", "latest", "trailers", "whole")

    def __init__(self, capacity: Capacity) -> None:
        self.expected = True
        self.whole = False
        self.trailers = False
        self.latest = b""
        self._capacity = capacity
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._ended = False

    def reserve(self, size: int) -> bool:
        """Reserve capacity for received bytes; False if there is none."""
        if not self._capacity.reserve_body(size):
            return False
        self._held_bytes += size
        return True

    def add(self, piece: bytes, *, ends: bool) -> None:
        """Append the next bytes."""
        if piece:
            self._pieces.append(piece)
        self.whole = ends

    @property
    def readable(self) -> bool:
        """Whether there is something to take: bytes, or the end."""
        return bool(self._pieces) or (self.whole and not self._ended)

    def take(self) -> bytes:
        """Take the bytes received since the last call; with ``whole`` set, these are the rest of the body."""
        self._ended = self.whole
        pieces = self._pieces
        self.latest = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return self.latest

    def free(self) -> None:
        """Release the held bytes and their capacity."""
        self._pieces.clear()
        self.latest = b""
        self._capacity.release_body(self._held_bytes)
        self._held_bytes = 0
