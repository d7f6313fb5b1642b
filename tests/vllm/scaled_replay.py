"""Requests that real engines served, one at a time, served again by simulated ones.

The simulator tells tokens apart in units of 512; these prompts are shorter, so everything is scaled: one real
token is sixteen simulated ones, in prompts, blocks, windows, chunks and rates alike, and one id is one block
of 32 real tokens. Only the last token of an answer is one, as it is sampled and never computed: of sixteen
all but one would be, into a block that no engine takes where the token before them fills the last. Hits scale
with it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.engine import SimEngine
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import Request, block_hashes
from kvatlas.router.simulation.setup import Timing

NUM_GPU_BLOCKS = 220
CHUNK_TOKENS = 16
"""So few that the time to a first token follows from the tokens computed, and not by the one step that even a
prompt of one token needs."""
BLOCK_TOKENS = 32
SCALE = UNIT_TOKENS // BLOCK_TOKENS


@dataclass
class Sent:
    """One request through the router and what came of it, by the client's clock."""

    at_s: float
    salt: str
    engine: str = ""
    cached_tokens: int = -1
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    text: str = ""


def workload(sent: Sequence[Sent]) -> list[Request]:
    """Scaled requests; equal blocks behind equal salts have equal ids."""
    ids: dict[object, int] = {}
    requests = []
    for one in sent:
        tokens = one.prompt + one.answer
        blocks = [tuple(tokens[at : at + BLOCK_TOKENS]) for at in range(0, len(tokens), BLOCK_TOKENS)]
        named: list[object] = [(one.salt, blocks[0]), *blocks[1:]]
        requests.append(
            Request(
                at_s=one.at_s - sent[0].at_s,
                input_tokens=SCALE * len(one.prompt),
                output_tokens=SCALE * (len(one.answer) - 1) + 1,
                ids=tuple(ids.setdefault(block, len(ids)) for block in named),
            )
        )
    return requests


def scaled_groups(groups: tuple[GroupSpec, ...]) -> tuple[GroupSpec, ...]:
    """Of the same layout, sixteen times as large."""
    return tuple(
        msgspec.structs.replace(
            group,
            block_size=SCALE * group.block_size,
            sliding_window=None if group.sliding_window is None else SCALE * (group.sliding_window - 1) + 1,
        )
        for group in groups
    )


def replayed_hits(sent: Sequence[Sent], groups: tuple[GroupSpec, ...]) -> list[int]:
    """Of every request on a simulated engine, placed as it was placed; in real tokens, as ``groups`` are."""
    runs: list[RequestRun] = []
    engines: dict[str, SimEngine] = {}
    for url in {one.engine for one in sent}:
        pool = HybridBlockPool(
            scaled_groups(groups),
            num_blocks=NUM_GPU_BLOCKS,
            scheme=HashScheme(algo="xxhash_cbor", hash_block_size=UNIT_TOKENS),
            retention_interval=0,
            chunk_tokens_max=SCALE * CHUNK_TOKENS,
            events=False,
        )
        engines[url] = SimEngine(
            pool, Timing(chunk_tokens=SCALE * CHUNK_TOKENS), first_token=_heed, ended=_heed, refused=_heed
        )
    for index, (one, request) in enumerate(zip(sent, workload(sent), strict=True)):
        engine = engines[one.engine]
        hashes = block_hashes(request, UNIT_TOKENS)
        pooled = engine.pool.request([0] * request.input_tokens, hashes=hashes)
        runs.append(RequestRun(index, pooled, request.input_tokens, request.output_tokens, request.at_s))
        engine.arrive(runs[-1], request.at_s)
        while engine.next_s < float("inf"):  # one at a time, as they were sent
            engine.advance()
    return [run.hit // SCALE for run in runs]


def _heed(run: RequestRun, now: float) -> None:
    """Events of a simulated engine that no test looks at."""
