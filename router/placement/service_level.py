"""The choice among engines of which each may be predicted to miss a request's target for the first token.

``decide`` is all that chooses one engine for a whole request: in decisions, their explanations, and
simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvatlas.router.fleet.engines import EngineId
from kvatlas.router.placement.candidate import Candidate
from kvatlas.router.placement.cost import Choice, within_level
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.first_token import SloStats
from kvatlas.router.placement.fleet_values import Candidates, columns

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
    engines: Sequence[Engine], found: Sequence[Candidate], pick: Pick, left_s: float, stats: SloStats
) -> Chosen:
    """Choose an engine; one that gives the first token in ``left_s``, if any is predicted to."""
    choice = pick(found)
    level = None if left_s == math.inf else within_service_level(engines, found, choice, left_s, stats)
    if level is None:
        return Chosen(engines, found, choice)
    some, candidates, skipped = level
    return Chosen(some, candidates, pick(candidates), skipped, choice)


class Delaying(Protocol):
    """An engine; ``own_s``: its overhead for a request, and the margin for errors of its predictions."""

    @property
    def own_s(self) -> float: ...


def level_met(choice: Choice, engines: Sequence[Delaying], left_s: float) -> list[bool] | None:
    """Return which engines are predicted to give the first token in ``left_s``; None: the chosen one is, and
    the others are not looked at."""
    scored, index = choice.scored, choice.index
    if scored.first_token_s(index) + engines[index].own_s <= left_s:
        return None
    return within_level(scored, [one.own_s for one in engines], left_s)


def within_service_level(
    engines: Sequence[Engine], found: Sequence[Candidate], choice: Choice, left_s: float, stats: SloStats
) -> tuple[list[Engine], Candidates, Candidates] | None:
    """Leave out the engines predicted to give the first token later than in ``left_s``.

    Returns the engines that remain, their candidates, and the candidates left out. None: the engine chosen by
    cost makes it, or none does.
    """
    stats.decisions += 1
    met = level_met(choice, engines, left_s)
    if met is None:
        return None
    in_time = [at for at, good in enumerate(met) if good]
    late = [at for at, good in enumerate(met) if not good]
    if not in_time:
        stats.hopeless += 1
        return None
    stats.engines_skipped += len(late)
    whole = columns(found)
    return [engines[at] for at in in_time], whole.only(in_time), whole.only(late)


class SloForecast(msgspec.Struct, frozen=True):
    """Explained: seconds left until the request's target, and each engine's predicted first token with its
    margin, without another engine's help."""

    left_s: float
    predicted_s: dict[EngineId, float]


def slo_forecast(engines: Sequence[Engine], choice: Choice, left_s: float) -> SloForecast:
    """Return the first token predicted at each engine, for explanations."""
    predicted = {
        engine.engine_id: choice.scored.first_token_s(index) + engine.own_s
        for index, engine in enumerate(engines)
    }
    return SloForecast(left_s, predicted)
