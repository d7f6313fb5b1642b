"""A terminated process ends: with what it depends on silent, and with a part that does not end."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.server_lifecycle import ShutdownGuard
from tests.router.serve.test_reload import AWAY, Serving
from tests.support.waiting import run, until, until_thread
from tests.support.whole_router import running

GIVES_UP = "shutdown does not end"
HANGS = """
import asyncio, sys
from kvatlas.router import server_lifecycle
from kvatlas.router.__main__ import run
from kvatlas.router.app import Router

server_lifecycle.STOP_S = 0.5
begin = Router.__init__

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

def __init__(self, *args, **more):
    begin(self, *args, **more)
    self.works.append(deaf)

Router.__init__ = __init__
sys.exit(run(["serve", *sys.argv[1:]]))
"""
"""kvatlas with one more task, which swallows its cancellation."""


def test_tasks_that_do_not_end_are_named_with_where_they_wait(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    waits_at = 0

    async def main() -> None:
        async def inner() -> None:
            nonlocal waits_at
            waits_at = sys._getframe().f_lineno + 1
            await asyncio.sleep(3600)

        async def outer() -> None:
            await inner()

        task = asyncio.create_task(outer(), name="the deaf one")
        await asyncio.sleep(0)  # it waits
        guard = ShutdownGuard(lambda: 0.0, end=ended.append)
        assert not ended
        for _ in range(2):
            guard.begin(asyncio.get_running_loop())
        await until_thread(lambda: ended, "it gives up")  # in a thread of its own, past a stuck loop
        task.cancel()

    run(main())
    said = "".join(capfd.readouterr())
    assert ended == [1]
    assert GIVES_UP in said
    assert "the deaf one" in said
    assert "outer" in said
    assert f"{Path(__file__).name}:{waits_at}'" in said, "the line that inner() waits at"


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_redis_that_accepts_and_never_answers_holds_nothing_up(tmp_path: Path, workers: int) -> None:
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    index = f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, running({}) as engines:
        router = Serving(tmp_path, workers)
        router.engines = [engines[0].base_url]
        router.write("one", more=f'[index]\nurl = "{index}"\n')
        await router.start()
        await until(router.listens, lambda: router.log[-3000:], ignoring=AWAY)
        assert held
        assert await router.stop() == 0, router.log
        assert GIVES_UP not in router.log
        for writer in held:
            writer.close()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_task_that_does_not_end_is_named_and_left(number: int) -> None:
    async with running({}) as engines:
        words = ["--engine", engines[0].base_url, "--tokenizer", str(DEMO_TOKENIZER_DIR), "--port", "0"]
        words += ["--ops-port", "0", "--set", "listen.drain_s_max=0.1", "--set", "server.log_format=json"]
        pipe = asyncio.subprocess.PIPE
        router = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGS, *words, stderr=pipe)
        assert router.stderr is not None
        lines = await listened(router.stderr)
        router.send_signal(number)
        lines += [msgspec.json.decode(line) async for line in router.stderr]
        assert await router.wait() == 1, lines
    (line,) = [line for line in lines if GIVES_UP in line["event"]]
    assert "deaf" in " ".join(line["tasks"])
    assert line["after_s"] == 0.6


async def listened(stderr: asyncio.StreamReader) -> list[dict[str, Any]]:
    """Its output until it listens."""
    lines = []
    while not lines or lines[-1]["event"] != "listening":
        lines.append(msgspec.json.decode(await stderr.readline()))
    return lines
