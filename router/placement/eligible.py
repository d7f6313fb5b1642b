"""Eligible engines of a request.

Eligible are the engines ready for its model, and of these the ones that can answer it. Excluded are engines
that only prefill, that were tried, whose context is too short, or whose breakers are open, unless all are. A
gateway's subset, a client's own choice and the engine that holds an earlier response narrow the set further.

Invariant: at least one engine is returned, or an error that says why there is none.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.openai.apis import SALTED
from kvatlas.router.openai.errors import echoed, model_not_found, no_ready_engine, salt_not_accepted
from kvatlas.router.openai.estimates import estimated_tokens, longest_input
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import digits_of, engine_digits
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.prompts.prompt import Prompt, TextAffinity

_RECOUNT_S: Final = 1.0


class Length(NamedTuple):
    """Tokens that an engine's context must have room for, of the longest prompt of a request: with the answer
    that it ``asked`` for, which vLLM wants to fit too unless it shortens it; and with the ``least`` that may
    come, without which every engine refuses the prompt. ``least`` 0: it is not known, and keeps no engine
    out."""

    asked: int
    least: int


NO_LENGTH: Final = Length(0, 0)


def length_of(request: InboundRequest, read: Prompt | TextAffinity | None) -> Length:
    """Return the length of a request that was read; at least what an engine refused as too long."""
    found = _length_of(request, read)
    if not request.longer_than:
        return found
    least = request.longer_than + 1
    return Length(max(found.asked, least), max(found.least, least))


def _length_of(request: InboundRequest, read: Prompt | TextAffinity | None) -> Length:
    if isinstance(read, Prompt):
        tokens, rest, least = read.num_tokens, read.rest, read.answer_tokens_min
        if read.variants:
            tokens = max([variant.num_tokens for variant in read.variants.values()])
        longest = tokens
        if rest.longest > tokens:
            longest, tokens = rest.longest, rest.longest if rest.given else tokens
        answer = read.answer_tokens_max
        return Length(longest + (answer if answer > least else least), tokens + least)  # noqa: FURB136
    if read is None:
        # Pooling: nothing is generated.
        asked, least = longest_input(request)
        return Length(asked, least) if asked else NO_LENGTH
    if read.num_prompts > 1 or read.reason == "truncation":
        return NO_LENGTH
    return Length(estimated_tokens(request, read.reason) + 1, 0)


class EligibleEngines:
    """Eligible engines of one fleet; holds no state of a request."""

    def __init__(self, fleet: Fleet[Engine], accounts: Accounts) -> None:
        self._fleet = fleet
        self._accounts = accounts
        self._recount_s = -math.inf

    def engines(
        self, request: InboundRequest, exclude: frozenset[str], length: Length = NO_LENGTH
    ) -> list[Engine]:
        """Return the engines. Raises ``ApiError`` if there are none."""
        holder = None
        if request.pinned is None and request.earlier_response is not None:
            holder = self._holder(request, exclude, request.earlier_response)
        if holder is not None and request.reads_response:
            # Also where no engine is ready to compute.
            return [holder]
        engines = self._ready(request, exclude, length)
        if request.pinned is not None:
            return _pinned(request.pinned, engines)
        if holder is None:
            return engines
        if request.isolated and request.path in SALTED:
            self._salting(request, [holder])
        return [holder]

    def _ready(self, request: InboundRequest, exclude: frozenset[str], length: Length) -> list[Engine]:
        model, client = request.model, request.client
        ready = self._fleet.ready(model)
        if self._fleet.has_roles:
            ready = _answering(ready)
        if not ready and model is not None and self._fleet.ready(None) and not self._fleet.knows(model):
            raise model_not_found(model)
        untried = [e for e in ready if e.engine_id not in exclude] if exclude else ready
        untried = _continuing(request, untried) if request.continues else untried
        if request.isolated and request.path in SALTED:
            untried = self._salting(request, untried)
        if not untried:
            raise no_ready_engine("No engine can take this request now; GET /ready gives the reason.")
        if length is not NO_LENGTH or request.among is not None:
            untried = self._fitting(request, untried, length)
        accounts = self._accounts
        now = accounts.now()
        if now < accounts.free_until:
            return untried
        for engine in untried:
            if now >= engine.breaker.free_until:
                break
        else:
            # Asked for all engines at most once a second while another model's are kept out.
            if now >= self._recount_s:
                self._recount_s = now + _RECOUNT_S
                accounts.free_until = min([engine.breaker.free_until for engine in self._fleet])
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

    def _fitting(self, request: InboundRequest, engines: list[Engine], length: Length) -> list[Engine]:
        """Return those that the gateway allows, with room for the prompt and its answer. If no engine of the
        model has, those with the longest context, whose own refusal tells the client."""
        lengths, among = self._fleet.lengths(request.model), request.among
        if among is not None:
            engines = _among(among, engines)
        # Where only one engine can take it anyway, that one tells the client what is too long.
        bound = request.pinned is not None or request.earlier_response is not None
        # The usual list stays the same object, by which what follows from it is found again.
        if bound or length.asked <= lengths.shortest:
            return engines
        of = lengths.of
        for tokens in length:
            if found := [engine for engine in engines if of[engine.engine_id] >= tokens]:
                return found
        for engine in self._fleet:
            allowed = among is None or endpoint_of(engine.engine.base_url) in among
            if allowed and engine.engine.answers and of.get(engine.engine_id, 0) >= length.least:
                raise no_ready_engine(
                    f"The engines whose context has room for {length.least} tokens cannot take this request "
                    "now; retry shortly."
                )
        longest = max([of[engine.engine_id] for engine in engines])
        return [engine for engine in engines if of[engine.engine_id] == longest]

    def _salting(self, request: InboundRequest, engines: list[Engine]) -> list[Engine]:
        """Return those that are proven to read the salt in requests for this path. Raises ``ApiError`` if
        none is."""
        fleet, path, model = self._fleet, request.path, request.model
        found = [engine for engine in engines if not fleet.why_unsalted(engine, path)]
        if len(found) == len(engines):
            # The usual list stays the same object, by which what follows from it is found again.
            return engines
        if found:
            return found
        why = fleet.why_unsalted(engines[0], path)
        others = fleet if model is None else fleet.serving(model)
        waits = [one for one in others if one.salt_proof is None or one.salt_proof.may_change(path)]
        if waits and fleet.needs_salt_proofs:
            raise no_ready_engine(f"{path} {why}, and this router isolates caches; retry shortly.")
        raise salt_not_accepted(f"{path} {why}, and this router isolates caches")

    def _holder(self, request: InboundRequest, exclude: frozenset[str], response: str) -> Engine | None:
        """Return the engine that made the response that a request is about; None: no router has named it.
        Raises ``ApiError`` where it cannot be asked."""
        # Any other one would answer that the response does not exist.
        wanted = engine_digits(response)
        if wanted is None:
            return None
        found = next((engine for engine in self._fleet if digits_of(engine.engine_id) == wanted), None)
        if found is None:
            raise no_ready_engine("The engine that holds this response is not here now; retry shortly.")
        elsewhere = request.among is not None and endpoint_of(found.engine.base_url) not in request.among
        if not (found.up or found.silent) or found.engine_id in exclude or elsewhere:
            raise no_ready_engine("The engine that holds this response does not answer; retry shortly.")
        if (found.held or found.asleep) and not request.reads_response:
            raise no_ready_engine("The engine that holds this response computes nothing now; retry shortly.")
        return found


def _answering(ready: list[Engine]) -> list[Engine]:
    """Engines that answer clients."""
    found = [engine for engine in ready if engine.engine.answers]
    if ready and not found:
        raise no_ready_engine("Only prefill engines are ready for this model; GET /ready gives the reason.")
    return found


def _continuing(request: InboundRequest, engines: list[Engine]) -> list[Engine]:
    """Engines that may go on with another one's stream: what other software makes of its ids is not
    known."""
    return [one for one in engines if one.says_ids and (one.parses or not request.parses)]


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
