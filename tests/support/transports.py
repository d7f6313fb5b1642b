"""Transports without sockets, for what sockets cannot bring apart on command."""

from __future__ import annotations

import asyncio
from typing import Any


class FakeTransport(asyncio.Transport):
    """Sends nothing, and tells what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False
        self.unsent = 0
        self.reading = True

    def write(self, data: Any) -> None: ...

    def writelines(self, pieces: Any) -> None: ...

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
