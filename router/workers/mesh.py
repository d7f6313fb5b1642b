"""Messages between the workers of one machine: one socket per sibling; messages are not split or reordered.

Sending never blocks. A message that does not fit into a sibling's buffer is dropped as a whole and counted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping

# Less than Linux's default socket buffer (net.core.wmem_default, 208 KiB).
MESSAGE_BYTES_MAX = 192 << 10
_READ_AT_ONCE = 32


class Mesh:
    """Message sockets to all siblings.

    ``sockets``: by sibling, non-blocking. ``on_message`` is called in the event loop with (sibling, message).
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], on_message: Callable[[int, bytes], None]
    ) -> None:
        self._sockets = sockets
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Start to receive; call it in the running event loop."""
        self._loop = asyncio.get_running_loop()
        for sibling, sock in self._sockets.items():
            self._loop.add_reader(sock, self._read, sibling, sock)

    def close(self) -> None:
        """Stop receiving and close the sockets."""
        if self._loop is not None:
            for sock in self._sockets.values():
                self._loop.remove_reader(sock)
            self._loop = None

    def broadcast(self, message: bytes) -> int:
        """Send to every sibling; returns how many could not receive it."""
        missed = 0
        for sock in self._sockets.values():
            try:
                sock.send(message)
            except OSError:
                # Buffer full: the sibling is dead, stopped or far behind.
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
            # End of file: the parent has exited, and the siblings with it.
            if not message:
                if self._loop is not None:
                    self._loop.remove_reader(sock)
                return
            self._on_message(sibling, message)
