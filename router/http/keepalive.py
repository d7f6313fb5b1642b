"""TCP keepalive: a peer without power, or a connection that a middlebox forgot, is noticed within a minute.

The system's default is two hours, and a quarter of an hour for bytes that were sent and not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 3
_DEAD_S = KEEPALIVE_IDLE_S + KEEPALIVE_COUNT * KEEPALIVE_INTERVAL_S
# By name: not every system has all of them.
_KEEPALIVE = {
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
    "TCP_KEEPCNT": KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": 1000 * _DEAD_S,
}


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the system probe a TCP connection that is silent; a Unix socket needs none."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # A connection may be lost before it is set up here.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
