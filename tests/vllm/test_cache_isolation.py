"""Two tenants with the same prompt before a real vLLM engine share no hit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import openai
import pytest

from tests.support.waiting import wait_until
from tests.support.whole_router import tenants
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = "lime tovu gado mesi fuza baru kolu " * 24


def test_a_prompt_is_a_hit_for_its_own_tenant_alone(
    vllm_python: str, tiny_model: Path, tmp_path: Path
) -> None:
    rules, secret = tenants(tmp_path, {"ada": "", "eve": ""}).file, tmp_path / "secret"
    secret.write_text("a secret of 32 bytes or more than that")
    settings = (f"keys.file={rules}", f"keys.isolate_secret_file={secret}", "keys.isolate=tenant")
    options = [word for one in settings for word in ("--set", one)]
    engine = VllmEngine(vllm_python, tiny_model, num_gpu_blocks=400, log=tmp_path / "engine.log")
    with (
        engine,
        RouterProcess([engine.base_url], tiny_model, log=tmp_path / "router.log", options=options) as router,
    ):
        cached = []
        for number, tenant in enumerate(("ada", "eve", "ada", "eve")):
            client = openai.OpenAI(base_url=f"{router.base_url}/v1", api_key=f"key-of-{tenant}")
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
            usage = answer.usage
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)
            wait_until(partial(has_receipts, router, number + 1), "its receipt")
        receipts = router.receipts()
    assert [bool(tokens) for tokens in cached] == [False, False, True, True]
    assert [one["outcome"] for one in receipts] == ["exact"] * 4


def has_receipts(router: RouterProcess, count: int) -> bool:
    return len(router.receipts()) == count
