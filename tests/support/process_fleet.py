"""A fleet in real processes under load: engines, a server, replicas, and clients that count every answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.simulation.demo.engines import engine_process
from kvatlas.router.tools.index import verify_scope
from kvatlas.router.tools.index_reader import read_scope
from kvatlas.router.tools.index_verifier import EngineDiff
from tests.support.processes import Replica, replicas
from tests.support.waiting import WAIT_S, patience, until

WORDS = ("the", "quick", "router", "reads", "a", "long", "story", "about", "an", "engine")
MODEL = "kvatlas-demo"
_UNDER_WAY_MAX = 1024
QUICK = EngineSettings(
    groups="gptoss-like",
    num_blocks=600,
    prefill_s_per_token=1e-6,
    decode_s_per_token=1e-4,
    max_num_batched_tokens=2048,
)
LEASE_S = 3.0
SETTINGS = (f"index.lease_s={LEASE_S}", "index.lookup_timeout_s=0.25")
"""Short leases; a long look-up deadline, as the machines that run tests are slow and crowded."""


class Clients:
    """Conversations sent to the replicas in turn, as a load balancer would: a request that no replica has
    begun to answer goes to the next one. ``failures`` must stay empty."""

    def __init__(self, members: list[Replica], session: aiohttp.ClientSession) -> None:
        self.members = members
        self.failures: list[str] = []
        self.answered = 0
        self.retried = 0
        self.compared: list[tuple[int, int]] = []
        self._session = session
        self._turn = 0
        self._rng = random.Random(5)
        self._systems = [self._text(150) for _ in range(4)]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self, users: int = 3) -> None:
        self._tasks = [asyncio.create_task(self._user()) for _ in range(users)]

    async def stop(self) -> None:
        """End all users. aiohttp turns a cancellation into ``TimeoutError`` where its time-out is due in the
        same turn of the loop, as after a test that has held the loop."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, count: int = 10) -> None:
        """Wait for that many more answers."""
        goal = self.answered + count
        await until(lambda: self.answered >= goal or self.failures, "more answers")

    async def _user(self) -> None:
        while not self._stopping:
            messages = [{"role": "system", "content": self._rng.choice(self._systems)}]
            for _ in range(3):
                messages.append({"role": "user", "content": self._text(20)})
                answer = await self.ask(messages)
                messages.append({"role": "assistant", "content": answer or "nothing"})

    async def ask(self, messages: list[dict[str, str]], **fields: Any) -> str | None:
        """One request, by way of whichever replica takes it."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}
        for _ in range(8):
            if self._stopping:
                return None
            member = self.members[self._turn % len(self.members)]
            self._turn += 1
            try:
                # Short: a replica that stands still is left for another one.
                slow = patience()
                timeout = aiohttp.ClientTimeout(total=20 * slow, connect=2 * slow, sock_read=1.5 * slow)
                url = f"{member.url}/v1/chat/completions"
                async with self._session.post(url, json=body, timeout=timeout) as answer:
                    payload = await answer.read()
                    if answer.status == 503 and b"draining" in payload:
                        continue
                    if answer.status != 200:
                        self.failures.append(f"{member.name}: {answer.status} {payload[:200]!r}")
                        return None
                    return self._note(answer, msgspec.json.decode(payload))
            except (aiohttp.ClientError, TimeoutError, OSError):
                self.retried += 1
                await asyncio.sleep(0.05)
        self.failures.append("no replica answered")
        return None

    def _note(self, answer: aiohttp.ClientResponse, body: Any) -> str:
        self.answered += 1
        predicted = answer.headers.get("x-kvatlas-hit-tokens")
        details = body["usage"].get("prompt_tokens_details") or {}
        if predicted is not None:
            self.compared.append((int(predicted), details.get("cached_tokens") or 0))
        return str(body["choices"][0]["message"]["content"])

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=words))


class Fleet:
    """Everything of one test."""

    def __init__(self, index: str, engines: list[str], members: list[Replica], clients: Clients) -> None:
        self.index = index
        self.engines = engines
        self.members = members
        self.clients = clients
        self._session = clients._session

    async def get(self, member: Replica, path: str) -> Any:
        """A control page of a replica; None while it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            timeout = aiohttp.ClientTimeout(total=2)  # it is asked again
            async with self._session.get(member.ops_url + path, timeout=timeout) as answer:
                payload = await answer.read()
                return (
                    msgspec.json.decode(payload)
                    if answer.content_type == "application/json"
                    else payload.decode()
                )
        return None

    async def metric(self, member: Replica, name: str) -> float:
        """The sum over all series of one metric."""
        page = await self.get(member, "/metrics") or ""
        lines = [line for line in page.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def holders(self) -> dict[str, str]:
        """Engine -> the replica whose lease has not expired, by a registry that was written to these
        servers."""
        client = Client(IndexSettings(url=self.index))
        try:
            if not await client.start(2.0):
                return {}
            snapshot = await read_scope(client, MODEL)
            if snapshot is None or snapshot.view.scope.server_identity != client.identity:
                return {}
            complete = snapshot.view.slots.keys() & snapshot.addresses.keys()
            return {e: lease.holder for e, lease in snapshot.leases.items() if lease.held and e in complete}
        except IndexUnavailable:
            return {}
        finally:
            await client.close()

    async def settled(self, among: set[str] | None = None) -> None:
        """Every engine is followed by one of ``among`` (default: any replica), and known to be caught up."""
        names = among or {member.name for member in self.members}

        async def complete() -> bool:
            held = await self.holders()
            if set(held) != set(self.engines) or not set(held.values()) <= names:
                return False
            for member in self.members:
                if member.name in names:
                    ready = await self.get(member, "/ready") or {"engines": {}}
                    feeds = [engine["feed"] for engine in ready["engines"].values()]
                    if len(feeds) != len(self.engines) or set(feeds) != {"ready"}:
                        return False
            return True

        await until(complete, f"every engine followed by {names}")

    async def verify(self) -> list[EngineDiff]:
        """``kvatlas index verify`` on a fleet at work; every difference that stays."""
        client = Client(IndexSettings(url=self.index))
        try:
            assert await client.start(WAIT_S)
            snapshot = await read_scope(client, MODEL)
            assert snapshot is not None
            return await verify_scope(client, snapshot, {}, settle_s=5.0 * patience())
        finally:
            await client.close()

    async def check_exact(self) -> None:
        """The index says of every engine what its feed says, and no client saw an error."""
        diffs = await self.verify()
        assert {diff.engine for diff in diffs} >= set(self.engines)
        assert all(diff.exact for diff in diffs), diffs
        assert sum(diff.resident for diff in diffs) > 0
        assert self.clients.failures == []


class Relay:
    """A way to a server on this machine. Bytes take ``delay_s`` each way, as over a distance: what is sent
    meanwhile is not held up by what was sent before."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._delay_s = delay_s
        self.url = ""
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass_on(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop, under_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](_UNDER_WAY_MAX)

        async def read() -> None:
            data = b"-"
            while data:
                data = await source.read(1 << 16)
                await under_way.put((loop.time() + self._delay_s, data))

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read())
                while True:
                    due_s, data = await under_way.get()
                    await asyncio.sleep(due_s - loop.time())
                    if not data:
                        break
                    target.write(data)
                    await target.drain()
        except* OSError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def fleet(index: str, *, tools: str | None = None, engines: int = 3) -> AsyncIterator[Fleet]:
    """Two replicas in processes of their own at work, every engine followed. ``tools``: the URL to look at
    the index with, if another."""
    with engine_process([QUICK] * engines) as urls, replicas(2, urls, index, *SETTINGS) as members:
        async with aiohttp.ClientSession() as session:
            clients = Clients(members, session)
            made = Fleet(tools or index, urls, members, clients)
            await made.settled()
            clients.start()
            try:
                await clients.more(20)
                yield made
            finally:
                await clients.stop()
