"""SIGHUP to ``kvatlas serve``, alone and as the parent of workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import MODEL, running

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
AWAY = (OSError, aiohttp.ClientError)


async def metric(url: str, name: str, **labels: str) -> float:
    """A metric's sum over all other labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


class Serving:
    """``kvatlas serve --config`` of a file that the test writes."""

    command = "serve"

    def __init__(self, folder: Path, workers: int) -> None:
        self.port, self.ops = free_port(), free_port()
        self.workers = workers
        self.engines: list[str] = []
        self.sources: dict[str, str] = {}
        """``kv_source`` of engines, by their URL."""
        self.process: asyncio.subprocess.Process | None = None
        self._path, self._log = folder / "router.toml", folder / "log"

    def write(self, alias: str, more: str = "", server: str = "") -> None:
        sources = {url: f'kv_source = "{source}"\n' for url, source in self.sources.items()}
        listed = "".join(f'[[engines]]\nbase_url = "{url}"\n{sources.get(url, "")}' for url in self.engines)
        self._path.write_text(
            f"[server]\nport = {self.port}\nops_port = {self.ops}\nworkers = {self.workers}\n{server}\n"
            f'{listed}[models."*"]\ntokenizer = "{DEMO_TOKENIZER_DIR}"\n'
            f'[aliases]\n{alias} = "{MODEL}"\n{more}\n'
        )

    async def start(self) -> None:
        words = ["-m", "kvatlas", self.command, "--config", str(self._path)]
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=log)

    def hup(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    async def stop(self) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def children(self) -> list[int]:
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    async def knows(self, *names: str) -> bool:
        """Every one of several new connections, which any worker may get, finds these names and no others."""
        for _ in range(8 * self.workers):
            url = f"http://127.0.0.1:{self.port}/v1/models"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                listed = {card["id"] for card in (await answer.json()).get("data", [])}
            if listed != {MODEL, *names}:
                return False
        return True

    async def metric(self, name: str, **labels: str) -> float:
        return await metric(f"http://127.0.0.1:{self.ops}", name, **labels)

    async def listens(self) -> bool:
        return await self.metric("kvatlas_engine_up") > 0

    async def is_known(self, *names: str) -> None:
        async def it_is() -> bool:
            return await self.knows(*names)

        await until(it_is, lambda: f"{names} everywhere; {self.log[-3000:]}", ignoring=AWAY)

    async def counts(self, outcome: str, number: int) -> None:
        async def it_does() -> bool:
            return await self.metric("kvatlas_config_reloads_total", outcome=outcome) == number

        await until(it_does, lambda: f"{number} {outcome}; {self.log[-3000:]}", ignoring=AWAY)


@asynccontextmanager
async def serving(folder: Path, workers: int) -> AsyncIterator[Serving]:
    async with running({}) as engines:
        router = Serving(folder, workers)
        router.engines = [engines[0].base_url]
        router.write("one")
        await router.start()
        try:
            await router.is_known("one")
            yield router
        finally:
            status = await router.stop()
        assert status == 0, router.log


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_new_configuration_is_taken_and_a_bad_one_is_not(tmp_path: Path, workers: int) -> None:
    async with serving(tmp_path, workers) as router:
        router.write("two", server='log_format = "json"', more="[prompts]\nworker_threads = 3")
        router.hup()
        await router.is_known("two")
        await router.counts("applied", 1)
        assert await router.metric("kvatlas_config_waiting") == 1
        assert "prompts.worker_threads" in router.log

        router.write("three", more="[policy]\nspread = -1")
        router.hup()
        await router.counts("refused", 1)
        assert await router.knows("two")
        assert "policy.spread" in router.log

        router.write("three", more='[models.m]\ntokenizer = "/nowhere"')
        router.hup()
        await router.counts("refused", 2)
        assert await router.knows("two")

        router.write("two")
        router.hup()
        await router.counts("applied", 2)  # of the log's format
        router.hup()
        await router.counts("unchanged", 1)
        assert await router.metric("kvatlas_config_waiting") == 0


async def test_a_replacement_worker_has_the_applied_configuration(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as router:
        router.write("two")
        router.hup()
        await router.is_known("two")
        before = router.children()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(set(router.children()) - set(before)) == 2, "both are replaced")
        await router.is_known("two")


async def test_many_signals_together_end_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, 2) as router:
        pids = router.children()
        for number in range(20):
            router.write(f"name{number}")
            router.hup()
        await router.is_known("name19")
        assert router.children() == pids
