"""Loopback ports without a listener, below those that systems give to connections and to port 0.

So no connection of another process takes one before it is used, or between two uses. A server may bind its
port long after it was chosen (vLLM: tens of seconds), so none is given twice before all were given: each test
process holds a share of its own, and takes from it in turn. Listen on port 0 where the part under test can,
and need not come back at the same place.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import random
import socket
from collections.abc import Iterator

from tests.world.seams import virtual_loop

CLUSTER_BUS = 10_000
"""A node of a Redis Cluster also listens on its port plus this."""
_FIRST, _LAST = 12_000, 22_000
"""With the bus still below 32768, where Linux begins to give ports itself."""
_SHARES = 64
"""Test processes side by side that never choose the same."""
_SHARE_LOCKS = _FIRST - _SHARES
"""A process holds share N while it is bound to this port plus N."""


def free_ports(count: int) -> list[int]:
    """All are held until all are chosen, so they differ. On virtual time: ports of the virtual network."""
    if (loop := virtual_loop()) is not None:
        return [loop.net.port("127.0.0.1") for _ in range(count)]
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = next(_turns())
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


@functools.cache
def _turns() -> Iterator[int]:
    """This process's ports, again and again, from any of them: the process before it had the same."""
    mine = range(_FIRST + _share(), _LAST, _SHARES)
    at = random.SystemRandom().randrange(len(mine))
    return itertools.cycle([*mine[at:], *mine[:at]])


@functools.cache
def _share() -> int:
    """Its number, which is held until the process ends."""
    for share in range(_SHARES):
        lock = socket.socket()
        with contextlib.suppress(OSError):
            lock.bind(("127.0.0.1", _SHARE_LOCKS + share))
            atexit.register(lock.close)
            return share
        lock.close()
    raise RuntimeError(f"more than {_SHARES} test processes choose ports at the same time")
