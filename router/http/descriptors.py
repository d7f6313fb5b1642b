"""File descriptors: every connection needs one, and a process has a limited number.

The soft limit is raised as needed; a limit that is too low is logged at the start. Running out is a failure
of this process, never of an engine.
"""

from __future__ import annotations

import errno
import resource
import socket
import time

import structlog

_log = structlog.get_logger()
# The client's, and the engine's during a request.
_DESCRIPTORS_PER_CONNECTION = 2
# Event streams, polls, log files, listening sockets.
_OTHER_DESCRIPTORS = 256
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})
_LOG_INTERVAL_S = 10.0
_LAST_DESCRIPTORS = 16
_REMEDY = "raise the limit (ulimit -n, LimitNOFILE= of a systemd unit, ulimits of a container)"


def descriptors_needed(connections_max: int) -> int:
    """Return the file descriptors for this number of client connections."""
    return connections_max * _DESCRIPTORS_PER_CONNECTION + _OTHER_DESCRIPTORS


def raise_descriptor_limit(connections_max: int, *, default: int = 0) -> int:
    """Raise the soft limit for this number of client connections; return how many are possible then.

    Fewer are logged as a warning, unless ``connections_max`` is the ``default`` and at least half of it is
    possible.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_needed(connections_max)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    held = max(1, (soft - _OTHER_DESCRIPTORS) // _DESCRIPTORS_PER_CONNECTION)
    unasked = connections_max == default and 2 * held >= default
    (_log.debug if unasked else _log.warning)(
        "fewer connections than listen.connections_max: file descriptors are limited",
        connections_max=connections_max,
        held=held,
        limit=soft,
        descriptors_needed=wanted,
        remedy=_REMEDY,
    )
    return held


def is_last_descriptor(sock: socket.socket) -> bool:
    """Return whether this socket has one of the last file descriptors; log it at most every 10 s.

    The system assigns the lowest free number.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or sock.fileno() < soft - _LAST_DESCRIPTORS:
        return False
    _log_shortage(soft)
    return True


def is_out_of_descriptors(error: BaseException) -> bool:
    """Return whether file descriptors have run out; log it at most every 10 s."""
    if getattr(error, "errno", None) not in _EXHAUSTED:
        return False
    _log_shortage(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return True


def _log_shortage(limit: int) -> None:
    now = time.monotonic()
    if now >= _LastLog.next_at:
        _LastLog.next_at = now + _LOG_INTERVAL_S
        _log.error("out of file descriptors", limit=limit, remedy=_REMEDY)


class _LastLog:
    next_at = 0.0
