"""``policy.engine_priority`` on real engines: requests of every API go in the router's order where an engine
schedules by priority, and by arrival, without an error, where it does not."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LONG_TOKENS = 1500
ARGS = ("--block-size", "32", "--max-model-len", "8192", "--max-num-seqs", "1")
WEIGHT = 200.0
"""Puts the long prompt behind whatever comes within three seconds at 100,000 tokens a second, and longer
at any rate of a CPU: its place does not depend on the pace of the machine."""


@pytest.fixture(params=["priority", "fcfs"])
def router(
    request: pytest.FixtureRequest, vllm_python: str, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, RouterProcess, VllmEngine]]:
    engine = VllmEngine(
        vllm_python,
        tiny_model,
        num_gpu_blocks=700,
        log=tmp_path / "engine.log",
        extra_args=(*ARGS, "--scheduling-policy", request.param),
    )
    options = ("--set", f"policy.engine_priority={WEIGHT}")
    with (
        engine,
        RouterProcess([engine.base_url], tiny_model, log=tmp_path / "router.log", options=options) as front,
    ):
        yield request.param, front, engine


def waiting(engine: VllmEngine) -> int:
    """Requests in the engine's waiting queue."""
    with urllib.request.urlopen(f"{engine.base_url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return round(
        sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting{"))
    )


def until_waiting(engine: VllmEngine, count: int, threads: list[threading.Thread]) -> None:
    pause = threading.Event()
    for _ in range(600):
        if waiting(engine) == count:
            return
        assert all(thread.is_alive() for thread in threads), "the request ahead of them ended too early"
        pause.wait(0.05)
    raise AssertionError(f"not {count} requests wait in the engine")


def test_short_prompts_of_every_api_pass_a_long_one_exactly_where_the_engine_goes_by_priority(
    router: tuple[str, RouterProcess, VllmEngine], anthropic: Any
) -> None:
    scheduling, front, engine = router
    rng = random.Random(1)
    url = front.base_url
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
    said = [{"role": "user", "content": "hi"}]
    long = [rng.randrange(10, 1000) for _ in range(LONG_TOKENS)]
    asks: dict[str, Callable[[], Any]] = {
        "long": lambda: api.completions.create(  # each answer takes long enough to be read before the next
            model="tiny", prompt=long, max_tokens=400, extra_body={"ignore_eos": True}
        ),
        "completions": lambda: api.completions.create(model="tiny", prompt="hi", max_tokens=400),
        "chat": lambda: api.chat.completions.create(model="tiny", messages=said, max_tokens=400),  # type: ignore[call-overload]
        "responses": lambda: api.responses.create(model="tiny", input="hi", max_output_tokens=400),
        "messages": lambda: messages.messages.create(model="tiny", messages=said, max_tokens=400),  # type: ignore[arg-type]
    }
    failed: list[str] = []

    def ask(name: str) -> None:
        try:
            asks[name]()
        except (openai.APIError, anthropic.APIError) as error:
            failed.append(f"{name}: {error}")

    shorts = [name for name in asks if name != "long"]
    for name in shorts:  # clients and engine load what they need for each API
        asks[name]()
    blocker = api.completions.create(
        model="tiny", prompt="go on", max_tokens=8_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(blocker))
    threads: list[threading.Thread] = []
    for names in (["long"], shorts):
        added = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in added:
            thread.start()
        threads += added
        until_waiting(engine, len(threads), threads)
    blocker.close()
    for thread in threads:
        thread.join(300)
    api.close()
    messages.close()

    assert not failed
    # In the order of the engine's answers: threads of clients may read theirs later than the next one's.
    last = front.receipts()[-len(asks) :]
    ended = ["long" if one["prompt_tokens"] == LONG_TOKENS else one["api"] for one in last]
    if scheduling == "priority":
        assert sorted(ended[:-1]) == sorted(shorts)
        assert ended[-1] == "long"
    else:
        assert ended[0] == "long"
        assert sorted(ended[1:]) == sorted(shorts)
    # vLLM's V1 engines ignore priorities without that policy: there is no refusal to remember.
    assert front.metric("kvatlas_proxy_priorities_refused_total") == 0
    receipts = json.dumps(front.receipts())
    assert all(f'"{api_name}"' in receipts for api_name in ("completions", "chat", "responses", "messages"))
