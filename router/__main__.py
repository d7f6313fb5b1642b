"""Entry point of the ``kvatlas`` command and its error boundary: every failure ends in one sentence.

Light to import: where kvatlas was installed without its dependencies, as in an engine's environment, it gets
this far and reports what to install. Invariants:
no traceback reaches the terminal unless ``KVATLAS_TRACEBACK`` is set; the status is 0 done, 1 no or failed, 2
bad arguments or configuration, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
import traceback
from collections.abc import Sequence

TRACEBACK_VARIABLE = "KVATLAS_TRACEBACK"
# Extra that provides a module; all others are dependencies.
_EXTRA_OF = {"torch": "connectors", "mooncake": "connectors-mooncake"}
# New objects between two garbage collections. Imports create no garbage; collecting takes a tenth of their
# time.
_COLLECT_EVERY = 50_000


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Run one command; returns its exit status and prints to stderr why it is not 0."""
    gc.set_threshold(_COLLECT_EVERY)
    try:
        # A terminal that lacks a character shows "?".
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        from kvatlas.router.cli import call  # noqa: PLC0415  # needs the dependencies

        status = call(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:  # noqa: BLE001  # the one place where everything ends
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        status = _report(_innermost(error))
    return status


def _innermost(error: BaseException) -> BaseException:
    """Unwrap a task group's error if it holds a single one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _report(error: BaseException) -> int:
    """Print why the command failed; returns the status."""
    pipe_closed = _flush_output()
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError) and pipe_closed:
        # The reader has closed the pipe: head, or a pager that was quit.
        return 1
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) != "kvatlas":
        what = f"'.[{_EXTRA_OF[name]}]'" if name in _EXTRA_OF else "."
        _print_error(
            f"this command needs the Python module {name!r}, which is not installed; "
            f"in a checkout of kvatlas: python -m pip install {what}"
        )
    elif isinstance(error, OSError):
        _print_error(_of_system(error))
    elif isinstance(error, MemoryError):
        _print_error("not enough memory")
    else:
        _print_error(
            f"unexpected {type(error).__name__}: {error} (a bug; {TRACEBACK_VARIABLE}=1 shows where)"
        )
    return 1


def _of_system(error: OSError) -> str:
    """Format an operating system error with its file, without its number."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename else said


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"kvatlas: {text}", file=sys.stderr, flush=True)


def _flush_output() -> bool:
    """Flush the output; detach an output that is closed or full, so that nothing fails on it at exit.

    Returns whether the reader has closed the pipe.
    """
    if sys.stdout is None:
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
        if not gone:
            sys.stdout.flush()
    except (OSError, ValueError):  # full, closed, or no file at all
        gone = False
    else:
        if not gone:
            return False
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


if __name__ == "__main__":
    main()
