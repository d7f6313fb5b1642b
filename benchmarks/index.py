"""The index alone: decision latency, ingest rate, memory per block.

    python benchmarks/index.py [--json]

Decision: hits of one prompt on every engine (look-up and hit rules, hashes given), 1000 and 4000 blocks, 8
and 64 engines, full attention + sliding window, each engine holding a prefix of its own length beside half
a million other blocks. Ingest: decode and apply of map-encoded batches, 64 blocks per event and 1 block
per event (16 events per batch), in blocks per CPU second of one core. Memory: resident set per (engine,
group, block) after a million blocks. Medians of several rounds; quote ratios on a shared machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme, block_hashes
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash, BlockStored, Event, encode_batch, encode_tokens
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.model import FleetResidency

BLOCK, WINDOW = 16, 128
OTHER_BLOCKS = 500_000
SCHEME = HashScheme(hash_block_size=BLOCK)


class FixedPrompt:
    """A prompt whose hashes are known."""

    def __init__(self, token_ids: list[int]) -> None:
        self.num_tokens = len(token_ids)
        self.token_ids, self.extras = token_ids, NO_EXTRAS
        self._hashes = block_hashes(token_ids, SCHEME)

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        return self._hashes


def stored(tokens: list[int], hashes: list[BlockHash], group: int, window: int | None = None) -> Event:
    """A stored event of one group."""
    kind = "sliding_window" if window else "full_attention"
    listed: list[Any] = list(hashes)
    return BlockStored(
        listed, None, encode_tokens(tokens), BLOCK, None, "GPU", None, None, group, kind, window
    )


def decision(blocks: int, engines: int, rng: random.Random) -> float:
    """Median seconds of one ``predict``."""
    fleet = FleetResidency(ModelFacts())
    tokens = [rng.randrange(50_000) for _ in range(blocks * BLOCK + 5)]
    prompt = FixedPrompt(tokens)
    names = [f"engine-{number}" for number in range(engines)]
    kept = -(-(WINDOW - 1) // BLOCK)
    for name in names:
        length = rng.randrange(blocks // 4, blocks)
        hashes = prompt.hashes(SCHEME)[:length]
        events = [stored(tokens[: length * BLOCK], hashes, 0), stored(tokens, hashes[-kept:], 1, WINDOW)]
        fleet.apply(name, decode_batch(encode_batch(0.0, events)))
        others = [BlockHash(rng.getrandbits(64)) for _ in range(OTHER_BLOCKS // engines)]
        fleet.index.store(name, Plane("GPU", 0), others)
    rounds = []
    for _ in range(201):
        began = time.perf_counter()
        fleet.predict(prompt, names)
        rounds.append(time.perf_counter() - began)
    return statistics.median(rounds)


def payloads(per_event: int, total: int, events_per_batch: int, rng: random.Random) -> list[bytes]:
    """Batches of stored events, chained by parent."""
    parent: Any = None
    batches = []
    for _ in range(total // (per_event * events_per_batch)):
        events: list[Event] = []
        for _ in range(events_per_batch):
            hashes: list[Any] = [rng.getrandbits(64) for _ in range(per_event)]
            raw = encode_tokens([rng.randrange(50_000) for _ in range(per_event * BLOCK)])
            events.append(
                BlockStored(hashes, parent, raw, BLOCK, None, "GPU", None, None, 0, "full_attention")
            )
            parent = hashes[-1]
        batches.append(encode_batch(0.0, events))
    return batches


def ingest(per_event: int, total: int, rng: random.Random) -> tuple[float, float]:
    """Blocks per CPU second of decode and apply, the engine's hash scheme known; and which share of that time
    is decoding, which workers of one machine could leave to one of them."""
    batches = payloads(per_event, total, 16 if per_event == 1 else 4, rng)
    fleet = FleetResidency(ModelFacts())
    tokens = list(range(BLOCK))
    fleet.apply("e", decode_batch(encode_batch(0.0, [stored(tokens, block_hashes(tokens, SCHEME), 0)])))
    began_s = time.process_time()
    for payload in batches:
        decode_batch(payload)
    decoded_s = time.process_time()
    for payload in batches:
        fleet.apply("e", decode_batch(payload))
    whole_s = time.process_time() - decoded_s
    return total / whole_s, (decoded_s - began_s) / whole_s


def memory(engines: int) -> float:
    """Bytes of resident set per (engine, group, block), a million blocks in all, in a fresh process."""
    code = f"from benchmarks.index import memory_here; print(memory_here({engines}))"
    root = Path(__file__).resolve().parent.parent
    return float(subprocess.check_output([sys.executable, "-c", code], cwd=root))


def memory_here(engines: int) -> float:
    """``memory`` in this process: every engine holds the same blocks, as shared prompts do."""
    fleet = FleetResidency(ModelFacts())
    count = 1_000_000 // engines
    before = resident_bytes()
    seeds = [random.Random(5) for _ in range(engines)]
    for number, rng in enumerate(seeds):
        for _ in range(count // 1000):
            hashes = [BlockHash(rng.getrandbits(64)) for _ in range(1000)]
            fleet.index.store(f"engine-{number}", Plane("GPU", 0), hashes)
    return (resident_bytes() - before) / (count // 1000 * 1000 * engines)


def resident_bytes() -> int:
    """Resident set of this process."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(3)
    figures: dict[str, float] = {}
    for blocks in (1000, 4000):
        for engines in (8, 64):
            figures[f"decision_{blocks}_blocks_{engines}_engines_us"] = round(
                decision(blocks, engines, rng) * 1e6, 1
            )
    for per_event, total in ((64, 1 << 20), (1, 1 << 18)):
        rates, shares = zip(*[ingest(per_event, total, rng) for _ in range(3)], strict=True)
        figures[f"ingest_{per_event}_blocks_per_event_m_per_cpu_s"] = round(statistics.median(rates) / 1e6, 2)
        figures[f"ingest_{per_event}_blocks_per_event_decoding_share"] = round(statistics.median(shares), 2)
    for engines in (1, 4):
        figures[f"memory_{engines}_engines_bytes_per_block"] = round(memory(engines), 1)
    if args.json:
        print(msgspec.json.encode(figures).decode())
    else:
        for name, value in figures.items():
            print(f"{name:<48} {value:>10}")


if __name__ == "__main__":
    main()
