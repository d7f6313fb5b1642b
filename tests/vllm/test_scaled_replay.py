"""The scaled replay of ``test_tier_simulation`` against vLLM's scheduler: 3000 requests, no server.

What differs there once in a thousand requests shows here in every run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.groups import GroupSpec
from tests.vllm.forked import driven
from tests.vllm.scaled_replay import BLOCK_TOKENS, CHUNK_TOKENS, NUM_GPU_BLOCKS, Sent, replayed_hits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = 3000
SEED = 3
"""Of this one, answers scaled to whole units gave five wrong hits."""
WINDOW = {"kind": "sliding_window", "block_size": BLOCK_TOKENS, "sliding_window": 64}
FULL = {"kind": "full_attention", "block_size": BLOCK_TOKENS}
GROUPS: list[dict[str, Any]] = [WINDOW] * 5 + [FULL]
"""Of the tiny Gemma 3 that the servers run."""
PROMPT_TOKENS_MAX = 1500
CHATS_MAX = 14


def chats(rng: random.Random) -> Iterator[tuple[list[int], int]]:
    """Prompts and how much to answer: conversations that grow and branch behind three system prompts."""
    systems = [_tokens(rng, rng.randint(80, 260)) for _ in range(3)]
    known: list[list[list[int]]] = []
    while True:
        kind = rng.random()
        chat = rng.choice(known) if known and kind >= 0.25 else None
        if chat is None:
            known.append(chat := [rng.choice(systems)])
        elif kind >= 0.75 or len(chat) >= 14:
            known.append(chat := chat[: 1 + 2 * rng.randint(0, max(0, len(chat) // 2 - 1))])
        if len(known) > CHATS_MAX:
            known.pop(rng.randrange(len(known)))
        if sum(map(len, chat)) > PROMPT_TOKENS_MAX:
            del chat[3:]
        chat.append(_tokens(rng, rng.randint(8, 90)))
        answer = rng.randint(1, 24)
        yield [token for part in chat for token in part], answer
        chat.append(_tokens(rng, answer + 3))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(count)]


def test_every_hit_equals_the_schedulers(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    made = chats(random.Random(SEED))
    requests = [next(made) for _ in range(REQUESTS)]
    job = {"groups": GROUPS, "num_blocks": NUM_GPU_BLOCKS, "chunk_tokens": CHUNK_TOKENS, "requests": requests}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    lines = driven(vllm_python, "tests.vllm.drive_alone", "--model", str(tiny_model), str(path), timeout=800)
    served = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(served) == REQUESTS
    sent = [
        Sent(float(index), "", engine="one", cached_tokens=hit, prompt=prompt, answer=answer)
        for index, ((prompt, _), (hit, answer)) in enumerate(zip(requests, served, strict=True))
    ]
    found = replayed_hits(sent, tuple(GroupSpec(index, **group) for index, group in enumerate(GROUPS)))
    wrong = [
        f"request {index}: simulated {mine}, vLLM {one.cached_tokens} of {len(one.prompt)}"
        for index, (mine, one) in enumerate(zip(found, sent, strict=True))
        if mine != one.cached_tokens
    ]
    assert not wrong, f"{len(wrong)} of {REQUESTS}:\n" + "\n".join(wrong[:20])
    assert sum(found) > 100 * REQUESTS, "hits too few to say anything"
