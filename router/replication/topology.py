"""Servers that hold the index: one master, Sentinel's master, or the masters of a Cluster with their slots.

redis-py queries and parses. Its Cluster client is not used: it follows redirections and updates its view of
the Cluster within a command, while the index must know which run of which server a reply came from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from kvatlas.router.replication.index_url import Target
from kvatlas.router.replication.redis_connection import IndexUnavailable

Address = tuple[str, int]


class SlotRange(NamedTuple):
    """Slots ``first`` to ``last`` are served by ``master``."""

    first: int
    last: int
    master: Address


class Topology(NamedTuple):
    """The masters in use; one range for one server, none before any was found."""

    clustered: bool
    ranges: tuple[SlotRange, ...]

    @property
    def masters(self) -> list[Address]:
        return list(dict.fromkeys(part.master for part in self.ranges))

    def master_of(self, key: bytes) -> Address | None:
        if len(self.ranges) == 1:
            return self.ranges[0].master
        slot = key_slot(key)
        return next((part.master for part in self.ranges if part.first <= slot <= part.last), None)


def single(address: Address) -> Topology:
    return Topology(False, (SlotRange(0, SLOTS - 1, address),))


async def cluster_topology(node: Redis, asked: Address) -> Topology:
    """Read the Cluster's topology from one of its nodes. Raises ``IndexUnavailable`` if slots are not
    served.
    """
    ranges = sorted(
        SlotRange(first, last, ((master[0] or b"").decode() or asked[0], int(master[1])))
        for first, last, master, *_ in await node.execute_command("CLUSTER SLOTS")
    )
    covered = sum(part.last - part.first + 1 for part in ranges)
    if covered != SLOTS:
        raise IndexUnavailable("CLUSTERDOWN", f"{SLOTS - covered} slots are not served")
    return Topology(True, tuple(ranges))


async def sentinel_master(target: Target, arguments: dict[str, Any]) -> Address:
    """Return the address of the master that the Sentinels name. Raises ``IndexUnavailable``."""
    own = arguments | {"username": None, "password": None, "db": 0}
    sentinel = Sentinel([])
    sentinel.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **own)) for host, port in target.addresses
    ]
    try:
        host, port = await sentinel.discover_master(target.service)
    except MasterNotFoundError as error:
        asked = ", ".join(f"{host}:{port}" for host, port in target.addresses)
        down = " : " in str(error)
        detail = "at least one does not answer" if down else "all answer"
        why = f"no master named {target.service!r} at the Sentinels {asked} ({detail})"
        raise IndexUnavailable("sentinel", why) from error
    finally:
        await sentinel.aclose()
    return str(host), int(port)
