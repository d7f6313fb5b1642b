"""Runs requests one at a time through vLLM's scheduler. Runs under vLLM's interpreter.

Usage: ``-m tests.vllm.drive_alone --model DIR JOB``. JOB is one JSON object: ``groups``, ``num_blocks``,
``chunk_tokens``, and ``requests``, each (prompt token ids, tokens to generate). One JSON line per request:
the hit that the cache manager found for it, and its answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.vllm.real_scheduler import Prompt, RealEngine, Setup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("job", type=Path)
    options = parser.parse_args()
    job = json.loads(options.job.read_text())
    setup = Setup(
        groups=tuple(job["groups"]),
        num_blocks=job["num_blocks"],
        max_num_batched_tokens=job["chunk_tokens"],
    )
    engine = RealEngine(setup, options.model)
    engine.scheduler.cache_config.block_size = min(group["block_size"] for group in job["groups"])
    for token_ids, max_tokens in job["requests"]:
        prompt = Prompt(token_ids)
        hit = engine.hit(prompt)
        request = engine.add(prompt, max_tokens)
        while engine.busy:
            engine.step()
        print(json.dumps([hit, list(request.output_token_ids)]))


if __name__ == "__main__":
    main()
