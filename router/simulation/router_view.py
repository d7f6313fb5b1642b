"""A router's view of each engine's cache: exact, a shadow, or none.

Each variant of a simulation has one view of the fleet. ``look`` returns, per engine, the hit and the shared
prefix (``kvatlas.router.placement.candidate``) in tokens; ``prefilled`` passes on an
observation that every router makes. Only ``OracleView`` reads the engines."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.router.placement.shadow import Shadow, ShadowPrompt, ShadowSpec
from kvatlas.router.simulation.other_router import PrefixHit
from kvatlas.router.simulation.setup import FleetSetup
from kvatlas.router.simulation.tiers import EngineTiers
from kvatlas.router.simulation.variants import Variant

NOTHING = PrefixHit(0, 0)


class RouterView:
    """View without any cache, and interface of all views. ``hashes`` are those of whole hash blocks."""

    def __init__(self, engines: int) -> None:
        self._nothing = [NOTHING] * engines

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        return self._nothing

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass


class OracleView(RouterView):
    """Exact view without delay: the engines' own pools, and the memory outside them if ``tiers`` are given
    (one per pool); with ``pulls``, what host memory holds by itself."""

    def __init__(
        self,
        pools: Sequence[HybridBlockPool],
        tiers: Sequence[EngineTiers | None] | None = None,
        *,
        pulls: bool = False,
    ) -> None:
        super().__init__(len(pools))
        self._pools = pools
        self._pulls = pulls
        self._tiers: Sequence[EngineTiers | None] = tiers or [None] * len(pools)

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        probe = self._pools[0].request([0] * prompt_tokens, hashes=hashes)
        found = []
        for pool, outside in zip(self._pools, self._tiers, strict=True):
            hit, shared_prefix = pool.find_prefix(probe)
            cpu = storage = alone = 0
            if outside is not None:
                alone = outside.held_alone(probe) if self._pulls else 0
                end, medium, _ = outside.reach(probe, hit, now)
                cpu, storage = (end - hit, 0) if medium == "CPU" else (0, end - hit)
            found.append(PrefixHit(hit, shared_prefix, cpu, storage, alone))
        return found


class ExactRules(RouterView):
    """View of the router's own shadow pools (``kvatlas.router.placement.shadow``): the rules of engines,
    without events."""

    def __init__(self, engines: int, spec: ShadowSpec) -> None:
        super().__init__(engines)
        self._shadows = [Shadow(spec) for _ in range(engines)]

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        known = list(hashes)
        prompt = ShadowPrompt([0] * prompt_tokens, lambda _: known)
        return [PrefixHit(*shadow.lookup(prompt)) for shadow in self._shadows]

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        self._shadows[engine].served([0] * prompt_tokens, lambda _: list(hashes))


def router_view(
    variant: Variant,
    setup: FleetSetup,
    pools: list[HybridBlockPool],
    tiers: Sequence[EngineTiers | None],
) -> RouterView:
    count, scheme = len(pools), pools[0].scheme
    match variant.view:
        case "truth":
            pulls = variant.pulls and setup.tiers is not None and setup.tiers.pull_bytes_per_s > 0
            return OracleView(pools, tiers if variant.tiers else None, pulls=pulls)
        case "rules":
            spec = ShadowSpec(
                groups=setup.groups,
                num_blocks=setup.num_blocks,
                scheme=scheme,
                retention_interval=setup.retention,
                chunk_tokens_max=setup.timing.chunk_tokens,
                assumed=(),
            )
            return ExactRules(count, spec)
        case "blind":
            return RouterView(count)
