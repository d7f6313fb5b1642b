"""The choice among engines of which each may be predicted to miss a request's target for the first token.

``decide`` is all that chooses one engine for a whole request: in decisions, their explanations, and
simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvatlas.router.fleet.engines import EngineId
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.cost import Choice, ScoredCandidates
from kvatlas.router.placement.engine_order import EngineOrder
from kvatlas.router.placement.first_token import SloStats
from kvatlas.router.placement.fleet_values import Candidates, columns

if TYPE_CHECKING:
    from kvatlas.router.placement.engine import Engine

Pick = Callable[[Sequence[Candidate]], Choice]
"""The policy's choice among some engines; raises ``ValueError`` without any."""


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """A choice, and among which engines: ``skipped`` are predicted to miss the target."""

    engines: Sequence[Engine]
    candidates: Sequence[Candidate]
    choice: Choice
    skipped: Sequence[Candidate] = ()
    first: Choice | None = None
    """The choice among all."""


def decide(
    engines: Sequence[Engine],
    found: Sequence[Candidate],
    pick: Pick,
    left_s: float,
    stats: SloStats,
    order: EngineOrder | None = None,
) -> Chosen:
    """Choose an engine; one that gives the first token in ``left_s``, if any is predicted to."""
    choice = pick(found)
    level = None if left_s == math.inf else within_service_level(engines, found, choice, left_s, stats, order)
    if level is None:
        return Chosen(engines, found, choice)
    some, candidates, skipped = level
    return Chosen(some, candidates, pick(candidates), skipped, choice)


class Predicting(Protocol):
    """An engine that predicts its first tokens."""

    def level_s(self, scored: ScoredCandidates, index: int, order: EngineOrder | None) -> tuple[float, float]:
        """Return the seconds to the first token at candidate ``index``, and the margin for errors."""


def level_met(
    choice: Choice, engines: Sequence[Predicting], left_s: float, order: EngineOrder | None = None
) -> list[bool] | None:
    """Return which engines are predicted to give the first token in ``left_s``, those within the margin for
    errors if no other is; None: the chosen one is, and the others are not looked at."""
    scored, index = choice.scored, choice.index
    if sum(engines[index].level_s(scored, index, order)) <= left_s:
        return None
    # Asking all of a thousand engines would hold the loop: those that the cost's own seconds put first.
    soonest = range(len(engines)) if len(engines) <= _ASKED_MAX else scored.soonest(_ASKED_MAX)
    times = {at: engines[at].level_s(scored, at, order) for at in {index, *soonest}}
    surely = {at for at, (seconds, margin_s) in times.items() if seconds + margin_s <= left_s}
    met = surely or {at for at, (seconds, _) in times.items() if seconds <= left_s}
    return [at in met for at in range(len(engines))]


# Engines whose first tokens are predicted for one decision, at most.
_ASKED_MAX: Final = 32


def within_service_level(
    engines: Sequence[Engine],
    found: Sequence[Candidate],
    choice: Choice,
    left_s: float,
    stats: SloStats,
    order: EngineOrder | None = None,
) -> tuple[list[Engine], Candidates, Candidates] | None:
    """Leave out the engines predicted to give the first token later than in ``left_s``.

    Returns the engines that remain, their candidates, and the candidates left out. None: the engine chosen by
    cost makes it, or none does, or all do without the margin for errors.
    """
    stats.decisions += 1
    met = level_met(choice, engines, left_s, order)
    if met is None:
        return None
    in_time = [at for at, good in enumerate(met) if good]
    late = [at for at, good in enumerate(met) if not good]
    if not in_time:
        stats.hopeless += 1
        return None
    if not late:
        return None
    stats.engines_skipped += len(late)
    whole = columns(found)
    return [engines[at] for at in in_time], whole.only(in_time), whole.only(late)


class SloForecast(msgspec.Struct, frozen=True):
    """Explained: seconds left until the request's target, and each engine's predicted first token with its
    margin, without another engine's help."""

    left_s: float
    predicted_s: dict[EngineId, float]


def slo_forecast(
    engines: Sequence[Engine], choice: Choice, left_s: float, order: EngineOrder | None = None
) -> SloForecast:
    """Return the first token predicted at each engine, for explanations."""
    predicted = {
        engine.engine_id: sum(engine.level_s(choice.scored, index, order))
        for index, engine in enumerate(engines)
    }
    return SloForecast(left_s, predicted)
