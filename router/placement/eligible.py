"""Eligible engines of a request, and their state as arrays of numbers.

Eligible are the engines ready for its model, and of these the ones that can answer it. Excluded are engines
that only prefill, that were tried, whose context is too short, or whose breakers are open, unless all are. A
gateway's subset, a client's own choice and the engine that holds an earlier response narrow the set further.
Most requests have the same eligible engines, so what follows from the set is kept until it changes: the
``CandidateSet``, with which a prompt is looked up, and the ``FleetSnapshot``.

A decision asks every engine for the same values: its queue, its rate, what it holds of the prompt. Most of
them are as they were at the decision before, so a snapshot keeps a row of each engine, and reads it again
only when something happened to the engine (``EngineChanges``), or when time alone changes it: each row says
until when it is good. Engines with an equal hit are one group, and those that hold nothing are in none. So a
decision takes a Python step for every engine that changed, and otherwise reckons with arrays; a ``Candidate``
is made of an engine only where one is looked at.

Invariants: at least one engine is returned, or an error that says why there is none; a snapshot's values are
those of reading every engine again (tests/router/placement/test_snapshot.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.engines import EngineId, endpoint_of
from kvatlas.router.fleet.status import Fleet, Frontend
from kvatlas.router.index.hit_rules import hits_behind
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.index.model import ModelIndexes
from kvatlas.router.index.query_plan import EngineHit
from kvatlas.router.openai.apis import SALTED
from kvatlas.router.openai.errors import echoed, model_not_found, no_ready_engine, salt_not_accepted
from kvatlas.router.openai.estimates import estimated_tokens, longest_input
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.openai.response_ids import digits_of, engine_digits
from kvatlas.router.placement.candidate import Candidate, EngineState, Hit
from kvatlas.router.placement.cost import Choice, within_level
from kvatlas.router.placement.engine import Accounts, Engine, EngineChanges, PromptView
from kvatlas.router.placement.first_token import SloStats
from kvatlas.router.placement.fleet_values import Candidates, FleetValues, Floats, Places, columns
from kvatlas.router.placement.others import NO_OTHERS, OthersLoad
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
    that publish events, by model and frontend. ``guessed``: some have shadows; ``dropping``: schemes of those
    that may prove a hit by a block behind the last token but one."""

    schemes: list[tuple[Frontend, HashScheme]] = []
    by_model: dict[tuple[str, Frontend], list[str]] = {}
    guessed: bool = False
    dropping: set[HashScheme] = set()


NO_CANDIDATES = CandidateSet()


class CandidateSets:
    """Candidate sets of one fleet. Hash schemes are known from ``scopes``, or from other replicas.

    A list of most engines of a model is looked up with the set of all of them: what an engine has that is not
    in the list is found and left aside. So a retry, a breaker, or an engine that goes down or is drained
    makes no new set, and the index no new plan, of nearly all engines.
    """

    def __init__(self, fleet: Fleet[Engine], scopes: ModelIndexes) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._changes = -1, -1
        self._last = _KeptSet([], NO_CANDIDATES)
        self._whole: dict[str, _KeptSet | None] = {}
        """By model, of all its engines; None: not made yet."""

    def get(self, engines: Sequence[Engine]) -> CandidateSet:
        """Return a set that has these engines, and perhaps others; it must not be changed."""
        changes = self._fleet.setups, self._scopes.changes
        if changes != self._changes:
            self._changes = changes
            self._whole.clear()
            self._last = _KeptSet([], NO_CANDIDATES)
        last = self._last
        if engines is last.listed and not last.passing:
            return last.found
        model = engines[0].base_model if engines else None
        if model is not None:
            serving = self._fleet.serving(model)
            if 2 * len(engines) >= len(serving):
                kept = self._whole.get(model)
                if kept is None or not kept.holds:
                    kept = self._whole[model] = _KeptSet(serving, candidate_set(serving))
                if kept.engines.issuperset(engines):
                    self._last = kept.listing(engines)
                    return kept.found
        if self._last.listed != engines or not self._last.holds:
            self._last = _KeptSet(engines, candidate_set(engines))
        return self._last.found


class _KeptSet:
    """A set of these engines."""

    def __init__(self, engines: Sequence[Engine], found: CandidateSet) -> None:
        self.listed = engines
        self.engines = frozenset(engines)
        self.found = found
        # Schemes that may change without a change of fleet and scopes.
        self.passing = [(one, one.scheme) for one in engines if one.lasting_scheme is None]

    @property
    def holds(self) -> bool:
        """Whether no engine has another scheme by now."""
        return not self.passing or all(engine.scheme == scheme for engine, scheme in self.passing)

    def listing(self, engines: Sequence[Engine]) -> _KeptSet:
        """Return the same set for a list of some of them."""
        found = copy.copy(self)
        found.listed = engines
        return found


def candidate_set(engines: Sequence[Engine]) -> CandidateSet:
    """Build the set."""
    found = CandidateSet()
    hashed: dict[tuple[Frontend, HashScheme], None] = {}
    layouts: dict[tuple[CacheLayout, HashScheme], None] = {}
    for engine in engines:
        frontend, scheme, model = engine.frontend, engine.scheme, engine.base_model
        hashed[frontend, scheme] = None
        layout = engine.layout
        if layout is not None:
            layouts[layout, scheme] = None
        if engine.shadow is not None:
            found.guessed = True
        if model is not None and engine.publishes_events:
            found.by_model.setdefault((model, frontend), []).append(engine.engine_id)
    found.schemes.extend(hashed)
    found.dropping.update([scheme for layout, scheme in layouts if hits_behind(layout)])
    return found


_READY = FeedState.READY
_NO_ROOMS: dict[int, tuple[float, float]] = {}
# Sets of engines with equal hits whose positions are kept.
_SETS_MAX = 1024
# Lists of engines whose snapshots are kept: those of a model, and those without one that failed.
_SNAPSHOTS_MAX = 8


class FleetSnapshot:
    """Values of some engines, in their order. ``changes``: of all engines; None: the engines are read once.
    ``like``: a snapshot of many of these engines, whose values are taken over."""

    __slots__ = (
        "_at",
        "_borrowed",
        "_borrowing",
        "_due",
        "_engine_ids",
        "_fits_tokens",
        "_fleet_rates",
        "_head_at_s",
        "_head_s",
        "_known",
        "_late_sum",
        "_lates",
        "_medians",
        "_moving",
        "_others",
        "_position",
        "_positions",
        "_queues",
        "_recent_sum",
        "_recents",
        "_scheduled_s",
        "_states",
        "_surely_fits",
        "_unclear",
        "_until_s",
        "_waiting",
        "changed",
        "engines",
        "values",
    )

    def __init__(
        self,
        engines: Sequence[Engine],
        changes: EngineChanges | None = None,
        like: FleetSnapshot | None = None,
    ) -> None:
        count = len(engines)
        self.engines = engines
        self._at: dict[Engine, int] = dict(zip(engines, range(count), strict=True))
        self.changed: set[EngineId] = set() if changes is None else changes.follow()
        """Engines that are to be read again."""
        # Whether the engines have been read.
        self._known = False
        self._engine_ids = [engine.engine_id for engine in engines]
        self._position: dict[str, int] = dict(zip(self._engine_ids, range(count), strict=True))
        # By the identity of the names, which the plans of the index keep: a hash walks over all names.
        self._positions: dict[int, _Positions] = {}
        nothing = np.zeros(count)
        self.values = FleetValues(*np.zeros((5, count)))
        # A decision keeps the list: another one follows a change.
        self._states: list[EngineState] = [EngineState()] * count
        # As whole multiples of a small part of a second: a sum that is kept is what adding up again would be.
        self._recents, self._recent_sum = [0] * count, 0
        self._lates, self._late_sum = [0] * count, 0
        self._fits_tokens, self._waiting = np.full(count, math.inf), nothing.copy()
        self._surely_fits = math.inf
        # ``HeadProgress`` of each: queues that do not fall with time have a head of 0 s.
        self._queues, self._head_at_s, self._head_s = np.zeros((2, count)), nothing.copy(), nothing.copy()
        self._moving: set[int] = set()
        # Engines whose own hit is not that of others with equal blocks.
        self._unclear: set[int] = set()
        # Until when each engine's values are good, and the earliest of these times first; a time may be
        # listed too early.
        self._until_s, self._scheduled_s = [math.inf] * count, [math.inf] * count
        self._due: list[tuple[float, int]] = []
        # Engines with estimates of the fleet, and these, by the medians that they were taken from.
        self._borrowing: set[int] = set()
        self._borrowed = 0.0, 0.0
        self._fleet_rates = engines[0].rates.fleet if engines else None
        self._medians: tuple[float, float, float] | None = None
        self._others: Mapping[str, OthersLoad] | None = {}
        if like is not None:
            self._take_over(like)

    def holds_any(self, engines: Sequence[Engine]) -> bool:
        """Whether it has the first or the last of these engines: then it has most of them, usually."""
        return bool(engines) and (engines[0] in self._at or engines[-1] in self._at)

    def _take_over(self, like: FleetSnapshot) -> None:
        """Copy the values of engines that both have; the others are to be read."""
        if not like._known or not self.engines:  # of the same class
            return
        at, count = self._at, len(self.engines)
        places = list(map(like._at.get, self.engines, repeat(-1)))
        known = [place for place, old in enumerate(places) if old >= 0]
        old = [place for place in places if place >= 0]

        def taken(values: Floats) -> Floats:
            found = np.zeros((*values.shape[:-1], count))
            found[..., known] = values[..., old]
            return found

        values = like.values
        self.values = FleetValues(
            taken(values.rates),
            taken(values.decode_s),
            taken(values.requests),
            taken(values.recent_s),
            taken(values.admitted_s),
        )
        self._states = [EngineState() if place < 0 else like._states[place] for place in places]
        self._recents = [0 if place < 0 else like._recents[place] for place in places]
        self._lates = [0 if place < 0 else like._lates[place] for place in places]
        self._recent_sum, self._late_sum = sum(self._recents), sum(self._lates)
        self._fits_tokens, self._waiting = taken(like._fits_tokens), taken(like._waiting)
        self._queues, self._head_at_s, self._head_s = map(
            taken, (like._queues, like._head_at_s, like._head_s)
        )
        self._until_s = [math.inf if place < 0 else like._until_s[place] for place in places]
        self.changed.update(like.changed)
        if len(known) < count:
            self.changed.update([self._engine_ids[place] for place, old in enumerate(places) if old < 0])
        for name in ("_moving", "_borrowing", "_unclear"):
            engines = [like.engines[place] for place in getattr(like, name)]
            setattr(self, name, {at[engine] for engine in engines if engine in at})
        self._scheduled_s = self._until_s[:]
        self._due = list(zip(self._until_s, range(count), strict=True))
        heapify(self._due)
        self._borrowed, self._medians, self._others = like._borrowed, like._medians, like._others
        self._summed()
        self._known = True

    def candidates(self, asked: PromptView, now: float) -> Candidates:
        """Return the engines as candidates for one prompt, in order."""
        queue_s = self.queue_s(asked.others, now)
        engines = self.engines
        hits, which = self._hits(asked)
        rooms = _NO_ROOMS
        behind_pages = {} if asked.order is None else self._pass(asked, hits, which, queue_s)
        if asked.tokens > self._surely_fits:
            rooms = {}
            for at in (self._fits_tokens < asked.tokens).nonzero()[0].tolist():
                pages = engines[at].load.pages
                rooms[at] = pages.wait_s(asked.tokens, behind_pages.get(at, 0)), pages.share(asked.tokens)
        return Candidates(
            self._engine_ids,
            self._states,
            self.values,
            queue_s,
            hits=hits,
            which=which,
            rooms=rooms,
            nothing=lambda at: engines[at].hit(asked),
            now=now,
        )

    def queue_s(self, others: Mapping[str, OthersLoad] | None, now: float) -> Floats:
        """Return the seconds of prompts queued at each engine; ``values`` are of now as well."""
        self._refresh(others, now)
        whole_s, beyond_s = self._queues
        if not self._moving:
            return whole_s.copy()
        left_s: Floats = whole_s - np.minimum(now - self._head_at_s, self._head_s)
        return np.maximum(left_s, 0.0) + beyond_s

    def _pass(self, asked: PromptView, hits: Sequence[Hit], which: Places, queue_s: Floats) -> dict[int, int]:
        """Take off the prompts that this one would pass in the engines' own order. Returns their pages."""
        pages: dict[int, int] = {}
        order, states = asked.order, self._states
        for at in self._waiting.nonzero()[0].tolist():
            engine = self.engines[at]
            if order is None or not engine.takes_order:
                continue
            rate, number = states[at].prefill_s_per_token, which.item(at)
            work_s = rate * (asked.tokens - (hits[number - 1].whole_tokens if number else 0))
            behind_s, pages[at] = engine.load.behind(order.rank_s(work_s), rate)
            queue_s[at] = max(0.0, queue_s.item(at) - behind_s)
        return pages

    def _hits(self, asked: PromptView) -> tuple[list[Hit], Places]:
        """Return the hits of engines that hold a part of the prompt, or will; and of each engine the number
        of its hit, from 1, or 0."""
        engines, position = self.engines, self._position
        single: dict[int, EngineHit | None] = {}
        for found in (asked.held, asked.common, asked.coming):
            for name in found:
                if (at := position.get(name)) is not None:
                    single[at] = None
        if asked.shadows is not None:
            single.update({at: None for at, one in enumerate(engines) if one.shadow is not None})
        hits: list[Hit] = []
        which = np.zeros(len(engines), np.intp)
        special = {*single, *self._unclear} if single or self._unclear else ()
        for held, names in asked.alike:
            known = self._positions.get(id(names))
            if known is None or known.names is not names:
                known = self._positions_of(names)
            first, those = known.first, known.those
            if special and not those.isdisjoint(special):
                apart = those.intersection(special)
                single.update(dict.fromkeys(apart, held))
                first = min(those - apart, default=-1)
            if first >= 0:
                hits.append(engines[first].discounted(held))
                if known.places is not None:
                    which[known.places] = len(hits)
                else:
                    for at in those:
                        which[at] = len(hits)
        if single:
            self._by_hit(asked, single, hits, which)
        return hits, which

    def _by_hit(
        self, asked: PromptView, single: Mapping[int, EngineHit | None], hits: list[Hit], which: Places
    ) -> None:
        """Add the hits of engines that are asked one by one."""
        common, coming, held_by, nothing = asked.common, asked.coming, asked.held.get, asked.nothing.get
        made: dict[tuple[int, int, int], Hit] = {}
        numbers: dict[int, int] = {}
        for at, alike in single.items():
            engine = self.engines[at]
            name, feed = engine.engine_id, engine.feed
            held = alike or held_by(name) or nothing(name)
            plain = feed is not None and feed.state is _READY and not feed.unconfirmed
            if held is None or not plain or held.mode in {"unknown", "shadow"}:
                hit = engine.hit(asked, held)
            else:
                # Engines with equal state that missed nothing have equal hits.
                key = id(held), common.get(name, 0), coming.get(name, 0)
                known = made.get(key)
                hit = known if known is not None else made.setdefault(key, engine.hit(asked, held))
                if engine.evictions.crowded and hit.soon_tokens:
                    hit = engine.after_evictions(hit, asked)
            number = numbers.get(id(hit))
            if number is None:
                hits.append(hit)
                number = numbers[id(hit)] = len(hits)
            which[at] = number

    def _positions_of(self, names: tuple[str, ...]) -> _Positions:
        if len(self._positions) >= _SETS_MAX:
            self._positions.clear()
        position = self._position
        those = frozenset([position[name] for name in names if name in position])
        places = np.array(sorted(those)) if len(those) > _FEW else None
        known = self._positions[id(names)] = _Positions(names, those, min(those, default=-1), places)
        return known

    def _refresh(self, others: Mapping[str, OthersLoad] | None, now: float) -> None:
        """Read the engines that may have changed."""
        rates, due = self._fleet_rates, self._due
        if not self._known:
            stale: Collection[int] = range(len(self.engines))
            self._borrowed = (0.0, 0.0) if rates is None else rates.borrowed
        elif (
            not self.changed
            and others is self._others
            and rates is not None
            and rates.medians is self._medians
            and not (due and due[0][0] <= now)
        ):
            return
        else:
            stale = self._stale(others, now)
        self._others = others
        if stale:
            self._states = self._states[:]
            for at in stale:
                self._read(at, now)
            self._summed()
        # After the reading, which may itself note changes: heads that are done by now.
        self.changed.clear()
        self._known = True
        self._medians = None if rates is None else rates.medians

    def _summed(self) -> None:
        """Set what follows from all engines."""
        self.values.summed(self._recent_sum / _ONE, self._late_sum / _ONE)
        self._surely_fits = self._fits_tokens.item(self._fits_tokens.argmin())

    def _stale(self, others: Mapping[str, OthersLoad] | None, now: float) -> Collection[int]:
        before, position, names = self._others, self._position, self.changed
        if others is not before and others != before:
            if others is None or before is None:
                return range(len(self.engines))
            told = {**before, **others}
            names.update([EngineId(name) for name in told if before.get(name) != others.get(name)])
        stale: set[int] = set()
        for name in names:
            if (known := position.get(name)) is not None:
                stale.add(known)
        due, scheduled_s, until_s = self._due, self._scheduled_s, self._until_s
        while due and due[0][0] <= now:
            _, at = heappop(due)
            scheduled_s[at] = math.inf
            if until_s[at] <= now:
                stale.add(at)
            else:
                self._schedule(at)
        if self._borrowing and self._fleet_rates is not None:
            borrowed = self._fleet_rates.borrowed
            if borrowed != self._borrowed:
                self._borrowed = borrowed
                stale |= self._borrowing
        return stale

    def _read(self, at: int, now: float) -> None:
        """Read one engine."""
        engine = self.engines[at]
        rates, load, feed = engine.rates, engine.load, engine.feed
        rate, interference_s = rates.current(now)
        known = self._others
        others = known.get(engine.engine_id, NO_OTHERS) if known else None if known is None else NO_OTHERS
        queue_s, running, waiting, _, late_s, recent_s, head, until_s = load.ahead(now, others, rate)
        values, state, last_s = self.values, self._states[at], load.last_admit_s
        if recent_s != state.recent_s:
            before, self._recents[at] = self._recents[at], int(recent_s * _ONE_F)
            self._recent_sum += self._recents[at] - before
            values.recent_s[at] = recent_s
        if late_s != state.late_s:
            before, self._lates[at] = self._lates[at], int(late_s * _ONE_F)
            self._late_sum += self._lates[at] - before
        self._states[at] = EngineState(running, waiting, last_s, rate, interference_s, late_s, recent_s)
        values.rates[at], values.decode_s[at] = rate, interference_s * running
        values.requests[at], values.admitted_s[at] = running + waiting, last_s
        self._waiting[at] = waiting
        self._fits_tokens[at] = load.pages.surely_fits_tokens
        if head is not None:
            self._moving.add(at)
            self._queues[0, at], self._queues[1, at] = head.whole_s, head.beyond_s
            self._head_at_s[at], self._head_s[at] = head.head_at_s, head.head_s
        else:
            self._moving.discard(at)
            self._queues[0, at], self._queues[1, at], self._head_s[at] = queue_s, 0.0, 0.0
        if feed is None or feed.state is not _READY or feed.unconfirmed or engine.evictions.crowded:
            self._unclear.add(at)
        else:
            self._unclear.discard(at)
        if now > rates.fresh_until_s:
            self._borrowing.add(at)
        else:
            self._borrowing.discard(at)
        rates_until_s = rates.constant_until(now)
        self._until_s[at] = until_s if until_s < rates_until_s else rates_until_s  # noqa: FURB136
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        until_s = self._until_s[at]
        if until_s < self._scheduled_s[at]:
            self._scheduled_s[at] = until_s
            heappush(self._due, (until_s, at))


_ONE: Final = 1 << 140
_ONE_F: Final = float(_ONE)
# Fewer positions are assigned faster one by one.
_FEW: Final = 16


class _Positions(NamedTuple):
    """Positions of the engines of these names, the first one (-1: there is none), and all as an array if they
    are many."""

    names: tuple[str, ...]
    those: frozenset[int]
    first: int
    places: Places | None


class FleetSnapshots:
    """Snapshots of the latest lists of engines."""

    def __init__(self, changes: EngineChanges) -> None:
        self._changes = changes
        self._kept: list[FleetSnapshot] = []

    def of(self, engines: Sequence[Engine]) -> FleetSnapshot:
        """Return the snapshot of these engines."""
        kept = self._kept
        for snapshot in kept:
            if snapshot.engines is engines:
                return snapshot
        for snapshot in kept:
            # Adapters of one model have the same engines in lists of their own.
            if snapshot.engines == engines:
                return snapshot
        for left in kept[_SNAPSHOTS_MAX - 1 :]:
            self._changes.leave(left.changed)
        like = next((one for one in kept if one.holds_any(engines)), None)
        made = FleetSnapshot(engines, self._changes, like)
        self._kept = [made, *kept[: _SNAPSHOTS_MAX - 1]]
        return made


def candidates(engines: Sequence[Engine], asked: PromptView, now: float) -> Candidates:
    """Return these engines as candidates for one prompt, without a snapshot to come back to."""
    return FleetSnapshot(engines).candidates(asked, now)


def within_service_level(
    engines: Sequence[Engine], found: Sequence[Candidate], choice: Choice, left_s: float, stats: SloStats
) -> tuple[list[Engine], Candidates, Candidates] | None:
    """Leave out the engines predicted to give the first token later than in ``left_s``.

    Returns the engines that remain, their candidates, and the candidates left out. None: the engine chosen by
    cost makes it, or none does.
    """
    scored, index = choice.scored, choice.index
    stats.decisions += 1
    if scored.first_token_s(index) + engines[index].own_s <= left_s:
        return None
    met = within_level(scored, [one.own_s for one in engines], left_s)
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
