"""The whole router before two real vLLM engines that exchange KV by NIXL over TCP.

Prompts begin with a prefix that the prefill engine was made to hold, so that the pair is the cheaper choice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.support.ports import free_ports
from tests.vllm.observed_fleet import BLOCK_TOKENS, Fleet, running
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

NUM_GPU_BLOCKS = 400
PREFIX_TOKENS = 16 * BLOCK_TOKENS
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
FREE_CHOICE = (
    *("--set", "pd.min_remote_tokens=64", "--set", "pd.leg_overhead_s=0"),
    *("--set", "pd.transfer_s_per_token=0"),
)


class Apart(NamedTuple):
    fleet: Fleet
    prefill: VllmEngine
    decode: VllmEngine

    def client(self, base_url: str | None = None) -> openai.OpenAI:
        """Of the router, or of an engine."""
        url = base_url or self.fleet.router.base_url
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def settle(self) -> None:
        for engine in (self.prefill, self.decode):
            self.fleet.settle(engine.base_url)

    def warmed(self, number: int, tail: int) -> list[int]:
        """A prompt whose beginning the prefill engine holds, and nobody holds the rest of."""
        rng = random.Random(number)
        prefix = [rng.randrange(10, 1000) for _ in range(PREFIX_TOKENS)]
        with self.client(self.prefill.base_url) as client:
            client.completions.create(model="tiny", prompt=[*prefix, 5], max_tokens=1)
        self.settle()
        return prefix + [rng.randrange(10, 1000) for _ in range(tail)]

    def legs(self) -> list[dict[str, Any]]:
        """The last two receipts."""
        return self.fleet.router.receipts()[-2:]


def _engine(python: str, model: Path, log: Path, role: str) -> VllmEngine:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cpu",
    }
    return VllmEngine(
        python,
        model,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        log=log,
        extra_args=(
            *("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"),
            *("--max-num-batched-tokens", "512", "--kv-transfer-config", json.dumps(transfer)),
        ),
        environment={
            "UCX_TLS": "tcp,self,sysv,posix,cma",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
        },
    )


@pytest.fixture(scope="module")
def apart(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    logs = tmp_path_factory.mktemp("logs")
    engines = [
        _engine(vllm_python, tiny_model, logs / f"{role}.log", role) for role in ("producer", "consumer")
    ]
    roles = ("prefill", "decode")
    with running(engines, tiny_model, log=logs / "router.log", roles=roles, options=FREE_CHOICE) as fleet:
        yield Apart(fleet, *engines)


def _alone(apart: Apart, prompt: list[int]) -> Any:
    """What one engine says that computes everything: another salt, so nothing is cached."""
    with apart.client(apart.prefill.base_url) as client:
        salted = {"cache_salt": "alone"}
        return client.completions.create(model="tiny", prompt=prompt, extra_body=salted, **ASKED)


@pytest.mark.parametrize(("number", "tail"), [(1, 1), (2, 70), (3, 300)])
def test_the_answer_is_bit_for_bit_that_of_one_engine_and_both_receipts_are_right(
    apart: Apart, number: int, tail: int
) -> None:
    prompt = apart.warmed(number, tail)
    with apart.client() as client:
        raw = client.completions.with_raw_response.create(model="tiny", prompt=prompt, **ASKED)
    answer = raw.parse()
    assert raw.headers["x-kvatlas-engine"] == apart.decode.base_url
    assert raw.headers["x-kvatlas-prefill-engine"] == apart.prefill.base_url
    apart.settle()
    first, second = apart.legs()
    assert (first["leg"], first["outcome"]) == ("prefill", "exact"), first
    assert first["actual_tokens"] == PREFIX_TOKENS
    assert (second["leg"], second["outcome"]) == ("decode", "unpredicted")
    assert second["actual_tokens"] == PREFIX_TOKENS, "vLLM tells the prefill engine's hit"
    assert second["gap_s"] < 20
    alone = _alone(apart, prompt)
    assert answer.choices[0].text == alone.choices[0].text
    assert answer.choices[0].logprobs == alone.choices[0].logprobs


def test_a_streamed_chat(apart: Apart) -> None:
    words = "gado lime tovu " * 100
    messages: Any = [{"role": "user", "content": words}]
    with apart.client(apart.prefill.base_url) as client:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    apart.settle()
    messages[0]["content"] += "and then " * 20
    with apart.client() as client:
        parts = list(
            client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 8
    assert [one["leg"] for one in apart.legs()] == ["prefill", "decode"]


def test_what_a_transfer_leaves_at_the_decode_engine_is_predicted_exactly(apart: Apart) -> None:
    """The same prompt again, at the decode engine alone."""
    prompt = apart.warmed(7, 300)
    with apart.client() as client:
        client.completions.create(model="tiny", prompt=prompt, **ASKED)
        apart.settle()
        several = {"n": 2, "temperature": 0.5}
        client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body=several)
    receipt = apart.fleet.router.receipts()[-1]
    assert (receipt["engine_id"], receipt["leg"]) == (apart.decode.base_url, "")
    assert receipt["outcome"] in {"exact", "unreported"}, receipt


def test_parameters_that_would_end_the_decode_engine_reach_nobody(apart: Apart) -> None:
    with apart.client() as client:
        body = {"kv_transfer_params": {"do_remote_prefill": True}}
        client.completions.create(model="tiny", prompt=[5] * 40, max_tokens=1, extra_body=body)
        client.completions.create(model="tiny", prompt=[6] * 40, max_tokens=1)


def test_a_prefill_engine_that_dies_costs_no_answer(apart: Apart) -> None:
    """And when it is back, it is asked again: as another one, with another name at the side channel."""
    prompt = apart.warmed(9, 100)
    alone = _alone(apart, prompt)
    apart.prefill.kill()
    try:
        with apart.client() as client:
            answer = client.completions.create(model="tiny", prompt=prompt, **ASKED)
    finally:
        apart.prefill.start()
        apart.prefill.wait_until_healthy()
    assert answer.choices[0].text == alone.choices[0].text
    assert answer.choices[0].logprobs == alone.choices[0].logprobs
    apart.fleet.taps[apart.prefill.base_url].connect()
    apart.fleet.router.wait_until_up(apart.prefill.base_url)
    prompt = apart.warmed(10, 100)
    with apart.client() as client:
        client.completions.create(model="tiny", prompt=prompt, **ASKED)
    assert [one["leg"] for one in apart.legs()] == ["prefill", "decode"]
