"""Keys, a queue, isolated caches, pulls, engines ended by SIGKILL and SIGTERM or stopped for a while, clients
that leave, and reloads, all at once: with one worker, with two, and with two routers on a Redis 20 ms away.

Every request is answered, or refused by a rule; no answer is one that an engine aborted, that it computed
from other KV or from another tenant's, or that belongs to another tenant; and nothing is left open, at
routers and at engines. ``KVATLAS_SOAK_S``: for how long (default 20 s; 600 before a release).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.admission.key_file import digest_of
from tests.router.serve.test_reload import Serving, metric
from tests.support.ports import free_port
from tests.support.process_fleet import Relay
from tests.support.processes import EngineProcess
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import RUN_S, run_real, until
from tests.support.whole_router import MODEL, TEXT

ENGINES = 3
SECONDS = float(os.environ.get("KVATLAS_SOAK_S", "20"))
pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(SECONDS + 600)]
LIMITS = {
    "free": "",
    "few": "requests_per_minute = 60",
    "one": "concurrent_requests = 1",
    "cheap": "uncached_tokens_per_minute = 20000",
    "low": 'priority = "low"',
}
CLIENTS = {"nobody": 1, "free": 40}
REFUSALS = {"invalid_api_key": 401, "rate_limit_exceeded": 429, "queue_full": 429, "queue_timeout": 503}
"""Permitted errors; each occurs at least once, given time."""
LONG_S = 600.0
"""In a shorter soak not everything happens: on a busy machine clients may be too slow to fill the queue."""
FAULTS = {
    "no_ready_engine": 503,
    "engine_unreachable": 502,
    "engine_stream_broken": 502,
    "engine_timeout": 504,
    "engine_died": 503,
    "request_ends_engines": 503,
}
"""Further ones, since engines are killed."""
ABORTED = re.compile(rb'"(?:finish_reason|stop_reason)": ?"abort"|"status": ?"cancelled"')
"""vLLM's words for an answer that it gave up (``FinishReason.ABORT``, vLLM 0.32)."""
WRONG = b"WRONG KV CACHE"
"""The simulated engine's answer where it computes from another prompt's KV."""
RESPONSES_MAX = 200
SECRETS_MAX = 50
REDIS_S = 0.02
"""Time to Redis and back."""
ENGINE = EngineSettings(
    prefill_s_per_token=5e-4,
    decode_s_per_token=5e-3,
    num_blocks=600,
    kv_connector="offloading",
    host_blocks=4000,
    handshake_timeout_s=1.0,
)


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, folder: Path, workers: int, indexes: list[str]) -> None:
        """``indexes``: the shared index of each router; empty: one in its memory."""
        self.folder, self.indexes = folder, indexes
        self.keys, self.secret = folder / "keys.toml", folder / "secret"
        self.secret.write_text("a secret of 32 bytes or more than that")
        self.routers: list[Serving] = []
        for number in range(len(indexes)):
            own = folder / f"router{number}"
            own.mkdir()
            self.routers.append(Serving(own, workers))
        self.secrets: dict[str, set[str]] = {}
        """Latest prompts that begin with something unique, and the tenants that sent them."""
        self.held: set[str] = set()
        """Of these: an engine has answered one, so it holds the prompt of that tenant."""
        self.unseen = 0
        """Answers to prompts that were held for other tenants."""
        self.responses: dict[str, str] = {}
        """Tenants by the ids of their latest responses."""
        self.looked = 0
        self.engines: list[EngineProcess] = []
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.faults: list[str] = []
        self.rng = random.Random(7)
        self.kills = self.terminations = self.stops = self.reloads = 0
        self.open: dict[str, float] = {}

    async def engine(self) -> None:
        made = EngineProcess(msgspec.structs.replace(ENGINE, side_channel_port=free_port()))
        await made.start()
        self.engines.append(made)

    def write(self) -> None:
        names = [*LIMITS, *([] if self.reloads % 2 else ["late"])]
        text = "".join(f"[tenants.{name}]\n{LIMITS.get(name, '')}\n" for name in names)
        text += "".join(
            f'[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(f"key-{name}")}"\n' for name in names
        )
        part = self.folder / "part"
        part.write_text(text)
        part.replace(self.keys)
        queue, length = self.rng.choice([0.05, 0.2]), self.rng.choice([4, 10])
        more = f'[keys]\nfile = "{self.keys}"\nisolate = "tenant"\nisolate_secret_file = "{self.secret}"\n'
        more += "[pull]\nenabled = true\n[fleet]\npoll_interval_s = 0.5\n"
        more += f"[queue]\nsaturation_s = {queue}\nrequests_max = {length}\nwait_s_max = 2\n"
        more += f"engine_requests_max = {self.rng.choice([2, 4])}\n"
        for router, url in zip(self.routers, self.indexes, strict=True):
            router.engines = [engine.base_url for engine in self.engines]
            ports = {engine.base_url: engine.settings.side_channel_port for engine in self.engines}
            router.sources = {url: f"127.0.0.1:{port}" for url, port in ports.items()}
            shared = f'[index]\nurl = "{url}"\nlookup_timeout_s = 0.25\n' if url else ""
            router.write("name", more + shared)

    def url(self, path: str) -> str:
        """At any router."""
        return f"http://127.0.0.1:{self.rng.choice(self.routers).port}/v1/{path}"

    async def client(self, tenant: str, end: float) -> None:
        headers = {"authorization": f"Bearer key-{tenant}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while time.monotonic() < end:
                text = TEXT * self.rng.randint(1, 60) + str(self.rng.randint(0, 20))
                path, body = self.request(tenant, text)
                try:
                    leaves = 0.05 if self.rng.random() < 0.05 else None
                    timeout = {"x-request-timeout": self.rng.choice(["0.1", "5"])}
                    async with asyncio.timeout(leaves):
                        if self.responses and self.rng.random() < 0.1:
                            await self.look(session, tenant)
                        await self.ask(session, path, body, timeout, tenant)
                except TimeoutError:
                    self.outcomes[0, "the client left"] += 1

    def request(self, tenant: str, text: str) -> tuple[str, dict[str, Any]]:
        """A chat, a response that the engine stores, or a completion with several prompts."""
        body: dict[str, Any] = {"model": self.rng.choice([MODEL, "name"]), "stream": self.rng.random() < 0.7}
        kind, tokens = self.rng.random(), self.rng.randint(1, 200)
        if kind < 0.1:
            return "responses", {**body, "stream": False, "input": text, "max_output_tokens": tokens}
        body["max_tokens"] = tokens
        if kind < 0.2:
            text, body["stream"] = self.new_to(tenant), False
            return "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
        if kind < 0.3:
            return "completions", {**body, "prompt": [text, f"{tenant} {text}"]}
        return "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}

    def new_to(self, tenant: str) -> str:
        """A text that no engine has had from this tenant, and if possible one has from another."""
        new = [text for text, senders in self.secrets.items() if tenant not in senders]
        held = [text for text in new if text in self.held]
        if not new or (not held and self.rng.random() < 0.1):
            if len(self.secrets) >= SECRETS_MAX:
                oldest = next(iter(self.secrets))
                del self.secrets[oldest]
                self.held.discard(oldest)
            new = [f"{self.rng.getrandbits(64)} " + TEXT * 20]
        text = self.rng.choice(held or new)
        self.secrets.setdefault(text, set()).add(tenant)
        return text

    async def look(self, session: aiohttp.ClientSession, tenant: str) -> None:
        """A stored response, of whichever tenant."""
        held, owner = self.rng.choice(list(self.responses.items()))
        try:
            async with session.get(self.url(f"responses/{held}")) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return
        self.looked += 1
        if answer.status == 200 and owner != tenant:
            self.faults.append(f"{tenant} saw a response of {owner}: {raw[:200]!r}")

    async def ask(
        self, session: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str], tenant: str
    ) -> None:
        try:
            async with session.post(self.url(path), json=body, headers=headers) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return
        code = ""
        if answer.status != 200:
            code = str(msgspec.json.decode(raw)["error"]["code"])
            if (REFUSALS | FAULTS).get(code) != answer.status:
                self.faults.append(f"{answer.status} {code} {raw[:200]!r}")
            if code in REFUSALS and "messages" in body:
                self.secrets.get(body["messages"][0]["content"], set()).discard(tenant)
            await asyncio.sleep(0.02)  # a client that is refused does not ask again at once
        elif body["stream"] and not raw.rstrip().endswith(b"data: [DONE]"):
            code = "engine_stream_broken"
            if code.encode() not in raw:
                self.faults.append(f"a stream ended with {raw[-200:]!r}")
        elif not body["stream"]:
            self.answered(path, body, msgspec.json.decode(raw), tenant)
        if ABORTED.search(raw) and code != "engine_stream_broken":
            self.faults.append(f"an engine's abort was passed on: {raw[-300:]!r}")
        if WRONG in raw:
            self.faults.append(f"an answer of other KV: {raw[:300]!r}")
        self.outcomes[answer.status, code] += 1

    def answered(self, path: str, body: Any, answer: Any, tenant: str) -> None:
        if path == "responses":
            if len(self.responses) >= RESPONSES_MAX:
                del self.responses[next(iter(self.responses))]
            self.responses[answer["id"]] = tenant
        elif path == "chat/completions" and (text := body["messages"][0]["content"]) in self.secrets:
            self.unseen += text in self.held
            self.held.add(text)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached:
                self.faults.append(f"{tenant} hit {cached} tokens of another tenant: {answer}")

    async def trouble(self, end: float) -> None:
        """Stops an engine for a while, or ends it, and starts it again at the same address or another one
        elsewhere, which a reload says, again and again."""
        while time.monotonic() + 3 < end:
            await asyncio.sleep(self.rng.uniform(0.5, 2.0))
            if self.rng.random() < 0.3:
                with self.rng.choice(self.engines).standing_still():
                    await asyncio.sleep(self.rng.uniform(0.1, 3.0))
                self.stops += 1
                continue
            victim = self.engines.pop(0)
            if self.rng.random() < 0.5:
                await victim.kill()
                self.kills += 1
            else:
                await victim.terminate()
                self.terminations += 1
            if self.rng.random() < 0.5:
                await victim.start()
                self.engines.append(victim)
            else:
                await self.engine()
            self.reloads += 1
            self.write()
            for router in self.routers:
                router.hup()

    async def metric(self, name: str, **labels: str) -> float:
        """Of all routers together."""
        return sum([await router.metric(f"kvatlas_{name}", **labels) for router in self.routers])

    async def over(self) -> bool:
        """No account has anything open, and no engine."""
        names = ("proxy_requests_active", "queue_waiting", "tenant_active", "inflight_prompts")
        self.open = {name: await self.metric(name) for name in names}
        for engine in self.engines:
            for name in ("num_requests_running", "num_requests_waiting"):
                self.open[f"{engine.base_url} {name}"] = await metric(engine.base_url, f"vllm:{name}")
        return not any(self.open.values())


@asynccontextmanager
async def redis_far_away() -> AsyncIterator[str]:
    with Server(any_program()) as server:
        async with Relay(server.port, REDIS_S / 2) as relay:
            yield relay.url


@pytest.mark.parametrize(("routers", "workers"), [(1, 1), (1, 2), (2, 1)], ids=["one", "workers", "redis"])
def test_every_request_is_answered_or_refused_by_a_rule(tmp_path: Path, routers: int, workers: int) -> None:
    run_real(soaked(tmp_path, routers, workers), SECONDS + RUN_S)


async def soaked(tmp_path: Path, routers: int, workers: int) -> None:
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(redis_far_away()) if routers > 1 else ""
        soak = Soak(tmp_path, workers, [index] * routers)
        for _ in range(ENGINES):
            await soak.engine()
        soak.write()
        try:
            for router in soak.routers:
                await router.start()
            for one in soak.routers:
                log = partial("{0.log}".format, one)
                await until(one.listens, log, ignoring=(OSError, aiohttp.ClientError))
            end = time.monotonic() + SECONDS
            async with asyncio.TaskGroup() as tasks:
                for tenant in (*LIMITS, "late", "nobody"):
                    for _ in range(CLIENTS.get(tenant, 4)):
                        tasks.create_task(soak.client(tenant, end))
                tasks.create_task(soak.trouble(end))
            await until(soak.over, lambda: f"every account is back to zero: {soak.open}")
            refused = await soak.metric("config_reloads_total", outcome="refused")
            admitted = await soak.metric("load_admitted_total")
            closed = [await soak.metric(f"load_{name}_total") for name in ("finished", "failed")]
            pulls = await soak.metric("pulls_total")
            lookups = await soak.metric("shared_index_lookups_total")
        finally:
            statuses = [await router.stop() for router in soak.routers]
            for engine in soak.engines:
                await engine.kill()
    print(
        f"{SECONDS:.0f} s, {routers} routers of {workers} workers, {soak.kills} kills, "
        f"{soak.terminations} terminations, {soak.stops} stops, {soak.reloads} reloads, {pulls:.0f} pulls, "
        f"{lookups:.0f} look-ups in Redis, {soak.looked} looks, {soak.unseen} prompts held for another "
        f"tenant: {dict(soak.outcomes)}"
    )
    assert soak.faults == []
    assert (statuses, refused) == ([0] * routers, 0), [router.log[-5000:] for router in soak.routers]
    assert admitted == sum(closed)
    assert (lookups > 0) == (routers > 1)
    codes = Counter(code for _, code in soak.outcomes.elements())
    assert codes[""] > 0, soak.outcomes
    if SECONDS >= LONG_S:
        happened = [soak.kills, soak.terminations, soak.stops, soak.reloads, soak.looked, soak.unseen, pulls]
        assert min(*[codes[code] for code in ("", *REFUSALS)], *happened) > 0, soak.outcomes
