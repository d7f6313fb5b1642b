"""State shared with the other routers of the fleet: replicas on a shared index, and sibling workers.

Their requests in flight enter the same accounts as our own: with a shared index through the index, among
workers without one through their gossip. A single router has neither, and this does nothing. Invariant: no
request waits here for another router, only for the index, which has deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from router.admission.gate import KeyGate
from router.config.schema import Config
from router.fleet.status import Fleet
from router.placement.engine import NO_PEER_SNAPSHOT, Accounts, Engine, PeerSnapshot, SharedView
from router.placement.inflight import InflightPrompt
from router.placement.load.others import OthersLoad
from router.workers.context import WorkerContext
from router.workers.gossip import SiblingGossip

if TYPE_CHECKING:  # it imports redis-py, which a router without a shared index does not need
    from router.replication.service import SharedIndex


class PeerSharing:
    """Call ``begin`` once fleet and keys are known; ``worker``: the router is one of several workers. Raises
    ``SettingsError`` for unusable files of the index."""

    def __init__(
        self, config: Config, accounts: Accounts, *, clock: Callable[[], float], worker: WorkerContext | None
    ) -> None:
        self._accounts = accounts
        self._clock = clock
        self._worker = worker
        self._fleet: Fleet[Engine]  # set by ``begin``
        self.index = _shared_index(config, self.own_load, clock)
        self.gossip: SiblingGossip | None = None
        """Among workers: carries what the shared index does not, or everything without one."""
        if self.index is not None:
            accounts.inflight = self.index.inflight

    def begin(self, fleet: Fleet[Engine], gate: KeyGate | None) -> None:
        """Share the load of these engines and the limits of these keys."""
        self._fleet, worker = fleet, self._worker
        if self.index is not None and gate is not None:
            self.index.share_limits(gate, "" if worker is None else worker.folder.name)
        if worker is not None:
            self.gossip = self._gossip_of(worker, gate)
        if self.index is not None:
            secrets = tuple if gate is None else lambda: gate.keys.secrets
            self.index.share_responses(self._accounts.responses, secrets)

    def _gossip_of(self, worker: WorkerContext, gate: KeyGate | None) -> SiblingGossip:
        alone = self.index is None
        gossip = SiblingGossip(
            worker, self.own_load, clock=self._clock, whole=alone, served=self._served_elsewhere, gate=gate
        )
        self._accounts.responses = gossip.responses
        if alone:
            self._accounts.inflight, self._accounts.affinity = gossip.inflight, gossip.affinity
        return gossip

    @property
    def lookup(self) -> SharedView | None:
        """The shared index as seen by decisions."""
        return None if self.index is None else self.index.lookup

    @property
    def peer_state(self) -> Callable[[], PeerSnapshot]:
        """Latest state received from siblings."""
        return (lambda: NO_PEER_SNAPSHOT) if self.gossip is None else self.gossip.peer_state

    @property
    def problem(self) -> str:
        """Why the shared index does not answer; "" if it does, or if there is none."""
        return "" if self.index is None else self.index.problem

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines to run in the background."""
        return [] if self.index is None else [self.index.run()]

    async def close(self) -> None:
        """Close all connections."""
        if self.index is not None:
            await self.index.close()

    def others(self) -> Mapping[str, OthersLoad] | None:
        """Requests in flight of all other routers, by engine; None: currently unknown."""
        if self.index is not None:
            return self.index.lookup.last_load()
        return {} if self.gossip is None else self.gossip.others()

    def own_load(self, now: float) -> dict[str, OthersLoad]:
        """Requests in flight of this router alone, for the others."""
        loads = ((engine.engine_id, engine.load.own(now)) for engine in self._fleet)
        return {engine_id: load for engine_id, load in loads if load is not None}

    def _served_elsewhere(self, prompt: InflightPrompt) -> None:
        """Update the shadow of an engine that has computed a prompt of another worker."""
        engine = self._fleet.get(prompt.engine_id)
        if engine is not None and engine.shadow is not None and prompt.num_blocks:
            tokens = range(prompt.num_blocks * engine.shadow.spec.scheme.hash_block_size)
            engine.shadow.served(tokens, lambda scheme: list(prompt.hashes))


def _shared_index(
    config: Config, own_load: Callable[[float], dict[str, OthersLoad]], clock: Callable[[], float]
) -> SharedIndex | None:
    if not config.index.is_shared:
        return None
    from router.replication.service import SharedIndex  # noqa: PLC0415  # redis-py comes with it

    return SharedIndex(config.index, own_load, clock=clock)
