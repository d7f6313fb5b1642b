"""Loopback ports that nobody listens on.

Another process may take one before it is used: listen on port 0 where the part under test can.
"""

from __future__ import annotations

import contextlib
import socket

CLUSTER_BUS = 10_000
"""A node of a Redis Cluster also listens on its port plus this."""


def free_ports(count: int) -> list[int]:
    """All are held until all are chosen, so they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def free_port() -> int:
    """One port."""
    return free_ports(1)[0]


def free_port_with_bus() -> int:
    """One port whose bus port is free too."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as bus:
            bus.bind(("127.0.0.1", port + CLUSTER_BUS))
            return port
