"""Cost of time receipts, the cache funnel and service levels per request, in microseconds of CPU.

    python -m benchmarks.seconds

Each part is timed alone, on a decision of a whole router in process (``benchmarks.decision``): the least of
many rounds, since others are busy too. *Always* is what every streamed request takes, *service level* what
one with a target takes besides; where the engine of the lowest cost misses it, all engines are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import msgspec

from benchmarks.decision import Bench
from kvatlas.router.admission.claims import read_claim
from kvatlas.router.observe.cache_funnel import CacheFunnel
from kvatlas.router.observe.receipts import Receipt
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.placement.first_token import FirstTokenErrors
from kvatlas.router.placement.placement import Decision
from kvatlas.router.placement.service_level import within_service_level
from kvatlas.router.prompts.prompt import Prompt

_RUNS = 500


def cpu_us(work: Callable[[], object], rounds: int) -> float:
    """CPU of one run, without the loop's own."""

    def timed(one: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(rounds):
            start = time.thread_time_ns()
            for _ in range(_RUNS):
                one()
            best = min(best, (time.thread_time_ns() - start) / _RUNS)
        return best / 1000

    return timed(work) - timed(lambda: None)


async def parts(engines: int, rounds: int) -> tuple[dict[str, float], ...]:
    """Cost of each part, by name: of every request, of one with a service level, and of one that is late."""
    bench = Bench(engines)
    await bench.warm()
    router = bench.router
    decision: Decision = await router.planner.explain(bench.request())
    await bench.place()
    receipt = router.accounts.receipts.latest[-1]
    assert receipt.actual_tokens is not None
    assert receipt.predicted_ttft_s is not None
    read = decision.read
    assert isinstance(read, Prompt)
    scheme = decision.engine.scheme
    hashes, unit = read.hashes(scheme), scheme.hash_block_size
    held = decision.candidate.hit.whole_tokens
    hot, errors, funnel = router.accounts.hot, FirstTokenErrors(), CacheFunnel()
    predicted_s, settings = receipt.predicted_ttft_s, PolicySettings(service_levels=True)
    fields = msgspec.structs.asdict(receipt)
    added = (
        "predicted_ttft_s",
        "queue_s",
        "pages_s",
        "load_s",
        "prefill_s",
        "engine_s",
        "router_s",
        "tenant",
        "held_tokens",
        "missed",
        "elsewhere_s",
        "seen_tokens",
        "salted",
        "slo_ttft_s",
    )
    before = {name: value for name, value in fields.items() if name not in added}
    larger = cpu_us(lambda: Receipt(**fields), rounds) - cpu_us(lambda: Receipt(**before), rounds)
    always = {
        "prediction by parts": cpu_us(decision.first_token, rounds),
        "most held by any engine": cpu_us(decision.most_held, rounds),
        "longest prefix seen": cpu_us(lambda: hot.longest(hashes, unit, held), rounds),
        "larger receipt": larger,
        "error": cpu_us(lambda: errors.add("m", predicted_s, predicted_s + 0.01), rounds),
        "funnel": cpu_us(lambda: funnel.add(receipt), rounds),
    }
    headers = [(b"host", b"router"), (b"content-type", b"application/json"), (b"x-slo-ttft-ms", b"500")]

    def level(left_s: float) -> object:
        stats = router.accounts.slo_stats
        return within_service_level(decision.engines, decision.candidates, decision.choice, left_s, stats)

    besides = {
        "target read": cpu_us(
            lambda: read_claim(headers, in_body=None, arrived_s=0.0, targets=settings.targets), rounds
        ),
        "chosen engine makes it": cpu_us(lambda: level(60.0), rounds),
    }
    rare = {"no engine makes it": cpu_us(lambda: level(-60.0), rounds)}
    router.proxy.close()
    router.reader.close()
    return always, besides, rare


async def main(rounds: int) -> None:
    """Print the table."""
    for engines in (2, 8, 64):
        always, besides, rare = await parts(engines, rounds)
        cells = ", ".join(f"{name} {us:.2f}" for name, us in (always | besides | rare).items())
        total, level = sum(always.values()), sum(besides.values())
        print(f"{engines} engines: always {total:.2f} us, service level {level:.2f} us ({cells})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    asyncio.run(main(parser.parse_args().rounds))
