"""The body of a gateway's request: collected as it is shown, counted as long as it is held.

Always true: what is held counts in the router's capacity for bodies until ``free``; the router is given every
byte once, and told of the end once.
"""

from __future__ import annotations

from router.http.server.capacity import Capacity


class RequestBody:
    """``expected``: there is one; ``trailers``: trailers came behind it; ``latest``: what the router was
    given last, all of a body that came in one piece."""

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

    def hold(self, size: int) -> bool:
        """So many bytes came; False: there is no room for them."""
        if not self._capacity.take(size):
            return False
        self._held_bytes += size
        return True

    def add(self, piece: bytes, *, ends: bool) -> None:
        """The next bytes."""
        if piece:
            self._pieces.append(piece)
        self.whole = ends

    @property
    def waits(self) -> bool:
        """There is something to take: bytes, or the end."""
        return bool(self._pieces) or (self.whole and not self._ended)

    def take(self) -> bytes:
        """What came since the last time; with ``whole`` it is the rest."""
        self._ended = self.whole
        pieces = self._pieces
        self.latest = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return self.latest

    def free(self) -> None:
        """Nobody holds it any more."""
        self._pieces.clear()
        self.latest = b""
        self._capacity.give(self._held_bytes)
        self._held_bytes = 0
