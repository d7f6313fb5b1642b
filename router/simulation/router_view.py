"""A router's view of each engine's cache: exact, a shadow, or none.

Each variant of a simulation has one view of the fleet. ``look`` returns, per engine, the hit and the shared
prefix (``kvatlas.router.placement.candidate``) in tokens; ``prefilled`` passes on an
observation that every router makes. Only ``OracleView`` reads the engines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, make_choice
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.load import Ticket
from kvatlas.router.placement.shadow import Shadow, ShadowPrompt, ShadowSpec
from kvatlas.router.placement.split import Pick, Side, plan
from kvatlas.router.simulation.other_router import PrefixHit
from kvatlas.router.simulation.setup import Fetch, FleetSetup, RequestRun, Variant
from kvatlas.router.simulation.tiers import EngineTiers

NOTHING = PrefixHit(0, 0)


def seen_of(candidates: Sequence[Candidate]) -> list[PrefixHit]:
    """Return what events show of each engine, for other routers."""
    return [PrefixHit(one.hit.gpu_tokens, one.hit.shared_prefix_tokens) for one in candidates]


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


# Disaggregated prefill in the simulated fleet: the router's own decision over pairs, and both legs.
#
# The first engines of the fleet compute prompts for the others; these fetch them and generate, or do both
# themselves. Not simulated: failures, and leases (blocks are kept until they are fetched).


class Leg(msgspec.Struct, eq=False):
    """A prompt computed on one engine for another. ``whole``: the hashes of prompt and answer."""

    engine: int
    ticket: Ticket
    prefix: InflightPrompt | None
    run: RequestRun
    whole: Sequence[BlockHash]
    answer_tokens: int
    """Number of tokens that the other engine generates."""


class Roles:
    """Roles of the engines: engines 0 to ``prefill - 1`` compute prompts for the others."""

    def __init__(self, prefill: int, groups: tuple[GroupSpec, ...], pd: PdSettings) -> None:
        self.prefill = prefill
        self._pd = pd
        families = {group.family for group in groups}
        self._states = Family.MAMBA in families

    def choose(
        self,
        candidates: Sequence[Candidate],
        question: PlacementRequest,
        pick: Pick,
        policy: PolicySettings,
        left_s: float,
    ) -> tuple[int, Choice, int | None]:
        """Return the engine that answers, the choice of the one that computes the prompt, and that engine if
        it is another. ``left_s``: time until the target of the first token."""
        tokens = question.prompt_tokens
        decode = [Side(one, "", self._lacks(one, tokens)) for one in candidates[self.prefill :]]
        prefill = [Side(one, "") for one in candidates[: self.prefill]]
        found = plan(
            decode, prefill, tokens, question.prompt_key, pick=pick, policy=policy, pd=self._pd, left_s=left_s
        )
        place = self.prefill + found.decode
        if found.partner is not None:
            choice = found.partner.choice
            return place, choice, choice.index
        return place, make_choice(found.scored, found.decode, "cheapest"), None

    def fetch(self, prompt_tokens: int) -> Fetch:
        """Return the number of tokens that the decode engine fetches; with a recurrent state it computes the
        last token itself.
        """
        end = prompt_tokens - 1 if self._states and prompt_tokens > 1 else prompt_tokens
        return Fetch(end, self._pd.transfer_s_per_token, self._pd.leg_overhead_s)

    def _lacks(self, candidate: Candidate, prompt_tokens: int) -> int:
        """Return the tokens missing there."""
        # Recurrent states are always sent, so the full-attention prefix counts.
        hit = candidate.hit
        has = max(hit.soon_tokens, hit.shared_prefix_tokens) if self._states else hit.soon_tokens
        return max(0, prompt_tokens - has)
