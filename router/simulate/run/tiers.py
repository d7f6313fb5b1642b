"""Memory outside the GPUs: host memory of each engine's own, and a store that all of them share.

What an engine computed is copied into both as connectors copy it (``HybridBlockPool.due``), and a prompt is
given what reaches furthest, of equals host memory, as ``HybridMultiConnector`` does. Bytes move over links,
one transfer after the other on each: host memory over one link per engine, the store over one per engine and
one that all share, in both directions. A block can be loaded from the store once it has been written; what
would have to wait behind ``WRITES_MAX`` blocks of the same engine is not written. Copies into host memory
take no time: that direction of its link is idle otherwise.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.pool.host_tier import HeldKey, HostTier
from publisher.pool.layout import PoolLayout
from router.simulate.run.tier_setup import Medium, TierSetup, TierSpec

WRITES_MAX = 4096
"""As the connectors' ``stores_max``."""


class Link:
    """Transfers one after the other; ``bytes_per_s`` may be infinite."""

    __slots__ = ("_bytes_per_s", "free_s")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def send(self, num_bytes: int, now: float) -> float:
        """When a transfer that is asked for now ends."""
        self.free_s = max(self.free_s, now) + num_bytes / self._bytes_per_s
        return self.free_s


class Reached(NamedTuple):
    """How far a prompt would get: tokens in all, and from where those beyond the GPU's would come."""

    end: int
    medium: Medium | None


class SharedStore:
    """One store of all engines. What is being written is held once its time has come."""

    def __init__(self, spec: TierSpec, layout: PoolLayout) -> None:
        self.spec = spec
        self.held = HostTier(layout, spec.blocks)
        self.reads = Link(spec.total_bytes_per_s)
        self._writes = Link(spec.total_bytes_per_s)
        self._coming: list[tuple[float, int, Link, list[HeldKey]]] = []
        self._under_way: set[HeldKey] = set()
        self._waiting: Counter[Link] = Counter()
        self._order = 0

    def write(self, link: Link, chain: Sequence[HeldKey], block_bytes: int, now: float) -> int:
        """Put blocks in, over an engine's link, that are neither there nor on their way; returns how many
        were left out, as too many of this engine's are waiting already."""
        self.settle(now)
        self.held.use([key for key in chain if key in self.held])
        new = [key for key in dict.fromkeys(chain) if key not in self.held and key not in self._under_way]
        written = new[: max(0, WRITES_MAX - self._waiting[link])]
        if written:
            size = len(written) * block_bytes
            ends_s = max(link.send(size, now), self._writes.send(size, now)) + self.spec.latency_s
            self._order += 1
            heapq.heappush(self._coming, (ends_s, self._order, link, written))
            self._under_way.update(written)
            self._waiting[link] += len(written)
        return len(new) - len(written)

    def settle(self, now: float) -> None:
        """What has been written by now is there."""
        while self._coming and self._coming[0][0] <= now:
            _, _, link, written = heapq.heappop(self._coming)
            self._under_way.difference_update(written)
            self._waiting[link] -= len(written)
            self.held.store(written)


class EngineTiers:
    """One engine's way to its host memory and to the store."""

    def __init__(self, setup: TierSetup, layout: PoolLayout, store: SharedStore | None) -> None:
        self._setup = setup
        self._host = None if setup.host is None else HostTier(layout, setup.host.blocks)
        self._store = store
        self._host_link = Link(math.inf if setup.host is None else setup.host.bytes_per_s)
        rate = math.inf if store is None else store.spec.bytes_per_s
        self._reads, self._writes = Link(rate), Link(rate)
        self.left_out_blocks = 0
        """Not written into the store, for too many waited."""
        self.moved_bytes = 0
        """Loaded."""

    def reach(self, request: PoolRequest, hit: int, now: float) -> Reached:
        """How far a prompt gets from its GPU hit on."""
        end: int = hit
        medium: Medium | None = None
        if self._host is not None and (found := self._host.reach(request, hit)) > end:
            end, medium = found, "CPU"
        if self._store is not None:
            self._store.settle(now)
            if (found := self._store.held.reach(request, hit)) > end:
                end, medium = found, "STORAGE"
        return Reached(end, medium)

    def load(self, request: PoolRequest, medium: Medium, now: float) -> tuple[float, float]:
        """Begin the load of a request that the pool has started: when it ends, and the seconds that it takes
        away from computing."""
        spec, tier = (
            (self._setup.host, self._host)
            if medium == "CPU"
            else (self._setup.store, None if self._store is None else self._store.held)
        )
        if spec is None or tier is None:
            raise ValueError(f"there is no {medium} to load from")
        keys = tier.load_keys(request, request.hit, request.loading_to)
        tier.use([key for key in keys if key in tier])
        size = len(keys) * self._setup.block_bytes
        self.moved_bytes += size
        if medium == "CPU":
            ends_s = self._host_link.send(size, now)
        elif self._store is not None:
            ends_s = max(self._reads.send(size, now), self._store.reads.send(size, now))
        return ends_s + spec.latency_s, spec.busy_share * size / spec.bytes_per_s

    def store(self, chain: Sequence[HeldKey], now: float) -> None:
        """Keep what became full in a step that ends now."""
        if self._host is not None:
            self._host.store(chain)
        if self._store is not None and chain:
            size = self._setup.block_bytes
            self.left_out_blocks += self._store.write(self._writes, chain, size, now)


def tiers_of(setup: TierSetup | None, pools: Sequence[HybridBlockPool]) -> list[EngineTiers | None]:
    """The tiers of a fleet, engine by engine; None where there are none."""
    if setup is None or not setup.any:
        return [None] * len(pools)
    store = None if setup.store is None else SharedStore(setup.store, pools[0].layout)
    return [EngineTiers(setup, pool.layout, store) for pool in pools]
