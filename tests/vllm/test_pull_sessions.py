"""Requests of the router against vLLM's own P2P sessions: a wrong source or an evicted block is a miss."""

from __future__ import annotations

import json

import pytest

from kvatlas.router.openai.members import at_once
from kvatlas.router.pd.bodies import split_body
from kvatlas.router.pd.transfer import KvSource
from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", [1, 2])
def test_every_block_that_comes_has_the_content_of_its_hash(vllm_python: str, seed: int) -> None:
    body = at_once(split_body("/v1/completions", b'{"model": "m", "prompt": "p"}'))
    asked = json.loads(at_once(KvSource(body, "10.0.0.1", 5710).asked_with("x-1")))
    words = (
        "tests.vllm.drive_pull",
        "--params",
        json.dumps(asked["kv_transfer_params"]),
        "--seed",
        str(seed),
    )
    *_, line = driven(vllm_python, *words, timeout=300, VLLM_LOGGING_LEVEL="CRITICAL")
    told = json.loads(line)
    assert (told["peer"], told["probes"], told["serves"]) == ("10.0.0.1:5710", True, False)
    assert 0 < told["held"] < told["asked"]
    assert told["differences"] == []
    assert told["refused"] == {"seed": True, "config": True}, "other hashes or models are never exchanged"
