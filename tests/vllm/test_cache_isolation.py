"""Two tenants with the same prompt before a real vLLM engine share no hit."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES
from tests.support.waiting import wait_until
from tests.support.whole_router import tenants
from tests.vllm.observed_fleet import BLOCK_TOKENS, running
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


ENGINE_ARGS = ("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048")


def text(word: str) -> str:
    """A prompt that shares nothing with that of another word."""
    return f"{word} tovu gado mesi fuza baru kolu " * 24


BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": text("lime"), "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": text("gado")}], "max_tokens": 1},
    MESSAGES: {"messages": [{"role": "user", "content": text("mesi")}], "max_tokens": 1},
    RESPONSES: {"input": text("fuza"), "max_output_tokens": 1},
}


def test_a_prompt_is_a_hit_for_its_own_tenant_alone(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    rules, secret = tenants(tmp_path, {"ada": "", "eve": ""}).file, tmp_path / "secret"
    secret.write_text("a secret of 32 bytes or more than that")
    settings = (f"keys.file={rules}", f"keys.isolate_secret_file={secret}", "keys.isolate=tenant")
    options = [word for one in settings for word in ("--set", one)]
    engine = VllmEngine(
        vllm_python, tiny_model, num_gpu_blocks=400, log=tmp_path / "engine.log", extra_args=ENGINE_ARGS
    )
    with running([engine], tiny_model, log=tmp_path / "router.log", options=options) as fleet:
        router = fleet.router
        for number, (path, tenant) in enumerate(product(BODIES, ("ada", "eve", "ada", "eve"))):
            ask(router, path, tenant)
            wait_until(partial(has_receipts, router, number + 1), "its receipt")
            fleet.settle(engine.base_url)
        receipts = router.receipts()
    hits = [bool(one["actual_tokens"]) for one in receipts]
    assert hits == [False, False, True, True] * len(BODIES)
    assert {one["outcome"] for one in receipts} == {"exact"}


def ask(router: RouterProcess, path: str, tenant: str) -> None:
    """Send the prompt of this API. Raises ``HTTPError``."""
    body = json.dumps({"model": "tiny", **BODIES[path]}).encode()
    headers = {"x-api-key": f"key-of-{tenant}", "content-type": "application/json"}
    with urlopen(Request(router.base_url + path, body, headers)) as answer:
        assert json.load(answer)["usage"]


def has_receipts(router: RouterProcess, count: int) -> bool:
    return len(router.receipts()) == count
