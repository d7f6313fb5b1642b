"""The usage record of real processes: SIGTERM writes all of it, kill -9 loses nothing that was counted."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvatlas.router.observe.usage import UsageLine
from tests.router.serve.test_reload import AWAY, Serving
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, running

_line = msgspec.json.Decoder(UsageLine)


def all_files(path: Path) -> list[Path]:
    """The files of a router and its workers."""
    return [path, *path.parent.glob(f"{path.name}.[0-9w]*")]


def lines(path: Path) -> list[UsageLine]:
    return [_line.decode(text) for file in all_files(path) for text in file.read_bytes().splitlines()]


async def ask(router: Serving, name: str) -> int:
    """One chat over a connection of its own, which any worker may get."""
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 3,
        "messages": [{"role": "user", "content": TEXT}],
    }
    url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
    headers = {"x-request-id": name}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def serving(router: Serving, path: Path, engine: str, more: str = "") -> None:
    router.engines = [engine]
    router.write("one", more=f'[usage]\npath = "{path}"\n{more}')
    await router.start()
    await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
async def test_sigterm_writes_every_line(tmp_path: Path, workers: int) -> None:
    path, names = tmp_path / "usage.jsonl", {f"r{number}" for number in range(60)}
    router = Serving(tmp_path, workers)
    async with running({}) as (engine,):
        await serving(router, path, engine.base_url, "file_bytes_max = 4000\nfiles_max = 1000\n")
        assert set(await asyncio.gather(*(ask(router, name) for name in names))) == {200}
        assert await router.stop() == 0, router.log
    found = [line.request_id for line in lines(path)]
    assert sorted(found) == sorted(names), "each once"
    assert len(all_files(path)) > workers, "rotated"


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
async def test_kill_9_loses_no_line_that_was_counted_and_leaves_whole_lines(
    tmp_path: Path, workers: int
) -> None:
    path = tmp_path / "usage.jsonl"
    names = {f"a{number}" for number in range(40)}
    router = Serving(tmp_path, workers)
    async with running({}) as (engine,):
        await serving(router, path, engine.base_url)
        for name in names:
            assert await ask(router, name) == 200

        async def written() -> bool:
            return await router.metric("kvatlas_usage_written_total") == len(names)

        await until(written, "every line counted as written", ignoring=AWAY)
        victims = router.children() if workers > 1 else []
        assert router.process is not None
        for pid in victims or [router.process.pid]:
            os.kill(pid, signal.SIGKILL)
        if workers > 1:
            await until(lambda: len(set(router.children()) - set(victims)) == workers, "workers replaced")
            await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)
        else:
            await router.process.wait()
            with path.open("ab") as file:
                file.write(b'{"arrived_s": 1')  # as a crash in the middle of a write leaves it
            await router.start()
            await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)
        assert await ask(router, "b") == 200
        assert await router.stop() == 0, router.log
    found = [line.request_id for line in lines(path)]
    assert sorted(found) == sorted({*names, "b"}), "each once"


async def ask_mixed(router: Serving, name: str, rng: random.Random) -> int:
    """One request of any API, streamed or not; the generated tokens that its answer tells."""
    path = rng.choice(["chat/completions", "completions", "messages", "responses"])
    stream, many, limit = rng.random() < 0.5, rng.random() < 0.2, rng.randint(1, 6)
    body: dict[str, Any] = {"model": MODEL, "stream": stream, "max_tokens": limit}
    if path in {"chat/completions", "messages"}:
        body["messages"] = [{"role": "user", "content": TEXT}]
    if path == "completions":
        body["prompt"] = TEXT
    if path == "responses":
        body = {"model": MODEL, "stream": stream, "max_output_tokens": limit, "input": TEXT, "store": False}
    if path.endswith("completions"):
        body |= {"n": 3} if many else {}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
    url = f"http://127.0.0.1:{router.port}/v1/{path}"
    headers = {"x-request-id": name}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        got = await answer.read()
    assert answer.status == 200, got
    # The last one of a message's stream, whose first event has none yet.
    return int(re.findall(rb'"(?:completion|output)_tokens": ?(\d+)', got)[-1])


@pytest.mark.process
async def test_kill_9_differs_from_an_independent_count_of_300_in_what_was_in_flight_only(
    tmp_path: Path,
) -> None:
    path, rng, told = tmp_path / "usage.jsonl", random.Random(1), dict[str, int]()
    router = Serving(tmp_path, 1)

    async def asked(first: int, last: int) -> None:
        names = iter([f"m{number}" for number in range(first, last)])

        async def client() -> None:
            for name in names:
                told[name] = await ask_mixed(router, name, rng)

        await asyncio.gather(*(client() for _ in range(6)))

    async with running({"decode_s_per_token": 0.002}) as (engine,):
        await serving(router, path, engine.base_url)
        await asked(0, 150)

        async def written() -> bool:
            return await router.metric("kvatlas_usage_written_total") == len(told)

        await until(written, "every line counted as written", ignoring=AWAY)
        url, body = f"http://127.0.0.1:{router.port}/v1/completions", {"model": MODEL, "prompt": TEXT}
        async with aiohttp.ClientSession() as session:
            flying = [
                await session.post(
                    url,
                    json={**body, "max_tokens": 1500, "ignore_eos": True, "stream": True},
                    headers={"x-request-id": f"flying{number}"},
                )
                for number in range(4)
            ]
            for answer in flying:
                await answer.content.readany()
            assert router.process is not None
            os.kill(router.process.pid, signal.SIGKILL)
            await router.process.wait()
            for answer in flying:
                answer.close()
        await router.start()
        await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)
        await asked(150, 300)
        assert await router.stop() == 0, router.log
    found = lines(path)
    assert {line.request_id: line.generated_tokens for line in found} == told, "all but those in flight"
    assert len(found) == 300, "each once"
    assert {line.generated_is for line in found} == {"measured"}
