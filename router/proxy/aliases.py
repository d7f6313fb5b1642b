"""Names that clients may use for models, and the shares of the models behind them.

Where several models share a name, requests of one session stay with one of them, so that their prefixes
stay cached; others are spread at random by weight. Invariants: only the value of the body's top-level
``model`` changes, every other byte stays.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import xxhash

from kvatlas.router.openai.request import Session


class Aliases:
    """``shares``: name -> model -> weight. Raises ``ValueError`` naming what is wrong."""

    def __init__(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        for name, weights in shares.items():
            if not weights:
                raise ValueError(f"{name}: expected at least one model with its weight")
            for model, weight in weights.items():
                if not 0 <= weight < float("inf"):
                    raise ValueError(f"{name}.{model} = {weight}: expected a weight, 0 or more")
            if not sum(weights.values()):
                raise ValueError(f"{name}: one weight at least must be more than 0")
            if chained := set(weights) & set(shares):
                raise ValueError(f"{name}: {min(chained)} is an alias itself; name a served model")
        self._shares = {name: tuple(weights.items()) for name, weights in shares.items()}

    @classmethod
    def from_shares(cls, shares: Mapping[str, Mapping[str, float]]) -> Aliases | None:
        """None where there are no such names."""
        return cls(shares) if shares else None

    def items(self) -> list[tuple[str, list[str]]]:
        """Every name, and the models that it may stand for."""
        return [(name, [to for to, weight in shares if weight]) for name, shares in self._shares.items()]

    def model_for(self, name: str | None, session: Session | None) -> str | None:
        """The model to ask for instead of ``name``; None: it is no alias. Sub-agents follow their session."""
        shares = None if name is None else self._shares.get(name)
        if shares is None:
            return None
        total = sum(weight for _, weight in shares)
        share = random.random() if session is None else xxhash.xxh3_64_intdigest(session.id.encode()) / 2**64
        point = share * total
        for model, weight in shares:
            if point < weight:
                return model
            point -= weight
        return next(model for model, weight in reversed(shares) if weight)
