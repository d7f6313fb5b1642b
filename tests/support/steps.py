"""Count the bytecode instructions that some work takes: its cost without a clock."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any


class TooManyStepsTakenError(BaseException):
    """Ends work that is far beyond its bound; no handler of ``Exception`` may swallow it."""


class _Counter:
    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most
        self._before: Any = None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count > self._most:
                sys.settrace(self._before)
                raise TooManyStepsTakenError(self.count)
        else:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def __enter__(self) -> _Counter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def steps(work: Callable[[], object], most: int = 5_000_000) -> int:
    """Instructions of Python functions called by ``work``; loops inside of C functions count as one. Raises
    beyond ``most``."""
    with _Counter(most) as counter:
        work()
    return counter.count


async def steps_of(work: Callable[[], Awaitable[object]], most: int = 5_000_000) -> int:
    """The same of a coroutine, with whatever else the loop runs meanwhile."""
    with _Counter(most) as counter:
        await work()
    return counter.count
