"""Ops port of several workers: merges the pages of all workers into those of one router."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvatlas.router.api.answers import EndedRequest, LiveRequest, PrefixView, ReceiptView, SessionView
from kvatlas.router.api.metric_families import of_stats
from kvatlas.router.api.metrics_page import Sources, families
from kvatlas.router.api.prometheus_text import in_steps, page_steps
from kvatlas.router.api.views import LATEST_SHOWN, SESSIONS_SHOWN, LocalView
from kvatlas.router.http.settings import ListenStats
from kvatlas.router.observe.findings import Finding, joined
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.history import RecentHistory
from kvatlas.router.observe.receipts import EVIDENCE_KEPT
from kvatlas.router.openai.members import at_once, run_cooperatively
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.gossip import WorkerGossipStats
from kvatlas.router.workers.merged_metrics import (
    CounterStore,
    decoded_page,
    encoded_family,
    encoded_page,
    merged,
)
from kvatlas.router.workers.sibling_calls import SiblingCalls

T = TypeVar("T")
# Fields of an engine's view that each worker reports for its own requests.
_OWN = frozenset(
    {"load", "receipts", "drifting", "contradicting", "first_tokens", "cache_worth_s_per_minute"}
)


class AggregateView:
    """An ``OpsView`` of this worker and its siblings. If a sibling does not answer in time, only its last
    known counts are shown."""

    def __init__(self, worker: WorkerContext, sources: Sources, calls: SiblingCalls) -> None:
        self._worker = worker
        self._sources = sources
        self._own = LocalView(sources)
        self._calls = calls
        self._counters: CounterStore | None = None
        self._lives: dict[int, int] = {}
        self._asking = asyncio.Lock()
        # The lock and the single thread merge answers in the order of their requests, so counts never fall.
        self._merger = ThreadPoolExecutor(1, "kvatlas-metrics")

    async def own_page(self) -> bytes:
        """Return this worker's part of ``metrics``, for a sibling (``decoded_page``)."""
        found = await run_cooperatively(in_steps(encoded_family, families(self._sources)))
        return encoded_page(self._worker.slot, self._worker.life, found)

    async def own_part(self, name: str, wanted: str = "") -> bytes | None:
        """Return this worker's part of the named method's result, encoded; None for an unknown name.
        ``wanted``: a request id or a session."""
        parts: dict[str, Callable[[], Awaitable[Any]]] = {
            "engines": self._own.engines,
            "problems": self._own.problems,
            "receipts": partial(self._own.receipts, wanted),
            "answers": partial(self._own.answers, wanted),
            "sessions": partial(self._own.sessions, wanted),
            "history": self._own.history,
            "requests": self._own.requests,
            "prefixes": self._own.prefixes,
        }
        part = parts.get(name)
        return None if part is None else msgspec.json.encode(await part())

    async def _others(self, name: str, kind: type[T], wanted: str = "") -> list[T]:
        """Return the siblings' parts of the named list that came in time."""
        path = f"/worker/{name}" + (f"?{urlencode({'wanted': wanted})}" if wanted else "")
        answers = await self._calls.call_all(path)
        return [part for one in answers.values() for part in msgspec.json.decode(one, type=list[kind])]  # type: ignore[valid-type]

    async def metrics(self) -> bytes:
        # Pages are merged in a thread, since those of a large fleet take long.
        async with self._asking:
            answers = await self._calls.call_all("/worker/metrics")
            pages = [await self.own_page(), *answers.values()]
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._merger, self._page, pages)

    def _page(self, encoded: list[bytes]) -> bytes:
        pages = list(map(decoded_page, encoded))
        if self._counters is None:
            self._counters = CounterStore(self._worker.counters_fd)
        shared = self._sources.shared
        found = merged(pages, self._counters, shared_index=shared is not None and shared.shares_blocks)
        answered = {page.slot: page.life for page in pages}
        self._lives |= answered
        found += group_families(self._worker.count, answered, self._lives)
        return at_once(page_steps(found))

    async def engines(self) -> list[Any]:
        """Return the state of each engine, merged over all workers."""
        views: list[dict[str, Any]] = msgspec.to_builtins(await self._own.engines())
        by_id = {view["engine"]: view for view in views}
        for other in await self._others("engines", dict[str, Any]):
            view = by_id.get(other["engine"])
            if view is not None:
                _add(view, other)
        return views

    async def problems(self) -> list[Finding]:
        """Return the problems that any worker sees."""
        return joined((await self._own.problems(), await self._others("problems", Finding)))

    async def receipts(self, request_id: str = "") -> Sequence[ReceiptView | msgspec.Raw]:
        theirs = await self._others("receipts", msgspec.Raw, request_id)
        return [*await self._own.receipts(request_id), *theirs]

    async def answers(self, request_id: str = "") -> list[EndedRequest]:
        """Return the ended requests of all workers, ordered by their end."""
        found = await self._own.answers(request_id)
        found += await self._others("answers", EndedRequest, request_id)
        found.sort(key=lambda request: request.at_s)
        return found if request_id else found[-LATEST_SHOWN:]

    async def sessions(self, session: str = "") -> list[SessionView]:
        """Return the sessions of all workers, the latest first."""
        found = {(one.tenant, one.session): one for one in await self._own.sessions(session)}
        for other in await self._others("sessions", SessionView, session):
            key = other.tenant, other.session
            found[key] = found[key].joined(other) if key in found else other
        tenants = Counter(name for _, name in found)
        shown = [
            one if tenants[one.session] == 1 else msgspec.structs.replace(one, held_tokens=None)
            for one in sorted(found.values(), key=lambda one: -one.latest[-1].at_s)
        ]
        return shown if session else shown[:SESSIONS_SHOWN]

    async def history(self) -> RecentHistory:
        """Return the history, summed over all workers."""
        answers = await self._calls.call_all("/worker/history")
        others = [msgspec.json.decode(answer, type=RecentHistory) for answer in answers.values()]
        return (await self._own.history()).joined(others)

    async def requests(self) -> list[LiveRequest]:
        """Return the requests in progress of all workers, the oldest first."""
        found = await self._own.requests() + await self._others("requests", LiveRequest)
        return sorted(found, key=lambda request: -request.age_s)

    async def prefixes(self) -> list[PrefixView]:
        """Return the prompt prefixes; counts of all workers are summed."""
        known = {prefix.id: prefix for prefix in await self._own.prefixes()}
        for other in await self._others("prefixes", PrefixView):
            mine = known.setdefault(other.id, other)
            if mine is not other:
                rate, holders = mine.rate + other.rate, mine.holders | other.holders
                known[other.id] = msgspec.structs.replace(mine, rate=rate, holders=holders)
        return sorted(known.values(), key=lambda prefix: prefix.tokens)


def _add(view: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge another worker's report about the same engine."""
    # shared index: the other worker follows this engine
    if view["feed"] is None and other["feed"] is not None:
        view |= {key: value for key, value in other.items() if key not in _OWN}
    for outcome, count in other["receipts"].items():
        view["receipts"][outcome] = view["receipts"].get(outcome, 0) + count
    view["drifting"] = view["drifting"] or other["drifting"]
    view["contradicting"] = [*view["contradicting"], *other["contradicting"]][-EVIDENCE_KEPT:]
    view["cache_worth_s_per_minute"] += other["cache_worth_s_per_minute"]
    view["first_tokens"] = _joined(view["first_tokens"], other["first_tokens"])


def _joined(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Merge the first tokens of two workers."""
    # Medians are those of the worker that compared more.
    most = one if one["compared"] >= two["compared"] else two
    margins = [margin for margin in (one["margin_s"], two["margin_s"]) if margin is not None]
    return most | {
        "accurate": one["accurate"] + two["accurate"],
        "compared": one["compared"] + two["compared"],
        "guessed": one["guessed"] and two["guessed"],
        "margin_s": max(margins, default=None),
    }


def group_families(count: int, answered: Collection[int], lives: Mapping[int, int]) -> Iterable[Metric]:
    """Families that show which of ``count`` workers are up; ``lives``: how often each was replaced."""
    up = GaugeMetricFamily(
        "kvatlas_worker_up", "1 if the worker process answered for this page in time", labels=["worker"]
    )
    restarts = CounterMetricFamily(
        "kvatlas_worker_restarts", "Times the worker process was replaced", labels=["worker"]
    )
    for slot in range(count):
        up.add_metric([str(slot)], float(slot in answered))
        restarts.add_metric([str(slot)], float(lives.get(slot, 0)))
    return up, restarts


def worker_families(
    slot: int, stats: WorkerGossipStats, delays: Histogram, listen: ListenStats | None
) -> Iterable[Metric]:
    """A worker's own families: its share of the requests, and its exchange with the siblings."""
    requests = CounterMetricFamily(
        "kvatlas_worker_requests", "Requests read by each worker process", labels=["worker"]
    )
    requests.add_metric([str(slot)], float(0 if listen is None else listen.requests))
    yield requests
    yield from of_stats(stats)
    delay = HistogramMetricFamily(
        "kvatlas_worker_gossip_delay_seconds",
        "From a placement (or another change) at one worker until a sibling worker has applied it",
    )
    delay.add_metric([], delays.buckets(), delays.total)
    yield delay
