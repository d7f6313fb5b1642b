"""Small workloads and fleets for tests of the simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers import COMPARED
from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.simulation.engine import SimEngine
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.outcome import FleetRun
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.tiers import TierSetup, tiers_of
from kvatlas.router.simulation.variants import variants_of

FULL = (GroupSpec(0, "full_attention", 64),)
HYBRID = (GroupSpec(0, "full_attention", 64), GroupSpec(1, "sliding_window", 64, sliding_window=128))
FAST = Timing(prefill_s_per_token=0.001, decode_s=0.01, chunk_tokens=512, seqs_max=4)


def request(at_s: float, tokens: int, output: int, first_id: int, session: int = 0) -> Request:
    """A prompt whose ids count up from ``first_id``."""
    units = -(-(tokens + output) // 512)
    ids = tuple(range(first_id, first_id + units))
    return Request(at_s=at_s, input_tokens=tokens, output_tokens=output, ids=ids, session=session)


class Bench:
    """One engine and what it tells."""

    def __init__(
        self,
        *,
        num_blocks: int,
        timing: Timing = FAST,
        groups: tuple[GroupSpec, ...] = FULL,
        tiers: TierSetup | None = None,
    ) -> None:
        self.told: list[tuple[str, int, float]] = []
        pool = HybridBlockPool(
            groups,
            num_blocks=num_blocks,
            scheme=HashScheme(hash_block_size=64),
            chunk_tokens_max=512,
            events=False,
        )
        self.engine = SimEngine(
            pool,
            timing,
            first_token=lambda run, now: self.told.append(("first", run.index, now)),
            ended=lambda run, now: self.told.append(("ended", run.index, now)),
            refused=lambda run, now: self.told.append(("refused", run.index, now)),
            tiers=tiers_of(tiers, [pool])[0],
        )

    def run(
        self, requests: list[Request], *, pauses: int = 0, ranks: list[float] | None = None
    ) -> list[RequestRun]:
        """All requests to their end; this many pauses before each arrival. ``ranks``: their keys in the
        engine's order."""
        runs = []
        before_s = 0.0
        for index, one in enumerate(requests):
            for pause in range(pauses):
                until_s = before_s + (one.at_s - before_s) * pause / pauses
                while self.engine.next_s <= until_s:
                    self.engine.advance()
            before_s = one.at_s
            while self.engine.next_s <= one.at_s:
                self.engine.advance()
            pooled = self.engine.pool.request([0] * one.input_tokens, hashes=block_hashes(one, 64))
            rank_s = 0.0 if ranks is None else ranks[index]
            run = RequestRun(index, pooled, one.input_tokens, one.output_tokens, one.at_s, rank_s=rank_s)
            runs.append(run)
            self.engine.arrive(run, one.at_s)
        while self.engine.next_s < float("inf"):
            self.engine.advance()
        return runs

    def time_of(self, what: str, index: int) -> float:
        return next(now for name, one, now in self.told if (name, one) == (what, index))

    def of(self, what: str) -> list[int]:
        return [index for name, index, _ in self.told if name == what]


def fleet_run(requests: list[Request], variant: str = "kvatlas", **changes: Any) -> FleetRun:
    fields: dict[str, Any] = {"groups": HYBRID, "num_blocks": 400, "engines": 3, "timing": FAST}
    setup = FleetSetup(**{**fields, **changes})
    return FleetSim(setup, variants_of([variant], COMPARED)[variant]).run(requests)


def line(**changes: Any) -> dict[str, Any]:
    """A good line of the workload format."""
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changes}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path
