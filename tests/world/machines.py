"""Which machine and which process of a world the running code belongs to. Tasks and callbacks inherit
both."""

from __future__ import annotations

from contextvars import ContextVar

MACHINE: ContextVar[str] = ContextVar("machine", default="127.0.0.1")
"""Address of the machine."""
PROCESS: ContextVar[int] = ContextVar("process", default=0)
"""Number of the process; 0: the test itself, which is never killed."""
