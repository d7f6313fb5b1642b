"""One run of a plan: start the fleet, let clients and faults go, wait for quiet, look at everything, stop.

``play`` is the whole of it: a plan in, a ``Report`` out. The same plan gives the same report, byte for byte
(``Report.digest``).
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import traceback
from collections import Counter
from typing import Any

import msgspec

from tests.world import clients, oracles
from tests.world.clients import Exchange
from tests.world.faults import Faults
from tests.world.fleet import PORT, Fleet, router_host
from tests.world.gateway import Gateway
from tests.world.oracles import Judged, Violation
from tests.world.plan import ClientRequest, Plan
from tests.world.seams import run_with
from tests.world.truth import Truth

START_S_MAX = 60.0
RECOVER_S_MAX = 120.0
_ENDED_S_MAX = 30.0
_RECONNECT_S_MAX = 1.0
"""Keepalive may end a half-open connection at any moment of quiet."""
_SETTLE_S = {"pd": 40.0}
"""Leases of blocks run out in this time."""
_SETTLE_S_ELSE = 8.0
_PROBED_S_MAX = 60.0
_PROBES = 12
_PROBE_EVERY_S = 1.5


class Report(msgspec.Struct):
    """Result of a run. ``counts``: exchanges by status or end; ``receipts``: predictions by outcome."""

    seed: int
    kind: str
    violations: list[Violation] = []
    counts: dict[str, int] = {}
    receipts: dict[str, int] = {}
    continued: int = 0
    """Streams that went on from another engine."""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    turns: int = 0
    calls_max: int = 0
    digest: str = ""


class World:
    """One plan on the running loop."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop: Any = asyncio.get_running_loop()
        self.fleet = Fleet(plan)
        self.truth = Truth(plan.engines[0].get("characters", "words"))
        self.prompts = oracles.Prompts()
        self.judged: list[Judged] = []
        self.violations: list[Violation] = []
        self.counts = Counter[str]()
        self.receipts = Counter[str]()
        self.faults = Faults(self.fleet, self.loop.time())
        self.calls_max, self.calls_max_at_s = 0, 0.0
        """Most calls of one turn, and when."""
        self._compiled = False
        """The first chat has been answered: its template is compiled in this process."""
        self.gateway = Gateway(self.fleet) if plan.gateway else None

    async def run(self) -> None:
        plan, fleet = self.plan, self.fleet
        try:
            await fleet.start()
            if self.gateway is not None:
                await self.gateway.start()
            if why := await fleet.until_ready(START_S_MAX):
                self.violations.append(
                    Violation("faults", f"not ready {START_S_MAX:.0f} s after the start: {why}")
                )
            self.faults.begin_s, self.loop.calls_max = self.loop.time(), 0  # a start loads tokenizers
            faults = [asyncio.create_task(self.faults.run(one)) for one in plan.faults]
            await asyncio.gather(*(self._converse(i, one) for i, one in enumerate(plan.requests)))
            await asyncio.gather(*faults)
            fleet.losing.clear()
            await self._quiet()
            self.calls_max, self.calls_max_at_s = self.loop.calls_max, self.loop.calls_max_at_s
            self._judge_all()  # from here on the turns are also the oracles'
            await self._end()
        finally:
            fleet.close()

    async def _converse(self, number: int, request: ClientRequest) -> None:
        """One client: its turns, one after the other."""
        await asyncio.sleep(max(0.0, self.faults.begin_s + request.at_s - self.loop.time()))
        earlier: list[dict[str, str]] = []
        for turn in range(request.turns):
            judged = await self._send(f"r{number}-{turn}", request, clients.body_of(request, turn, earlier))
            said = judged.told
            if said is None or said.reason not in ("length", "stop"):
                return
            earlier = clients.next_turn(request, turn, earlier, said.text)

    async def _send(
        self, request_id: str, request: ClientRequest, body: dict[str, Any], *, quiet: bool = False
    ) -> Judged:
        path, data = clients.PATHS[request.api], json.dumps(body).encode()
        expected = await self.truth.expected(path, data)
        self.prompts.sent(request.tenant, request_id, expected)
        one = Exchange(request, request_id, path, data, self.loop.time(), quiet=quiet)
        judged = Judged(one, expected)
        self.judged.append(judged)
        if self.gateway is not None:
            await clients.exchange(one, self.gateway.address)
        else:
            await clients.exchange(one, (router_host(request.router), PORT))
        answer = one.answer
        if not self._compiled and answer.status == 200 and request.api not in ("completions", "tokens"):
            self._compiled, self.loop.calls_max = True, 0
        self.counts[str(answer.status) if answer.end == "complete" else answer.end] += 1
        self.loop.mark(answer.body, request_id, answer.end, answer.status)
        judged.read()
        if judged.told is not None and judged.told.error:
            self.counts["error event"] += 1
        if "isolate" in self.plan.config.get("keys", {}):
            begin_s = self.faults.begin_s
            self.violations += oracles.judge_isolation(judged, self.prompts, self.fleet, begin_s)
        return judged

    async def _quiet(self) -> None:
        """No traffic until everything has settled, then requests one by one."""
        fleet = self.fleet
        if why := await fleet.until_ready(RECOVER_S_MAX):
            text = f"not ready {RECOVER_S_MAX:.0f} s after the last fault: {why}"
            self.violations.append(Violation("faults", text))
            return
        for _ in range(int(_ENDED_S_MAX / 0.1)):
            if not any(one.router.proxy.stats.requests_active for one in fleet.serving.values()):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE_S.get(self.plan.kind, _SETTLE_S_ELSE))
        if why := await fleet.until_ready(_RECONNECT_S_MAX):
            self.violations.append(Violation("faults", f"not ready in quiet: {why}"))
        self.violations += oracles.judge_books(fleet)
        self.violations += oracles.judge_leases(fleet)
        before, decodes = oracles.outcomes(fleet), oracles.handoffs(fleet)
        for number in range(_PROBES):
            await self._until_unprobed()
            await self._send(f"q{number}", *self._probe(number), quiet=True)
            await asyncio.sleep(_PROBE_EVERY_S)
        self.receipts = oracles.outcomes(fleet)
        decodes = oracles.handoffs(fleet) - decodes
        self.violations += oracles.judge_receipts(before, self.receipts, fleet, self.plan, decodes)
        self.violations += oracles.judge_books(fleet)

    async def _until_unprobed(self) -> None:
        """Wait for prompts of the routers' own, which may evict blocks while a request waits behind them."""
        for _ in range(int(_PROBED_S_MAX / 0.1)):
            probes = [one.router.probes for one in self.fleet.serving.values()]
            if not any(one is not None and one._active for one in probes):
                return
            await asyncio.sleep(0.1)

    def _probe(self, number: int) -> tuple[ClientRequest, dict[str, Any]]:
        """Two texts by turns, with and without a longer end."""
        api: Any = "messages" if self.plan.kind == "agents" and number % 3 == 2 else "chat"
        tenant = "probe" if self.plan.tenants else ""
        router = number // 2 % self.plan.routers
        request = ClientRequest(
            at_s=0,
            client=9,
            api=api,
            stream=bool(number // 2 % 2),
            answer_tokens=3,
            router=router,
            tenant=tenant,
        )
        text = f"quiet probe of the story {(1, 2, 1, 2, 3, 1)[number // 2]} " * 20 + "?" * (number % 2)
        return request, clients.body_of(request, 0, [{"role": "user", "content": text}])

    def _judge_all(self) -> None:
        for judged in self.judged:
            self.violations += oracles.judge_answer(judged, self.fleet, self.faults, self.judged)
        self.violations += oracles.judge_order(self.judged, self.fleet, self.plan)
        self.violations += oracles.judge_work(self.judged, self.fleet, self.plan)

    async def _end(self) -> None:
        fleet = self.fleet
        await fleet.stop_routers()
        if self.gateway is not None:
            await self.gateway.stop()
        await asyncio.sleep(0.1)
        self.violations += oracles.judge_stopped(fleet)
        self.violations += oracles.judge_released(fleet)
        await fleet.stop_engines()
        await asyncio.sleep(1.5)
        self.violations += oracles.judge_end(fleet)


def play(plan: Plan, *, log: list[Any] | None = None, counts_calls: bool = False) -> Report:
    """Run a plan. A world that fails by itself is a violation of ``faults``."""
    report = Report(plan.seed, plan.kind)
    begun = time.process_time()
    gc.collect()
    gc.disable()  # collections come at other moments in each run, and run finalisers
    try:
        run_with(lambda loop: _run(loop, plan, report, log, counts_calls=counts_calls), plan.seed)
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.violations.append(
            Violation(
                "faults",
                f"the world failed: {type(error).__name__}: {error} at {where.filename}:{where.lineno}",
            )
        )
    finally:
        gc.enable()
    report.cpu_s = round(time.process_time() - begun, 2)
    return report


async def _run(loop: Any, plan: Plan, report: Report, log: list[Any] | None, *, counts_calls: bool) -> None:
    loop.look_s, loop.log = plan.busy_s, log
    world = World(plan)
    began = loop.time()
    try:
        if counts_calls:
            with loop.count_calls():
                await world.run()
            report.calls_max = world.calls_max
            if world.calls_max > oracles.CALLS_MAX:
                at_s = world.calls_max_at_s - world.faults.begin_s
                text = f"{world.calls_max} calls in one turn at {at_s:.3f} s"
                world.violations.append(Violation("turns", text))
        else:
            await world.run()
    finally:
        report.violations = world.violations
        report.counts, report.receipts = dict(world.counts), dict(world.receipts)
        report.continued = sum(oracles.continued(one, world.fleet) for one in world.judged)
        report.virtual_s, report.turns = round(loop.time() - began, 1), loop.turns
        report.digest = f"{loop.digest:08x}"
