"""Real engines behind a real router, and a way to wait until the router knows all that happened in them.

Requests go through the router one at a time. Events travel beside the answers, so before the next request
the test makes sure that the router has applied all that the last one caused: a barrier request, sent to the
engine itself, surely stores a block; engines publish in order, so once the test has received the barrier's
batch all earlier ones have left, and the router is waited for until it has applied that batch. Where a
connector tells of blocks too, the barrier is over when its block was told in the connector's medium: stores
of one engine end in the order in which they began, later than the step that computed the block.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import zmq

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockRemoved, BlockStored
from tests.vllm.chat_load import Request
from tests.vllm.router_process import RouterProcess
from tests.vllm.vllm_engine import VllmEngine, side_by_side

BLOCK_TOKENS = 32
_EVENT_DEADLINE_MS = 60_000
_BARRIERS_MAX = 3
"""A connector may leave a block out, while it has much to store."""


class EventTap:
    """The test's own subscription to an engine: which batches it has sent, and what was in them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: VllmEngine, medium: str) -> None:
        """``medium``: where a barrier's block must have been stored for the barrier to be over."""
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(engine.events)
        self._client = openai.OpenAI(base_url=f"{engine.base_url}/v1", api_key="none", max_retries=0)
        self._rng = random.Random(engine.base_url)
        self._medium = medium
        self.barriers: list[list[int]] = []
        """The prompts that were sent for barriers so far."""
        self.stored: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()
        """Blocks reported so far, by medium."""
        self.firsts: list[list[int]] = []
        """First blocks of prompts, as the engine stored them: one for each of its groups of layers."""

    def connect(self) -> None:
        """Send barriers until one is heard: a subscription takes effect some time after it is asked for."""
        for _ in range(100):
            if self._hear(self._send_barrier(), timeout_ms=500) is not None:
                return
        raise AssertionError("the engine publishes no events")

    def barrier(self) -> int:
        """Sequence number of a batch that was sent after everything that earlier requests caused."""
        for _ in range(_BARRIERS_MAX):
            seq = self._hear(self._send_barrier(), timeout_ms=_EVENT_DEADLINE_MS)
            if seq is not None:
                return seq
        raise AssertionError("the barrier's events did not come")

    def close(self) -> None:
        self._socket.close(0)
        self._client.close()

    def _send_barrier(self) -> list[int]:
        """A prompt not sent before, one block and a token long; returns its block."""
        tokens = [self._rng.randrange(10, 1000) for _ in range(BLOCK_TOKENS + 1)]
        self.barriers.append(tokens)
        self._client.completions.create(model="tiny", prompt=tokens, max_tokens=1)
        return tokens[:BLOCK_TOKENS]

    def _hear(self, block: list[int], timeout_ms: int) -> int | None:
        while self._socket.poll(timeout_ms):
            _, seq, payload = self._socket.recv_multipart()
            batch = decode_batch(payload)
            assert not batch.rejected
            for event in batch.events:
                if isinstance(event, BlockRemoved):
                    self.removed[event.medium or "GPU"] += len(event.block_hashes)
            stored = [event for event in batch.events if isinstance(event, BlockStored)]
            for event in stored:
                self.stored[event.medium or "GPU"] += len(event.block_hashes)
                if event.parent_block_hash is None:
                    self.firsts.append(list(event.tokens()[:BLOCK_TOKENS]))
            there = [event for event in stored if (event.medium or "GPU") == self._medium]
            if any(event.block_hashes and event.tokens() == block for event in there):
                return int.from_bytes(seq, "big")
        return None


@dataclass
class Fleet:
    """Engines, the router before them, and a tap on each engine's events (by engine id)."""

    router: RouterProcess
    taps: dict[str, EventTap]

    def settle(self, engine_id: str) -> None:
        """Wait until the router knows all that happened in this engine."""
        self.router.wait_until_seen(engine_id, self.taps[engine_id].barrier())


@contextmanager
def running(
    engines: Sequence[VllmEngine],
    tokenizer: Path,
    *,
    log: Path,
    medium: str = "GPU",
    roles: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Start the engines side by side, the router before them, and stop them all at the end. ``roles``: of the
    engines, in order; ``options`` are the router's."""
    with ExitStack() as stack:
        stack.enter_context(side_by_side(engines))
        context = stack.enter_context(zmq.Context())
        taps = {engine.base_url: EventTap(context, engine, medium) for engine in engines}
        for tap in taps.values():
            stack.callback(tap.close)
        told = [engine.base_url for engine in engines]
        if roles:
            told = [f"{url},role={role}" for url, role in zip(told, roles, strict=True)]
        router = stack.enter_context(RouterProcess(told, tokenizer, log=log, options=options))
        fleet = Fleet(router, taps)
        for engine_id, tap in taps.items():
            tap.connect()
            fleet.settle(engine_id)
        yield fleet


@dataclass
class Outcome:
    """Prediction for one request, and the engine's report."""

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
