"""Ends what hangs, and says which test it was.

pytest-timeout's signal cannot interrupt compiled code that waits. One case is known: uvloop's ``Loop.close``
warns of a handle that was left open from inside a C callback; where the filters make that warning an error,
the handle is not closed and the loop waits for it for ever (uvloop 0.23, ``__uv_walk_close_all_handles_cb``).
``fail_instead_of_waiting`` raises it after the loop has closed. For all others a ``Watchdog`` prints the
test's node id and all stacks and ends the process: pytest-xdist then names the test, too, and goes on in
another worker.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import warnings
from time import monotonic, sleep

import uvloop
import uvloop.loop

GRACE_S = 30.0
"""From the time-out of a test, which pytest-timeout could not enforce, to the end of the process."""
LOOK_S = 1.0
"""Between looks of the watchdog at the clock."""


def fail_instead_of_waiting() -> None:
    """Have ``uvloop.Loop.close`` close what was left open before it warns of it."""
    close = uvloop.Loop.close

    def close_whole(loop: uvloop.loop.Loop) -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            close(loop)
        for one in found:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)

    setattr(uvloop.Loop, "close", close_whole)  # noqa: B010  # the stub has no such signature


class Watchdog:
    """Of one process and one test at a time. ``stderr``: the descriptor to write to, not pytest's capture."""

    def __init__(self, stderr: int) -> None:
        self._stderr = stderr
        self._watched: tuple[str, float] | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, node_id: str, timeout_s: float) -> None:
        """A test begins that pytest-timeout ends after ``timeout_s``."""
        self._watched = (node_id, monotonic() + timeout_s)
        # Needs no interpreter lock, for code that waits without giving it up; it cannot name the test.
        faulthandler.dump_traceback_later(timeout_s + 2 * GRACE_S, exit=True, file=self._stderr)

    def end(self) -> None:
        """The test has ended."""
        faulthandler.cancel_dump_traceback_later()
        self._watched = None

    def _watch(self) -> None:
        # A thread for each test, or a notice to this one, would cost more than most tests.
        while (watched := self._watched) is None or monotonic() < watched[1] + GRACE_S:
            sleep(LOOK_S)
        os.write(self._stderr, f"\n\n{watched[0]} hangs; the process ends. All stacks:\n".encode())
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)
        os._exit(1)
