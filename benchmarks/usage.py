"""Cost of the usage record on the event loop: CPU per request, on and off, and bytes on disk.

    python -m benchmarks.usage [--requests N]

In process: requests begin and end at a real ``RequestTracker``, with a prompt of 2,000 tokens. The difference
is the time on the event loop's thread (``thread_time``); hashing, encoding and writing are timed apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.router.observe import usage
from kvatlas.router.observe.requests import RequestTracker
from kvatlas.router.observe.usage import PlacementFacts, UsageLog, UsageSettings, usage_line
from kvatlas.router.openai.request import Usage

TOKENS = array("q", range(2000))
ROUNDS = 7
KEY = bytes(32)


def facts() -> PlacementFacts:
    """As a placement gives them."""
    return PlacementFacts(tokens=TOKENS, extras=NO_EXTRAS, mode="native", predicted_tokens=1024, queue_s=0.1)


def seconds(tracker: RequestTracker, count: int) -> float:
    """CPU seconds of this thread for the life of ``count`` requests."""
    begun = time.thread_time()
    for _ in range(count):
        record = tracker.begin("POST", "/v1/chat/completions")
        record.placement_facts = facts
        record.usage = Usage(2000, 100, 1024)
        tracker.end(record)
    return time.thread_time() - begun


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    count = parser.parse_args().requests
    usage.QUEUE_LEN_MAX, usage.QUEUE_TOKENS_MAX = count, 1 << 40
    off_us, on_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        settings = UsageSettings(path=str(Path(folder) / "usage.jsonl"))
        for _ in range(ROUNDS):
            off_us.append(1e6 * seconds(RequestTracker(time.monotonic), count) / count)
            tracker, log = RequestTracker(time.monotonic), UsageLog(settings)
            tracker.on_end = log.add
            on_us.append(1e6 * seconds(tracker, count) / count)
        begun = time.perf_counter()
        log.start()
        log.close()
        written_us = 1e6 * (time.perf_counter() - begun) / max(1, log.stats.written)
        record = tracker.begin("POST", "/v1/chat/completions")
        begun = time.thread_time()
        for _ in range(1000):
            usage_line(record, facts(), 0.0, 1.0, KEY)
        line_us = 1e3 * (time.thread_time() - begun)
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / max(1, log.stats.written)
    off, on = statistics.median(off_us), statistics.median(on_us)
    print(f"event loop, off: {off:.2f} us per request")
    print(f"event loop, on:  {on:.2f} us per request, {on - off:+.2f} us")
    print(f"writer's thread: {written_us:.1f} us per line, {line_us:.1f} us of it hashes; {size:.0f} bytes")


if __name__ == "__main__":
    main()
