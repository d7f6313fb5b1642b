"""Disaggregated prefill in the simulated fleet: the router's own decision over pairs, and both legs.

The first engines of the fleet compute prompts for the others; these fetch them and generate, or do both
themselves. Not simulated: failures, and leases (blocks are kept until they are fetched).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import Candidate, PlacementRequest, PolicySettings
from kvatlas.router.placement.cost import Choice, make_choice
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.load import Ticket
from kvatlas.router.placement.pair_plan import Side, lacked, plan
from kvatlas.router.placement.service_level import Pick
from kvatlas.router.simulation.request_run import Fetch, RequestRun


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
        decode = [
            Side(one, "", lacked(one.hit, tokens, states=self._states)) for one in candidates[self.prefill :]
        ]
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
