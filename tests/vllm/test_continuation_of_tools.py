"""Chats that a parser of vLLM reads (reasoning, calls of tools) go on from another engine as if nothing had
broken, or are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.proxy.continuation import completion_of
from kvatlas.router.proxy.continuation_plan import ContinuationPlan, plan_of
from kvatlas.router.proxy.failures import EventRefusedError
from kvatlas.router.proxy.kept_stream import KeptStream
from kvatlas.router.proxy.parsed_stream import ParsedStream
from tests.support.paths import ROOT
from tests.vllm.router_process import RouterProcess
from tests.vllm.test_continuation import Case, broken, continuations
from tests.vllm.tiny_model import write_tiny_model
from tests.vllm.told_streams import ToldStream, told
from tests.vllm.vllm_engine import VllmEngine, side_by_side, two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
ARGS = (
    "--enable-scale-out", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3", "--block-size", "32",
    "--max-model-len", "4096", "--max-num-seqs", "32",
    "--logits-processors", "tests.vllm.written_answers:WrittenAnswers", "tests.vllm.held_steps:SlowEngine",
)  # fmt: skip


def _hermes(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _coder(name: str, **arguments: Any) -> str:
    told = "".join(f"<parameter={one}>\n{value}\n</parameter>\n" for one, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def answers(parser: str) -> list[str]:
    call = _hermes if parser == "hermes" else _coder
    return [
        f"<think>\nweather 🙂.\n</think>\n\n{call('weather', city='Zürich 漢')}\n{call('time', zone='CET')}",
        "<think>\nsome thought\n</think>\n\nThe answer is 42 🙂 <b>x</b>.",
        "only thinking, 4 < 5",
        f"<think>a</think>x < y <b> z <<<< and {call('time')}",
        f"{call('time')} and text behind",
        f"<think>{'so 🙂. ' * 12}</think>{'word 漢 ' * 12}{call('weather', city='Zürich ' * 4)}",
    ]


SETTINGS = ("proxy.continue_tools=true", "proxy.stall_s=60")
LONG = 5
"""The answer that is broken under many chats at one time."""
STREAMS = 24


CUTS = 12
"""Of an answer; those shorter than ``EVERY_CUT`` events are cut behind each."""
EVERY_CUT = 30


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(parser: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("written-model"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(MARKS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps(config))
    ids = [tokenizer.encode(one, add_special_tokens=False).ids for one in answers(parser)]
    (directory / "answers.json").write_text(json.dumps(ids))
    return directory


@pytest.fixture(scope="module")
def engines(
    vllm_python: str, parser: str, model: Path, slow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmEngine]]:
    both = two_engines(
        vllm_python,
        model,
        tmp_path_factory.mktemp("logs"),
        num_gpu_blocks=700,
        extra_args=(*ARGS, "--tool-call-parser", parser),
        environment={"PYTHONPATH": str(ROOT), "KVATLAS_TEST_SLOW": str(slow)},
    )
    with side_by_side(both):
        yield both


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"answer {number}."}],
        "temperature": 0,
        "max_tokens": 2000,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


class Asking:
    """Asks an engine; ``read`` of it, as ``ParsedStream`` does."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._room = asyncio.Semaphore(16)

    async def read(self, path: str, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        async with self._room, self._session.post(self._url + path, data=body, headers=headers) as answer:
            data = await answer.read()
        if answer.status != 200:
            raise EventRefusedError(answer.status, [], data)
        return data


async def goes_on(
    body: dict[str, Any], events: list[bytes], cut: int, ask: Asking, step: int
) -> ToldStream | str:
    """The answer to a client whose stream breaks behind ``cut`` events; or why it does not go on. ``step``:
    tokens of an event of the engine that goes on."""
    plan = plan_of(CHAT, json.dumps(body).encode(), parses=True)
    assert isinstance(plan, ContinuationPlan), plan
    kept = KeptStream(plan)
    out = kept.feed(b"".join(events[:cut]))
    if kept.complete:
        return told(out + kept.closing())
    if why := kept.check():
        return why
    if not kept.parsed:
        return "text"
    stream = ParsedStream(kept)
    if why := await stream.differs(ask.read):
        return why
    rest = json.loads(completion_of(kept, len(kept.ids), 4096) or b"")
    stream.taken()
    for block in (await ask.read(COMPLETION, json.dumps({**rest, "stream_interval": step}).encode())).split(
        b"\n\n"
    )[:-1]:
        out += stream.feed(block + b"\n\n")
        while stream.due:
            out += await stream.parsed()
            assert not kept.failed
    assert kept.complete
    return told(out)


def readable(answer: ToldStream, parser: str) -> ToldStream:
    """Without white space beside calls where that depends on the lengths of events (qwen3_coder): a busy
    engine puts several tokens into one."""
    return answer if parser == "hermes" else replace(answer, text="".join(answer.text.split()))


async def test_a_chat_cut_anywhere_reads_like_one_that_was_not(
    engines: list[VllmEngine], parser: str
) -> None:
    first, second = engines
    counts, wrong = Counter[str](), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        ask, other = Asking(session, first.base_url), Asking(session, second.base_url)

        async def judge(
            body: dict[str, Any], right: ToldStream, events: list[bytes], cut: int, step: int
        ) -> None:
            result = await goes_on(body, events, cut, other, step)
            if isinstance(result, str):
                counts[result] += 1
            elif readable(result, parser).same(readable(right, parser)):
                counts["equal"] += 1
            else:
                wrong.append((body["messages"], cut, step, result, right))

        tasks = []
        for number, tools in itertools.product(range(LONG), (TOOLS, None)):
            body = chat(number, **({"tools": tools} if tools else {}))
            stream = await ask.read(CHAT, json.dumps({**body, "return_token_ids": True}).encode())
            events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
            right = told(await ask.read(CHAT, json.dumps(body).encode()))
            steps = (1, 8) if parser == "hermes" else (1,)
            every = 1 if len(events) < EVERY_CUT else 1 + len(events) // CUTS
            cuts = range(2 + number % every, len(events) + 1, every)
            tasks += [judge(body, right, events, cut, steps[cut % len(steps)]) for cut in cuts]
        await asyncio.gather(*tasks)
    assert not wrong, f"{len(wrong)} wrong of {counts}: {wrong[:2]}"
    assert counts["equal"] > 0.5 * counts.total(), counts
    # Nothing of an answer has been sent yet, or it is text from there on.
    assert set(counts) <= {"equal", "reasoning", "text"}, counts


async def test_a_chat_under_a_grammar_does_not_go_on(engines: list[VllmEngine], parser: str) -> None:
    body = chat(1, tools=TOOLS, parallel_tool_calls=False)
    async with aiohttp.ClientSession() as session:
        ask = Asking(session, engines[0].base_url)
        plain = {name: one for name, one in body.items() if name != "parallel_tool_calls"}
        stream = await ask.read(CHAT, json.dumps({**plain, "return_token_ids": True}).encode())
        events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
        assert await goes_on(body, events, 12, ask, 1) == "format"


async def test_chats_of_a_killed_engine_read_like_those_of_others(
    engines: list[VllmEngine], parser: str, model: Path, slow: Path, tmp_path: Path
) -> None:
    cases = [Case(CHAT, chat(LONG, tools=TOOLS)) for _ in range(STREAMS)]
    for number, one in enumerate(cases):
        one.body["messages"] = [{"role": "user", "content": f"Chat {number}, answer {LONG}."}]
    victim, other = engines
    options = [word for one in SETTINGS for word in ("--set", one)]
    urls = [one.base_url for one in engines]
    async with aiohttp.ClientSession() as session:
        ask = Asking(session, other.base_url)
        whole = [told(await ask.read(CHAT, json.dumps(one.body).encode())) for one in cases]
    with RouterProcess(urls, model, log=tmp_path / "router.log", options=options) as router:
        streams = await broken("core killed", cases, victim, router, slow)
        went_on = continuations(router)
    victim.kill()
    victim.start()
    victim.wait_until_healthy()
    results = [told(stream.data) for stream in streams]
    pairs = list(zip(results, whole, strict=True))
    wrong = [
        (result, right)
        for result, right in pairs
        if not readable(result, parser).same(readable(right, parser))
        and not (result.error and right.reasoning.startswith(result.reasoning))
    ]
    assert not wrong, f"{len(wrong)} wrong: {wrong[:2]}"
    assert sum(result.error is None for result in results) > STREAMS / 2
    assert went_on > 0
