"""What the ops port shows of several workers: the pages of all, as those of one router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlencode

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from router.api.answers import EndedRequest, LiveRequest, PrefixView, ReceiptView
from router.api.metrics.families import of_stats
from router.api.metrics.page import Sources, families, in_steps, page_steps
from router.api.views import LATEST_SHOWN, OwnView
from router.http.server.stats import ListenStats
from router.observe.histogram import Histogram
from router.observe.history import RecentHistory
from router.observe.receipts import EVIDENCE_KEPT
from router.openai.members import at_leisure, at_once
from router.workers.calls import SiblingCalls
from router.workers.gossip import WorkerGossipStats
from router.workers.merge import CountLedger, WorkerPage, family_of, merged
from router.workers.seat import WorkerSeat

_PAGE = msgspec.msgpack.Decoder(WorkerPage)
_OWN = frozenset({"load", "receipts", "drifting", "contradicting", "first_tokens"})
"""Of an engine: counted by each worker for its own requests."""


class WholeView:
    """An ``OpsView`` of this worker and its siblings. What a sibling does not say in time is left out, but
    for what it has counted before."""

    def __init__(self, seat: WorkerSeat, sources: Sources, calls: SiblingCalls) -> None:
        self._seat = seat
        self._sources = sources
        self._own = OwnView(sources)
        self._calls = calls
        self._ledger: CountLedger | None = None
        self._lives: dict[int, int] = {}
        self._asking = asyncio.Lock()
        self._merger = ThreadPoolExecutor(1, "kvatlas-metrics")
        """With both, answers are merged in the order in which they were asked for: counts never fall."""

    async def own_page(self) -> WorkerPage:
        """This worker's part of ``metrics``, for a sibling."""
        found = await at_leisure(in_steps(family_of, families(self._sources)))
        return WorkerPage(self._seat.slot, self._seat.life, found)

    async def own_part(self, name: str, request_id: str = "") -> bytes | None:
        """This worker's part of what the method of this name shows; None: there is none."""
        parts: dict[str, Callable[[], Awaitable[Any]]] = {
            "engines": self._own.engines,
            "receipts": partial(self._own.receipts, request_id),
            "answers": partial(self._own.answers, request_id),
            "history": self._own.history,
            "requests": self._own.requests,
            "prefixes": self._own.prefixes,
        }
        part = parts.get(name)
        return None if part is None else msgspec.json.encode(await part())

    async def metrics(self) -> bytes:
        """See ``OpsView``. Pages are merged in a thread: those of many engines take long."""
        async with self._asking:
            answers = await self._calls.ask_all("/worker/metrics")
            own = await self.own_page()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._merger, self._page, own, list(answers.values()))

    def _page(self, own: WorkerPage, answers: list[bytes]) -> bytes:
        pages = [own, *map(_PAGE.decode, answers)]
        if self._ledger is None:
            self._ledger = CountLedger(self._seat.ledger)
        found = merged(pages, self._ledger, shared_index=self._sources.shared is not None)
        answered = {page.slot: page.life for page in pages}
        self._lives |= answered
        found += crew_families(self._seat.count, answered, self._lives)
        return at_once(page_steps(found))

    async def engines(self) -> list[Any]:
        """See ``OpsView``."""
        views: list[dict[str, Any]] = msgspec.to_builtins(await self._own.engines())
        by_id = {view["engine"]: view for view in views}
        for answer in (await self._calls.ask_all("/worker/engines")).values():
            for other in msgspec.json.decode(answer):
                view = by_id.get(other["engine"])
                if view is not None:
                    _add(view, other)
        return views

    async def receipts(self, request_id: str = "") -> Sequence[ReceiptView | msgspec.Raw]:
        """Those of each worker together."""
        found: list[ReceiptView | msgspec.Raw] = list(await self._own.receipts(request_id))
        for answer in (await self._calls.ask_all(_of_request("receipts", request_id))).values():
            found += msgspec.json.decode(answer, type=list[msgspec.Raw])
        return found

    async def answers(self, request_id: str = "") -> list[EndedRequest]:
        """Those of each worker together, by the time they ended."""
        found = await self._own.answers(request_id)
        for answer in (await self._calls.ask_all(_of_request("answers", request_id))).values():
            found += msgspec.json.decode(answer, type=list[EndedRequest])
        found.sort(key=lambda request: request.at_s)
        return found if request_id else found[-LATEST_SHOWN:]

    async def history(self) -> RecentHistory:
        """Counts of all workers added up."""
        answers = await self._calls.ask_all("/worker/history")
        others = [msgspec.json.decode(answer, type=RecentHistory) for answer in answers.values()]
        return (await self._own.history()).joined(others)

    async def requests(self) -> list[LiveRequest]:
        """See ``OpsView``."""
        found = await self._own.requests()
        for answer in (await self._calls.ask_all("/worker/requests")).values():
            found += msgspec.json.decode(answer, type=list[LiveRequest])
        return sorted(found, key=lambda request: -request.age_s)

    async def prefixes(self) -> list[PrefixView]:
        """See ``OpsView``: what workers saw of a prefix is added up."""
        known = {prefix.id: prefix for prefix in await self._own.prefixes()}
        for answer in (await self._calls.ask_all("/worker/prefixes")).values():
            for other in msgspec.json.decode(answer, type=list[PrefixView]):
                mine = known.get(other.id)
                if mine is not None:
                    rate, holders = mine.rate + other.rate, mine.holders | other.holders
                    known[other.id] = msgspec.structs.replace(mine, rate=rate, holders=holders)
                else:
                    known[other.id] = other
        return sorted(known.values(), key=lambda prefix: prefix.tokens)


def _of_request(page: str, request_id: str) -> str:
    return f"/worker/{page}?{urlencode({'request_id': request_id})}" if request_id else f"/worker/{page}"


def _add(view: dict[str, Any], other: dict[str, Any]) -> None:
    """What another worker says of the same engine."""
    if view["feed"] is None and other["feed"] is not None:  # the index is shared: that one follows it
        view |= {key: value for key, value in other.items() if key not in _OWN}
    for outcome, count in other["receipts"].items():
        view["receipts"][outcome] = view["receipts"].get(outcome, 0) + count
    view["drifting"] = view["drifting"] or other["drifting"]
    view["contradicting"] = [*view["contradicting"], *other["contradicting"]][-EVIDENCE_KEPT:]
    view["first_tokens"] = _joined(view["first_tokens"], other["first_tokens"])


def _joined(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Return two workers' first tokens as one: medians are those of the worker that has seen more."""
    most = one if one["compared"] >= two["compared"] else two
    margins = [margin for margin in (one["margin_s"], two["margin_s"]) if margin is not None]
    return most | {
        "held": one["held"] + two["held"],
        "compared": one["compared"] + two["compared"],
        "margin_s": max(margins, default=None),
    }


def crew_families(count: int, answered: Collection[int], lives: Mapping[int, int]) -> Iterable[Metric]:
    """Which of ``count`` workers are there; ``lives``: how often each was replaced."""
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
    """A worker's own families: its share of the work, and how it talks with its siblings."""
    requests = CounterMetricFamily(
        "kvatlas_worker_requests", "Requests read by each worker process", labels=["worker"]
    )
    requests.add_metric([str(slot)], float(0 if listen is None else listen.requests))
    yield requests
    yield from of_stats("worker_gossip", stats)
    delay = HistogramMetricFamily(
        "kvatlas_worker_gossip_delay_seconds",
        "From a placement (or another change) at one worker until a sibling worker has taken note of it",
    )
    delay.add_metric([], delays.buckets(), delays.total)
    yield delay
