"""Sleep at each level, the host memory of a connector that sleep resets, and models that cache nothing: what
vLLM's engine core does and publishes, and what the index and the router make of it."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import AllBlocksCleared
from kvatlas.router.fleet.engine_metrics import read_statement
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_file import TraceHeader, header_facts
from kvatlas.router.tools.trace_verification import ProbePrompt
from tests.vllm.forked import driven

pytestmark = pytest.mark.vllm

PROMPT = list(range(10, 210))


@pytest.fixture(scope="module", params=["0.32", "0.33"])
def found(request: pytest.FixtureRequest, vllm_python: str, tiny_model: Path) -> list[dict[str, Any]]:
    python = vllm_python if request.param == "0.32" else os.environ.get("KVATLAS_VLLM_033_PYTHON", "")
    if not python:
        pytest.skip("KVATLAS_VLLM_033_PYTHON names no interpreter with vLLM 0.33; make test-vllm sets it")
    words = ("tests.vllm.drive_sleep", "--model", str(tiny_model))
    lines = driven(python, *words, timeout=600, VLLM_TARGET_DEVICE="cpu")
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_empties_the_cache_from_level_1_and_says_so_with_the_next_step(
    found: list[dict[str, Any]], level: int
) -> None:
    case = found[level]
    fleet = FleetResidency(header_facts(msgspec.convert(case["header"], TraceHeader), {}))

    def predicted() -> int:
        return fleet.predict(ProbePrompt(PROMPT, NO_EXTRAS), ["e"])["e"].hit_tokens

    def told(payloads: list[str]) -> list[type]:
        batches = [decode_batch(base64.b64decode(payload)) for payload in payloads]
        for batch in batches:
            fleet.apply("e", batch)
        fleet.engine("e").finish_detection()
        return [type(event) for batch in batches for event in batch.events]

    awake, asleep, after = case["hits"]
    assert told(case["batches"][0])
    assert predicted() == awake > 0
    assert asleep == (awake if level == 0 else 0)
    assert case["batches"][1] == []
    if level:
        assert predicted() > asleep, "only the metrics show it"
        fleet.engine("e").clear(connector=True)
        assert predicted() == asleep
    kinds = told(case["batches"][2])
    assert (kinds[0] is AllBlocksCleared) is (level > 0)
    assert predicted() == after == asleep


def test_host_memory_that_was_reset_publishes_nothing_and_stores_its_blocks_again(
    found: list[dict[str, Any]],
) -> None:
    assert found[3] == {"host_memory": [["stored"], [], ["stored"], []]}


def test_an_encoder_decoder_model_says_that_it_caches_nothing(found: list[dict[str, Any]]) -> None:
    off = found[4]["enable_prefix_caching"]
    page = b'vllm:cache_config_info{enable_prefix_caching="%s"} 1.0\n' % off.encode()
    statement = read_statement(page, None)
    assert statement is not None
    assert statement.caches_prefixes is False
