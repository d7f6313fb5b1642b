"""Garbage collection in the shared index: engines that left while no replica could retire them. Every writer
runs it; the server decides what is removed. An engine whose lease is held, or expired less than ``idle_s``
ago, is kept.
"""

from __future__ import annotations

from kvatlas.router.replication.leases import holders
from kvatlas.router.replication.registry import (
    Registry,
    ScopeView,
)


class RegistryGc:
    """Garbage collection of one scope's registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._orphans: set[str] = set()

    async def run(self, idle_s: float) -> ScopeView | None:
        """Remove engines whose lease expired ``idle_s`` ago, and those found without a lease twice in a row.

        A writer whose lease the server lost renews it in between. Returns the registry as it was before; None
        if there is none. Raises ``IndexUnavailable``.
        """
        registry = self._registry
        view = await registry.fetch()
        if view is None:
            return None
        leases = await holders(registry.client, registry.keys)
        orphans = view.slots.keys() - leases.keys()
        gone = {engine_id for engine_id, lease in leases.items() if lease.expires_in_s < -idle_s}
        for engine_id in gone | (orphans & self._orphans):
            if await registry.retire(view.scope, engine_id, None, idle_s):
                for partition in range(view.scope.partitions):
                    fence = registry.keys.fence(partition, view.scope.partitions)
                    await registry.client.command("HDEL", fence, engine_id)
        self._orphans = orphans
        return view
