"""Proofs of engines' salts, which replicas leave in Redis for each other.

There is a key for each process of an engine, and one more while a replica tries it: the others wait for its
outcome. Messages between replicas would not do: those are read with requests to engines that are up, and a
server is tried before it is up.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from kvatlas.router.fleet.salt_proof import SaltProof, read_told
from kvatlas.router.fleet.shared_proofs import LEADER_S_MAX, TOLD_S_MAX
from kvatlas.router.replication.keys import proof_key
from kvatlas.router.replication.messages import VERSION
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable

_KEPT_S: Final = 86_400
"""A replica that starts later than this tries the server again."""
_PAUSE_S: Final = 0.25


class StoredProofs:
    """Implements ``SharedProofs``."""

    def __init__(self, client: Client, namespace: str, replica: str) -> None:
        self._client, self._namespace, self._replica = client, namespace, replica

    async def ask(self, engine_id: str, proof: SaltProof) -> None:
        """Implement ``SharedProofs``: return when a proof is there, or when no other replica tries it."""
        key, tries = self._key(engine_id, proof), proof.tries
        await self._client.start(LEADER_S_MAX)
        with suppress(TimeoutError, IndexUnavailable):
            async with asyncio.timeout(TOLD_S_MAX):
                while True:
                    if told := await self._client.command("GET", key):
                        with suppress(ValueError):
                            proof.hear(read_told(told))
                    if proof.tries != tries or await self._claim(key):
                        return
                    await asyncio.sleep(_PAUSE_S)

    async def tell(self, engine_id: str, proof: SaltProof) -> None:
        """Implement ``SharedProofs``."""
        with suppress(IndexUnavailable):
            await self._client.command("SET", self._key(engine_id, proof), proof.told(), "EX", _KEPT_S)

    async def _claim(self, key: bytes) -> bool:
        """Whether this replica is the one to try the server now."""
        ends_ms = int(1000 * TOLD_S_MAX)
        return bool(await self._client.command("SET", key + b":try", self._replica, "NX", "PX", ends_ms))

    def _key(self, engine_id: str, proof: SaltProof) -> bytes:
        return proof_key(self._namespace, f"{VERSION}:{engine_id}:{proof.started}")
