"""A simulated fleet against a real one: two vLLM engines, the traffic of the end-to-end test, two policies.

The simulator tells tokens apart in units of 512; these prompts are shorter, so everything is scaled:
one real token is sixteen simulated ones, in prompts, blocks, windows, chunks and rates alike, and one id is
one block of 32 real tokens. Only the last token of an answer is one, as it is sampled and never computed: of
sixteen all but one would be, into a block that no engine takes where the token before them fills the last.
Hits scale with it exactly.

Stated: placed as the router placed them, the simulated engines' hits are those that vLLM reported, to the
token, for every request; placed by the policies themselves at the fitted rates, the simulated fleet puts the
two policies in the order in which they came out by the clients' clocks.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from publisher.block_hash import HashScheme
from publisher.block_pool import HybridBlockPool
from publisher.groups import GroupSpec
from router.observe.prefix_ids import UNIT_TOKENS
from router.simulate.advise.command import ObservedFleet, see
from router.simulate.fit import fit_capture
from router.simulate.run.arms import ARMS
from router.simulate.run.engine import RequestRun, SimEngine
from router.simulate.run.fleet import FleetSetup, FleetSim
from router.simulate.timing import Timing
from router.simulate.workload.access_log import Captured
from router.simulate.workload.requests import Asked, Request, block_hashes
from tests.vllm.chat_load import ChatLoad
from tests.vllm.chat_load import Request as ChatRequest
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROUNDS = ((11, "kvatlas"), (11, "round-robin"), (12, "round-robin"), (12, "kvatlas"))
"""Seed of the traffic and policy, from empty caches; in an order that no drift of the machine favours."""
REQUESTS = 90
WARM_UP = 24
"""Requests of no round: an engine's first steps take far longer than all others."""
NUM_GPU_BLOCKS = 220
CHUNK_TOKENS = 16
"""So few that the time to a first token is told by the tokens computed, and not by the one step that even a
prompt of one token needs."""
BLOCK_TOKENS = 32
SCALE = UNIT_TOKENS // BLOCK_TOKENS
ENGINE_ARGS = (
    *("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"),
    *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
)
POLICIES = ("kvatlas", "round-robin")


@dataclass
class Sent:
    """One request through the router and what came of it, by the client's clock."""

    round_: int
    at_s: float
    salt: str
    engine: str = ""
    ttft_s: float = 0.0
    duration_s: float = 0.0
    cached_tokens: int = -1
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    text: str = ""


@dataclass
class Real:
    """All that was sent, in order, and the fleet it was sent to."""

    sent: list[Sent]
    seen: ObservedFleet
    engines: list[str]


def send(client: openai.OpenAI, request: ChatRequest, round_: int) -> Sent:
    """Streamed, so that the first token can be timed."""
    arguments = dict(request.arguments)
    body = dict(arguments.pop("extra_body", {}))
    salt = body.get("cache_salt", "")
    arguments |= {"stream": True, "stream_options": {"include_usage": True}}
    arguments["extra_body"] = body | {"return_token_ids": True}
    api = client.chat.completions if request.chat else client.completions
    sent = Sent(round_, time.monotonic(), salt)
    raw = api.with_raw_response.create(**arguments)
    sent.engine = raw.headers["x-kvatlas-engine"]
    for part in raw.parse():
        _take(sent, part, chat=request.chat)
    sent.duration_s = time.monotonic() - sent.at_s
    return sent


def _take(sent: Sent, part: Any, *, chat: bool) -> None:
    if part.usage is not None:
        sent.cached_tokens = part.usage.prompt_tokens_details.cached_tokens
    for choice in part.choices:
        told = choice.model_extra or {}
        prompt = (part.model_extra or {}).get("prompt_token_ids") or told.get("prompt_token_ids")
        sent.prompt = prompt or sent.prompt
        tokens = told.get("token_ids") or []
        if tokens and not sent.answer:
            sent.ttft_s = time.monotonic() - sent.at_s
        sent.answer += tokens
        sent.text += (choice.delta.content if chat else choice.text) or ""


@pytest.fixture(scope="module")
def real(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        engines = [
            VllmEngine(
                vllm_python,
                tiny_model,
                num_gpu_blocks=NUM_GPU_BLOCKS,
                log=logs / f"engine{index}.log",
                extra_args=ENGINE_ARGS,
            )
            for index in range(2)
        ]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_until_healthy()
        urls = [engine.base_url for engine in engines]
        sent: list[Sent] = []
        for round_, (seed, policy) in enumerate(ROUNDS):
            for url in urls:
                empty(url)
            log = logs / f"router{round_}.log"
            with RouterProcess(urls, tiny_model, log=log, policy=policy) as router:
                if not round_:
                    _drive(router, -1, seed=1, count=WARM_UP)
                    for url in urls:
                        empty(url)
                sent += _drive(router, round_, seed=seed, count=REQUESTS)
                seen = see(router.ops_url)
        yield Real(sent, seen, urls)


def _drive(router: RouterProcess, round_: int, *, seed: int, count: int) -> list[Sent]:
    """One request at a time: the same ones for every policy, but for the answers that turns go on from."""
    sent = []
    with openai.OpenAI(base_url=f"{router.base_url}/v1", api_key="none", max_retries=0) as client:
        for request in ChatLoad(seed=seed).requests(count):
            one = send(client, request, round_)
            request.answered(one.text)
            sent.append(one)
    return sent


def empty(url: str) -> None:
    """Of its prefix cache, and of what a connector holds, by vLLM's own endpoint."""
    asked = urllib.request.Request(f"{url}/reset_prefix_cache?reset_external=true", method="POST")
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert json.load(answer) == {"success": True}


def workload(sent: list[Sent]) -> list[Request]:
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


def scaled_groups(seen: ObservedFleet) -> tuple[GroupSpec, ...]:
    assert seen.groups is not None
    return tuple(
        msgspec.structs.replace(
            group,
            block_size=SCALE * group.block_size,
            sliding_window=None if group.sliding_window is None else SCALE * (group.sliding_window - 1) + 1,
        )
        for group in seen.groups
    )


def fitted(sent: list[Sent]) -> tuple[Timing, float]:
    """Rates of the real engines, scaled; and the seconds that a request takes besides its tokens: the way
    there and back, once for a request and not for every chunk, so to be added to the simulated times."""
    captured = [
        Captured(
            asked=Asked(at_s=one.at_s, input_tokens=len(one.prompt), output_tokens=len(one.answer), ids=()),
            model="tiny",
            engine=one.engine,
            output_reported=True,
            predicted_tokens=None,
            cached_tokens=one.cached_tokens,
            ttft_s=one.ttft_s,
            duration_s=one.duration_s,
            queue_s=0.0,
        )
        for one in sent
    ]
    timing = fit_capture(captured, Timing()).timing
    scaled = msgspec.structs.replace(
        timing,
        request_s=0.0,
        prefill_s_per_token=timing.prefill_s_per_token / SCALE,
        decode_s=timing.decode_s / SCALE,
        chunk_tokens=SCALE * CHUNK_TOKENS,
        seqs_max=8,
    )
    return scaled, timing.request_s


def replayed_hits(real: Real) -> list[int]:
    """Of every request on a simulated engine, placed as it was placed; real tokens."""
    groups = scaled_groups(real.seen)
    visits: list[RequestRun] = []
    engines: dict[str, SimEngine] = {}
    for url in real.engines:
        pool = HybridBlockPool(
            groups,
            num_blocks=NUM_GPU_BLOCKS,
            scheme=HashScheme(algo="xxhash_cbor", hash_block_size=UNIT_TOKENS),
            retention_interval=0,
            chunk_tokens_max=SCALE * CHUNK_TOKENS,
            events=False,
        )
        engines[url] = SimEngine(
            pool, Timing(chunk_tokens=SCALE * CHUNK_TOKENS), first_token=_heed, ended=_heed, refused=_heed
        )
    for index, (one, request) in enumerate(zip(real.sent, workload(real.sent), strict=True)):
        if index and one.round_ != real.sent[index - 1].round_:
            for emptied in engines.values():
                assert emptied.pool.reset()
        engine = engines[one.engine]
        hashes = block_hashes(request, UNIT_TOKENS)
        pooled = engine.pool.request([0] * request.input_tokens, hashes=hashes)
        visits.append(RequestRun(index, pooled, request.input_tokens, request.output_tokens, request.at_s))
        engine.arrive(visits[-1], request.at_s)
        while engine.next_s < float("inf"):  # one at a time, as they were sent
            engine.advance()
    return [visit.hit // SCALE for visit in visits]


def _heed(visit: RequestRun, now: float) -> None:
    """Nobody listens here."""


def test_the_adviser_sees_the_fleet(real: Real) -> None:
    assert (real.seen.engines, real.seen.blocks) == (2, NUM_GPU_BLOCKS)
    assert real.seen.groups is not None
    assert len(real.seen.groups) == 6


def test_every_hit_is_predicted_to_the_token(real: Real) -> None:
    told = [one.cached_tokens for one in real.sent]
    found = replayed_hits(real)
    wrong = [
        f"request {index}: simulated {mine}, vLLM {theirs} of {len(real.sent[index].prompt)}"
        for index, (mine, theirs) in enumerate(zip(found, told, strict=True))
        if mine != theirs
    ]
    assert not wrong, f"{len(wrong)} of {len(told)}:\n" + "\n".join(wrong[:20])
    assert sum(told) > 5_000, "too few hits to say anything"


def test_the_policies_come_out_in_the_order_of_the_clients_clocks(real: Real) -> None:
    timing, besides_s = fitted(real.sent)
    measured: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    simulated: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    hits = dict.fromkeys(POLICIES, (0, 0))
    for round_, (_, policy) in enumerate(ROUNDS):
        sent = [one for one in real.sent if one.round_ == round_]
        setup = FleetSetup(
            groups=scaled_groups(real.seen), num_blocks=NUM_GPU_BLOCKS, engines=2, timing=timing
        )
        rows = FleetSim(setup, ARMS[policy], mean_prompt_tokens=1.0).run(workload(sent)).rows
        measured[policy] += [one.ttft_s for one in sent]
        simulated[policy] += [besides_s + row.ttft_s for row in rows]
        theirs, ours = hits[policy]
        found = sum(row.hit for row in rows) // SCALE
        hits[policy] = theirs + sum(one.cached_tokens for one in sent), ours + found
    medians = [{policy: statistics.median(of[policy]) for policy in POLICIES} for of in (measured, simulated)]
    means = [{policy: statistics.fmean(of[policy]) for policy in POLICIES} for of in (measured, simulated)]
    print(f"measured, simulated: medians {medians}, means {means}; hit tokens (vLLM, simulated) {hits}")
    assert [min(POLICIES, key=of.__getitem__) for of in medians] == ["kvatlas", "kvatlas"]
