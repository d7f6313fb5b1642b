"""Keys, a queue, engines killed (SIGKILL to their processes) and reloads, all at once: every request is
answered, or refused by a rule, and nothing is left open. ``KVATLAS_SOAK_S``: for how long (default 20 s; 600
before a release).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from publisher.engine import EngineSettings
from router.admission.key_file import digest_of
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
}
"""What else, since engines are killed."""
ENGINE = EngineSettings(prefill_s_per_token=5e-4, decode_s_per_token=5e-3, num_blocks=600)


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys.toml"
        self.router = Serving(folder, 2)
        self.engines: list[EngineProcess] = []
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.faults: list[str] = []
        self.rng = random.Random(7)
        self.kills = self.reloads = 0
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
                body: dict[str, Any] = {
                    "model": self.rng.choice([MODEL, "name"]),
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": self.rng.randint(1, 200),
                    "stream": self.rng.random() < 0.7,
                }
                try:
                    leaves = 0.05 if self.rng.random() < 0.05 else None
                    async with asyncio.timeout(leaves):
                        await self.ask(session, body, {"x-request-timeout": self.rng.choice(["0.1", "5"])})
                except TimeoutError:
                    self.outcomes[0, "the client left"] += 1

    async def ask(self, session: aiohttp.ClientSession, body: Any, headers: dict[str, str]) -> None:
        url = f"http://127.0.0.1:{self.router.port}/v1/chat/completions"
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
        self.outcomes[answer.status, code] += 1

    async def trouble(self, end: float) -> None:
        """Kills an engine, and starts it again at the same address or another one elsewhere, which a reload
        says, again and again."""
        while time.monotonic() + 3 < end:
            await asyncio.sleep(self.rng.uniform(0.5, 2.0))
            victim = self.engines.pop(0)
            await victim.kill()
            self.kills += 1
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


def test_every_request_is_answered_or_refused_by_a_rule(tmp_path: Path) -> None:
    async def main() -> None:
        soak = Soak(tmp_path)
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
        print(f"{SECONDS:.0f} s, {soak.kills} kills, {soak.reloads} reloads: {dict(soak.outcomes)}")
        assert soak.faults == []
        assert (status, refused) == (0, 0), router.log[-5000:]
        assert admitted == sum(closed)
        codes = Counter(code for _, code in soak.outcomes.elements())
        rules = REFUSALS if SECONDS >= QUEUE_FULL_S else [code for code in REFUSALS if "queue" not in code]
        seen = [codes[code] for code in ("", *rules)]
        assert min(*seen, soak.kills, soak.reloads) > 0, soak.outcomes

    asyncio.run(main())
