"""The other routers of the fleet: replicas on a shared index, and sibling workers of this machine.

What they have in flight stands in the same books as our own requests: with a shared index in the one that
replicas exchange, among workers without one in the one that they tell each other. A router that is alone has
neither, and this does nothing. Always true: nobody waits here for anybody but the index, which has deadlines.
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
from router.workers.gossip import SiblingGossip
from router.workers.seat import WorkerContext

if TYPE_CHECKING:  # redis-py comes with it, which a router without a shared index does without
    from router.replication.service import SharedIndex


class PeerSharing:
    """``begin`` it once fleet and keys are known; ``seat``: the router is one of several workers. Raises
    ``SettingsError`` for files of the index that are of no use."""

    def __init__(
        self, config: Config, accounts: Accounts, *, clock: Callable[[], float], seat: WorkerContext | None
    ) -> None:
        self._accounts = accounts
        self._clock = clock
        self._seat = seat
        self._fleet: Fleet[Engine]  # from ``begin`` on
        self.index = _shared_index(config, self.own_load, clock)
        self.gossip: SiblingGossip | None = None
        """Among workers; without a shared index of all books, else of those that it has not."""
        if self.index is not None:
            accounts.inflight = self.index.inflight

    def begin(self, fleet: Fleet[Engine], gate: KeyGate | None) -> None:
        """These are the engines whose load is told, and the keys whose limits are shared."""
        self._fleet, seat = fleet, self._seat
        if self.index is not None and gate is not None:
            self.index.share_limits(gate, "" if seat is None else seat.folder.name)
        if seat is not None:
            self.gossip = self._gossip_of(seat, gate)
        if self.index is not None:
            secrets = tuple if gate is None else lambda: gate.keys.secrets
            self.index.share_responses(self._accounts.responses, secrets)

    def _gossip_of(self, seat: WorkerContext, gate: KeyGate | None) -> SiblingGossip:
        alone = self.index is None
        gossip = SiblingGossip(
            seat, self.own_load, clock=self._clock, whole=alone, served=self._served_elsewhere, gate=gate
        )
        self._accounts.responses = gossip.responses
        if alone:
            self._accounts.inflight, self._accounts.affinity = gossip.inflight, gossip.affinity
        return gossip

    @property
    def lookup(self) -> SharedView | None:
        """The shared index as decisions ask it."""
        return None if self.index is None else self.index.lookup

    @property
    def told(self) -> Callable[[], PeerSnapshot]:
        """What siblings have told by themselves."""
        return (lambda: NO_PEER_SNAPSHOT) if self.gossip is None else self.gossip.told

    @property
    def problem(self) -> str:
        """Why the shared index does not answer; "" where it does, or there is none."""
        return "" if self.index is None else self.index.problem

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """What runs in the background."""
        return [] if self.index is None else [self.index.run()]

    async def close(self) -> None:
        """The router ends."""
        if self.index is not None:
            await self.index.close()

    def others(self) -> Mapping[str, OthersLoad] | None:
        """What all others have in flight, by engine; None: it is not known now."""
        if self.index is not None:
            return self.index.lookup.last_load()
        return {} if self.gossip is None else self.gossip.others()

    def own_load(self, now: float) -> dict[str, OthersLoad]:
        """What this router alone has in flight, for the others."""
        loads = ((engine.engine_id, engine.load.own(now)) for engine in self._fleet)
        return {engine_id: load for engine_id, load in loads if load is not None}

    def _served_elsewhere(self, prompt: InflightPrompt) -> None:
        """An engine has computed a prompt that another worker sent there: so has its shadow."""
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
