"""Workers on a virtual clock: what it costs placement that each knows the others' requests a little later.

    python -m benchmarks.workers_virtual [--trace TRACE.jsonl.gz] [--workers 1,4] [--seeds 8] [--seconds 40]
        [--plain]

The load is that of ``benchmarks.workers quality``: users who chat, or a trace at a fifteenth of its tokens
and eight times its speed (``--plain``: answers are not streamed, so that rates are not learned). One JSON
line per seed: the share of prompt tokens found cached, in all and of the first 20 s, and the most tokens that
an engine computed, over the mean. A run depends on its arguments alone; what is simulated, and what is left
out, says ``benchmarks/virtual_crew.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from functools import partial
from typing import Any

import msgspec

from benchmarks.virtual_crew import ENGINES, TOKENS, VirtualFleet
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.demo import run as demo
from kvatlas.router.simulation.requests import Request
from kvatlas.router.simulation.workload import WorkloadSource

TRACE_ENGINE = msgspec.structs.replace(demo.ENGINE, num_blocks=6000)
TRACE_SPEED, TRACE_SHARE, UNIT_SHARE = 8.0, 20, 15
SYSTEMS, SYSTEM_WORDS, QUESTION_WORDS, TOKENS_PER_WORD = 10, (500, 1600), (20, 150), 1.35
USERS, TURNS, ASKED_TWICE, THINK_S, ANSWER_TOKENS = 8 * ENGINES, (2, 6), 0.25, (0.2, 1.5), (12, 40)
START_S = 20.0


def replay(fleet: VirtualFleet, trace: list[Request], *, streams: bool, seconds: float) -> None:
    """The first ``seconds`` of a trace, to one worker after the other."""
    workers = itertools.cycle(fleet.workers)
    for request in trace:
        at_s = (request.at_s - trace[0].at_s) / TRACE_SPEED
        if at_s <= seconds:
            units = request.ids[: -(-request.input_tokens // UNIT_TOKENS)]
            tokens = [token for unit in units for token in _text(unit)]
            answer = max(1, request.output_tokens // TRACE_SHARE)
            fleet.later(at_s, partial(fleet.ask, next(workers), tokens, answer, streams=streams))


def _text(unit: int) -> list[int]:
    rng = random.Random(unit)
    return [rng.randrange(10, TOKENS) for _ in range(UNIT_TOKENS // UNIT_SHARE)]


class Chats:
    """Users as those of ``kvatlas.router.simulation.demo.load``, in tokens: each turn to the next worker."""

    def __init__(self, fleet: VirtualFleet, seed: int, seconds: float) -> None:
        self._fleet, self._seconds = fleet, seconds
        self._rng = random.Random(seed)
        self._workers = itertools.cycle(fleet.workers)
        self._systems = [self._words(*SYSTEM_WORDS) for _ in range(SYSTEMS)]
        for user in range(USERS):
            fleet.later(user * 0.02, self._begin)

    def _words(self, least: int, most: int) -> list[int]:
        count = int(TOKENS_PER_WORD * self._rng.randint(least, most))
        return [self._rng.randrange(10, TOKENS) for _ in range(count)]

    def _begin(self) -> None:
        weights = [1 / (rank + 1) for rank in range(SYSTEMS)]
        self._turn(self._rng.choices(self._systems, weights)[0], self._rng.randint(*TURNS))

    def _turn(self, before: list[int], left: int) -> None:
        if self._fleet.now >= self._seconds:
            return
        if not left:
            self._begin()
            return
        tokens, worker = before + self._words(*QUESTION_WORDS), next(self._workers)
        waits = asks = 2 if self._rng.random() < ASKED_TWICE else 1

        def done(request: SimRequest) -> None:
            nonlocal waits
            waits -= 1
            if not waits:
                after = partial(self._turn, tokens + request.output, left - 1)
                self._fleet.later(self._rng.uniform(*THINK_S), after)

        for _ in range(asks):
            self._fleet.ask(worker, tokens, self._rng.randint(*ANSWER_TOKENS), streams=True, done=done)


def run(workers: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    fleet = VirtualFleet(TRACE_ENGINE if args.trace else demo.ENGINE, workers, seed)
    if args.trace:
        trace = WorkloadSource(name=args.trace).draws([seed])[seed]
        replay(fleet, trace, streams=not args.plain, seconds=args.seconds)
    else:
        Chats(fleet, seed, args.seconds)
    fleet.run(args.seconds)
    computed = [0] * ENGINES
    for _, prompt, cached, engine in fleet.rows:
        computed[engine] += prompt - cached
    return {
        "workers": workers,
        "seed": seed,
        "requests": len(fleet.rows),
        "cached_percent": _cached_percent(fleet.rows, args.seconds),
        "cached_percent_at_start": _cached_percent(fleet.rows, START_S),
        "imbalance": round(max(computed) / statistics.mean(computed), 3),
    }


def _cached_percent(rows: list[tuple[float, int, int, int]], before_s: float) -> float:
    of = [(prompt, cached) for at_s, prompt, cached, _ in rows if at_s <= before_s]
    return round(100 * sum(cached for _, cached in of) / sum(prompt for prompt, _ in of), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,4")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--trace", help="a recorded workload instead of the demo's")
    parser.add_argument("--plain", action="store_true", help="answers of the trace are not streamed")
    args = parser.parse_args()
    for workers in map(int, args.workers.split(",")):
        found = [run(workers, seed, args) for seed in range(args.seeds)]
        for one in found:
            print(json.dumps(one), flush=True)
        means = {
            name: round(statistics.mean([one[name] for one in found]), 3)
            for name in ("cached_percent", "cached_percent_at_start", "imbalance")
        }
        print(json.dumps({"workers": workers, "mean of": args.seeds, **means}), flush=True)


if __name__ == "__main__":
    main()
