"""Keys, a queue, engines ended by SIGKILL and SIGTERM, and reloads, all at once, with one worker and two.

Every request is answered, or refused by a rule; no answer is one that an engine aborted, that it computed
from other KV, or that belongs to another tenant; and nothing is left open. ``KVATLAS_SOAK_S``: for how long
(default 20 s; 600 before a release).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.admission.key_file import digest_of
from tests.router.serve.test_reload import Serving
from tests.support.processes import EngineProcess
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT

ENGINES = 3
SECONDS = float(os.environ.get("KVATLAS_SOAK_S", "20"))
pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(SECONDS + 180)]
LIMITS = {
    "free": "",
    "few": "requests_per_minute = 60",
    "one": "concurrent_requests = 1",
    "cheap": "uncached_tokens_per_minute = 20000",
    "low": 'priority = "low"',
}
CLIENTS = {"nobody": 1, "free": 40}
REFUSALS = {"invalid_api_key": 401, "rate_limit_exceeded": 429, "queue_full": 429, "queue_timeout": 503}
"""What a request may be answered with besides 200, and each is at least once, given time."""
QUEUE_FULL_S = 60.0
"""In a shorter soak a busy machine's clients may be too slow to fill the queue."""
FAULTS = {
    "no_ready_engine": 503,
    "engine_unreachable": 502,
    "engine_stream_broken": 502,
    "engine_timeout": 504,
    "engine_died": 503,
    "request_ends_engines": 503,
}
"""What else, since engines are killed."""
ABORTED = re.compile(rb'"(?:finish_reason|stop_reason)": ?"abort"|"status": ?"cancelled"')
"""vLLM's words for an answer that it gave up (``FinishReason.ABORT``, vLLM 0.32)."""
WRONG = b"WRONG KV CACHE"
"""The simulated engine's answer where it computes from another prompt's KV."""
RESPONSES_MAX = 200
ENGINE = EngineSettings(prefill_s_per_token=5e-4, decode_s_per_token=5e-3, num_blocks=600)


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.keys = folder / "keys.toml"
        self.router = Serving(folder, workers)
        self.responses: dict[str, str] = {}
        """Tenants by the ids of their latest responses."""
        self.looked = 0
        self.engines: list[EngineProcess] = []
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.faults: list[str] = []
        self.rng = random.Random(7)
        self.kills = self.terminations = self.reloads = 0
        self.open: dict[str, float] = {}

    async def engine(self) -> None:
        made = EngineProcess(ENGINE)
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
        more = f'[keys]\nfile = "{self.keys}"\n[fleet]\npoll_interval_s = 0.5\n'
        more += f"[queue]\nsaturation_s = {queue}\nrequests_max = {length}\nwait_s_max = 2\n"
        more += f"engine_requests_max = {self.rng.choice([2, 4])}\n"
        self.router.engines = [engine.base_url for engine in self.engines]
        self.router.write("name", more)

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
            return "completions", {**body, "prompt": [text, f"{tenant} {text}"]}
        return "chat/completions", {**body, "messages": [{"role": "user", "content": text}]}

    async def look(self, session: aiohttp.ClientSession, tenant: str) -> None:
        """A stored response, of whichever tenant."""
        held, owner = self.rng.choice(list(self.responses.items()))
        url = f"http://127.0.0.1:{self.router.port}/v1/responses/{held}"
        try:
            async with session.get(url) as answer:
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
        url = f"http://127.0.0.1:{self.router.port}/v1/{path}"
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                raw = await answer.read()
        except aiohttp.ClientError as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            return
        code = ""
        if answer.status != 200:
            code = str(msgspec.json.decode(raw)["error"]["code"])
            if (REFUSALS | FAULTS).get(code) != answer.status:
                self.faults.append(f"{answer.status} {code} {raw[:200]!r}")
            await asyncio.sleep(0.02)  # a client that is refused does not ask again at once
        elif body["stream"] and not raw.rstrip().endswith(b"data: [DONE]"):
            code = "engine_stream_broken"
            if code.encode() not in raw:
                self.faults.append(f"a stream ended with {raw[-200:]!r}")
        elif path == "responses":
            if len(self.responses) >= RESPONSES_MAX:
                del self.responses[next(iter(self.responses))]
            self.responses[msgspec.json.decode(raw)["id"]] = tenant
        if ABORTED.search(raw) and code != "engine_stream_broken":
            self.faults.append(f"an engine's abort was passed on: {raw[-300:]!r}")
        if WRONG in raw:
            self.faults.append(f"an answer of other KV: {raw[:300]!r}")
        self.outcomes[answer.status, code] += 1

    async def trouble(self, end: float) -> None:
        """Kills an engine, and starts it again at the same address or another one elsewhere, which a reload
        says, again and again."""
        while time.monotonic() + 3 < end:
            await asyncio.sleep(self.rng.uniform(0.5, 2.0))
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
            self.router.hup()

    async def over(self) -> bool:
        """No account has anything open."""
        names = ("proxy_requests_active", "queue_waiting", "tenant_active", "inflight_prompts")
        self.open = {name: await self.router.metric(f"kvatlas_{name}") for name in names}
        return not any(self.open.values())


@pytest.mark.parametrize("workers", [1, 2])
async def test_every_request_is_answered_or_refused_by_a_rule(tmp_path: Path, workers: int) -> None:
    soak = Soak(tmp_path, workers)
    router = soak.router
    for _ in range(ENGINES):
        await soak.engine()
    soak.write()
    await router.start()
    try:
        await until(router.listens, lambda: router.log[-3000:], ignoring=(OSError, aiohttp.ClientError))
        end = time.monotonic() + SECONDS
        async with asyncio.TaskGroup() as tasks:
            for tenant in (*LIMITS, "late", "nobody"):
                for _ in range(CLIENTS.get(tenant, 4)):
                    tasks.create_task(soak.client(tenant, end))
            tasks.create_task(soak.trouble(end))
        await until(soak.over, lambda: f"every account is back to zero: {soak.open}")
        refused = await router.metric("kvatlas_config_reloads_total", outcome="refused")
        admitted = await router.metric("kvatlas_load_admitted_total")
        closed = [await router.metric(f"kvatlas_load_{name}_total") for name in ("finished", "failed")]
    finally:
        status = await router.stop()
        for engine in soak.engines:
            await engine.kill()
    print(
        f"{SECONDS:.0f} s, {workers} workers, {soak.kills} kills, {soak.terminations} terminations, "
        f"{soak.reloads} reloads, {soak.looked} looks at responses: {dict(soak.outcomes)}"
    )
    assert soak.faults == []
    assert (status, refused) == (0, 0), router.log[-5000:]
    assert admitted == sum(closed)
    codes = Counter(code for _, code in soak.outcomes.elements())
    rules = REFUSALS if SECONDS >= QUEUE_FULL_S else [code for code in REFUSALS if "queue" not in code]
    seen = [codes[code] for code in ("", *rules)]
    assert min(*seen, soak.kills + soak.terminations, soak.reloads, soak.looked) > 0, soak.outcomes
