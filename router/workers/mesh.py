"""Messages between the workers of one machine: one socket to each sibling, every message whole and in order.

Always true: sending waits for nobody; what a sibling has no room for is dropped and counted, message by
message, never in parts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

MESSAGE_BYTES_MAX = 192 << 10
"""Below the least buffer that Linux gives a socket by default (208 KiB)."""
_READ_AT_ONCE = 32


class Mesh:
    """``sockets``: by sibling, not blocking. ``hear`` is called with (sibling, message) in the loop."""

    def __init__(self, sockets: Mapping[int, socket.socket], hear: Callable[[int, bytes], None]) -> None:
        self._sockets = sockets
        self._hear = hear
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to hear; in the running loop."""
        self._loop = asyncio.get_running_loop()
        for sibling, sock in self._sockets.items():
            self._loop.add_reader(sock, self._read, sibling, sock)

    def close(self) -> None:
        """Hear no more."""
        if self._loop is not None:
            for sock in self._sockets.values():
                self._loop.remove_reader(sock)
            self._loop = None

    def tell_all(self, message: bytes) -> int:
        """Send to every sibling; how many did not get it."""
        missed = 0
        for sock in self._sockets.values():
            try:
                sock.send(message)
            except OSError:  # its buffer is full: it is dead, stopped or far behind
                missed += 1
        return missed

    def _read(self, sibling: int, sock: socket.socket) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                message = sock.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:  # the parent is gone, and so are the siblings
                if self._loop is not None:
                    self._loop.remove_reader(sock)
                return
            self._hear(sibling, message)
