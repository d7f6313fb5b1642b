"""The whole router before two real vLLM engines: every predicted hit must be what the engine then reports.

Requests go through the router one at a time. Events travel beside the answers, so before the next request
the test makes sure that the router has applied all that the last one caused: a barrier request, sent to the
engine itself, surely stores a block; engines publish in order, so once the test has received the barrier's
batch all earlier ones have left, and the router is waited for until it has applied that batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import zmq
from chat_load import ChatLoad, Request
from router_process import RouterProcess
from vllm_engine import VllmEngine

from publisher.events import BlockRemoved, BlockStored, decode_batch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = 240
NUM_GPU_BLOCKS = 220
"""Six groups share them: a handful of conversations fills the pool, and eviction is constant."""

ENGINE_ARGS = ("--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "256")
_BLOCK_TOKENS = 32
_EVENT_DEADLINE_MS = 20_000


class EventTap:
    """The test's own subscription to an engine: which batches it has sent, and what was in them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: VllmEngine) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(engine.events)
        self._client = openai.OpenAI(base_url=f"{engine.base_url}/v1", api_key="none", max_retries=0)
        self._rng = random.Random(engine.base_url)
        self.removed = 0

    def connect(self) -> None:
        """Send barriers until one is heard: a subscription takes effect some time after it is asked for."""
        for _ in range(100):
            if self._hear(self._send_barrier(), timeout_ms=200) is not None:
                return
        raise AssertionError("the engine publishes no events")

    def barrier(self) -> int:
        """Sequence number of a batch that was sent after everything that earlier requests caused."""
        seq = self._hear(self._send_barrier(), timeout_ms=_EVENT_DEADLINE_MS)
        assert seq is not None, "the barrier's events did not come"
        return seq

    def close(self) -> None:
        self._socket.close(0)
        self._client.close()

    def _send_barrier(self) -> list[int]:
        """A prompt nobody has sent before, one block and a token long; returns its block."""
        tokens = [self._rng.randrange(10, 1000) for _ in range(_BLOCK_TOKENS + 1)]
        self._client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        return tokens[:_BLOCK_TOKENS]

    def _hear(self, block: list[int], timeout_ms: int) -> int | None:
        while self._socket.poll(timeout_ms):
            _, seq, payload = self._socket.recv_multipart()
            batch = decode_batch(payload)
            assert not batch.rejected
            self.removed += sum(isinstance(event, BlockRemoved) for event in batch.events)
            stored = [event for event in batch.events if isinstance(event, BlockStored)]
            if any(event.block_hashes and event.tokens() == block for event in stored):
                return int.from_bytes(seq, "big")
        return None


@dataclass
class Fleet:
    """Two engines, the router before them, and a tap on each engine's events (by engine id)."""

    router: RouterProcess
    taps: dict[str, EventTap]

    def settle(self, engine_id: str) -> None:
        """Wait until the router knows all that happened in this engine."""
        self.router.wait_until_seen(engine_id, self.taps[engine_id].barrier())


@pytest.fixture(scope="module")
def fleet(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        engines = [
            VllmEngine(
                vllm_python,
                tiny_model,
                num_gpu_blocks=NUM_GPU_BLOCKS,
                log=logs / f"engine{index}.log",
                extra_args=ENGINE_ARGS,
            )
            for index in range(2)
        ]
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        for engine in engines:
            engine.wait_until_healthy()
        context = stack.enter_context(zmq.Context())
        taps = {engine.base_url: EventTap(context, engine) for engine in engines}
        for tap in taps.values():
            stack.callback(tap.close)
        router = RouterProcess([engine.base_url for engine in engines], tiny_model, log=logs / "router.log")
        stack.enter_context(router)
        fleet = Fleet(router, taps)
        for engine_id, tap in taps.items():
            tap.connect()
            fleet.settle(engine_id)
        yield fleet


@dataclass
class Outcome:
    """What the router foretold for one request and what the engine reported."""

    engine_id: str
    predicted: int
    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


def send(client: openai.OpenAI, request: Request) -> Outcome:
    """Send one request through the router and read its answer to the end."""
    api = client.chat.completions if request.chat else client.completions
    raw = api.with_raw_response.create(**request.arguments)
    answer: Any = raw.parse()
    parts = list(answer) if request.stream else [answer]
    outcome = Outcome(
        engine_id=raw.headers["x-kvatlas-engine"],
        predicted=int(raw.headers["x-kvatlas-hit-tokens"]),
        text="".join(_text(part, request) for part in parts),
    )
    usage = parts[-1].usage
    if usage is not None:
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
    return outcome


def _text(part: Any, request: Request) -> str:
    if not part.choices:
        return ""  # the part of a stream that carries the usage
    choice = part.choices[0]
    if not request.chat:
        return choice.text or ""
    return (choice.delta if request.stream else choice.message).content or ""


def test_every_predicted_hit_is_what_the_engine_reports(fleet: Fleet) -> None:
    outcomes: list[Outcome] = []
    with openai.OpenAI(base_url=f"{fleet.router.base_url}/v1", api_key="none", max_retries=0) as client:
        for request in ChatLoad(seed=11).requests(REQUESTS):
            outcome = send(client, request)
            request.answered(outcome.text)
            outcomes.append(outcome)
            fleet.settle(outcome.engine_id)

    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None]
    wrong = [
        f"request {index}: predicted {outcome.predicted}, engine reported {outcome.cached_tokens}"
        f" of {outcome.prompt_tokens} on {outcome.engine_id}"
        for index, outcome in enumerate(outcomes)
        if outcome.cached_tokens is not None and outcome.predicted != outcome.cached_tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(told)} wrong:\n" + "\n".join(wrong[:20])

    hits = [outcome for outcome in told if outcome.predicted]
    served = Counter(outcome.engine_id for outcome in outcomes)
    removed = {engine_id: tap.removed for engine_id, tap in fleet.taps.items()}
    print(f"{len(told)} told, {len(hits)} hits, served {served}, blocks removed {removed}")
    assert len(told) >= 200, "too few requests said what was cached"
    assert len(hits) >= len(told) // 4, "too few hits to say anything"
    assert set(served) == set(fleet.taps), "one engine served everything"
    assert min(removed.values()) > 100, "hardly anything was evicted"
