"""Memory outside the GPUs: host memory of each engine, and a store shared by all.

Computed blocks are copied to both as connectors do it (``HybridBlockPool.due``), and a prompt uses the one
with the longest prefix, host memory if equal, like ``HybridMultiConnector``. Transfers on a link are
sequential: host memory has one link per engine, the store one per engine and a common one, for both
directions. A block can be loaded from the store once it has been written; a block that would wait behind
``WRITES_MAX`` blocks of the same engine is not written. Copies to host memory take no time: that direction of
its link is otherwise idle.

Engines that pull (``TierSetup.pull_bytes_per_s``) also fetch what another engine's host memory holds, if the
router named that engine (``vllm/v1/kv_offload/tiering/p2p``, vLLM 0.32). The prefix is looked up when the
prompt is scheduled and may by then be shorter than promised. It passes through the engine's own host memory
and occupies a link of both engines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from kvatlas.publisher.block_pool import HybridBlockPool, PoolRequest
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.publisher.pool.host_tier import HeldKey, HostTier
from kvatlas.publisher.pool.layout import PoolLayout
from kvatlas.publisher.pool.retention_order import RetentionHint

Medium = Literal["CPU", "STORAGE", "PEER"]
# The router's own default (``policy.load_s_per_token``).
KV_KIB_PER_TOKEN = 100.0
_BLOCKS_MAX = 1 << 31
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks`` of host memory per engine, or of the whole store. Rates in bytes per second.

    Settings of memory outside the GPUs: its size, its speed, its cost for the engine; also parsed from flags.

    ``64GiB``, ``20000`` (blocks) or ``400%`` (of the GPUs' memory: of an engine's pool for host memory, of
    the fleet's for a store) is the size; options of the link follow a colon: ``400%:gbit_s=25+latency_ms=2``.
    """

    blocks: int
    bytes_per_s: float
    """Rate of an engine's link."""
    total_bytes_per_s: float = math.inf
    """Rate of the store's own link; host memory has none."""
    latency_s: float = 0.0
    busy_share: float = 0.0
    """Compute time lost to a load, as a share of the seconds that its bytes are on the link."""

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= _BLOCKS_MAX:
            raise ValueError(f"capacity must be 1 to {_BLOCKS_MAX} blocks, got {self.blocks}")
        for name in ("bytes_per_s", "total_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.latency_s < 3600:
            raise ValueError(f"latency_s must be 0 to 3600, got {self.latency_s}")
        if not 0 <= self.busy_share <= 1:
            raise ValueError(f"busy_share must be 0 to 1, got {self.busy_share}")


class TierSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Memory beside the GPUs. ``block_bytes``: size of a block, equal in every group."""

    block_bytes: int
    host: TierSpec | None = None
    store: TierSpec | None = None
    pull_bytes_per_s: float = 0.0
    """Rate of each engine's link to the others; 0: engines do not pull. Needs ``host``."""
    pull_latency_s: float = 0.002
    """Latency of one pull: the lookup and its answer."""
    hint_share: float = 0.0
    """Above 0: the router sends retention hints, and host memory obeys them (policy ``hinted`` instead of
    ``lru``) within this share for each tenant."""

    def __post_init__(self) -> None:
        if not 0 <= self.pull_bytes_per_s < math.inf:
            raise ValueError(f"pull_bytes_per_s must be finite and not negative, got {self.pull_bytes_per_s}")
        if not 0 <= self.hint_share <= 1:
            raise ValueError(f"hint_share must be 0 to 1, got {self.hint_share}")
        if self.pull_bytes_per_s and self.host is None:
            raise ValueError("pull_bytes_per_s needs host: engines pull from host memory")

    def load_s_per_token(self, medium: Medium, groups: tuple[GroupSpec, ...]) -> float:
        """Return the seconds per token of a long load: of full attention's blocks, or of the smallest
        group's."""
        spec = self.host if medium == "CPU" else self.store
        if medium != "PEER" and spec is None:
            return 0.0
        rate = self.pull_bytes_per_s if spec is None else min(spec.bytes_per_s, spec.total_bytes_per_s)
        full = [group.block_size for group in groups if group.family is Family.FULL]
        blocks = sum(1 / size for size in full) or 1 / min(group.block_size for group in groups)
        return blocks * self.block_bytes / rate

    @property
    def any(self) -> bool:
        return self.host is not None or self.store is not None


# Pinned copies over PCIe 5 x16; x16 of generation 4 reaches about 20.
HOST_LINK = {"gbyte_s": 45.0, "latency_ms": 0.1, "busy": 0.0}
STORE_LINK = {"gbit_s": 100.0, "total_gbit_s": math.inf, "latency_ms": 2.0, "busy": 0.0}


def block_bytes(groups: tuple[GroupSpec, ...], kv_kib_per_token: float) -> int:
    """Return the bytes of a block of any group, from the bytes per token of full attention (else of the
    smallest blocks)."""
    sizes = [g.block_size for g in groups if g.family is Family.FULL] or [g.block_size for g in groups]
    return max(1, round(min(sizes) * kv_kib_per_token * 1024))


def read_host(text: str, gpu_blocks: int, bytes_per_block: int) -> TierSpec:
    """Parse the host memory of one engine; ``gpu_blocks``: its pool's. Raises ``ValueError``."""
    return _spec(text, HOST_LINK, gpu_blocks, bytes_per_block)


def read_store(text: str, gpu_blocks: int, bytes_per_block: int) -> TierSpec:
    """Parse the shared store; ``gpu_blocks``: the fleet's. Raises ``ValueError``."""
    return _spec(text, STORE_LINK, gpu_blocks, bytes_per_block)


def _spec(text: str, defaults: dict[str, float], gpu_blocks: int, bytes_per_block: int) -> TierSpec:
    capacity, link = _split(text, defaults)
    return TierSpec(
        blocks=_blocks(capacity, gpu_blocks, bytes_per_block),
        bytes_per_s=link["gbyte_s"] * 1e9 if "gbyte_s" in link else link["gbit_s"] * 1e9 / 8,
        total_bytes_per_s=link.get("total_gbit_s", math.inf) * 1e9 / 8,
        latency_s=link["latency_ms"] / 1e3,
        busy_share=link["busy"],
    )


def _split(text: str, defaults: dict[str, float]) -> tuple[str, dict[str, float]]:
    capacity, _, options = text.partition(":")
    link = dict(defaults)
    for option in filter(None, options.split("+")):
        key, _, value = option.partition("=")
        if key not in defaults:
            raise ValueError(f"{option!r}: there are {', '.join(defaults)}")
        try:
            link[key] = float(value)
        except ValueError:
            raise ValueError(f"{option!r}: expected a number") from None
    return capacity.strip(), link


def _blocks(text: str, gpu_blocks: int, bytes_per_block: int) -> int:
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "%" if text.endswith("%") else "")
    try:
        value = float(text.removesuffix(unit))
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ValueError(
            f"{text!r}: expected a size such as 64GiB, a share of the GPUs' such as 400%, or blocks"
        )
    if unit == "%":
        return int(value / 100 * gpu_blocks)
    return int(value * _UNITS[unit] / bytes_per_block) if unit else int(value)


# The connectors' default of ``stores_max``.
WRITES_MAX = 4096


class Link:
    """Sequential transfers; ``bytes_per_s`` may be infinite."""

    __slots__ = ("_bytes_per_s", "free_s")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def send(self, num_bytes: int, now: float) -> float:
        """Return when a transfer requested now ends."""
        self.free_s = max(self.free_s, now) + num_bytes / self._bytes_per_s
        return self.free_s


class Reached(NamedTuple):
    """Extent of a prompt: tokens in all, and the medium of those beyond the GPU's."""

    end: int
    medium: Medium | None
    pulled: int = 0
    """Tokens that only the other engine has."""


class SharedStore:
    """One store of all engines. A block being written counts as held once its transfer has ended."""

    def __init__(self, spec: TierSpec, layout: PoolLayout) -> None:
        self.spec = spec
        self.held = HostTier(layout, spec.blocks)
        self.reads = Link(spec.total_bytes_per_s)
        self._writes = Link(spec.total_bytes_per_s)
        self._coming: list[tuple[float, int, Link, list[HeldKey]]] = []
        self._under_way: set[HeldKey] = set()
        self._waiting: Counter[Link] = Counter()
        self._order = itertools.count()

    def write(self, link: Link, chain: Sequence[HeldKey], block_bytes: int, now: float) -> int:
        """Write blocks over an engine's link unless they are held or in transit; returns how many were
        omitted because too many of this engine's are waiting."""
        self.settle(now)
        self.held.use([key for key in chain if key in self.held])
        new = [key for key in dict.fromkeys(chain) if key not in self.held and key not in self._under_way]
        written = new[: max(0, WRITES_MAX - self._waiting[link])]
        if written:
            size = len(written) * block_bytes
            ends_s = max(link.send(size, now), self._writes.send(size, now)) + self.spec.latency_s
            heapq.heappush(self._coming, (ends_s, next(self._order), link, written))
            self._under_way.update(written)
            self._waiting[link] += len(written)
        return len(new) - len(written)

    def settle(self, now: float) -> None:
        """Make blocks available whose transfer has ended by now."""
        while self._coming and self._coming[0][0] <= now:
            _, _, link, written = heapq.heappop(self._coming)
            self._under_way.difference_update(written)
            self._waiting[link] -= len(written)
            self.held.store(written)


class EngineTiers:
    """One engine's access to its host memory and to the store."""

    def __init__(self, setup: TierSetup, layout: PoolLayout, store: SharedStore | None) -> None:
        self._setup = setup
        self.host = None if setup.host is None else HostTier(layout, setup.host.blocks, setup.hint_share)
        self._store = store
        self._host_link = Link(math.inf if setup.host is None else setup.host.bytes_per_s)
        rate = math.inf if store is None else store.spec.bytes_per_s
        self._reads, self._writes = Link(rate), Link(rate)
        self.peers = Link(setup.pull_bytes_per_s or math.inf)
        # Blocks not written to the store because the queue was full.
        self.left_out_blocks = 0
        # Tokens loaded.
        self.moved_bytes = 0

    def held_alone(self, request: PoolRequest) -> int:
        """Return the tokens of a prompt that the host memory holds by itself, in every group."""
        return 0 if self.host is None else self.host.reach(request, 0)

    def reach(self, request: PoolRequest, hit: int, now: float, source: EngineTiers | None = None) -> Reached:
        """Return how far a prompt gets beyond its GPU hit; ``source``: the engine to pull from."""
        end: int = hit
        medium: Medium | None = None
        if self.host is not None and (found := self.host.reach(request, hit)) > end:
            end, medium = found, "CPU"
        if self._store is not None:
            self._store.settle(now)
            if (found := self._store.held.reach(request, hit)) > end:
                end, medium = found, "STORAGE"
        if (
            source is not None
            and source.host is not None
            and (found := source.host.reach(request, hit)) > end
        ):
            return Reached(found, "PEER", found - end)
        return Reached(end, medium)

    def load(
        self, request: PoolRequest, medium: Medium, now: float, hint: RetentionHint | None = None
    ) -> tuple[float, float]:
        """Start the load of a request that the pool has started. Returns when it ends, and the lost compute
        time in seconds."""
        spec, tier = (
            (self._setup.host, self.host)
            if medium == "CPU"
            else (self._setup.store, None if self._store is None else self._store.held)
        )
        if spec is None or tier is None:
            raise ValueError(f"there is no {medium} to load from")
        keys = tier.load_keys(request, request.hit, request.loading_to)
        tier.use([key for key in keys if key in tier], hint if medium == "CPU" else None, now)
        size = len(keys) * self._setup.block_bytes
        self.moved_bytes += size
        if medium == "CPU":
            ends_s = self._host_link.send(size, now)
        elif self._store is not None:
            ends_s = max(self._reads.send(size, now), self._store.reads.send(size, now))
        return ends_s + spec.latency_s, spec.busy_share * size / spec.bytes_per_s

    def pull(
        self, request: PoolRequest, source: EngineTiers, now: float, hint: RetentionHint | None = None
    ) -> tuple[float, float]:
        """Start to pull the missing part of a load into this host memory, and to load from there, like
        ``load``."""
        # The blocks count as held at once. Each end sends or receives one pull after the other.
        if self.host is None or source.host is None:
            raise ValueError("there is no host memory to pull from, or into")
        keys = self.host.load_keys(request, request.hit, request.loading_to)
        missing = [key for key in keys if key not in self.host]
        source.host.use([key for key in missing if key in source.host], now=now)
        size = len(missing) * self._setup.block_bytes
        begins_s = max(now, self.peers.free_s, source.peers.free_s)
        arrived_s = self.peers.send(size, begins_s)
        source.peers.send(size, begins_s)
        self.host.store(keys, hint, now)
        ends_s, owed_s = self.load(request, "CPU", now, hint)
        return max(ends_s, arrived_s + self._setup.pull_latency_s), owed_s

    def store(self, chain: Sequence[HeldKey], now: float, hint: RetentionHint | None = None) -> None:
        """Store blocks that were filled in a step that ends now."""
        if self.host is not None:
            self.host.store(chain, hint, now)
        if self._store is not None and chain:
            size = self._setup.block_bytes
            self.left_out_blocks += self._store.write(self._writes, chain, size, now)


def tiers_of(setup: TierSetup | None, pools: Sequence[HybridBlockPool]) -> list[EngineTiers | None]:
    """Return the tiers of a fleet, by engine; None without any."""
    if setup is None or not setup.any:
        return [None] * len(pools)
    store = None if setup.store is None else SharedStore(setup.store, pools[0].layout)
    return [EngineTiers(setup, pool.layout, store) for pool in pools]
