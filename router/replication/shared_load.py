"""Load that replicas share, and no blocks: each follows all engines, by its own feeds and index.

There is one scope for all models. A task receives load and prompts in flight, and the one lease says which
replica acts for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.replication.service import REFRESH_S, SharedState, Work

# The scope of all models, what its one lease is of, seconds that a read waits for prompts in flight, and its
# pause, in which several come together. No model has this name, and an empty one would be no hash tag in a
# Cluster.
FLEET_SCOPE = "*"
_FLEET = EngineAddress("fleet")
RECEIVE_WAIT_S = 0.05
RECEIVE_PAUSE_S = 0.003


class SharedLoad(SharedState):
    """Shared load of a router; placement uses ``peers``."""

    shares_blocks = False

    def leads(self, first: str | None) -> bool | None:
        """Implement ``SharedState``: who has the fleet's lease."""
        del first
        return self.lease_manager.follows(_FLEET.engine_id)

    def _scope_of(self, engine_id: str) -> str | None:
        del engine_id
        return FLEET_SCOPE

    def _works(self) -> Iterable[Work]:
        return (self._receive,)

    async def _receive(self) -> None:
        """Receive what other replicas send: decisions use what came last, and wait for nothing."""
        await self._write_client.start(self.settings.connect_timeout_s)
        self.lease_manager.add_candidate(_FLEET, FLEET_SCOPE)
        while True:
            self.peers = await self.lookup.receive(FLEET_SCOPE, RECEIVE_WAIT_S)
            idle = not self.lease_manager.others_alive or self.lookup.problem
            await asyncio.sleep(REFRESH_S if idle else RECEIVE_PAUSE_S)
