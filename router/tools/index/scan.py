"""Reads a shared index from outside: which scopes it has, who follows what, and every block key.

For tools and tests only: it walks all keys (SCAN), which no router ever does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
from redis.exceptions import RedisError

from router.fleet.identity import EngineAddress
from router.index.base import Words
from router.replication.leases.leases import Lease, Leases
from router.replication.leases.membership import Signature, read_roll
from router.replication.redis.client import Client
from router.replication.redis.errors import unavailable
from router.replication.schema.keys import ScopeKeys
from router.replication.schema.registry import Registry, Scope, ScopeView

_SCAN_COUNT = 5000
_GLOB = re.compile(rb"([\\*?\[\]])")
_TIMEOUT_S = 10.0


class ScopeBooks(NamedTuple):
    """One model's books, leases and replicas at about one moment."""

    model: str
    view: ScopeView
    leases: dict[str, Lease]
    replicas: dict[str, Signature]

    @property
    def addresses(self) -> dict[str, EngineAddress]:
        """Where the engines' events are, as the replicas that follow them say."""
        return {e.engine_id: e for signature in self.replicas.values() for e in signature.wants}


async def models_of(client: Client) -> list[str]:
    """The models that have a scope in the client's namespace."""
    namespace = client.settings.namespace.encode()
    pattern = re.compile(re.escape(namespace) + rb":\{(.*)\}:scope")
    found = set()
    async for keys in scan(client, namespace + b":{", b"}:scope"):
        found |= {unquote(match[1].decode()) for key in keys if (match := pattern.fullmatch(key))}
    return sorted(found)


async def read_books(client: Client, model: str) -> ScopeBooks | None:
    """Everything but the blocks; None where there is no such scope."""
    view = await Registry(client, model).fetch()
    if view is None:
        return None
    leases = await Leases(client, model, "").holders()
    roll = read_roll(await client.command("HGETALL", ScopeKeys(client.settings.namespace, model).replicas))
    return ScopeBooks(model, view, leases, {name: s for name, s in roll.items() if s is not None})


async def scan(client: Client, head: bytes, tail: bytes = b"") -> AsyncIterator[list[bytes]]:
    """All keys that start with ``head`` and end in ``tail``, a page at a time.

    A key may come twice. Raises ``IndexUnavailable``.
    """
    glob = _GLOB.sub(rb"\\\1", head) + b"*" + _GLOB.sub(rb"\\\1", tail)
    for master in client.masters():
        cursor = 0
        while True:
            query = ("SCAN", cursor, "MATCH", glob, "COUNT", _SCAN_COUNT)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    cursor, keys = await master.execute_command(*query)
            except (RedisError, OSError) as error:
                raise unavailable(error) from error
            yield keys
            if not cursor:
                break


async def block_hashes(client: Client, keys: ScopeKeys, scope: Scope) -> Words:
    """The hash of every block that has a key in this scope, in no order."""
    found: list[bytes] = []
    for partition in range(scope.partitions):
        prefix = keys.prefix(scope.epoch, partition, scope.partitions)
        async for page in scan(client, prefix):
            found += [key[-8:] for key in page if len(key) == len(prefix) + 8]
    return np.unique(np.frombuffer(b"".join(found), "<u8").astype(np.uint64))
