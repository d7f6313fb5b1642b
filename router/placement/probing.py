"""When engines are probed, and by whom: one router of the whole fleet, a few engines at a time.

An engine that joins, comes back or restarts is probed once it is quiet (``fleet.probe``); what was not
proven is tried again after growing pauses. The router that leads the fleet (a lease of the shared index, else
the leading worker) sends the requests and tells the outcome to the others, again every ``TELL_EVERY_S`` for
those that joined meanwhile. A decision counts the hits of an engine by the share that its probe has seen come
(``Engine.hit_share``), and no engine pulls from an address that does not answer.

Invariants: at most ``fleet.probes_max`` requests are in flight, one for each engine; none goes to an engine
that is down, asleep, on hold, behind with its events, or at which a request waits; the outcome of a probe
counts only for the process that was probed. No probe is in an account, a receipt, a usage record or a
tenant's charge.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated, Final

import msgspec
import structlog

from kvatlas.router.admission.claims import ENGINE_PRIORITY
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.fleet.engine_client import REQUEST_S_MAX, Ask, EngineClient, Shown
from kvatlas.router.fleet.engine_probe import EngineProbe, EngineProber, Prediction
from kvatlas.router.fleet.engines import EngineId
from kvatlas.router.fleet.salt_proof import AGAIN_S, AGAIN_S_MAX
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.status import Fleet
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.index.model_indexes import ModelIndexes
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.placement.engine import Accounts, Engine, SharedView
from kvatlas.router.placement.engine_order import BAND_MS
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.prompts.prompt import Prompt
from kvatlas.router.prompts.reader import PromptReader

_log = structlog.get_logger()

LOOK_S: Final = 1.0
"""Pause between two looks at the fleet."""
TELL_EVERY_S: Final = 30.0
_SHARES: Final = int(TELL_EVERY_S / LOOK_S)
EVENTS_S_MAX: Final = 3.0
"""Longest wait for the events of a prompt."""
_TURN_S_MAX: Final = 5.0
_TURN_POLL_S: Final = 0.1
_CONNECT_S_MAX: Final = 2.0
_TOLD_BYTES_MAX: Final = 16_384
# Behind all classes of requests: lower numbers go first.
_LAST: Final = str(2 * BAND_MS)

Send = Callable[[str, str, bytes | None, dict[str, str], float], Awaitable[tuple[int, bytes]]]
"""Method, URL, body, headers and time limit in seconds of a request in the router's own name."""


class ProbeStats(msgspec.Struct):
    """Counters of the probes of engines."""

    probes: Annotated[dict[str, int], "kvatlas_engine_probes_total{outcome}"] = msgspec.field(
        default_factory=dict
    )
    """Probes of engines that this router has sent, by outcome: `proven`; `doubts`: something is not proven;
    `ended`: the engine restarted, left or was taken out meanwhile."""
    requests: Annotated[int, "kvatlas_engine_probe_requests_total"] = 0
    """Prompts of probes sent to engines."""


class Probes:
    """Probes of one router. ``leads``: whether this router acts for the whole fleet; ``ordered``: whether
    engines get priorities."""

    def __init__(
        self,
        fleet: Fleet[Engine],
        scopes: ModelIndexes,
        reader: PromptReader,
        accounts: Accounts,
        pulls: Pulls,
        settings: FleetSettings,
        *,
        send: Send,
        shared: SharedView | None,
        leads: Callable[[], bool],
        ordered: Callable[[], bool],
    ) -> None:
        self.fleet = fleet
        self.scopes = scopes
        self.reader = reader
        self.accounts = accounts
        self.shared = shared
        self.ordered = ordered
        self.send = send
        self.stats = ProbeStats()
        self.publish: Callable[[str, bytes], None] | None = None
        """Tells the other routers an outcome; None: there are none."""
        self._pulls = pulls
        self._settings = settings
        self._leads = leads
        self._active: dict[EngineId, asyncio.Task[None]] = {}
        self._due: dict[EngineId, tuple[EngineProbe | None, float]] = {}
        """When an engine may be probed again, and the outcome that this follows from."""
        self._looks = 0

    async def run(self) -> None:
        """Probe engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._leads():
                    self._look(tasks)
                    self._tell_all()
                await asyncio.sleep(LOOK_S)

    def learn(self, engine_id: str, told: bytes) -> None:
        """Take in an outcome that another router tells. Raises ``ValueError`` for one that cannot be read."""
        if len(told) > _TOLD_BYTES_MAX:
            raise ValueError("an outcome of a probe that is too long")
        try:
            found = msgspec.msgpack.decode(told, type=EngineProbe)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(str(error)) from None
        engine = self.fleet.get(engine_id)
        if engine is not None and engine.base_model == found.model and engine_id not in self._active:
            engine.probe = found

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        now = self.accounts.now()
        self._due = {name: due for name, due in self._due.items() if name in self.fleet}
        room = self._settings.probes_max - len(self._active)
        # New engines go before those that are tried again.
        for again in (False, True):
            for engine in self.fleet:
                if room <= 0:
                    return
                if (engine.probe is not None) == again and self._is_due(engine, now):
                    room -= 1
                    task = tasks.create_task(self._probe(engine), name=f"probe {engine.engine_id}")
                    self._active[engine.engine_id] = task

    def _is_due(self, engine: Engine, now: float) -> bool:
        name, probe = engine.engine_id, engine.probe
        if name in self._active:
            return False
        known = self._due.get(name)
        if known is None or known[0] is not probe:
            # It joined, restarted, or another router has told of it.
            known = self._due[name] = probe, now if probe is None or probe.again else math.inf
        return now >= known[1] and may_be_probed(engine, now)

    async def _probe(self, engine: Engine) -> None:
        name, outcome = engine.engine_id, "ended"
        found = engine.probe or EngineProbe(engine.base_model or "")
        found = EngineProbe(found.model, dict(found.apis), found.events, tries=found.tries, timed=found.timed)
        known = found.doubts()
        probed = _Probed(self, engine)
        try:
            prober = EngineProber(
                EngineClient(probed.ask),
                probed,
                found.model,
                publishes=engine.publishes_events,
                tokens_max=_tokens_max(engine),
                events_s_max=EVENTS_S_MAX,
            )
            await prober.probe(found)
            if self._pulls.enabled and engine.kind == "vllm":
                found.pull_source = await self._pull_source(engine)
            if probed.is_same():
                engine.probe, outcome = found, "doubts" if found.again else "proven"
                self._tell(engine)
                for what, one in found.doubts().items():
                    if one.verdict != "later" and known.get(what) != one:
                        _log.warning("not proven by the probe", engine=name, what=what, problem=one.why)
        except Exception as error:  # noqa: BLE001  # whatever an engine answers: nothing is proven by it
            _log.exception("engine could not be probed", engine=name, problem=describe_error(error))
        finally:
            self._active.pop(name, None)
            pause_s = min(AGAIN_S_MAX, AGAIN_S * 2.0 ** min(max(0, found.tries - 1), 10))
            due_s = self.accounts.now() + pause_s
            self._due[name] = engine.probe, math.inf if outcome == "proven" else due_s
            self.stats.probes[outcome] = self.stats.probes.get(outcome, 0) + 1

    async def _pull_source(self, engine: Engine) -> Shown:
        host, port = self._pulls.source_of(engine.engine)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S_MAX):
                transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
        except OSError as error:
            why = f"does not answer at {host}:{port}: {describe_error(error)}"
            # A guess of the port says little of an engine that may have no such tier.
            return Shown("unshown" if engine.engine.kv_source is None else "refuted", why)
        transport.abort()
        return Shown("proven")

    def _tell(self, engine: Engine) -> None:
        if self.publish is not None and engine.probe is not None:
            self.publish(engine.engine_id, msgspec.msgpack.encode(engine.probe))

    def _tell_all(self) -> None:
        # A share of a large fleet at each look.
        share = self._looks % _SHARES
        self._looks += 1
        if self.publish is not None:
            for engine in islice(self.fleet, share, None, _SHARES):
                self._tell(engine)


class _Probed:
    """Implements ``ProbedEngine`` for one process of an engine."""

    def __init__(self, probes: Probes, engine: Engine) -> None:
        self._probes = probes
        self._engine = engine
        self._life = engine.life
        self._model = engine.base_model or ""
        self._in_order = probes.ordered() and engine.takes_order
        self._took_s: float | None = None

    def is_same(self) -> bool:
        """Whether it is the process that the probe began with, serving the same model."""
        engine = self._engine
        return not engine.closed and engine.life == self._life and engine.base_model == self._model

    @property
    def ask(self) -> Ask:
        """Sends one request to it."""
        return self._ask

    async def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        address, headers = self._engine.engine, dict[str, str]()
        if address.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(address.dp_rank)
        url, send = address.base_url + path, self._probes.send
        if method == "GET":
            return await send(method, url, body, headers, REQUEST_S_MAX)
        self._probes.stats.requests += 1
        idle, began_s = self._is_idle(), self._probes.accounts.now()
        answer = await self._post(url, body, headers)
        ended_s = self._probes.accounts.now()
        alone = idle and self._is_idle() and self._engine.load.last_admit_s < began_s
        self._took_s = ended_s - began_s if alone else None
        return answer

    async def _post(self, url: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        send = self._probes.send
        if self._in_order:
            ordered = {**headers, ENGINE_PRIORITY.decode(): _LAST}
            answer = await send("POST", url, body, ordered, REQUEST_S_MAX)
            if answer[0] != 400:
                return answer
            # It schedules in the order of arrival, and takes no priority.
            self._in_order = False
        return await send("POST", url, body, headers, REQUEST_S_MAX)

    def _is_idle(self) -> bool:
        load = self._engine.load.current(self._probes.accounts.now())
        # One that its gauges show may be the probe.
        return load.running + load.waiting == load.foreign <= 1

    def took_s(self) -> float | None:
        """Return the seconds of the latest answer, if no request was known there meanwhile."""
        return self._took_s

    async def predict(self, path: str, body: bytes) -> Prediction:
        """Predict the hit of a request as a decision would."""
        engine, probes = self._engine, self._probes
        request = InboundRequest("POST", path, b"", [], body, self._model)
        try:
            read = await probes.reader.read(request, (engine.frontend,))
        except ApiError as error:
            return Prediction(why_unknown=str(error))
        if not isinstance(read, Prompt):
            return Prediction(why_unknown="its tokens could not be determined")
        name, found = engine.engine_id, None
        if probes.shared is not None:
            found = (await probes.shared.look(read, {name: self._model})).hits.get(name)
        if found is None and engine.residency is not None:
            found = probes.scopes.scope(self._model).predict(read, [name])[name]
        if found is None or found.mode == "unknown":
            why = "its cache is not known" if found is None else found.why_unknown
            return Prediction(None, read.num_tokens, "unknown", why)
        return Prediction(found.offloaded_tokens, read.num_tokens, found.mode)

    def events(self) -> int | None:
        """Return the events of its feed here."""
        return None if self._engine.feed is None else self._engine.feed.events

    def alignment(self) -> int | None:
        """Return the alignment of its groups; before any was stored, the block size that it states."""
        engine = self._engine
        if engine.layout is not None:
            return engine.layout.alignment
        stated = [one.attention_block_size for one in (engine.server_info, engine.stated) if one is not None]
        return next(filter(None, stated), None)

    async def settle(self) -> None:
        """Return: the router searches for hash schemes all the time."""

    async def turn(self) -> bool:
        """Wait until no request waits there; False if the engine may not be asked any more."""
        now = self._probes.accounts.now
        deadline = now() + _TURN_S_MAX
        while self.is_same():
            if may_be_probed(self._engine, now()):
                return True
            if now() >= deadline:
                break
            await asyncio.sleep(_TURN_POLL_S)
        return False


def may_be_probed(engine: Engine, now: float) -> bool:
    """Whether an engine may get a request for which no client waits."""
    if not engine.up or engine.closed or engine.held or engine.asleep or engine.base_model is None:
        return False
    if engine.publishes_events and engine.feed_state != FeedState.READY:
        return False
    return engine.breaker.allows(now) and not engine.load.current(now).waiting


def _tokens_max(engine: Engine) -> int | None:
    tokens = engine.context_tokens(None)
    return None if tokens == math.inf else int(tokens)
