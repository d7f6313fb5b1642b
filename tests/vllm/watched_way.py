"""A way to a server on this machine that calls the test when one kind of request passes.

So a test does something at exactly one moment of a request: after the server was told, or after it has
answered and before the client knows. Threads, since tests with real engines are not asynchronous.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.ports import free_port

_PIECE_BYTES = 1 << 16


class Way:
    """``url`` leads to ``server`` (``http://127.0.0.1:PORT``) while the way is open. ``asked`` is called once
    a request with ``mark`` in its body has been passed on, ``answered`` once the server has begun to answer
    it and before that is passed on; each once, by another thread."""

    def __init__(self, server: str, mark: bytes) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.server = server
        self.asked: Callable[[], None] | None = None
        self.answered: Callable[[], None] | None = None
        self._mark = mark
        self._here = "127.0.0.1", port
        self._there = "127.0.0.1", int(server.rpartition(":")[2])
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()

    def open(self) -> None:
        """Listen; a second call does nothing."""
        if self._listener is None:
            self._listener = socket.create_server(self._here)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuse connections and break those that there are, as a server does that dies."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                threading.Thread(target=self._pass, args=(here,), daemon=True).start()

    def _pass(self, here: socket.socket) -> None:
        with here, contextlib.suppress(OSError), socket.create_connection(self._there) as there:
            self._open |= {here, there}
            marked, asking = threading.Event(), threading.Lock()
            back = threading.Thread(target=self._answers, args=(there, here, marked, asking), daemon=True)
            back.start()
            self._requests(here, there, marked, asking)
            back.join()
            self._open -= {here, there}

    def _requests(
        self, here: socket.socket, there: socket.socket, marked: threading.Event, asking: threading.Lock
    ) -> None:
        with _ending(there), contextlib.suppress(OSError):
            seen = b""
            while piece := here.recv(_PIECE_BYTES):
                seen = seen[-len(self._mark) :] + piece
                found = self._mark in seen
                if found:
                    marked.set()
                    seen = b""
                with asking if found else contextlib.nullcontext():
                    there.sendall(piece)
                    if found and self.asked is not None:
                        then, self.asked = self.asked, None
                        then()

    def _answers(
        self, there: socket.socket, here: socket.socket, marked: threading.Event, asking: threading.Lock
    ) -> None:
        with _ending(here), contextlib.suppress(OSError):
            while piece := there.recv(_PIECE_BYTES):
                if marked.is_set() and self.answered is not None:
                    then, self.answered = self.answered, None
                    then()
                with asking:  # an answer is not quicker than what is to happen once its request was passed on
                    here.sendall(piece)


@contextlib.contextmanager
def _ending(other: socket.socket) -> Iterator[None]:
    """The end of one direction is the end of the other side's reading."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
