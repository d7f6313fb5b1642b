"""A router's view of each engine's cache: exact, its own history, a shadow, or none.

Each arm of a simulation looks at the fleet through one sight. ``look`` gives, per engine, the hit and the
shared prefix (``router.placement.candidate``) in tokens; the other calls tell a sight what a router sees
anyway. Nothing but ``OracleView`` ever asks an engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from publisher.block_pool import HybridBlockPool
from publisher.events import BlockHash, Family, GroupSpec
from router.pd.settings import PdSettings
from router.placement.affinity import Shadow, ShadowPrompt, ShadowSpec
from router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from router.placement.cost import Choice, chosen
from router.placement.inflight import InflightPrompt
from router.placement.load.account import Ticket
from router.placement.split import Pick, Side, plan
from router.simulate.run.arms import Arm
from router.simulate.run.setup import Fetch, FleetSetup, RequestRun
from router.simulate.run.tiers import EngineTiers


class PrefixHit(NamedTuple):
    """Of one prompt at one engine, in tokens: what its GPU holds, the shared prefix, and what it would load
    beyond the GPU's from host memory or from the store; ``alone``: what its host memory holds by itself."""

    hit: int
    shared_prefix: int
    cpu: int = 0
    storage: int = 0
    alone: int = 0


NOTHING = PrefixHit(0, 0)


class RouterView(Protocol):
    """``hashes`` are those of the prompt's whole hash blocks."""

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]: ...

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None: ...

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None: ...


class NoView:
    """Knows no cache at all."""

    def __init__(self, engines: int) -> None:
        self._nothing = [NOTHING] * engines

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        return self._nothing

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass


class OracleView:
    """An exact index without delay: the engines' own pools, and the memory outside them where ``tiers`` are
    given (one per pool); with ``pulls`` what host memory holds by itself."""

    def __init__(
        self,
        pools: Sequence[HybridBlockPool],
        tiers: Sequence[EngineTiers | None] | None = None,
        *,
        pulls: bool = False,
    ) -> None:
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

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass


class History:
    """A prefix tree of what was sent where, as routers without events keep one: full attention, no groups.

    ``blocks_max`` per engine caps it, least recently used first; None never forgets. A prompt counts from the
    moment it is placed. The tree needs no nodes: a block hash stands for its whole prefix.
    """

    def __init__(self, engines: int, block_tokens: int, blocks_max: int | None) -> None:
        self._held: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in range(engines)]
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        most = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        found = []
        for held in self._held:
            count = 0
            for block_hash in hashes:
                if block_hash not in held:
                    break
                count += 1
            tokens = min(count * self._block_tokens, most)
            found.append(PrefixHit(tokens, tokens))
        return found

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        held = self._held[engine]
        for block_hash in reversed(hashes):  # the start of a prefix is the last to be forgotten
            held[block_hash] = None
            held.move_to_end(block_hash)
        if self._blocks_max is not None:
            while len(held) > self._blocks_max:
                held.popitem(last=False)

    def sizes(self) -> list[int]:
        """Blocks held per engine."""
        return [len(held) for held in self._held]

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass


class ExactRules:
    """The router's own shadow pools (``router.placement.affinity``): the rules of engines, without events."""

    def __init__(self, engines: int, spec: ShadowSpec) -> None:
        self._shadows = [Shadow(spec) for _ in range(engines)]

    def look(self, prompt_tokens: int, hashes: Sequence[BlockHash], now: float) -> list[PrefixHit]:
        known = list(hashes)
        prompt = ShadowPrompt([0] * prompt_tokens, lambda _: known)
        return [PrefixHit(*shadow.lookup(prompt)) for shadow in self._shadows]

    def placed(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        pass

    def prefilled(self, engine: int, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        self._shadows[engine].served([0] * prompt_tokens, lambda _: list(hashes))


def history_blocks(
    groups: tuple[GroupSpec, ...], num_blocks: int, mean_prompt_tokens: float, retention: int | None
) -> int:
    """Blocks of full attention that a pool of ``num_blocks`` pages can keep beside the other groups' pages.

    What one prompt of the mean length leaves in the pool, at the given retention, says how many of its pages
    are full attention; the same share of the pool is what a tree of one group may hold.
    """
    pages = full = 0.0
    align = max(group.block_size for group in groups)
    kept = 1.0 if retention == 0 else mean_prompt_tokens / (retention or align)
    for group in groups:
        dense = mean_prompt_tokens / group.block_size
        if group.family is Family.FULL:
            full = max(full, dense)
            pages += dense
        elif group.family is Family.MAMBA:
            pages += min(dense, kept)
        else:
            span = group.sliding_window or group.attention_chunk_size or group.block_size
            pages += min(dense, kept * -(-span // group.block_size))
    return max(1, int(num_blocks * full / pages)) if full else num_blocks


def router_view(
    arm: Arm,
    setup: FleetSetup,
    pools: list[HybridBlockPool],
    tiers: Sequence[EngineTiers | None],
    *,
    mean_prompt_tokens: float,
) -> RouterView:
    """This arm's view of the engines."""
    count, scheme = len(pools), pools[0].scheme
    match arm.view:
        case "truth":
            pulls = arm.pulls and setup.tiers is not None and setup.tiers.pull_bytes_per_s > 0
            return OracleView(pools, tiers if arm.tiers else None, pulls=pulls)
        case "history":
            return History(count, scheme.hash_block_size, None)
        case "capped-history":
            capacity = history_blocks(setup.groups, setup.num_blocks, mean_prompt_tokens, setup.retention)
            return History(count, scheme.hash_block_size, capacity)
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
            return NoView(count)


# Prefill and decode apart in the simulated fleet: the router's own decision over pairs, and both legs.
#
# The first engines of the fleet compute prompts for the others; these fetch them and generate, or do all
# themselves. What is not simulated: failures, and leases (blocks are kept until they are fetched).


class Leg(msgspec.Struct, eq=False):
    """A prompt that is computed on one engine for another. ``whole``: the hashes of prompt and answer."""

    engine: int
    ticket: Ticket
    prefix: InflightPrompt | None
    visit: RequestRun
    whole: Sequence[BlockHash]
    answer_tokens: int
    """Tokens that the other one generates."""


class Roles:
    """Who computes prompts for whom: engines 0 to ``prefill - 1`` for the others."""

    def __init__(self, prefill: int, groups: tuple[GroupSpec, ...], pd: PdSettings) -> None:
        self.prefill = prefill
        self._pd = pd
        families = {group.family for group in groups}
        self._states = Family.MAMBA in families

    def choose(
        self, candidates: Sequence[Candidate], question: PlacementRequest, pick: Pick, policy: PolicySettings
    ) -> tuple[int, Choice, int | None]:
        """The engine that answers, the choice of the one that computes the prompt, and which that is if it
        is another one."""
        tokens = question.prompt_tokens
        decode = [Side(one, "", self._lacks(one, tokens)) for one in candidates[self.prefill :]]
        prefill = [Side(one, "") for one in candidates[: self.prefill]]
        found = plan(decode, prefill, tokens, question.prompt_key, pick=pick, policy=policy, pd=self._pd)
        place = self.prefill + found.decode
        if found.partner is not None:
            choice = found.partner.choice
            return place, choice, choice.index
        return place, chosen(found.scored, found.decode, "cheapest"), None

    def fetch(self, prompt_tokens: int) -> Fetch:
        """Tokens that the decode engine requests; it computes the last token before a recurrent state
        itself.
        """
        end = prompt_tokens - 1 if self._states and prompt_tokens > 1 else prompt_tokens
        return Fetch(end, self._pd.transfer_s_per_token, self._pd.leg_overhead_s)

    def _lacks(self, candidate: Candidate, prompt_tokens: int) -> int:
        """A model with recurrent states is always sent them, so the full-attention prefix counts."""
        hit = candidate.hit
        has = max(hit.soon_tokens, hit.shared_prefix_tokens) if self._states else hit.soon_tokens
        return max(0, prompt_tokens - has)
