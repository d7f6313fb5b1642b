"""Eligible engines of a request: those ready for its model, and of these the ones that can answer it.

Excluded are engines that only prefill, that were tried, or whose breakers are open, unless all are. A
gateway's subset, a client's own choice and the engine that holds an earlier response narrow the set further.
Invariant: at least one engine is returned, or an error that says why there is none.

Also their ``CandidateSet``, with which a prompt is looked up. Most requests have the same eligible engines,
so the last set is cached until it changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from publisher.block_hash import HashScheme
from router.fleet.engines import endpoint_of
from router.fleet.status import Fleet, Frontend
from router.index.model import ModelIndexes
from router.openai.errors import echoed, model_not_found, no_ready_engine
from router.openai.request import InboundRequest
from router.placement.engine import Accounts, Engine


class EligibleEngines:
    """Eligible engines of one fleet; holds no state of a request."""

    def __init__(self, fleet: Fleet[Engine], accounts: Accounts) -> None:
        self._fleet = fleet
        self._accounts = accounts

    def engines(self, request: InboundRequest, exclude: frozenset[str]) -> list[Engine]:
        """Return the engines. Raises ``ApiError`` if there are none."""
        return self._holders(request, self._ready(request, exclude), exclude)

    def _ready(self, request: InboundRequest, exclude: frozenset[str]) -> list[Engine]:
        model, client = request.model, request.client
        ready = self._fleet.ready(model)
        if self._fleet.has_roles:
            ready = _answering(ready)
        if not ready and model is not None and self._fleet.ready(None) and not self._fleet.knows(model):
            raise model_not_found(model)
        untried = [e for e in ready if e.engine_id not in exclude] if exclude else ready
        if not untried:
            raise no_ready_engine("No engine can take this request now; GET /ready gives the reason.")
        now = self._accounts.now()
        for engine in untried:
            if now >= engine.breaker.free_until:
                break
        else:
            return untried
        closed = [e for e in untried if now < e.breaker.free_until or e.breaker.allows(now, client)]
        if closed:
            return closed
        # With every breaker open a try costs less than a certain refusal: the fleet may have recovered.
        waits_s = [e.breaker.waits_s(now, client) for e in untried]
        willing = [e for e, wait_s in zip(untried, waits_s, strict=True) if not wait_s]
        if not willing:
            raise no_ready_engine(
                "All engines are rate-limiting (Retry-After).", retry_after_s=math.ceil(min(waits_s))
            )
        return willing

    def _holders(
        self, request: InboundRequest, engines: list[Engine], exclude: frozenset[str]
    ) -> list[Engine]:
        """Return the engines that can continue from an earlier response: the one that made it, if it is
        known."""
        # Any other one would answer that the response does not exist.
        if request.among is not None:
            engines = _among(request.among, engines)
        elif request.pinned is None and request.earlier_response is None:
            return engines
        if request.pinned is not None:
            return _pinned(request.pinned, engines)
        holder = self._accounts.responses.holder(request.earlier_response)
        found = None if holder is None else self._fleet.get(holder)
        if found is None:
            return engines
        elsewhere = request.among is not None and found not in engines
        if not (found.up or found.silent) or found.engine_id in exclude or elsewhere:
            raise no_ready_engine("The engine that holds this response does not answer; retry shortly.")
        return [found]


def _answering(ready: list[Engine]) -> list[Engine]:
    """Engines that answer clients."""
    found = [engine for engine in ready if engine.engine.answers]
    if ready and not found:
        raise no_ready_engine("Only prefill engines are ready for this model; GET /ready gives the reason.")
    return found


def _among(endpoints: frozenset[str], engines: list[Engine]) -> list[Engine]:
    """Engines that the gateway allows."""
    found = [engine for engine in engines if endpoint_of(engine.engine.base_url) in endpoints]
    if not found:
        raise no_ready_engine("None of the engines that the gateway allows can take this request now.")
    return found


def _pinned(engine_id: str, engines: list[Engine]) -> list[Engine]:
    found = [engine for engine in engines if engine.engine_id == engine_id]
    if not found:
        raise no_ready_engine(f"Engine {echoed(engine_id)}, which was asked for, cannot take it now.")
    return found


class CandidateSet(msgspec.Struct):
    """Some engines: their frontends with their hash schemes, the first engine's first, and the ids of those
    that publish events, by model and frontend. ``guessed``: some have shadows."""

    schemes: list[tuple[Frontend, HashScheme]] = []
    by_model: dict[tuple[str, Frontend], list[str]] = {}
    guessed: bool = False


NO_CANDIDATES = CandidateSet()


class CandidateSets:
    """Candidate sets of one fleet. Hash schemes are known from ``scopes``, or from other replicas."""

    def __init__(self, fleet: Fleet[Engine], scopes: ModelIndexes) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._last = NO_CANDIDATES
        self._engines: Sequence[Engine] = ()
        self._changes = -1, -1

    def get(self, engines: Sequence[Engine]) -> CandidateSet:
        """Return the set of these engines; it must not be changed."""
        changes = self._fleet.changes, self._scopes.changes
        if changes != self._changes or (engines is not self._engines and engines != self._engines):
            self._last, self._engines = candidate_set(engines), engines
            lasts = all(engine.lasting_scheme is not None for engine in engines)
            self._changes = changes if lasts else (-1, -1)
        return self._last


def candidate_set(engines: Sequence[Engine]) -> CandidateSet:
    """Build the set."""
    found = CandidateSet()
    for engine in engines:
        hashed, model = (engine.frontend, engine.scheme), engine.base_model
        if hashed not in found.schemes:
            found.schemes.append(hashed)
        if engine.shadow is not None:
            found.guessed = True
        if model is not None and engine.publishes_events:
            found.by_model.setdefault((model, engine.frontend), []).append(engine.engine_id)
    return found
