"""The engines that one prompt is looked up for, by what it is looked up with.

Most requests may go to the same engines, so what was found of the last ones asked stays for as long as
nothing of it changes. Always true: a ``Party`` given is what working it out anew would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from publisher.block_hash import HashScheme
from router.fleet.status import Fleet
from router.index.models import Scopes
from router.placement.engine import Engine


class Party(msgspec.Struct):
    """Some engines: their hash schemes, the first one's first, and the ids of those that publish events, by
    model. ``guessed``: some have shadows."""

    schemes: list[HashScheme] = []
    by_model: dict[str, list[str]] = {}
    guessed: bool = False


NO_PARTY = Party()


class Parties:
    """Of one fleet. What is known of engines' hashes is in ``scopes``, or told by other replicas."""

    def __init__(self, fleet: Fleet[Engine], scopes: Scopes) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._last = NO_PARTY
        self._engines: Sequence[Engine] = ()
        self._changes = -1, -1

    def of(self, engines: Sequence[Engine]) -> Party:
        """These engines; what is returned is not to be changed."""
        changes = self._fleet.changes, self._scopes.changes
        if changes != self._changes or (engines is not self._engines and engines != self._engines):
            self._last, self._engines = party_of(engines), engines
            lasts = all(engine.lasting_scheme is not None for engine in engines)
            self._changes = changes if lasts else (-1, -1)
        return self._last


def party_of(engines: Sequence[Engine]) -> Party:
    """Worked out anew."""
    party = Party()
    for engine in engines:
        scheme, model = engine.scheme, engine.base_model
        if scheme not in party.schemes:
            party.schemes.append(scheme)
        if engine.shadow is not None:
            party.guessed = True
        if model is not None and engine.publishes_events:
            party.by_model.setdefault(model, []).append(engine.engine_id)
    return party
