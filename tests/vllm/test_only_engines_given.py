"""``kvatlas serve --engine URL --engine URL`` before two real vLLM engines, and nothing else."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import run, until
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import side_by_side, two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE_ARGS = ("--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "256")
STORY = "The quick router reads a long story about a small engine and its famous garden. "


def exchange(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_it_is_exact_from_the_second_request(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    engines = two_engines(vllm_python, tiny_model, tmp_path, num_gpu_blocks=400, extra_args=ENGINE_ARGS)
    urls = [engine.base_url for engine in engines]
    with side_by_side(engines), RouterProcess(urls, None, log=tmp_path / "router.log") as router:

        def read() -> dict[str, Any]:
            found: dict[str, Any] = exchange(f"{router.base_url}/ready")["prompts"]["tiny"]
            return found

        run(until(lambda: read()["how"] == "here", lambda: f"the tokenizer: {read()}"))
        assert read()["source"] == str(tiny_model)
        for turn in range(4):
            messages = [{"role": "user", "content": STORY * (4 + turn)}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
            exchange(f"{router.base_url}/v1/chat/completions", body)

            def known(body: dict[str, Any] = body) -> bool:
                told = router.explain(body)
                hit = max(sum(one["hit_tokens"].values()) for one in told["engines"])
                return bool(hit >= told["prompt"]["tokens"] - 64)

            run(until(known, "its blocks are known"))
        receipts = router.receipts()
        print([(one["outcome"], one["predicted_tokens"], one["read"]) for one in receipts])
        assert [one["outcome"] for one in receipts] == ["exact"] * 4
        # Either engine may be asked next, and each misses once.
        assert sum(one["predicted_tokens"] > 0 for one in receipts) >= 2
        assert {one["read"] for one in receipts} == {"local"}
