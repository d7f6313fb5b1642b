"""Keeps the fleet's picture true: asks every engine what it serves, where its events are, how loaded it is.

One task per engine: ``GET /v1/models`` says whether it is up; the first time it is, ``GET
/kv_event_sources`` (vLLM 0.31+) tells the event endpoints unless they were configured; ``GET /metrics``
gives running and waiting requests, so that load from elsewhere is seen. What changes is told to a listener.
An engine that does not answer is asked again soon; nothing here ever raises to its caller.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from router.fleet.engine import Engine
from router.fleet.registry import EngineStatus, Fleet, ModelCard

_log = structlog.get_logger()


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often engines are asked, and for how long an answer is waited for."""

    poll_interval_s: float = 5.0
    poll_down_interval_s: float = 0.5
    """While an engine does not answer: how quickly its return is noticed."""
    poll_timeout_s: float = 3.0
    gauge_interval_s: float = 2.0
    answer_bytes_max: int = 8 << 20
    warm_up_s_max: float = 30.0
    """How long /ready waits for feeds to catch up before traffic is taken without them."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "poll_down_interval_s", "poll_timeout_s", "gauge_interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"fleet.{name} must be positive and finite, got {getattr(self, name)}")


class FleetListener(Protocol):
    """Who must know when the fleet changes."""

    def engine_up(self, status: EngineStatus) -> None:
        """An engine answers for the first time, again, or with other models or event endpoints."""

    def engine_down(self, status: EngineStatus) -> None:
        """An engine stopped answering."""

    def engine_gone(self, engine_id: str) -> None:
        """An engine left the fleet."""

    def engine_load(self, engine_id: str, *, running: int, waiting: int) -> None:
        """The engine's own gauges."""


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = True
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


_GAUGE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{([^}]*)\})?\s+(\S+)",
    re.MULTILINE,
)
_RANK = re.compile(rb'engine="(\d+)"')


class FleetPoller:
    """Runs one polling task per server until cancelled."""

    def __init__(
        self, fleet: Fleet, listener: FleetListener, settings: FleetSettings, session: aiohttp.ClientSession
    ) -> None:
        self._fleet = fleet
        self._listener = listener
        self._settings = settings
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=settings.poll_timeout_s)

    async def run(self) -> None:
        """Poll every server of the fleet; returns only by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            for base_url in {status.engine.base_url for status in self._fleet}:
                tasks.create_task(self._watch(base_url), name=f"poll {base_url}")

    async def _watch(self, base_url: str) -> None:
        gauges_due = asyncio.get_running_loop().time()
        models_due = gauges_due
        while True:
            now = asyncio.get_running_loop().time()
            up = any(status.up for status in self._ranks(base_url))
            if now >= models_due:
                up = await self._ask_models(base_url)
                pause = self._settings.poll_interval_s if up else self._settings.poll_down_interval_s
                models_due = asyncio.get_running_loop().time() + pause
            if up and now >= gauges_due:
                await self._ask_gauges(base_url)
                gauges_due = asyncio.get_running_loop().time() + self._settings.gauge_interval_s
            wake = min(models_due, gauges_due) if up else models_due
            await asyncio.sleep(max(0.0, wake - asyncio.get_running_loop().time()))

    def _ranks(self, base_url: str) -> list[EngineStatus]:
        return [status for status in self._fleet if status.engine.base_url == base_url]

    async def _ask_models(self, base_url: str) -> bool:
        problem = ""
        models: tuple[ModelCard, ...] = ()
        try:
            body = await self._get(f"{base_url}/v1/models")
            models = tuple(msgspec.json.decode(body, type=_Models).data)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, _BadAnswerError) as error:
            problem = f"GET /v1/models: {type(error).__name__} {error}".strip()
        if models and not any(status.up for status in self._ranks(base_url)):
            await self._discover_events(base_url)
        for status in self._ranks(base_url):
            self._note(status, models, problem)
        return bool(models)

    def _note(self, status: EngineStatus, models: tuple[ModelCard, ...], problem: str) -> None:
        was_up, had = status.up, status.models
        status.up, status.problem = bool(models), problem if not models else ""
        if models:
            status.models = models
            if not was_up or had != models:
                _log.info("engine up", engine=status.engine_id, models=[card.id for card in models])
                self._listener.engine_up(status)
        elif was_up:
            _log.warning("engine down", engine=status.engine_id, problem=problem)
            self._listener.engine_down(status)

    async def _discover_events(self, base_url: str) -> None:
        """Endpoints from the engine itself, for ranks whose endpoints nobody configured."""
        try:
            body = await self._get(f"{base_url}/kv_event_sources")
            sources = msgspec.json.decode(body, type=dict[str, _Source])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, _BadAnswerError):
            return
        known = self._ranks(base_url)
        if any(status.publishes_events for status in known):
            return
        for engine in discovered_engines(base_url, sources):
            self._fleet.add(engine)
        kept = {engine.engine_id for engine in discovered_engines(base_url, sources)}
        for status in known:
            if kept and status.engine_id not in kept:
                self._fleet.remove(status.engine_id)
                self._listener.engine_gone(status.engine_id)

    async def _ask_gauges(self, base_url: str) -> None:
        try:
            body = await self._get(f"{base_url}/metrics")
        except (aiohttp.ClientError, TimeoutError, OSError, _BadAnswerError):
            return
        for status in self._ranks(base_url):
            gauges = read_gauges(body, status.engine.dp_rank)
            status.kv_usage = gauges.get("kv_cache_usage_perc")
            if "num_requests_running" in gauges and "num_requests_waiting" in gauges:
                self._listener.engine_load(
                    status.engine_id,
                    running=int(gauges["num_requests_running"]),
                    waiting=int(gauges["num_requests_waiting"]),
                )

    async def _get(self, url: str) -> bytes:
        async with self._session.get(url, timeout=self._timeout) as answer:
            if answer.status != 200:
                raise _BadAnswerError(f"status {answer.status}")
            body = await answer.content.read(self._settings.answer_bytes_max + 1)
            while not answer.content.at_eof() and len(body) <= self._settings.answer_bytes_max:
                body += await answer.content.read(self._settings.answer_bytes_max + 1 - len(body))
            if len(body) > self._settings.answer_bytes_max:
                raise _BadAnswerError(f"answer over answer_bytes_max = {self._settings.answer_bytes_max}")
            return body


class _BadAnswerError(Exception):
    """A server answered, but not with what was asked for."""


def discovered_engines(base_url: str, sources: dict[str, _Source]) -> list[Engine]:
    """Engines of one server from its ``/kv_event_sources``: one per rank, the rank named only if several."""
    host = urlsplit(base_url).hostname or "127.0.0.1"
    live = {
        rank: s for rank, s in sources.items() if s.enable_kv_cache_events and s.endpoint and rank.isdigit()
    }
    return [
        Engine(
            base_url,
            int(rank) if len(sources) > 1 else None,
            reachable(source.endpoint or "", host),
            reachable(source.replay_endpoint, host) if source.replay_endpoint else None,
            source.topic,
        )
        for rank, source in sorted(live.items(), key=lambda item: int(item[0]))
    ]


def reachable(endpoint: str, host: str) -> str:
    """An endpoint as bound (``tcp://*:5557``) in the form others can connect to."""
    address = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)", f"tcp://{address}", endpoint)


def read_gauges(text: bytes, dp_rank: int | None) -> dict[str, float]:
    """vLLM's gauges in a metrics page, summed over models; those of one rank if ``dp_rank`` is given."""
    gauges: dict[str, float] = {}
    for match in _GAUGE.finditer(text):
        name, labels, value = match[1].decode(), match[2] or b"", match[3]
        rank = _RANK.search(labels)
        if dp_rank is not None and rank is not None and int(rank[1]) != dp_rank:
            continue
        try:
            gauges[name] = gauges.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return {name: value for name, value in gauges.items() if value == value}  # noqa: PLR0124  # drops NaN
