"""File descriptors: every connection takes one, and the process may have only so many.

The soft limit is raised as far as needed; what cannot be held is logged at the start. Running out is a
failure of this process, never of an engine.
"""

from __future__ import annotations

import errno
import resource
import socket
import time

import structlog

_log = structlog.get_logger()
_PER_CONNECTION = 2  # the client's and, while it is answered, the engine's
_OTHERS = 256  # event streams, polls, log files, listening sockets
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})
_SAY_EVERY_S = 10.0
_LAST = 16
_REMEDY = "raise the limit (ulimit -n, LimitNOFILE= of a systemd unit, ulimits of a container)"


def needed(connections_max: int) -> int:
    """File descriptors for so many client connections."""
    return connections_max * _PER_CONNECTION + _OTHERS


def connections_held(connections_max: int, *, default: int = 0) -> int:
    """Raise the soft limit for this many client connections; how many the process can hold then.

    Fewer are a warning, except where ``connections_max`` is the ``default``, which was not chosen, and at
    least half of it can be held.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed(connections_max)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    held = max(1, (soft - _OTHERS) // _PER_CONNECTION)
    unasked = connections_max == default and 2 * held >= default
    (_log.debug if unasked else _log.warning)(
        "fewer connections than listen.connections_max: file descriptors are limited",
        connections_max=connections_max,
        held=held,
        limit=soft,
        needed=wanted,
        remedy=_REMEDY,
    )
    return held


def is_last(sock: socket.socket) -> bool:
    """Whether this socket has one of the last file descriptors, of which the system gives the lowest; told in
    the log, now and then."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or sock.fileno() < soft - _LAST:
        return False
    _tell(soft)
    return True


def ran_out(error: BaseException) -> bool:
    """Whether this error says that there are no more file descriptors; told in the log, now and then."""
    if getattr(error, "errno", None) not in _EXHAUSTED:
        return False
    _tell(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return True


def _tell(limit: int) -> None:
    now = time.monotonic()
    if now >= _Said.next_at:
        _Said.next_at = now + _SAY_EVERY_S
        _log.error("out of file descriptors", limit=limit, remedy=_REMEDY)


class _Said:
    next_at = 0.0
