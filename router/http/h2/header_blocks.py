"""Header blocks out of HEADERS and CONTINUATION frames.

Pure. Always true: while a block is not whole nothing else may come; its size and its pieces are bounded.
"""

from __future__ import annotations

from router.http.h2 import frames as h2
from router.http.h2.frames import H2Error, H2Frame

_PIECES_MAX = 64


class HeaderBlocks:
    """``block_bytes_max``: of one block."""

    def __init__(self, block_bytes_max: int) -> None:
        self._block_bytes_max = block_bytes_max
        self.begun = False
        """A block is not whole."""
        self._first: H2Frame | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, found: H2Frame) -> tuple[H2Frame, bytes] | None:
        """A HEADERS or CONTINUATION frame. Returns the frame that began the block, and all of it, once it is
        whole. Raises ``H2Error``."""
        if found.kind == h2.HEADERS:
            self._first, self._pieces = found, [h2.fragment(found)]
            self._size = len(self._pieces[0])
        elif self._first is None or self._first.stream_id != found.stream_id:
            raise H2Error(h2.PROTOCOL_ERROR, "a continuation of nothing")
        else:
            self._size += len(found.payload)
            self._pieces.append(found.payload)
        if self._size > self._block_bytes_max or len(self._pieces) > _PIECES_MAX + 1:
            raise H2Error(h2.ENHANCE_YOUR_CALM, "a header block that is too long")
        self.begun = not found.flags & h2.END_HEADERS
        if self.begun:
            return None
        first, self._first = self._first, None
        return first, b"".join(self._pieces)
