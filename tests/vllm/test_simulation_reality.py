"""A simulated fleet against a real one: two vLLM engines, the traffic of the end-to-end test, two policies;
everything is scaled (``scaled_replay``).

Stated: placed as the router placed them, the simulated engines' hits are those that vLLM reported, to the
token, for every request; placed by the policies themselves at the fitted rates, the simulated fleet puts the
two policies in the order in which they came out by what vLLM found cached. First-token times by the clients'
clocks are printed beside the simulated ones: on a shared machine they say too little to be asserted.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kvatlas.router.simulation.advise import ObservedFleet, see
from kvatlas.router.simulation.fit import fit_capture
from kvatlas.router.simulation.fleet import FleetSim
from kvatlas.router.simulation.requests import Asked
from kvatlas.router.simulation.setup import FleetSetup, Timing
from kvatlas.router.simulation.usage_record import Captured
from kvatlas.router.simulation.variants import VARIANTS
from tests.vllm.chat_load import ChatLoad
from tests.vllm.chat_load import Request as ChatRequest
from tests.vllm.router_process import RouterProcess
from tests.vllm.scaled_replay import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    NUM_GPU_BLOCKS,
    SCALE,
    Sent,
    replayed_hits,
    scaled_groups,
    workload,
)
from tests.vllm.vllm_engine import two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ROUNDS = ((11, "kvatlas"), (11, "round-robin"), (12, "round-robin"), (12, "kvatlas"))
"""Seed of the traffic and policy, from empty caches; in an order that no drift of the machine favours."""
REQUESTS = 60
WARM_UP = 24
"""Requests of no round: an engine's first steps take far longer than all others."""
ENGINE_ARGS = (
    "--block-size",
    str(BLOCK_TOKENS),
    "--max-model-len",
    "2048",
    "--max-num-batched-tokens",
    str(CHUNK_TOKENS),
)
POLICIES = ("kvatlas", "round-robin")


@dataclass
class Real:
    """All that was sent, in order, and the fleet it was sent to."""

    sent: list[Sent]
    seen: ObservedFleet


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
        options = {"num_gpu_blocks": NUM_GPU_BLOCKS, "extra_args": ENGINE_ARGS}
        engines = two_engines(vllm_python, tiny_model, logs, **options)
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
        yield Real(sent, seen)


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
    with urllib.request.urlopen(asked) as answer:
        assert json.load(answer) == {"success": True}


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


def test_the_adviser_sees_the_fleet(real: Real) -> None:
    assert (real.seen.engines, real.seen.blocks) == (2, NUM_GPU_BLOCKS)
    assert real.seen.groups is not None
    assert len(real.seen.groups) == 6


def test_every_hit_is_predicted_to_the_token(real: Real) -> None:
    told = [one.cached_tokens for one in real.sent]
    assert real.seen.groups is not None
    found = replayed_hits(real.sent, real.seen.groups)
    wrong = [
        f"request {index}: simulated {mine}, vLLM {theirs} of {len(real.sent[index].prompt)}"
        for index, (mine, theirs) in enumerate(zip(found, told, strict=True))
        if mine != theirs
    ]
    assert not wrong, f"{len(wrong)} of {len(told)}:\n" + "\n".join(wrong[:20])
    assert sum(told) > 5_000, "too few hits to say anything"


def test_the_policies_come_out_in_the_order_of_what_was_cached(real: Real) -> None:
    timing, besides_s = fitted(real.sent)
    assert real.seen.groups is not None
    measured: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    simulated: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    hits = dict.fromkeys(POLICIES, (0, 0))
    for round_, (_, policy) in enumerate(ROUNDS):
        sent = [one for one in real.sent if one.round_ == round_]
        setup = FleetSetup(
            groups=scaled_groups(real.seen.groups), num_blocks=NUM_GPU_BLOCKS, engines=2, timing=timing
        )
        rows = FleetSim(setup, VARIANTS[policy]).run(workload(sent)).rows
        measured[policy] += [one.ttft_s for one in sent]
        simulated[policy] += [besides_s + row.ttft_s for row in rows]
        real_hits, simulated_hits = hits[policy]
        found = sum(row.hit for row in rows) // SCALE
        hits[policy] = real_hits + sum(one.cached_tokens for one in sent), simulated_hits + found
    medians = [{policy: statistics.median(of[policy]) for policy in POLICIES} for of in (measured, simulated)]
    means = [{policy: statistics.fmean(of[policy]) for policy in POLICIES} for of in (measured, simulated)]
    print(f"measured, simulated: medians {medians}, means {means}; hit tokens (vLLM, simulated) {hits}")
    theirs, ours = zip(*(hits[policy] for policy in POLICIES), strict=True)
    assert (theirs[0] > theirs[1], ours[0] > ours[1]) == (True, True)
