"""The reader keeps no more of any body than its bounds allow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.prompts.reader import Prompt, PromptReader
from kvatlas.router.prompts.settings import PromptSettings
from tests.support.prompts.readers import chat, local_reader, model_dir, read, read_prompt, request, say
from tests.support.waiting import run

BOUNDS = PromptSettings(prefix_cache_bytes_max=1 << 20)
BOUND = (1 << 20) + 2 * (1 << 18)
SLACK = 1 << 19
"""Memory that is no cache: the shapes of messages, the interpreter's own."""
REQUESTS = 20
LONG = "word " * 8_000
EMPTY = ", ".join(["[]"] * 3_000)


@pytest.fixture(autouse=True)
def small_context_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.prompts.local_model.CONTEXT_CACHE_BYTES_MAX", 1 << 18)


def tool(number: int, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def arguments(number: int) -> list[Any]:
    function = {"name": "f", "arguments": f'{{"n": {number}, "a": [{EMPTY}]}}'}
    return [{"id": "1", "type": "function", "function": function}]


HOSTILE: dict[str, Callable[[int], Any]] = {
    "cache_salt": lambda n: chat(say("user", "x"), cache_salt=f"{n}{LONG}"),
    "tools": lambda n: chat(say("user", "x"), tools=[tool(n, {"a": [[]] * 3_000})]),
    "long tools": lambda n: chat(say("user", "x"), tools=[tool(n, {"a": LONG})]),
    "role": lambda n: chat(say(f"{n}{LONG}", "x")),
    "call keys": lambda n: chat(
        say("assistant", "x", tool_calls=[{**arguments(0)[0], f"{n}{LONG}": 1, "type": "function"}])
    ),
    "arguments": lambda n: chat(say("user", "x"), say("assistant", "", tool_calls=arguments(n))),
    "name": lambda n: chat(say("user", "x", name=f"{n}{LONG}")),
    "many messages": lambda n: chat(*(say(f"r{n}.{m}", "") for m in range(150))),
    "effort": lambda n: chat(say("user", "x"), reasoning_effort=f"{n}{LONG}"),
    "kwargs": lambda n: chat(say("user", "x"), chat_template_kwargs={"enable_thinking": f"{n}{LONG}"}),
    "documents": lambda n: chat(say("user", "x"), documents=[{"title": f"{n}{LONG}"}]),
    "wide text": lambda n: chat(say("user", f"{n}\U0001f600{LONG[:5_000]}")),
    "truncation": lambda n: chat(say("user", "x"), truncate_prompt_tokens=9, truncation_side=f"{n}{LONG}"),
    "an unread field": lambda n: chat(say("user", f"{n}"), z=LONG * 4),
    "model": lambda n: {**chat(say("user", "x")), "model": f"{n}{LONG}"},
    "completion": lambda n: {"prompt": f"{n} {LONG[:5_000]}"},
    "ids": lambda n: {"prompt": [n, *range(4_000)]},
    "salted ids": lambda n: {"prompt": [n], "cache_salt": f"{n}{LONG}"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("m"), "chatml")


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE)
def test_memory_stays_within_the_bounds(folder: Path, kind: str) -> None:
    side = local_reader(folder, BOUNDS)
    _send(side, kind, range(2))  # whatever is made once
    gc.collect()
    tracemalloc.start()
    try:
        _send(side, kind, range(2, 2 + REQUESTS))
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stats = side.stats
    counted = stats.prefix_bytes + stats.context_bytes
    assert counted <= BOUND
    assert kept <= counted + SLACK, f"{kept} bytes are kept, {counted} are counted"


def _send(side: PromptReader, kind: str, numbers: range) -> None:
    async def main() -> None:
        for number in numbers:
            body = HOSTILE[kind](number)
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            prompt = await side.read(request(body, path, model=body.get("model", "m")))
            if isinstance(prompt, Prompt):
                await side.hashes(prompt, HashScheme())

    run(main())


def test_oversized_entries_are_not_cached(folder: Path) -> None:
    side = local_reader(folder, BOUNDS)
    for number in range(5):
        read_prompt(side, chat(say("user", f"question {number}")))
    known = side.stats.prefix_bytes
    read_prompt(side, chat(say("user", "x"), cache_salt="s" * 200_000))
    read(side, chat(say("user", "x"), say("assistant", ""), cache_salt="s" * 300_000))
    assert side.stats.oversized == 1  # a quarter is the limit
    assert side.stats.prefix_bytes > known
    assert side.stats.prefix_evictions == 0
    hits = side.stats.prefix_hits
    read(side, chat(say("user", "question 0")))
    assert side.stats.prefix_hits == hits + 1
    side.close()


@pytest.mark.long
def test_a_model_that_is_taken_out_takes_its_caches_along(folder: Path) -> None:
    side = local_reader(folder, BOUNDS)
    read(side, chat(say("user", "a question"), tools=[tool(1, {})]))
    assert side.stats.context_bytes > 0
    run(side.set_models({}))
    assert side.stats.context_bytes == 0
    side.close()
