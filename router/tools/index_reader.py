"""Reads a shared index from outside the router: its scopes, lease holders, and every block key. For tools and
tests only: it walks all keys (SCAN), which the router never does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
from redis.exceptions import RedisError

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.base import Words
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.leases import Lease, Leases
from kvatlas.router.replication.members import MemberRecord, decode_members
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import unavailable
from kvatlas.router.replication.registry import Registry, Scope, ScopeView

_SCAN_COUNT = 5000
_GLOB = re.compile(rb"([\\*?\[\]])")
_TIMEOUT_S = 10.0


class ScopeSnapshot(NamedTuple):
    """One model's registry, leases and replicas, read one after the other."""

    model: str
    view: ScopeView
    leases: dict[str, Lease]
    replicas: dict[str, MemberRecord]

    @property
    def addresses(self) -> dict[str, EngineAddress]:
        """Addresses of the engines, as reported by the replicas."""
        return {e.engine_id: e for record in self.replicas.values() for e in record.wants}


async def models_of(client: Client) -> list[str]:
    """Return the models that have a scope in the client's namespace."""
    namespace = client.settings.namespace.encode()
    pattern = re.compile(re.escape(namespace) + rb":\{(.*)\}:scope")
    found = set()
    async for keys in scan(client, namespace + b":{", b"}:scope"):
        found |= {unquote(match[1].decode()) for key in keys if (match := pattern.fullmatch(key))}
    return sorted(found)


async def read_scope(client: Client, model: str) -> ScopeSnapshot | None:
    """Read everything but the blocks; None if there is no such scope."""
    view = await Registry(client, model).fetch()
    if view is None:
        return None
    leases = await Leases(client, model, "").holders()
    records = decode_members(
        await client.command("HGETALL", ScopeKeys(client.settings.namespace, model).replicas)
    )
    return ScopeSnapshot(model, view, leases, {name: s for name, s in records.items() if s is not None})


async def scan(client: Client, head: bytes, tail: bytes = b"") -> AsyncIterator[list[bytes]]:
    """Yield all keys that start with ``head`` and end in ``tail``, page by page.

    A key may be returned twice. Raises ``IndexUnavailable``.
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
    """Return the hash of every block that has a key in this scope, unordered."""
    found: list[bytes] = []
    for partition in range(scope.partitions):
        prefix = keys.prefix(scope.epoch, partition, scope.partitions)
        async for page in scan(client, prefix):
            found += [key[-8:] for key in page if len(key) == len(prefix) + 8]
    return np.unique(np.frombuffer(b"".join(found), "<u8").astype(np.uint64))
