"""``policy.engine_priority`` on real engines: requests of every API go in the router's order where an engine
schedules by priority, and by arrival, without an error, where it does not."""

from __future__ import annotations

import http.client
import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.waiting import wait_until
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


def requests(engine: VllmEngine, state: str) -> int:
    """Requests that the engine has in this state: running or waiting."""
    with urllib.request.urlopen(f"{engine.base_url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    gauge = f"vllm:num_requests_{state}{{"
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(gauge)))


@contextmanager
def engine_kept_busy(engine: VllmEngine) -> Iterator[None]:
    """One long answer runs meanwhile; its client leaves at the end.

    vLLM's API server answers nothing else while it is behind the engine, and a random model's answer may put
    it there: a stream, by its chunks; a token that ends within a character, repeated without end, by decoding
    all of them again for each. So the answer is not streamed, and of these words only.
    """
    host, headers = engine.base_url.removeprefix("http://"), {"content-type": "application/json"}
    client = http.client.HTTPConnection(host, timeout=300)
    client.request("POST", "/tokenize", json.dumps({"model": "tiny", "prompt": "go on"}), headers)
    words = json.loads(client.getresponse().read())["tokens"]
    asked = {"model": "tiny", "prompt": words, "max_tokens": 8_000, "ignore_eos": True}
    client.request("POST", "/v1/completions", json.dumps(asked | {"allowed_token_ids": words}), headers)
    try:
        wait_until(lambda: requests(engine, "running") == 1, "the long answer runs")
        yield
    finally:
        client.close()


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

    def until_waiting(count: int) -> None:
        wait_until(
            lambda: requests(engine, "waiting") == count,
            lambda: f"{count} requests wait in the engine; failed: {failed}",
        )

    shorts = [name for name in asks if name != "long"]
    for name in shorts:  # clients and engine load what they need for each API
        asks[name]()
    threads: list[threading.Thread] = []
    with engine_kept_busy(engine):
        for names in (["long"], shorts):
            added = [threading.Thread(target=ask, args=(name,)) for name in names]
            for thread in added:
                thread.start()
            threads += added
            until_waiting(len(threads))
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
