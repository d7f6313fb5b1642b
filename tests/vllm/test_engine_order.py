"""``policy.engine_priority`` on real engines: requests of every API go in the router's order where an engine
schedules by priority, and by arrival, without an error, where it does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.waiting import wait_until
from tests.vllm.observed_fleet import BLOCK_TOKENS, Fleet, running
from tests.vllm.tiny_model import random_words
from tests.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LONG_TOKENS = 1500
SHORT_WORDS = BLOCK_TOKENS
"""A token at least for each: enough for a block, whose event tells when the engine computed the prompt."""
ARGS = ("--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--max-num-seqs", "1")
WEIGHT = 10_000.0
"""Puts the long prompt behind whatever comes within two minutes at 100,000 tokens a second, and longer at any
rate of a CPU: its place does not depend on the pace of the machine."""


@pytest.fixture(params=["priority", "fcfs"])
def scene(
    request: pytest.FixtureRequest, vllm_python: str, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[str, Fleet, VllmEngine]]:
    engine = VllmEngine(
        vllm_python,
        tiny_model,
        num_gpu_blocks=700,
        log=tmp_path / "engine.log",
        extra_args=(*ARGS, "--scheduling-policy", request.param, "--enable-log-requests"),
    )
    options = ("--set", f"policy.engine_priority={WEIGHT}")
    with running([engine], tiny_model, log=tmp_path / "router.log", options=options) as fleet:
        yield request.param, fleet, engine


def test_short_prompts_of_every_api_pass_a_long_one_exactly_where_the_engine_goes_by_priority(
    scene: tuple[str, Fleet, VllmEngine], anthropic: Any
) -> None:
    scheduling, fleet, engine = scene
    front, tap = fleet.router, fleet.taps[engine.base_url]
    rng = random.Random(1)
    api = openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0, timeout=300)
    messages = anthropic.Anthropic(base_url=front.base_url, api_key="none", max_retries=0, timeout=300)
    long = [rng.randrange(10, 1000) for _ in range(LONG_TOKENS)]

    def said() -> Any:
        return [{"role": "user", "content": random_words(rng, SHORT_WORDS)}]

    def words() -> str:
        return random_words(rng, SHORT_WORDS)

    asks: dict[str, Callable[[], Any]] = {
        "completions": lambda: api.completions.create(model="tiny", prompt=words(), max_tokens=1),
        "chat": lambda: api.chat.completions.create(model="tiny", messages=said(), max_tokens=1),
        "responses": lambda: api.responses.create(model="tiny", input=words(), max_output_tokens=1),
        "messages": lambda: messages.messages.create(model="tiny", messages=said(), max_tokens=1),
    }
    failed: list[str] = []

    def ask(name: str, make: Callable[[], Any]) -> None:
        try:
            make()
        except (openai.APIError, anthropic.APIError) as error:
            failed.append(f"{name}: {error}")

    for make in asks.values():  # clients and engine load what they need for each API
        make()
    fleet.settle(engine.base_url)
    before, computed_before = engine.added, len(tap.firsts)
    threads: list[threading.Thread] = []

    def start(name: str, make: Callable[[], Any]) -> None:
        """And wait until the engine has it, or the client an error."""
        threads.append(threading.Thread(target=ask, args=(name, make)))
        threads[-1].start()
        arrived = before + len(threads)
        wait_until(lambda: failed or engine.added == arrived, lambda: f"{name} arrives\n{engine.log_tail()}")

    with engine.paused():
        start("long", lambda: api.completions.create(model="tiny", prompt=long, max_tokens=1))
        for name, make in asks.items():
            start(name, make)
    for thread in threads:
        thread.join(300)
    api.close()
    messages.close()
    assert not failed
    # In the order in which the engine computed them. Those of answers, or of receipts, are orders of others.
    tap.barrier()
    computed = list(dict.fromkeys(tuple(block) for block in tap.firsts[computed_before:]))[: len(threads)]
    place = len(asks) if scheduling == "priority" else 0
    assert computed.index(tuple(long[:BLOCK_TOKENS])) == place, computed
    # vLLM's V1 engines ignore priorities without that policy: there is no refusal to remember.
    assert front.metric("kvatlas_proxy_priorities_refused_total") == 0
    assert {one["api"] for one in front.receipts()} >= asks.keys()
