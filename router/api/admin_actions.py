"""The admin actions on the fleet, without HTTP: list, add, remove, drain, undrain.

Each change takes effect at once and returns its result. Raises ``ApiError`` for invalid requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvatlas.router.fleet.engines import DesiredState, EngineAddress, FleetFullError, SourceStats
from kvatlas.router.fleet.sources import check_address
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.openai.errors import bad_request, engine_not_found, fleet_full
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.others import OthersLoad, others_at

DEADLINE_S_MAX: Final = 86_400.0
"""Of a drain: a day."""


class FleetActions:
    """``apply`` updates the fleet to the desired state; ``moves`` counts the streams of a drained engine that
    are to go on elsewhere; ``others`` is what siblings and replicas have in flight, None where it is not
    known. ``wall``: the Unix time."""

    def __init__(
        self,
        desired: DesiredState,
        fleet: Fleet[Engine],
        now: Callable[[], float],
        *,
        sources: Callable[[], Mapping[str, SourceStats]],
        apply: Callable[[], None],
        moves: Callable[[Engine], int] = lambda engine: 0,
        wall: Callable[[], float] = time.time,
        others: Callable[[], Mapping[str, OthersLoad] | None] = dict,
    ) -> None:
        self._others = others
        self._desired = desired
        self._fleet = fleet
        self._now = now
        self._sources = sources
        self._apply = apply
        self._moves = moves
        self._wall = wall

    def listing(self) -> dict[str, Any]:
        """Return every engine, every removed server and every source."""
        return {
            "engines": [self._describe(status) for status in self._fleet],
            "removed": [{"base_url": url, "by": one.by} for url, one in self._desired.removed.items()],
            "sources": {name: msgspec.to_builtins(stats) for name, stats in self._sources().items()},
        }

    def add(self, engine: EngineAddress) -> tuple[bool, dict[str, Any]]:
        """Add an engine or change its addresses. False if nothing changed."""
        engine = msgspec.structs.replace(engine, base_url=engine.base_url.rstrip("/"))
        try:
            check_address(engine)
        except ValueError as error:
            raise bad_request("invalid_engine", str(error), param="base_url") from None
        try:
            changed = self._desired.add(engine)
        except FleetFullError:
            raise fleet_full() from None
        self._apply()
        return changed, {"engine": engine.engine_id, "sources": self._desired.sources(engine.base_url)}

    def remove(self, name: str, who: str) -> dict[str, Any]:
        """Remove a server; its streams continue. It stays removed while other sources still list it."""
        if not name:
            raise bad_request("not_a_server", "Name the server: ?engine=http://HOST:PORT.", param="engine")
        if "#" in name:
            message = (
                f"{name} is one rank of a server; drain it, or remove the server {name.partition('#')[0]}."
            )
            raise bad_request("not_a_server", message, param="engine")
        if not self._desired.remove(name, who):
            raise engine_not_found(name)
        self._apply()
        return {"engine": name, "kept_out": name in self._desired.removed}

    def drain(self, name: str, who: str, deadline_s: float | None = None) -> dict[str, Any]:
        """Stop new requests to an engine, or to all ranks of a server. Running streams continue; of those
        that will not end within ``deadline_s`` the ones that can go on elsewhere are moved."""
        if deadline_s is not None and not 0 <= deadline_s <= DEADLINE_S_MAX:
            message = (
                f"deadline_s = {deadline_s:g} is not 0 to {DEADLINE_S_MAX:g}: give the seconds until the "
                "engine ends, or leave it out where its streams are to end there."
            )
            raise bad_request("invalid_deadline", message, param="deadline_s")
        self._affected(name)
        self._desired.drain(name, who, None if deadline_s is None else self._wall() + deadline_s)
        self._apply()
        drained = self._affected(name)
        requests, moves = sum(map(self._in_flight, drained)), sum(map(self._moves, drained))
        return {"engine": name, "requests": requests, "moves": moves}

    def undrain(self, name: str) -> dict[str, Any]:
        """End ``drain``. New requests come again, unless the engine is held for another reason too."""
        self._affected(name)
        was = self._desired.undrain(name)
        self._apply()
        held = next((status.held for status in self._affected(name) if status.held), "")
        return {"engine": name, "was_drained": was, "on_hold": held}

    def _affected(self, name: str) -> list[Engine]:
        found = [s for s in self._fleet if name in {s.engine_id, s.engine.base_url}]
        if not found:
            raise engine_not_found(name)
        return found

    def _in_flight(self, status: Engine) -> int:
        """Return the requests in flight at the engine, of this router and of those that report theirs."""
        load, others = status.load.current(self._now()), others_at(status.engine_id, self._others())
        own = max(0, load.running + load.waiting - load.foreign)
        return own if others is None else own + others.running + others.waiting

    def _describe(self, status: Engine) -> dict[str, Any]:
        return {
            "engine": status.engine_id,
            **msgspec.to_builtins(status.engine),
            "sources": self._desired.sources(status.engine.base_url),
            "up": status.up,
            "problem": status.problem,
            "on_hold": status.held,
            "feed_state": status.feed_state,
            "models": [card.id for card in status.models],
            "requests": self._in_flight(status),
        }
