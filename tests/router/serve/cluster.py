"""A cluster of processes: engines as pods known to an API server, routers behind a load balancer, and load.

What a kubelet, a Deployment and a Service do is done here, in their order: a new pod is listed before it
answers, is ready when it does, and the old one is terminated only after its preStop hook saw it idle. The
load balancer sends to routers whose ``/ready`` said yes when it looked last, and no client ever tries twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import aiohttp
import msgspec

from tests.support.kube_api import PODS, FakeKube, kube_api
from tests.support.kube_objects import pod
from tests.support.ports import free_port
from tests.support.processes import Replica, ended
from tests.support.waiting import HANG_S, WAIT_S, patience, until

LOOK_S = 0.1
"""How often the load balancer asks /ready."""
MODEL = "kvatlas-demo"
WORDS = ("the", "quick", "router", "reads", "a", "long", "story", "about", "an", "engine")
ENGINE = {
    "groups": "gptoss-like",
    "num_blocks": 1500,
    "prefill_s_per_token": 1e-6,
    "decode_s_per_token": 0.004,
}


class EnginePod:
    """One pod with its engine process, on an address of its own; all pods use the same ports."""

    def __init__(self, number: int, ports: tuple[int, int, int]) -> None:
        self.name = f"vllm-{number}"
        self.ip = f"127.0.7.{number}"
        self.http, self.events, self.replay = ports
        self.url = f"http://{self.ip}:{self.http}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **changes: Any) -> None:
        command = [sys.executable, "-m", "kvatlas", "engine", "--host", self.ip, "--port", str(self.http)]
        settings = {**ENGINE, **changes, "events_port": self.events, "replay_port": self.replay}
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def shown(self, *, ready: bool, grace_s: float | None = None) -> dict[str, Any]:
        """The pod as the API server has it; ``grace_s``: it terminates, after this time at the latest."""
        ports = {"http": self.http, "kv-events": self.events, "kv-replay": self.replay}
        made = pod(self.name, self.ip, ready=ready, terminating=grace_s is not None, ports=ports)
        if grace_s is not None:
            ends = datetime.now(UTC) + timedelta(seconds=grace_s)
            made["metadata"]["deletionTimestamp"] = ends.strftime("%Y-%m-%dT%H:%M:%SZ")
        return made

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.terminate()
        return ended(self.process)


class LoadBalancer:
    """Sends to routers that were ready when it looked last."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.routers: list[Replica] = []
        self.ready: list[Replica] = []
        self._session = session
        self._turn = 0

    async def run(self) -> None:
        while True:
            self.ready = [router for router in list(self.routers) if await self._is_ready(router)]
            await asyncio.sleep(LOOK_S)

    async def _is_ready(self, router: Replica) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)  # as a probe of Kubernetes: asked again
            async with self._session.get(f"{router.url}/ready", timeout=timeout) as answer:
                return answer.status == 200
        return False

    def pick(self) -> Replica:
        self._turn += 1
        return self.ready[self._turn % len(self.ready)]


class Load:
    """Users that stream answers and never try twice. ``cut`` and ``failed`` must stay empty."""

    def __init__(self, balancer: LoadBalancer, session: aiohttp.ClientSession) -> None:
        self.failed: list[str] = []
        self.cut: list[str] = []
        self.whole = 0
        self.by_engine: dict[str, int] = {}
        self._balancer = balancer
        self._session = session
        self._rng = random.Random(11)
        self._systems = [" ".join(self._rng.choices(WORDS, k=120)) for _ in range(4)]
        self._stopping = False
        self.lengths: tuple[int, ...] = (5, 40, 150)
        """Tokens of answers."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, users: int) -> None:
        self._tasks = [asyncio.create_task(self._user()) for _ in range(users)]

    async def stop(self) -> None:
        """No more requests; those that run are waited for."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def more(self, count: int) -> None:
        goal = self.whole + count
        await until(lambda: self.whole >= goal or self.failed or self.cut, f"{count} more answers")

    async def _user(self) -> None:
        while not self._stopping:
            tokens = self._rng.choice(self.lengths)
            router = self._balancer.pick()
            body = {
                "model": MODEL,
                "messages": [
                    {"role": "system", "content": self._rng.choice(self._systems)},
                    {"role": "user", "content": " ".join(self._rng.choices(WORDS, k=12))},
                ],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            began = False
            try:
                url = f"{router.url}/v1/chat/completions"
                timeout = aiohttp.ClientTimeout(total=HANG_S)
                async with self._session.post(url, json=body, timeout=timeout) as answer:
                    if answer.status != 200:
                        self.failed.append(f"{router.name}: {answer.status} {await answer.text()}")
                        continue
                    engine = answer.headers.get("x-kvatlas-engine", "?")
                    received = bytearray()
                    async for piece in answer.content.iter_any():
                        began = True
                        received += piece
                    self._judge(bytes(received), tokens, f"{router.name} {engine}")
                    self.by_engine[engine] = self.by_engine.get(engine, 0) + 1
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                (self.cut if began else self.failed).append(f"{router.name}: {error!r}")

    def _judge(self, received: bytes, tokens: int, where: str) -> None:
        events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")]
        if not events or events[-1].strip() != b"[DONE]":
            self.cut.append(f"{where}: no end: {events[-1:]}")
            return
        chunks = [msgspec.json.decode(event) for event in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        if any("error" in chunk for chunk in chunks) or reasons != ["length"] or len(choices) < tokens:
            self.cut.append(f"{where}: {reasons} after {len(choices)} of {tokens}: {events[-2:]}")
        else:
            self.whole += 1


class Cluster:
    """Everything of one test."""

    def __init__(self, kube: FakeKube, index: str, session: aiohttp.ClientSession, *settings: str) -> None:
        self.kube = kube
        self.balancer = LoadBalancer(session)
        self.load = Load(self.balancer, session)
        self.pods: list[EnginePod] = []
        self.session = session
        self._index = index
        self._settings = settings
        self._numbers = iter(range(1, 250))
        self._names = iter(range(1000))
        self._ports = (free_port(), free_port(), free_port())
        self.made: list[Replica] = []
        self.engine: dict[str, Any] = {}
        """Settings of engines that differ from ``ENGINE``."""
        self.grace_s = 30.0
        """Of their pods."""

    # -- engines --------------------------------------------------------------------------------------

    async def add_engine(self) -> EnginePod:
        """A pod is made, listed, and ready when its engine answers."""
        one = EnginePod(next(self._numbers), self._ports)
        one.start(**self.engine)
        self.pods.append(one)
        await self.kube.put(PODS, one.shown(ready=False))
        await until(lambda: self._answers(one), f"{one.name} answers")
        await self.kube.put(PODS, one.shown(ready=True))
        return one

    async def end_engine(self, one: EnginePod) -> None:
        """Deleted: shown as terminating, its preStop hook waits until it is idle, then SIGTERM, then gone.

        The hook waits until the routers have heard, for which it has a few seconds in a real cluster.
        """
        await self.kube.put(PODS, one.shown(ready=True, grace_s=self.grace_s))
        for router in self.routers:
            await until(partial(self._is_held, router, one), f"{router.name} holds {one.name}")
        await until(lambda: self._is_idle(one), f"{one.name} idle")
        served = await self._served(one)
        await self.load.more(8)
        assert await self._served(one) == served, f"{one.name} got new requests while terminating"
        assert await asyncio.to_thread(one.terminate) == 0
        await self.kube.delete(PODS, one.name)
        self.pods.remove(one)

    async def knows(self, router: Replica) -> dict[str, dict[str, Any]]:
        """Engines as a router sees them."""
        return {
            engine["engine"]: engine for engine in await self.ask(f"{router.ops_url}/kvatlas/engines") or ()
        }

    async def _is_held(self, router: Replica, one: EnginePod) -> bool:
        engine = (await self.knows(router)).get(one.url)
        return engine is None or engine["on_hold"] == "terminating"

    async def _answers(self, one: EnginePod) -> bool:
        return await self.ask(f"{one.url}/v1/models") is not None

    async def _is_idle(self, one: EnginePod) -> bool:
        page = await self.ask(f"{one.url}/metrics") or ""
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_")]
        return bool(lines) and all(float(line.rpartition(" ")[2]) == 0 for line in lines)

    async def _served(self, one: EnginePod) -> float:
        page = await self.ask(f"{one.url}/metrics") or ""
        lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total")]
        assert lines
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def ask(self, url: str) -> Any:
        """A page; None while there is none."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            # A page that does not come is asked for again.
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                payload = await answer.read()
                if answer.status != 200:
                    return None
                is_json = answer.content_type == "application/json"
                return msgspec.json.decode(payload) if is_json else payload.decode()
        return None

    # -- routers --------------------------------------------------------------------------------------

    @property
    def routers(self) -> list[Replica]:
        """Those that take requests."""
        return self.balancer.routers

    async def add_router(self) -> Replica:
        """A router process, in the load balancer as soon as it is ready."""
        settings = [
            "fleet.kubernetes.selector=app=vllm",
            "fleet.kubernetes.namespaces=serving",
            f"fleet.kubernetes.api={self.kube.url}",
            # In which the load balancer, that looks every ``LOOK_S``, has to notice.
            f"listen.drain_delay_s={1.5 * patience()}",
            f"listen.drain_s_max={WAIT_S}",
            *self._settings,
        ]
        router = Replica(f"router-{next(self._names)}", [], self._index, *settings)
        self.made.append(router)
        router.start()
        self.routers.append(router)
        await until(lambda: router in self.balancer.ready, f"{router.name} ready")
        return router

    async def end_router(self, router: Replica) -> None:
        """SIGTERM; the load balancer learns of it from /ready alone."""
        status = await asyncio.to_thread(router.stop)
        self.routers.remove(router)
        assert status == 0


@asynccontextmanager
async def cluster(index: str = "", *settings: str) -> AsyncIterator[Cluster]:
    """An API server, a load balancer, no engine and no router."""
    connector = aiohttp.TCPConnector(limit=0)
    async with kube_api() as kube, aiohttp.ClientSession(connector=connector) as session:
        made = Cluster(kube, index, session, *settings)
        balancing = asyncio.create_task(made.balancer.run())
        try:
            yield made
        finally:
            balancing.cancel()
            await asyncio.gather(balancing, return_exceptions=True)
            for router in made.made:
                if router.process is not None and router.process.returncode is None:
                    router.process.kill()
                    await asyncio.to_thread(router.stop)
            for one in made.pods:
                if one.process is not None and one.process.poll() is None:
                    one.process.kill()
                    one.process.wait()
