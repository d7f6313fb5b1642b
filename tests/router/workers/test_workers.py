"""``kvatlas serve --workers N``: one router to its clients, whichever process answers, and whichever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.app import Router
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.workers.context import WorkerSockets
from tests.support.ports import free_port
from tests.support.proxy_rig import Call, Engine, answer
from tests.support.waiting import run_real, until
from tests.support.whole_router import MODEL, QUICK, TEXT, configure, running, tenants

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
TOKEN = "a-token-for-the-test"


class Serving:
    """``kvatlas serve`` with several workers, and a client."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, ops: int, count: int) -> None:
        self.process, self.count = process, count
        self.url, self.ops = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops}"
        self.asked = 0
        """Requests that had their answer, from any worker."""

    def workers(self) -> list[int]:
        """Process ids, in the order of their start."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    async def chat(self, text: str = TEXT, *, key: str = "", **fields: Any) -> aiohttp.ClientResponse:
        """One chat on a connection of its own, so that any worker may get it."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}
        url = f"{self.url}/v1/chat/completions"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json=body) as answer,
        ):
            await answer.read()
            self.asked += 1
            return answer

    async def response(self, text: str) -> str:
        """The id of a new response, by any worker."""
        body = {"model": MODEL, "input": text, "max_output_tokens": 3}
        url = f"{self.url}/v1/responses"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            made = str((await answer.json())["id"])
            self.asked += 1
            return made

    async def has(self, response: str) -> bool:
        """Whether the response is had, by any worker."""
        url = f"{self.url}/v1/responses/{response}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            await answer.read()
            self.asked += 1
            return answer.status == 200

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.ops + path) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        families = text_string_to_metric_families(await self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    async def counted(self) -> None:
        """Every worker has reported what it answered: a page has its last known counts if it comes too late
        for that page."""

        async def all_there() -> bool:
            return await self.metric("kvatlas_requests_total") == self.asked

        await until(all_there, "all requests are counted, once")

    async def all_of(self, page: str, count: int) -> list[Any]:
        """A list of what this many requests left, at whichever workers."""
        found: list[Any] = []

        async def all_there() -> bool:
            found[:] = await self.get(f"/kvatlas/{page}")
            return len(found) == count

        await until(all_there, f"all workers' {page}")
        return found

    async def ready(self) -> None:
        """Every worker is there and has its feeds."""

        async def all_there() -> bool:
            up = await self.metric("kvatlas_worker_up")
            ready = await self.metric("kvatlas_feed_state", state="ready")
            behind = await self.metric("kvatlas_feed_state") - ready
            return up == self.count and ready > 0 and not behind

        await until(all_there, "all workers that know their engines", ignoring=(OSError, aiohttp.ClientError))

    async def admin(self, path: str, body: Any) -> Any:
        """A change by the admin API, on the port of everybody."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/admin/engines{path}", json=body, headers=headers) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await answer.json()


@asynccontextmanager
async def serving(
    engines: list[SimulatedEngine], folder: Path, workers: int = 3, **settings: str
) -> AsyncIterator[Serving]:
    (folder / "tokens").write_text(f"ada:{TOKEN}\n")
    port, ops = free_port(), free_port()
    words = [
        "serve",
        "--workers",
        str(workers),
        "--port",
        str(port),
        "--ops-port",
        str(ops),
        "--expose-decision",
    ]
    words += ["--tokenizer", str(DEMO_TOKENIZER_DIR), "--set", "fleet.poll_interval_s=0.2"]
    words += ["--set", "admin.enabled=true", "--set", f"admin.token_file={folder / 'tokens'}"]
    words += [word for key, value in settings.items() for word in ("--set", f"keys.{key}={value}")]
    words += [word for engine in engines for word in ("--engine", engine.base_url)]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvatlas", *words, stderr=log)
    router = Serving(process, port, ops, workers)
    try:
        await router.ready()
        yield router
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await process.wait()
        finally:
            print((folder / "log").read_text())


def test_three_workers_are_one_router_whichever_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with running({}, {}) as engines, serving(engines, tmp_path) as router:
            assert len(router.workers()) == 3
            for _ in range(12):
                assert (await router.chat()).status == 200
            await router.counted()
            # Each of these leaves out a worker that does not answer in time.
            await router.all_of("receipts", 12)
            answers = await router.all_of("answers", 12)
            assert [one["status"] for one in answers] == ["200"] * 12
            assert [one["at_s"] for one in answers] == sorted(one["at_s"] for one in answers)
            for one in answers:  # whichever worker it was at
                for page in ("answers", "receipts"):
                    (found,) = await router.all_of(f"{page}?request_id={one['request_id']}", 1)
                    assert found["request_id"] == one["request_id"]

            async def summed() -> bool:
                history, views = await router.get("/kvatlas/history"), await router.get("/kvatlas/engines")
                assert {interval["engines"] for interval in history["intervals"]} <= {0, 2}
                ended = sum(interval["requests"] for interval in history["intervals"])
                return ended == sum(sum(view["receipts"].values()) for view in views) == 12

            await until(summed, "history and receipts are those of all workers")

            async def is_shared() -> bool:
                assert (await router.chat("A long document. " * 600)).status == 200
                return await router.metric("kvatlas_prompts_shared_hits_total") > 0

            await until(is_shared, "a worker finds the prompt that another one has read")

            # A response is found where it is kept, whichever worker is asked for it.
            made = [await router.response(f"{number} {TEXT}") for number in range(4)]
            for _ in range(6):
                for name in made:
                    await until(partial(router.has, name), "the worker knows which engine has it")

            # What an administrator says at any worker holds at all.
            await router.admin("/drain", {"engine": engines[0].base_url})
            chosen = {(await router.chat()).headers["x-kvatlas-engine"] for _ in range(12)}
            assert chosen == {engines[1].base_url}

            for victim in (router.workers()[-1], router.workers()[0]):  # any worker; then the lead
                await router.counted()
                before = set(router.workers())
                os.kill(victim, signal.SIGKILL)
                await until(partial(_changed, router, before), "it is gone")
                await router.ready()
                assert len(router.workers()) == 3
                assert await router.metric("kvatlas_requests_total") == router.asked
                assert await router.metric("kvatlas_prompts_shared_entries") > 0
                chosen = {(await router.chat()).headers["x-kvatlas-engine"] for _ in range(6)}
                assert chosen == {engines[1].base_url}  # its successor knows what was decided
            await until(lambda: _is(router, "kvatlas_worker_restarts_total", 2), "both were replaced")

            pids = router.workers()
            long = asyncio.create_task(router.chat(max_tokens=2000, ignore_eos=True))
            await until(lambda: _is(router, "kvatlas_proxy_requests_active", 1), "it runs")
            router.process.send_signal(signal.SIGTERM)
            assert (await long).status == 200  # drained, not cut
            assert await router.process.wait() == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    run_real(main(), 170)


def _changed(router: Serving, before: set[int]) -> bool:
    return set(router.workers()) != before


async def _is(router: Serving, name: str, number: float) -> bool:
    return await router.metric(name) == number


def test_the_successor_of_a_worker_takes_over_proofs_of_salts(tmp_path: Path) -> None:
    """It asks its siblings before it tries a server itself."""
    keys, secret = tenants(tmp_path, {"ada": ""}), tmp_path / "secret"
    secret.write_text("s" * 32)
    settings = {"file": str(keys.file), "isolate": "tenant", "isolate_secret_file": str(secret)}

    async def main() -> None:
        async with running({}) as engines, serving(engines, tmp_path, workers=2, **settings) as router:
            tries = engines[0].scheduler.stats.finished.values()
            tried = sum(tries)
            assert tried
            before = set(router.workers())
            os.kill(max(before), signal.SIGKILL)
            await until(partial(_changed, router, before), "it is gone")
            await router.ready()
            for _ in range(6):
                assert (await router.chat(key="key-of-ada")).status == 200
            assert sum(tries) == tried + 6

    run_real(main(), 170)


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    async def main() -> None:
        async with running({}) as engines, serving(engines, tmp_path) as router:
            pids = router.workers()
            router.process.kill()
            await until(lambda: not any(_runs(pid) for pid in pids), "the workers ended")

    run_real(main(), 170)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_a_response_is_found_by_the_successor_of_a_worker(tmp_path: Path) -> None:
    """A new worker asks its siblings for what they were told before it began."""

    async with running(QUICK, QUICK, QUICK) as engines, serving(engines, tmp_path) as router:
        made = await router.response(TEXT)

        async def found_by_all() -> bool:
            return all([await router.has(made) for _ in range(24)])  # by any worker each

        # A worker that is killed before it has told its siblings takes what it knows with it.
        await until(found_by_all, "every worker finds it")
        before = set(router.workers())
        os.kill(max(before), signal.SIGKILL)
        await until(lambda: len(set(router.workers()) - before) == 1, "there is another one")
        await router.ready()
        await until(found_by_all, "every worker finds it, the new one too")


_CARDS = msgspec.json.encode({"object": "list", "data": [{"id": "m"}]})


async def _slow_to_say(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
    await engine.go.wait()
    known = call.head.first[1] == "/v1/models"
    writer.write(answer(200, _CARDS) if known else answer(404, b""))


@pytest.mark.parametrize("life", [0, 1])
async def test_only_a_replacement_waits_for_its_first_poll(life: int) -> None:
    async with Engine(_slow_to_say) as engine:
        with closing(WorkerSockets(1, ("127.0.0.1", 0))) as sockets:
            worker = sockets.open_worker(0, life, lambda: None, -1)
            router = Router(configure(EngineAddress(engine.url)), worker=worker)
            begun, leave = asyncio.Event(), asyncio.Event()

            async def works() -> None:
                async with router.running():
                    begun.set()
                    await leave.wait()

            working = asyncio.create_task(works())
            await until(lambda: engine.calls, "the engine is polled")
            if life:
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not begun.is_set()
                engine.go.set()
            await until(begun.is_set, "it may accept")
            assert bool(router.fleet.ready("m")) == bool(life)
            engine.go.set()
            leave.set()
            await working


async def test_a_replacement_begins_though_no_engine_answers() -> None:
    async with Engine(_slow_to_say) as engine:
        with closing(WorkerSockets(1, ("127.0.0.1", 0))) as sockets:
            config = configure(EngineAddress(engine.url))
            fleet = msgspec.structs.replace(config.fleet, poll_timeout_s=0.1)
            config = msgspec.structs.replace(config, fleet=fleet)
            router = Router(config, worker=sockets.open_worker(0, 1, lambda: None, -1))
            async with router.running():
                assert not router.fleet.ready(None)
