"""The default choice: place by the shared prefix, pay by the exact hit.

For engine e and a prompt of N tokens, with a = prefill seconds per token of e, in seconds::

    cost = queue                         prefill and loads still to do at e for prompts already placed there,
                                         or room_share of the wait for pages, if that is more
         + a * (N - hit - offloaded)     computing at e for this prompt
         - beta * a * (shared prefix - hit - offloaded)
         + min(DELAY_MAX_S, price * (the two above))    delay of the requests behind it
         + load * cpu + fetch * storage  blocks that e copies back instead of computing them
         + decode * running              delay of the prefill by running sequences
         + sequence * (running + waiting)    these two only if some engine could load a part of the prompt
         + scarcity * a * (N - hit)
         + spread * max(0, recent - mean recent)

    price = max(premium, delay * (mean requests + waiting, and running as well where prompts wait for pages))
    offloaded = cpu + storage,  0 <= hit + offloaded <= shared prefix <= N - 1

``hit`` is what the engine takes from its cache at this prompt's turn (``Hit``): what it holds now (exact, all
groups), or what a prompt already waiting there will have stored, if that is more. ``shared_prefix`` is the
shared prefix: the longest prefix that the engine has in any group or that a prompt in flight there has.

The credit values blocks that this visit makes the engine keep: under vLLM's default retention a branch point
of a hybrid model becomes a hit only after a visit (``shared_prefix_boundary`` in vLLM), so plain exact argmin
(beta = 0) spreads siblings by load and no engine is visited twice. Source of the form: fleet simulations with
vLLM's own cache manager, docs/decisions/002-cost-model.md; the form is that of Mooncake's conductor and
Dynamo's KV scheduler (both: prefill left + load), plus the credit.

Costs within ``TIE_S`` are equal. A cold prompt goes first to engines that got no request for
``probe_interval_s`` (with the shortest queue, and at most ``PROBE_COST_MAX_S`` more expensive), so none
starves.

Invariant: the result depends on the arguments alone, not on the order of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvatlas.router.placement.candidate import (
    Candidate,
    Cost,
    Hit,
    PolicySettings,
    Pull,
    Reason,
)
from kvatlas.router.placement.fleet_values import Candidates, Floats, Places, columns

# Costs that differ by at most this much are equal: the jitter of one scheduler step.
TIE_S = 0.001
# No prompt is put off for more than this, for others' sake (docs/decisions/050-what-a-prefill-delays.md).
DELAY_MAX_S = 60.0
_DELAY_MAX_S: Final[Floats] = np.array(DELAY_MAX_S)
# A prompt is cold if no engine's shared prefix covers more than this share of it; only those are probes.
COLD_FRACTION = 0.1
# A probe may cost this much more than the cheapest engine: it pays for a rate that later requests use.
PROBE_COST_MAX_S = 1.0
# Mean lateness of first tokens at which pages have their full price.
_SCARCE_AT_S: Final = 5.0

Part = tuple[int, int, float, float, int]
"""A prompt with a given hit, in tokens: cached tokens and shared prefix, both clamped, and the tokens whose
computing takes as long as all costs that depend on the engine's rate. Then ``load_s``, and the tokens that
take new pages."""
_CACHED, _SHARED, _BY_RATE, _LOAD_S, _PAGED = range(5)


class ScoredCandidates(msgspec.Struct, gc=False):
    """Costs of a prompt at each candidate: ``totals`` and ``queues`` are in their order, ``parts`` by number
    of the hit (``Candidates.which``). The other parts of a ``Cost`` follow from these."""

    candidates: Candidates
    prompt_tokens: int
    settings: PolicySettings
    totals: Floats
    queues: Floats
    parts: list[Part]
    longest_shared_prefix: int
    recent_mean_s: float
    """Mean over the candidates of their recent work."""
    prices: Floats
    """Price of a second of prefill at each, beside that second."""
    scarcity: float | None = None
    """Price of pages; None if nothing can be loaded: then neither pages nor sequences have a price."""

    def column(self, which: int) -> Floats:
        """Return one value of ``Part`` for each candidate."""
        found: Floats = np.array([part[which] for part in self.parts])[self.candidates.which]
        return found

    def cost(self, index: int, candidate: Candidate | None = None) -> Cost:
        """Return the cost of one candidate, part by part."""
        # Plain comparisons: ``max`` costs as much as four calls.
        candidate, settings, prompt_tokens = (
            candidate or self.candidates[index],
            self.settings,
            self.prompt_tokens,
        )
        wait_s, more_s = candidate.queue_s, candidate.recent_s - self.recent_mean_s
        wait_s = candidate.room_s if candidate.room_s > wait_s else wait_s  # noqa: FURB136
        cached, shared_prefix, _, load_s, paged = self.parts[self.candidates.which.item(index)]
        rate, uncached, credit_s = candidate.prefill_s_per_token, prompt_tokens - cached, 0.0
        prefill_s, decode_s = rate * uncached, candidate.decode_interference_s * candidate.running
        if shared_prefix > cached:
            credit_s = settings.beta * rate * (shared_prefix - cached)
        delay_s = self.delay_s(index, prefill_s - credit_s)
        if self.scarcity is not None:
            # With memory behind the GPUs a fifth of the tokens is computed: blocks for generating sequences
            # are scarcer than compute (docs/decisions/012).
            decode_s += settings.sequence_s * (candidate.running + candidate.waiting)
            delay_s += self.scarcity * rate * paged
        return Cost(
            candidate.engine_id,
            self.queues.item(index),
            prefill_s,
            load_s,
            decode_s,
            credit_s,
            delay_s,
            settings.spread * more_s if more_s > 0.0 else 0.0,
            self.totals.item(index),
            uncached,
            shared_prefix,
            wait_s,
        )

    def delay_s(self, index: int, computed_s: float) -> float:
        """Price of computing for this time at this candidate, beside the seconds themselves."""
        return min(self.prices.item(index) * computed_s, DELAY_MAX_S)

    def soonest(self, count: int) -> list[int]:
        """Positions of ``count`` candidates with the soonest first tokens by the cost's own seconds."""
        found, values = self.candidates, self.candidates.values
        first_s = found.waits_s + values.rates * (self.prompt_tokens - self.column(_CACHED))
        first_s = first_s + self.column(_LOAD_S) + values.decode_s
        places: list[int] = np.argpartition(first_s, count)[:count].tolist()
        return places


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen engine; ``scored`` and ``costs`` are in the order of the candidates.

    The load account is charged with ``uncached_tokens``: the policy's own estimate of what the engine
    computes.
    """

    index: int
    engine_id: str
    reason: Reason
    uncached_tokens: int
    cost: Cost
    """Cost of the chosen engine."""
    candidate: Candidate
    """The chosen engine's state."""
    scored: ScoredCandidates
    pull: Pull | None = None
    """Prefix that the engine is to pull from another one; ``cost`` counts it, ``costs`` do not."""

    @property
    def costs(self) -> tuple[Cost, ...]:
        """Cost of each engine."""
        return tuple(self.scored.cost(index) for index in range(len(self.scored.totals)))


def make_choice(scored: ScoredCandidates, index: int, reason: Reason) -> Choice:
    """Make the choice of this candidate."""
    candidate = scored.candidates[index]
    cost = scored.cost(index, candidate)
    return Choice(index, cost.engine_id, reason, cost.uncached_tokens, cost, candidate, scored)


def score(
    candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings, *, answers: bool = True
) -> ScoredCandidates:
    """Score every candidate. ``answers``: whether the price of computing counts running answers."""
    # Arrays instead of objects: this covers the whole fleet for each request. Only engines that hold a part
    # of the prompt differ in what they compute, and equal hits share it.
    found = candidates if isinstance(candidates, Candidates) else columns(candidates)
    values, hits = found.values, found.hits
    parts = [(0, 0, float(prompt_tokens), 0.0, prompt_tokens) if prompt_tokens else _part(Hit(), 0, settings)]
    by_rates = [parts[0][_BY_RATE]]
    # Only a share of the wait for pages: all of it would move sessions away from the engines that hold
    # them, so that more is computed and all wait longer (docs/decisions/014-pages-and-recent-work.md).
    queues = found.queues_s(settings.room_share) if found.rooms else found.queue_s
    longest, loaded, loads, last = 0, False, False, prompt_tokens - 1
    for hit in hits:
        part = _part(hit, prompt_tokens, settings)
        parts.append(part)
        _, shared_prefix, by_rate, load_s, _ = part
        by_rates.append(by_rate)
        longest = shared_prefix if shared_prefix > longest else longest  # noqa: FURB136
        loaded = loaded or load_s > 0.0
        # Only what lies outside the GPU is loaded; the part that is on the GPU, or will be, needs no link.
        loads = loads or hit.whole_tokens > hit.soon_tokens < last
    mean_s = values.recent_mean_s
    # A computed second is waited for by all that come before the engine is idle, as many as there are now
    # (Little's law). Under load a hit is worth a longer queue than it saves this prompt
    # (docs/decisions/050-what-a-prefill-delays.md). In an idle fleet too: a copy of a prefix makes every
    # cache smaller (005).
    prices = found.prices(settings.delay, settings.eviction_premium, answers=answers)
    totals: Floats = values.rates * (np.array(by_rates)[found.which] if hits else by_rates[0])
    totals += np.minimum(prices * totals, _DELAY_MAX_S)
    scored = ScoredCandidates(found, prompt_tokens, settings, totals, queues, parts, longest, mean_s, prices)
    totals += queues
    if loaded:
        totals += scored.column(_LOAD_S)
    totals += values.decode_s
    # Relative to the fleet: under equal load the term must not favour anyone. The queue is a momentary value:
    # long sessions return every few seconds, and without this term several of them share one engine while
    # others idle (014).
    if settings.spread and mean_s:
        totals += values.spread_of(settings.spread)
    if loads:
        _add_scarcity(scored)
    return scored


def _part(hit: Hit, prompt_tokens: int, settings: PolicySettings) -> Part:
    # vLLM always computes at least the last token.
    most = prompt_tokens - 1
    cached, shared_prefix, soon, load_s = hit.whole_tokens, hit.shared_prefix_tokens, hit.soon_tokens, 0.0
    if cached > most or shared_prefix > most:
        cached, shared_prefix, soon = min(cached, most), min(shared_prefix, most), min(soon, most)
    if cached > soon:
        load_s = _load_s(hit, cached, settings)
    if hit.share < 1.0 and prompt_tokens:
        cached, shared_prefix, soon = (int(hit.share * one) for one in (cached, shared_prefix, soon))
        load_s *= hit.share
    # The engine computes the last window of a hit again (bounded replay), so that part saves nothing.
    if hit.replay_tokens and cached > hit.replay_tokens:
        cached, shared_prefix = cached - hit.replay_tokens, shared_prefix - hit.replay_tokens
    if shared_prefix > cached:
        by_rate = prompt_tokens - cached - settings.beta * (shared_prefix - cached)
    else:
        shared_prefix, by_rate = cached, float(prompt_tokens - cached)
    return cached, shared_prefix, by_rate, load_s, prompt_tokens - soon


def _load_s(hit: Hit, cached: int, settings: PolicySettings) -> float:
    near = min(hit.near_tokens, cached)
    near_s = settings.load_s_per_token * (near - hit.soon_tokens)
    far_s = hit.storage_s_per_token or settings.storage_load_s_per_token
    return near_s + far_s * (cached - near)


def _add_scarcity(scored: ScoredCandidates) -> None:
    """Add the prices of sequences (to ``decode_s``) and of scarce pages (to ``delay_s``) if a part of the
    prompt can be loaded."""
    values, settings = scored.candidates.values, scored.settings
    # A load saves the computing but not the page; a hit on the GPU saves both. While first tokens come later
    # than computing and loading explain, prompts wait for pages, and this is their price
    # (docs/decisions/013).
    scored.scarcity = scarcity = settings.scarcity_premium * min(1.0, values.late_s / _SCARCE_AT_S)
    more_s = settings.sequence_s * values.requests
    scored.totals += more_s + scarcity * values.rates * scored.column(_PAGED)


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, settings: PolicySettings, *, prompt_key: int = 0
) -> Choice:
    """Choose the engine for this prompt. Raises ``ValueError`` without candidates.

    ``prompt_key`` breaks ties: different keys spread over equal engines, equal keys choose the same one.
    """
    scored = score(candidates, prompt_tokens, settings)
    if not len(scored.totals):
        raise ValueError("no engine to choose from")
    return make_choice(scored, *_pick(scored, prompt_key))


def _pick(scored: ScoredCandidates, key: int) -> tuple[int, Reason]:
    """Position of the choice, and the reason; candidates are given by their positions."""
    totals = scored.totals
    if len(totals) == 1:
        return 0, "only"
    best = totals.item(totals.argmin())
    if scored.longest_shared_prefix <= COLD_FRACTION * scored.prompt_tokens:
        # Engines without work for long. A warm prompt is no probe: its saving is not given up.
        idle, queues = scored.candidates.idle(scored.settings.probe_interval_s), scored.queues
        due = idle[(totals[idle] <= best + PROBE_COST_MAX_S) & (queues[idle] <= queues[queues.argmin()])]
        if len(due):
            return _settle(scored, due, key), "probe"
    equals = (totals <= np.array(best + TIE_S)).nonzero()[0]
    if len(equals) == 1:
        return equals.item(0), "cheapest"
    return _settle(scored, equals, key), "tie"


def _settle(scored: ScoredCandidates, equals: Places, key: int) -> int:
    """Break a tie: the longest shared prefix (it is free, and keeps prefixes together), then rendezvous."""
    places: list[int] = equals.tolist()
    if scored.longest_shared_prefix and len(places) > 1:
        parts, found = scored.parts, scored.candidates.which[equals].tolist()
        numbers = set(found)
        if len(numbers) > 1:
            shared = {number: parts[number][_SHARED] for number in numbers}
            longest = max(shared.values())
            places = [at for at, number in zip(places, found, strict=True) if shared[number] == longest]
    if len(places) == 1:
        return places[0]
    return places[favourite(list(map(scored.candidates.engine_ids.__getitem__, places)), key)]


# Highest-random-weight (rendezvous) hashing (Thaler and Ravishankar, 1998): every prompt has its own order of
# the engines. Different keys spread evenly, the same key chooses the same engine, and an engine that joins or
# leaves moves only the keys it wins or held.
_U64 = (1 << 64) - 1


def weight(engine_id: str, key: int) -> int:
    """Preference of ``key`` for this engine: uniform over 64 bits, equal in every router process."""
    return xxhash.xxh64_intdigest(engine_id.encode(), key & _U64)


def favourite(engine_ids: Sequence[str], key: int) -> int:
    """Position of the engine that ``key`` prefers. The order of the list does not matter."""
    weights = list(map(xxhash.xxh64_intdigest, map(str.encode, engine_ids), repeat(key & _U64)))
    return weights.index(max(weights))
