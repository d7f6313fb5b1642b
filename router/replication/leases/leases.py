"""One writer per engine: leases with fencing tokens that only rise, stored and timed by the server.

Whoever acquires a lease gets a token higher than every one before it. Writes carry the token and the server
compares it (``write_scripts.WRITE``), so a writer whose lease expired unnoticed cannot write.
Always true: at any moment at most one token of an engine passes the fence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from router.replication.redis.client import Client
from router.replication.schema import scripts
from router.replication.schema.keys import ScopeKeys


class Lease(NamedTuple):
    """One engine's lease as the server has it."""

    holder: str
    """Replica id."""
    token: int
    expires_in_s: float
    """By the server's clock when it was asked; not positive for one that expired or was released."""

    @property
    def held(self) -> bool:
        return self.expires_in_s > 0


class Leases:
    """The leases of one scope, for one replica."""

    def __init__(self, client: Client, model: str, replica_id: str) -> None:
        self._client = client
        self._keys = ScopeKeys(client.settings.namespace, model)
        self.replica_id = replica_id

    async def acquire(self, engine_id: str, *, above: int = 0) -> int | None:
        """A token, higher than ``above``; None while another replica holds the lease."""
        settings = self._client.settings
        reply = await self._client.run(
            scripts.ACQUIRE,
            [self._keys.leases],
            engine_id,
            self.replica_id,
            int(settings.lease_s * 1000),
            above,
            int(settings.control_ttl_s * 1000),
        )
        return int(reply[0]) or None

    async def renew(self, tokens: Mapping[str, int]) -> set[str]:
        """Renew all at once. Returns the engines whose lease is lost; they must be dropped at once."""
        settings = self._client.settings
        pairs = [part for engine_id, token in tokens.items() for part in (engine_id, token)]
        held = await self._client.run(
            scripts.RENEW,
            [self._keys.leases, self._keys.scope],
            self.replica_id,
            int(settings.lease_s * 1000),
            int(settings.control_ttl_s * 1000),
            *pairs,
        )
        return {engine_id for engine_id, still in zip(tokens, held, strict=True) if not still}

    async def release(self, engine_id: str, token: int) -> bool:
        """Release it, for another to acquire at once; False if it was not held any more."""
        keys = [self._keys.leases]
        return bool(await self._client.run(scripts.RELEASE, keys, engine_id, token))

    async def holders(self) -> dict[str, Lease]:
        """Every lease of the model, expired ones too."""
        return await holders(self._client, self._keys)


async def holders(client: Client, keys: ScopeKeys) -> dict[str, Lease]:
    """Every lease of a model, expired ones too. Raises ``IndexUnavailable``."""
    found = await client.command("HGETALL", keys.leases)
    return parse_leases(found, await client.command("TIME", key=keys.leases))


def parse_leases(fields: Mapping[bytes, bytes], now: Sequence[bytes | int]) -> dict[str, Lease]:
    """The leases from the fields of their hash, and the server's clock (``TIME``)."""
    now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
    leases: dict[str, Lease] = {}
    for engine_id, text in fields.items():
        token, expires_ms, holder = text.decode().split("|", 2)
        leases[engine_id.decode()] = Lease(holder, int(token), (int(expires_ms) - now_ms) / 1000)
    return leases
