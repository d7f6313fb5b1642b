"""What prompts cost: ``python benchmarks/prompts.py [--seconds 1]``. Needs nothing but the router's packages.

Prints microseconds per step of a chat (peek, first sight, exact repeat, next turn; hashing included), and how
long the event loop was held by bodies of 16 KB to 10 MB while another task ticked. The tokenizer is the one
that ships for the demo, or any Hugging Face directory given with ``--tokenizer``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

from publisher.block_hash import HashScheme
from router.openai.body import peek
from router.openai.request import InboundRequest
from router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings

DEMO = Path(__file__).parent.parent / "publisher" / "assets" / "demo_tokenizer"
SCHEME = HashScheme()
CHAT = "/v1/chat/completions"
WORDS = ("router", "finds", "prefix", "blocks", "of", "every", "engine", "and", "sends", "what", "is", "left")


async def no_engine(url: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    raise OSError(url)


def text(rng: random.Random, chars: int) -> str:
    words = []
    while chars > 0:
        words.append(rng.choice(WORDS) + str(rng.randint(0, 99)))
        chars -= len(words[-1]) + 1
    return " ".join(words)


def turns(rng: random.Random, num_messages: int, chars: int) -> list[dict[str, str]]:
    roles = ["system", *(["user", "assistant"] * num_messages)][:num_messages]
    return [{"role": role, "content": text(rng, chars // num_messages)} for role in roles]


def request(messages: list[dict[str, str]]) -> InboundRequest:
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "temperature": 0.7}).encode()
    return InboundRequest("POST", CHAT, b"", [], body, "m", True)


async def read(reader: PromptReader, inbound: InboundRequest) -> Prompt:
    prompt = await reader.read(inbound)
    assert isinstance(prompt, Prompt), prompt
    await reader.hashes(prompt, SCHEME)
    return prompt


async def median_us(steps: Iterable[Awaitable[Any]], seconds: float = 60.0) -> float:
    """Median wall time of a step in microseconds: robust against what else the machine does."""
    times, end = [], time.perf_counter() + seconds
    for step in steps:
        start = time.perf_counter()
        await step
        times.append(time.perf_counter() - start)
        if start > end:
            break
    return statistics.median(times) * 1e6


async def chat_costs(reader: PromptReader, kilobytes: int, seconds: float) -> None:
    rng = random.Random(kilobytes)
    base = turns(rng, 3 if kilobytes < 8 else 11, kilobytes * 1000)[: 2 if kilobytes < 8 else 10]
    inbound = request(base)
    start = time.perf_counter()
    prompt = await read(reader, inbound)
    first_us = (time.perf_counter() - start) * 1e6
    peek_us = await median_us(_peeked(inbound.body) for _ in range(1000))
    repeat_us = await median_us(read(reader, inbound) for _ in range(1000))
    known_us = await median_us(read(reader, made) for made in await known_turns(reader, base))
    fresh = (request([*base, *pair(text(rng, 40), f"{text(rng, 100)} {n}")]) for n in range(5000))
    fresh_us = await median_us((read(reader, made) for made in fresh), seconds)
    print(f"{len(inbound.body) / 1000:6.1f} KB, {len(prompt.token_ids)} tokens: peek {peek_us:.1f}", end="")
    print(f", first sight {first_us:.0f}, exact repeat {repeat_us:.1f}, next turn {known_us:.1f}", end="")
    print(f" where the tokenizer knows its new texts, {fresh_us:.1f} with 140 new characters")


def pair(answer: str, question: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


async def known_turns(reader: PromptReader, base: list[dict[str, str]]) -> list[InboundRequest]:
    """Next turns that all differ, of texts the tokenizer met before: what is left is our own work."""
    texts = [f"{word} is what I say" for word in WORDS]
    for word in texts:
        await read(reader, request([base[0], *pair(word, word)]))
    return [request([*base, *pair(answer, question)]) for answer in texts for question in texts]


async def _peeked(body: bytes) -> None:
    peek(body)


async def loop_hold_ms(reader: PromptReader, inbound: InboundRequest) -> tuple[float, float, str]:
    """The longest time between two ticks while one request is read: by the clock (with waits for the GIL and
    for a core) and as CPU time of the loop's own thread; and what came out."""
    by_clock = by_cpu = 0.0
    done = False

    async def tick() -> None:
        nonlocal by_clock, by_cpu
        clock, cpu = time.perf_counter(), time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now, now_cpu = time.perf_counter(), time.thread_time()
            by_clock, by_cpu = max(by_clock, now - clock), max(by_cpu, now_cpu - cpu)
            clock, cpu = now, now_cpu

    ticker = asyncio.ensure_future(tick())
    await asyncio.sleep(0)
    found = await reader.read(inbound)
    if isinstance(found, Prompt):
        await reader.hashes(found, SCHEME)
    done = True
    await ticker
    result = f"{len(found.token_ids)} tokens" if isinstance(found, Prompt) else f"affinity ({found.reason})"
    return by_clock * 1e3, by_cpu * 1e3, result


async def main(tokenizer: Path, seconds: float) -> None:
    # A small cache: in steady state memory is reused, and that is what is measured.
    settings = PromptSettings(prefix_cache_bytes_max=4 << 20)
    reader = PromptReader({"m": ModelPrompts(tokenizer_dir=str(tokenizer))}, settings, no_engine)
    local = reader.local_model("m")
    assert local is not None
    template = local.templates[False]
    engine = template.engine if template else None
    print(f"template engine {engine}, barriers {local.tokenizer.barrier is not None}")
    print("median microseconds of a chat, hashing included:")
    for kilobytes in (1, 8, 32, 128):
        await chat_costs(reader, kilobytes, seconds)
    print("longest hold of the event loop:")
    rng = random.Random(1)
    for size in (16_000, 100_000, 1_000_000, 2_000_000, 10_000_000):
        for num_messages in (2, 1001):
            inbound = request(turns(rng, num_messages, size))
            clock_ms, cpu_ms, result = await loop_hold_ms(reader, inbound)
            print(
                f"{len(inbound.body) / 1e6:8.2f} MB, {num_messages:4d} messages: {clock_ms:6.1f} ms by the",
                end="",
            )
            print(f" clock, {cpu_ms:5.1f} ms of its own CPU time; {result}")
    reader.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.tokenizer, arguments.seconds))
