"""A simulated fleet whose last engine joins or is drained halfway (``benchmarks.tiers --scaling``).

Prefixes for warm-up are chosen by the router's ``PromptMemory`` and sent piece by piece beside the requests,
to be computed or pulled from the host memory of another engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from publisher.block_hash import NO_EXTRAS, PromptExtras
from publisher.events import BlockHash
from router.placement.affinity import PromptMemory
from router.placement.candidate import Candidate, PlacementRequest, WarmUpSettings
from router.placement.cost import Choice
from router.placement.load import LoadSettings, Ticket
from router.placement.pull import occupy_links, with_pull
from router.prompts.prompt import Prompt
from router.simulate.fleet import FleetSim
from router.simulate.requests import Request, block_hashes
from router.simulate.setup import FleetSetup, RequestRun, Variant

WARMED = WarmUpSettings(enabled=True)
Event = Literal["joins", "leaves"]
Warming = Literal["none", "random", "hottest"]


class _Whole(msgspec.Struct, frozen=True):
    """A simulated prompt, as ``PromptMemory`` reads it."""

    request: Request
    num_prompts: int = 1
    skips_cache: bool = False
    extras: PromptExtras = NO_EXTRAS


class ScaledFleet(FleetSim):
    """The last engine joins, or is drained, with the first request after ``at_s``."""

    def __init__(
        self, setup: FleetSetup, variant: Variant, event: Event, warming: Warming, at_s: float, mean: float
    ) -> None:
        super().__init__(setup, variant, mean_prompt_tokens=mean)
        self._event, self._warming, self._at_s = event, warming, at_s
        self._memory = PromptMemory(WARMED.memory_tokens)
        # Prompt, tokens of it, and the engine to pull from; None: the one that holds most.
        self._steps: dict[int, list[tuple[Request, int, int | None]]] = {}
        self._free_s = [0.0] * setup.engines
        self._sent: dict[int, tuple[int, Ticket]] = {}
        self._happened = False
        self._draws = random.Random(setup.seed)
        self.warmed_tokens = self.pulled_tokens = self._pieces = 0

    def _arrive(self, index: int, request: Request) -> None:
        if self._now >= self._at_s and not self._happened:
            self._happened = True
            self._plan()
        for place in list(self._steps):
            self._warm(place)
        unit = self._scheme.hash_block_size
        hashes = block_hashes(request, unit)[: request.input_tokens // unit]
        super()._arrive(index, request)
        self._memory.add("", cast("Prompt", _Whole(request)), hashes, unit, self._now)

    @property
    def _places(self) -> list[int]:
        """Engines that get requests."""
        last = len(self._engines) - 1
        return [*range(last), last] if self._happened == (self._event == "joins") else list(range(last))

    def _choose(
        self,
        index: int,
        candidates: list[Candidate],
        question: PlacementRequest,
        hashes: Sequence[BlockHash],
        left_s: float,
    ) -> tuple[int, Choice, int | None]:
        places = self._places
        choice = self._policy([candidates[at] for at in places], question, self._knobs, self._state)
        if self._pull_s_per_token:  # places count from the first engine, as sources do
            sources = self._sources(question.prompt_tokens)
            choice = with_pull(
                choice, msgspec.structs.replace(sources, held_tokens=sources.held_tokens[: len(places)])
            )
        return places[choice.index], choice, None

    def _plan(self) -> None:
        last, tokens_max = len(self._engines) - 1, WARMED.tokens_max
        found = self._memory.hottest(tokens_max, self._now, lambda _: True)
        if self._warming == "none":
            return
        if self._warming == "random":
            found = self._memory.hottest(1 << 60, self._now, lambda _: True)
            self._draws.shuffle(found)
        for hot in found:
            request, unit = cast("_Whole", hot.prompt).request, self._scheme.hash_block_size
            place, end, source = last, hot.tokens, None
            if self._event == "leaves":
                hashes = block_hashes(request, unit)[: request.input_tokens // unit]
                hits = [
                    one.hit.whole_tokens for one in self._candidates(request.input_tokens, hashes, self._now)
                ]
                end = min(end, hits[last])
                if end <= max(hits[:last]):
                    continue
                place, source = min(range(last), key=lambda at: len(self._steps.get(at, ()))), last
            if (tokens_max := tokens_max - end) < 0 and self._warming == "random":
                return
            self._steps.setdefault(place, []).append((request, end, source))

    def _warm(self, place: int) -> None:
        """Send the next piece, if no prompt waits there."""
        engine = self._engines[place]
        late = self._now > self._at_s + WARMED.seconds_max
        if late or place in [at for at, _ in self._sent.values()] or engine.num_waiting:
            return
        if self._now < self._free_s[place]:
            return
        while self._steps.get(place):
            (request, end, giver), unit = self._steps[place][0], self._scheme.hash_block_size
            hashes = block_hashes(request, unit)
            prompt = hashes[: request.input_tokens // unit]
            own = self._candidates(request.input_tokens, prompt, self._now)[place]
            hit = min(own.hit.whole_tokens, end)
            if end - hit <= self._layout.alignment:
                self._steps[place].pop(0)
                continue
            piece = min(end, hit + WARMED.piece_tokens)
            source = self._source(place, giver)
            if source is not None and min(end, self._alone[source]) < piece:
                source = None
            if source is not None:
                piece = min(end, self._alone[source])
            elif own.recent_s > WARMED.busy_share_max * LoadSettings().recent_s:
                return
            self._pieces += 1
            index, tokens = -self._pieces, min(piece + 1, request.input_tokens)
            work_s = 0.0
            if source is not None:
                self.pulled_tokens += piece - hit
                work_s = self._charge(place, source, piece - hit)
            else:
                self.warmed_tokens += piece - hit
                self._free_s[place] = self._now + (piece - hit) / WARMED.tokens_per_s
            ticket = self._loads[place].admit(
                uncached_tokens=piece - hit if source is None else 1,
                now=self._now,
                streams=False,
                load_s=work_s,
                expected_s=math.inf if source is None else work_s,
                prompt_tokens=piece,
            )
            self._sent[index] = place, ticket
            run = self._run(place, index, tokens, hashes, 1)
            run.source = None if source is None else self._tiers[source]
            self._send(place, run)
            return
        self._steps.pop(place, None)

    def _source(self, place: int, giver: int | None) -> int | None:
        """Return the engine to pull the prompt from that was looked up last; None: there is none."""
        if not self._pull_s_per_token:
            return None
        others = [at for at in self._places if at != place] if giver is None else [giver]
        best = max(others, key=self._alone.__getitem__)
        return best if self._alone[best] else None

    def _charge(self, place: int, source: int, tokens: int) -> float:
        """Occupy the links of a pull; returns its predicted seconds."""
        link_s = self._sources().link_s(place, source, tokens)
        occupy_links(self._loads[place], self._loads[source], link_s, self._now)
        return link_s

    def _first_token(self, run: RequestRun, now: float) -> None:
        if run.index >= 0:
            super()._first_token(run, now)

    def _ended(self, run: RequestRun, now: float) -> None:
        if run.index >= 0:
            super()._ended(run, now)
            return
        place, ticket = self._sent.pop(run.index)
        self._loads[place].finish(ticket, now)

    def _refused(self, run: RequestRun, now: float) -> None:
        if run.index >= 0:
            super()._refused(run, now)
            return
        place, ticket = self._sent.pop(run.index)
        self._loads[place].fail(ticket, now)
