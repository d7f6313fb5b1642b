"""A simulated engine with host memory against two real ones with ``HybridOffloadConnector``.

The traffic of the end-to-end test goes through the router to two engines whose GPU pools are small and whose
host memory is not large either, so that blocks leave both. Simulated engines get the same requests, placed as
they were placed, and the barriers between them. Stated: nearly every request takes as many tokens from cache
as vLLM's own counters say, and over all of them the GPUs and the host memories give what they gave there. Not
to the token for every one: a store holds its blocks for as many steps as it takes on this machine, and they
come free, to be evicted, in an order that follows from it; simulated copies end in time. Scaled
(``scaled_replay``): one real token is sixteen simulated ones. The connector evicts by ``lru``, as the
simulated tier does.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.observe.prefix_ids import UNIT_TOKENS
from kvatlas.router.simulation.advise import see
from kvatlas.router.simulation.engine import SimEngine
from kvatlas.router.simulation.request_run import RequestRun
from kvatlas.router.simulation.requests import block_hashes
from kvatlas.router.simulation.setup import Timing
from kvatlas.router.simulation.tiers import TierSetup, TierSpec, tiers_of
from tests.vllm.chat_load import ChatLoad
from tests.vllm.chat_load import Request as ChatRequest
from tests.vllm.observed_fleet import running
from tests.vllm.scaled_replay import SCALE, Sent, scaled_groups, workload
from tests.vllm.test_offload_router import ENGINE_ARGS, NUM_GPU_BLOCKS, by_source, engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = 90
HOST_BYTES = 4 << 20
BLOCK_BYTES = 8192
"""A block of 16 tokens of the tiny model in float32."""
CHUNK_TOKENS = 256
OTHER_REQUESTS_MAX = 0.05
"""Share of requests that take another number of tokens from cache; 0 to 1 of 180 seen."""
OTHER_MEDIUM_MAX = 0.15
"""Share of the tokens from cache that come from the other medium; 0 to 0.06 seen."""


def send(client: openai.OpenAI, request: ChatRequest) -> Sent:
    """Streamed, with the tokens of its prompt and answer."""
    arguments = dict(request.arguments)
    body = dict(arguments.pop("extra_body", {}))
    salt = body.get("cache_salt", "")
    arguments |= {"stream": True, "stream_options": {"include_usage": True}}
    arguments["extra_body"] = body | {"return_token_ids": True}
    api = client.chat.completions if request.chat else client.completions
    sent = Sent(time.monotonic(), salt)
    raw = api.with_raw_response.create(**arguments)
    sent.engine = raw.headers["x-kvatlas-engine"]
    for part in raw.parse():
        _take(sent, part, chat=request.chat)
    return sent


def _take(sent: Sent, part: Any, *, chat: bool) -> None:
    if part.usage is not None:
        sent.cached_tokens = part.usage.prompt_tokens_details.cached_tokens
    for choice in part.choices:
        told = choice.model_extra or {}
        prompt = (part.model_extra or {}).get("prompt_token_ids") or told.get("prompt_token_ids")
        sent.prompt = prompt or sent.prompt
        sent.answer += told.get("token_ids") or []
        sent.text += (choice.delta.content if chat else choice.text) or ""


def empty(url: str) -> None:
    """Of its prefix cache, and of what a connector holds, by vLLM's own endpoint."""
    asked = urllib.request.Request(f"{url}/reset_prefix_cache?reset_external=true", method="POST")
    with urllib.request.urlopen(asked) as answer:
        assert json.load(answer) == {"success": True}


def simulated(sent: list[Sent], groups: tuple[GroupSpec, ...], engines: list[str]) -> list[Counter[str]]:
    """Tokens that every request takes, by medium, one request after the other; real tokens."""
    pools = {
        url: HybridBlockPool(
            groups,
            num_blocks=NUM_GPU_BLOCKS,
            scheme=HashScheme(algo="xxhash_cbor", hash_block_size=UNIT_TOKENS),
            retention_interval=0,
            chunk_tokens_max=SCALE * CHUNK_TOKENS,
            events=False,
        )
        for url in engines
    }
    host = TierSpec(blocks=HOST_BYTES // BLOCK_BYTES, bytes_per_s=1e9)
    behind = tiers_of(TierSetup(block_bytes=BLOCK_BYTES, host=host), list(pools.values()))
    fleet = {
        url: SimEngine(
            pool,
            Timing(chunk_tokens=SCALE * CHUNK_TOKENS),
            first_token=lambda run, now: None,
            ended=lambda run, now: None,
            refused=lambda run, now: None,
            tiers=outside,
        )
        for (url, pool), outside in zip(pools.items(), behind, strict=True)
    }
    taken = []
    for index, (one, request) in enumerate(zip(sent, workload(sent), strict=True)):
        at = fleet[one.engine]
        hashes = block_hashes(request, UNIT_TOKENS)
        pooled = at.pool.request([0] * request.input_tokens, hashes=hashes)
        run = RequestRun(index, pooled, request.input_tokens, request.output_tokens, request.at_s)
        at.arrive(run, request.at_s)
        while at.next_s < float("inf"):
            at.advance()
        tokens = {"GPU": run.hit - run.loaded, "CPU": run.loaded}
        taken.append(Counter({medium: count // SCALE for medium, count in tokens.items() if count}))
    return taken


def test_the_host_memory_gives_what_it_gives_in_vllm(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    extra = {"pinned_source_blocks_max": 0.5, "host_bytes": HOST_BYTES, "policy": "lru"}
    assert str(CHUNK_TOKENS) in ENGINE_ARGS
    engines = [
        engine(
            vllm_python, tiny_model, tmp_path / f"engine{at}.log", "HybridOffloadConnector", "offload", extra
        )
        for at in (0, 1)
    ]
    sent: list[Sent] = []
    told: list[Counter[str]] = []
    with (
        running(engines, tiny_model, log=tmp_path / "router.log", medium="CPU") as fleet,
        openai.OpenAI(base_url=f"{fleet.router.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        for url, tap in fleet.taps.items():
            empty(url)
            tap.barriers.clear()
        for request in ChatLoad(seed=7).requests(REQUESTS):
            before = {url: by_source(url) for url in fleet.taps}
            one = send(client, request)
            request.answered(one.text)
            sent.append(one)
            told.append(+(by_source(one.engine) - before[one.engine]))
            fleet.settle(one.engine)
            for barrier in fleet.taps[one.engine].barriers:
                sent.append(Sent(one.at_s, "", one.engine, prompt=barrier, answer=[0]))
                told.append(Counter())
            fleet.taps[one.engine].barriers.clear()
        groups = see(fleet.router.ops_url).groups
        urls = list(fleet.taps)
    assert groups is not None
    found = simulated(sent, scaled_groups(groups), urls)
    wrong = [
        f"request {at}: simulated {dict(mine)}, vLLM {dict(theirs)} of {len(sent[at].prompt)}"
        for at, (mine, theirs) in enumerate(zip(found, told, strict=True))
        if mine.total() != theirs.total()
    ]
    total, mine = sum(told, Counter[str]()), sum(found, Counter[str]())
    other = sum(max(total[medium] - mine[medium], 0) for medium in total) / total.total()
    print(f"vLLM {dict(total)}, simulated {dict(mine)}; other {wrong}")
    assert len(wrong) <= OTHER_REQUESTS_MAX * len(told), "\n".join(wrong)
    assert other <= OTHER_MEDIUM_MAX
    assert min(total["GPU"], total["CPU"]) > 1_000, f"too few hits to say anything: {total}"
