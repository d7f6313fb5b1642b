"""Loopback ports that nobody listens on, below those that systems give to connections and to port 0.

So no connection of another process takes one before it is used, or between two uses. Listen on port 0 where
the part under test can, and need not come back at the same place.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket

CLUSTER_BUS = 10_000
"""A node of a Redis Cluster also listens on its port plus this."""
_FIRST, _LAST = 12_000, 22_000
"""With the bus still below 32768, where Linux begins to give ports itself."""
_WORKERS = 8
"""Test processes side by side that never choose the same."""
_CHOICE = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """All are held until all are chosen, so they differ."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = _candidate()
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


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


def _candidate() -> int:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return _CHOICE.randrange(_FIRST + int(worker) % _WORKERS, _LAST, _WORKERS)
