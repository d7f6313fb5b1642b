"""Whether disaggregated prefill pays: the same fleet and requests, with and without roles.

With roles, the first token mostly comes later (fewer engines prefill, and blocks are transferred), and the
following ones come faster (no prompt is computed beside them). It pays if answers complete earlier and
first tokens come no later; if one gets better and the other worse, it is a trade-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvatlas.router.simulation.outcome import Outcome

GAIN_MIN = 0.05
Word = Literal["pays", "is a trade", "does not pay"]


class SplitVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Relative changes of means, over the seeds: negative is shorter."""

    first_token: float
    per_token: float
    answer: float
    every_seed: bool
    """Whether answers complete earlier for every seed."""

    @property
    def word(self) -> Word:
        if -self.answer < GAIN_MIN or not self.every_seed:
            return "does not pay"
        return "pays" if self.first_token < GAIN_MIN else "is a trade"

    @property
    def text(self) -> str:
        return (
            f"whole answers {self.answer:+.0%}, first tokens {self.first_token:+.0%}, "
            f"time between tokens {self.per_token:+.0%}"
        )


def verdict(alike: Sequence[Outcome], apart: Sequence[Outcome]) -> SplitVerdict:
    """Compare outcomes in the same order of seeds."""

    def changes(name: str) -> list[float]:
        pairs = zip(alike, apart, strict=True)
        return [
            getattr(other, name) / getattr(one, name) - 1 if getattr(one, name) else 0.0
            for one, other in pairs
        ]

    def mean(name: str) -> float:
        found = changes(name)
        return sum(found) / len(found)

    return SplitVerdict(
        first_token=mean("ttft_mean_s"),
        per_token=mean("per_token_mean_s"),
        answer=mean("answer_mean_s"),
        every_seed=all(change < 0 for change in changes("answer_mean_s")),
    )
