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

import uvloop
import uvloop.loop

GRACE_S = 30.0
"""From the time-out of a test, which pytest-timeout could not enforce, to the end of the process."""


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
    """Of one test. ``stderr``: the descriptor to write to, which is not the one that pytest captures."""

    def __init__(self, node_id: str, timeout_s: float, stderr: int) -> None:
        self._node_id = node_id
        self._timeout_s = timeout_s
        self._stderr = stderr
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        # Needs no interpreter lock, for code that waits without giving it up; it cannot name the test.
        faulthandler.dump_traceback_later(timeout_s + 2 * GRACE_S, exit=True, file=stderr)

    def end(self) -> None:
        """The test has ended."""
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        if self._ended.wait(self._timeout_s + GRACE_S):
            return
        os.write(self._stderr, f"\n\n{self._node_id} hangs; the process ends. All stacks:\n".encode())
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)
        os._exit(1)
