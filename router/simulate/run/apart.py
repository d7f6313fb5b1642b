"""Prefill and decode apart in the simulated fleet: the router's own decision over pairs, and both legs.

The first engines of the fleet compute prompts for the others; these fetch them and generate, or do all
themselves. What is not simulated: failures, and leases (blocks are kept until they are fetched).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from publisher.events import BlockHash
from publisher.groups import Family, GroupSpec
from router.pd.settings import PdSettings
from router.placement.candidate import Ask, Candidate, PolicySettings
from router.placement.cost import Choice, chosen
from router.placement.inflight import InflightPrompt
from router.placement.load.account import Ticket
from router.placement.split.pairs import Pick, Side, plan
from router.simulate.run.request_run import Fetch, RequestRun


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
        self, candidates: Sequence[Candidate], question: Ask, pick: Pick, policy: PolicySettings
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
        return place, chosen(found.weighed, found.decode, "cheapest"), None

    def fetch(self, prompt_tokens: int) -> Fetch:
        """What the decode engine asks for; the last token before a recurrent state is its own to compute."""
        end = prompt_tokens - 1 if self._states and prompt_tokens > 1 else prompt_tokens
        return Fetch(end, self._pd.transfer_s_per_token, self._pd.leg_overhead_s)

    def _lacks(self, candidate: Candidate, prompt_tokens: int) -> int:
        """A model with recurrent states is always sent them, so the full-attention prefix counts."""
        hit = candidate.hit
        has = max(hit.soon_tokens, hit.trunk_tokens) if self._states else hit.soon_tokens
        return max(0, prompt_tokens - has)
