"""Ops port of several workers: merges the pages of all workers into those of one router."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from kvatlas.router.api.answers import EndedRequest, LiveRequest, PrefixView, ReceiptView, SessionView
from kvatlas.router.api.asgi import ClientLeftError, error_answer, read_body
from kvatlas.router.api.metrics_page import Sources, families
from kvatlas.router.api.metrics_tables import of_stats
from kvatlas.router.api.prometheus_text import in_steps, page_steps
from kvatlas.router.api.views import LATEST_SHOWN, SESSIONS_SHOWN, LocalView
from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.settings import ListenStats
from kvatlas.router.observe.findings import Finding, joined
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.history import RecentHistory
from kvatlas.router.observe.receipts import EVIDENCE_KEPT
from kvatlas.router.openai.errors import ApiError, worker_unavailable
from kvatlas.router.openai.members import at_once, run_cooperatively
from kvatlas.router.workers.context import LEAD, WorkerContext
from kvatlas.router.workers.gossip import WorkerGossipStats

# Merges the metrics pages of several workers into one.
#
# Counts of a worker's own requests are summed. Values that all workers observe alike (engines, feeds, the
# index, sources) are not summed: the largest one is shown. Invariant: a sum never falls. The last known
# counts of a dead worker, or of one that does not answer in time, remain in the sum, and survive the merging
# worker (``CounterStore``).


# Name prefixes of families that are equal at every worker.
_ALIKE = (
    "kvatlas_build_info",
    "kvatlas_tokenizer_info",
    "kvatlas_engine_",
    "kvatlas_feed_",
    "kvatlas_index_",
    "kvatlas_source_",
    "kvatlas_queue_ahead_seconds",
    "kvatlas_prefill_seconds_per_token",
    "kvatlas_prediction_drifting",
    "kvatlas_cache_reports_doubtful",
    "kvatlas_time_to_first_token_margin_seconds",
    "kvatlas_inflight_prompts",
    "kvatlas_inflight_blocks",
    "kvatlas_lease_replicas",
    "kvatlas_lease_wanted",
    "process_max_fds",
    "process_start_time_seconds",
)
# With a shared index these are divided between the workers.
_DIVIDED = ("kvatlas_index_blocks", "kvatlas_index_residencies", "kvatlas_index_extra_copies")
# Kinds of families whose counts outlive the worker, with the suffixes of their samples.
_ENDS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}

T = TypeVar("T")
Labels = tuple[tuple[str, str], ...]
# A sample's name and labels.
Key = tuple[str, Labels]


class WorkerFamily(msgspec.Struct, array_like=True):
    """A metric family as sent to another worker."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


class WorkerPage(msgspec.Struct, array_like=True):
    """All families of one worker process."""

    slot: int
    life: int
    families: list[WorkerFamily]


class _SentPage(msgspec.Struct, array_like=True):
    """The same with encoded families, each encoded and decoded by itself: those of a thousand engines would
    hold the interpreter for 30 ms and longer."""

    slot: int
    life: int
    families: list[msgspec.Raw]


_SENT = msgspec.msgpack.Decoder(_SentPage)
_FAMILY = msgspec.msgpack.Decoder(WorkerFamily)


def encoded_family(family: Metric) -> msgspec.Raw:
    """Convert and encode a family for ``encoded_page``."""
    return msgspec.Raw(msgspec.msgpack.encode(family_of(family)))


def encoded_page(slot: int, life: int, families: list[msgspec.Raw]) -> bytes:
    """Return a worker's page of encoded families, for ``decoded_page``."""
    return msgspec.msgpack.encode(_SentPage(slot, life, families))


def decoded_page(data: bytes) -> WorkerPage:
    """Return the page of an ``encoded_page``. Raises ``msgspec.MsgspecError``."""
    sent = _SENT.decode(data)
    return WorkerPage(sent.slot, sent.life, [_FAMILY.decode(family) for family in sent.families])


def family_of(family: Metric) -> WorkerFamily:
    """Convert a family for sending."""
    samples = [(s.name, tuple(s.labels.items()), float(s.value)) for s in family.samples]
    return WorkerFamily(family.name, family.documentation, family.type, samples)


def is_alike(name: str, *, shared_index: bool) -> bool:
    """Whether this family is equal at every worker, so that it must not be summed."""
    if shared_index and name in _DIVIDED:
        return False
    return name.startswith(_ALIKE)


class CounterStore:
    """Last reported counters of every worker. ``file``: descriptor of a file that outlives this process."""

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        # Sum of the counts of ended worker processes.
        self._ended: dict[Key, float] = {}
        # Slot -> (life, counts).
        self._last: dict[int, tuple[int, dict[Key, float]]] = {}
        if file is not None:
            self._load(file)

    def update(self, slot: int, life: int, counts: dict[Key, float]) -> None:
        """Store the counts reported by a worker."""
        known = self._last.get(slot)
        if known is not None and known[0] != life:
            for key, value in known[1].items():
                self._ended[key] = self._ended.get(key, 0.0) + value
        self._last[slot] = life, counts

    def total(self) -> dict[Key, float]:
        """Return the counts summed over all worker processes, including ended ones."""
        total = dict(self._ended)
        for _, counts in self._last.values():
            for key, value in counts.items():
                total[key] = total.get(key, 0.0) + value
        return total

    def save(self) -> None:
        """Write the counters to the file, for the process that replaces this one."""
        if self._file is None:
            return
        body = msgspec.msgpack.encode(
            (list(self._ended.items()), [(s, life, list(c.items())) for s, (life, c) in self._last.items()])
        )
        os.pwrite(self._file, len(body).to_bytes(8, "little") + body, 0)

    def _load(self, file: int) -> None:
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        if not size:
            return
        try:
            ended, last = msgspec.msgpack.decode(
                os.pread(file, size, 8),
                type=tuple[list[tuple[Key, float]], list[tuple[int, int, list[tuple[Key, float]]]]],
            )
        except msgspec.MsgspecError:
            # The writer died while writing: its counts are lost.
            return
        self._ended = dict(ended)
        self._last = {slot: (life, dict(counts)) for slot, life, counts in last}


def merged(pages: Iterable[WorkerPage], counters: CounterStore, *, shared_index: bool) -> list[Metric]:
    """Merge pages into one set of families, in the order of the first page."""
    families: dict[str, WorkerFamily] = {}
    values: dict[str, dict[Key, float]] = {}
    for page in pages:
        counts: dict[Key, float] = {}
        for family in page.families:
            families.setdefault(family.name, family)
            into = values.setdefault(family.name, {})
            alike = is_alike(family.name, shared_index=shared_index)
            for name, labels, value in family.samples:
                key = name, labels
                if alike:
                    into[key] = max(into.get(key, value), value)
                elif family.kind in _ENDS:
                    counts[key] = value
                    into.setdefault(key, 0.0)
                else:
                    into[key] = into.get(key, 0.0) + value
        counters.update(page.slot, page.life, counts)
    _settle(values, counters.total(), families)
    counters.save()
    return [_metric(family, values[name]) for name, family in families.items()]


def _settle(
    values: Mapping[str, dict[Key, float]], total: Mapping[Key, float], families: Mapping[str, WorkerFamily]
) -> None:
    """Store the totals in the families they belong to."""
    home = {f"{name}{end}": name for name, family in families.items() for end in _ENDS.get(family.kind, ())}
    for key, value in total.items():
        if key[0] in home:
            values[home[key[0]]][key] = value


def _metric(family: WorkerFamily, values: Mapping[Key, float]) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return metric


# Calls from one worker to another, over HTTP on the sibling's control port (``supervisor.py``).
#
# Invariant: every call ends within its timeout, also if the sibling is dead, stuck or being replaced.


CALL_S_MAX = 1.0
_FORWARD_S_MAX = 30.0
_NOT_FORWARDED = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_BASE = "http://worker"
# Of a sibling's part of a page: of a thousand engines it has some 3 MB.
_ANSWER_BYTES_MAX = 64 << 20
# Address of the client whose request another worker forwards.
PEER_HEADER = "x-kvatlas-peer"


class SiblingCalls:
    """HTTP connections to the siblings of one worker; an async context manager. ``body_bytes_max``: largest
    request that is forwarded."""

    def __init__(self, worker: WorkerContext, *, body_bytes_max: int) -> None:
        self.siblings = sorted(worker.mesh)
        self._worker = worker
        self._body_bytes_max = body_bytes_max
        self._clients: dict[int, HttpClient] = {}

    async def __aenter__(self) -> Self:
        for slot in self.siblings:
            self._clients[slot] = HttpClient(socket_path=self._worker.control_path(slot), requests_max=64)
        return self

    async def __aexit__(self, *ended: object) -> None:
        for client in self._clients.values():
            await client.__aexit__(*ended)
        self._clients.clear()

    async def call(self, slot: int, path: str, *, method: str = "GET", body: bytes | None = None) -> bytes:
        """Call one sibling. Raises ``OSError`` if it does not answer in time."""
        try:
            async with self._clients[slot].exchange(method, _BASE + path, CALL_S_MAX, body) as answer:
                content = await answer.body(_ANSWER_BYTES_MAX)
                if answer.status >= 300:
                    raise OSError(f"status {answer.status}")
                return content
        except (KeyError, OSError) as error:
            raise OSError(f"worker {slot}: {method} {path}: {describe_error(error)}") from error

    async def call_all(
        self, path: str, *, method: str = "GET", body: bytes | None = None
    ) -> dict[int, bytes]:
        """Call all siblings; returns the answers that came in time, by worker."""
        calls = [self.call(slot, path, method=method, body=body) for slot in self.siblings]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return {slot: one for slot, one in zip(self.siblings, found, strict=True) if isinstance(one, bytes)}

    async def to_lead(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI application that forwards a request to the lead."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.decode("latin-1") not in {*_NOT_FORWARDED, PEER_HEADER}
        }
        headers[PEER_HEADER] = scope["client"][0] if scope.get("client") else ""
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        url, begun = _BASE + quote(scope["path"]) + query, False
        # An administrator's decision that the lead may have made must not reach it again.
        method, once = scope["method"], scope["method"] not in _SAFE
        try:
            async with asyncio.timeout(_FORWARD_S_MAX):
                body = await read_body(receive, self._body_bytes_max)
                async with self._clients[LEAD].exchange(
                    method, url, None, body, headers, once=once
                ) as answer:
                    fields = [field for field in answer.headers if field[0].decode() not in _NOT_FORWARDED]
                    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
                    begun = True
                    async for piece in answer.pieces():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        except ClientLeftError:
            return
        except ApiError as error:
            await error_answer(error, scope)(scope, receive, send)
        except (KeyError, OSError, ValueError):
            if begun:
                raise
            await error_answer(worker_unavailable(), scope)(scope, receive, send)


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
