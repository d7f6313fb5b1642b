"""Data of the ops port and the status page: of this process, or of several workers that form one router."""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from kvatlas.publisher.events import BlockHash
from kvatlas.router.api.answers import (
    EndedRequest,
    EngineView,
    LiveRequest,
    PrefixView,
    ReceiptView,
    SessionView,
    StoreView,
    view_receipt,
)
from kvatlas.router.api.findings import current_findings
from kvatlas.router.api.metrics_page import Sources, families
from kvatlas.router.api.prometheus_text import page_steps
from kvatlas.router.index.base import Plane
from kvatlas.router.index.places import GPU
from kvatlas.router.observe.findings import Finding
from kvatlas.router.observe.history import Counts, Gauges, RecentHistory
from kvatlas.router.observe.receipts import COMPARED, Receipt
from kvatlas.router.observe.requests import BROKEN, RequestRecord, RequestTracker
from kvatlas.router.openai.members import run_cooperatively
from kvatlas.router.placement.engine import Engine
from kvatlas.router.placement.others import OthersLoad, others_at

T = TypeVar("T")
_PREFIXES_MAX = 60
_REQUESTS_MAX = 1000
SESSIONS_SHOWN = 25
# About a millisecond.
ENGINES_PER_STEP = 8
# Shortest request id that is recognised inside a longer text.
_ID_CHARS_MIN = 8


def live_requests(tracker: RequestTracker) -> list[LiveRequest]:
    """Return the requests in progress, oldest first, at most a thousand."""
    now = tracker.clock()
    ordered = sorted(tracker.live, key=lambda record: record.arrived_s)[:_REQUESTS_MAX]
    return [
        LiveRequest(
            **_said(record),
            stage=_stage(record),
            age_s=now - record.arrived_s,
            why={name.removeprefix("kvatlas."): value for name, value in record.why().items()},
        )
        for record in ordered
    ]


def _said(record: RequestRecord) -> dict[str, Any]:
    """Return the fields that views of live and of ended requests share."""
    names = ("request_id", "path", "model", "tenant", "engine", "attempts")
    return {name: getattr(record, name) for name in names} | record.session_fields()


def _stage(record: RequestRecord) -> str:
    if not record.attempts:
        return "reading"
    return "streaming" if record.bytes_out else "placed"


def ended_requests(tracker: RequestTracker, latest: int, request_id: str = "") -> list[EndedRequest]:
    """Return the latest ended requests, oldest first; with ``request_id`` all that match it."""
    unix_offset_s = time.time() - tracker.clock()
    if request_id:
        found = [record for record in tracker.ended if is_named(record.request_id, request_id)]
    else:
        found = list(last(tracker.ended, latest))
    return [_ended(record, unix_offset_s) for record in found]


def last(kept: deque[T], count: int) -> list[T]:
    """Return the latest ``count``, oldest first, in a time independent of how many are stored."""
    return list(islice(reversed(kept), count))[::-1]


def is_named(request_id: str, asked: str) -> bool:
    """Whether ``asked`` is this id, its beginning, or an engine's id made of it (``chatcmpl-ID``)."""
    return request_id.startswith(asked) or (len(request_id) >= _ID_CHARS_MIN and request_id in asked)


def _ended(record: RequestRecord, unix_offset_s: float) -> EndedRequest:
    ended_s = record.arrived_s if record.ended_s is None else record.ended_s
    usage, first_s = record.usage, record.first_s
    return EndedRequest(
        **_said(record),
        at_s=ended_s + unix_offset_s,
        status=record.outcome,
        waited_s=record.waited_s,
        first_token_s=None if first_s is None else first_s - record.arrived_s,
        continued_from=record.continued_from,
        duration_s=ended_s - record.arrived_s,
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
    )


def sessions(sources: Sources, session: str = "") -> Generator[None, None, list[SessionView]]:
    """Return the latest sessions, the latest first; with ``session`` all whose name begins so. One step for
    each (``kvatlas.router.openai.members.run_cooperatively``)."""
    ledger, unix_offset_s = sources.requests.sessions, time.time() - sources.requests.clock()
    tenants = Counter(name for one in ledger.sessions.values() for name in one.names)
    keys = [key for key in reversed(ledger.sessions) if key[1].startswith(session)]
    found = []
    for key in keys if session else keys[:SESSIONS_SHOWN]:
        yield
        if (turns := ledger.sessions.get(key)) is None:
            continue
        tenant, name = key
        alone = all(tenants[one] == 1 for one in turns.names)
        blocks = ((engine, kept) for one in turns.names for engine, kept in ledger.blocks(one).items())
        found.append(
            SessionView(
                tenant=tenant,
                session=name,
                turns=turns.count,
                prompt_tokens=turns.prompt_tokens,
                cached_tokens=turns.cached_tokens,
                held_tokens=_held_tokens(sources, blocks) if alone else None,
                latest=[_ended(record, unix_offset_s) for record in turns.latest],
            )
        )
    return found


def _held_tokens(sources: Sources, blocks: Iterable[tuple[str, array[int]]]) -> dict[str, int]:
    """Return the tokens in those of these blocks that their engine holds on its GPU, by engine."""
    held: dict[str, int] = {}
    for engine_id, kept in blocks:
        status = sources.fleet.get(engine_id)
        if status is None or status.base_model is None or status.layout is None:
            continue
        index, group = sources.scopes.scope(status.base_model).index, status.layout.first_group
        slot = index.slot(engine_id)
        if slot is None or group is None:
            continue
        hashes: list[BlockHash] = np.unique(np.frombuffer(kept, np.uint64)).tolist()
        words = index.lookup(hashes).plane(Plane(GPU, group[0]), slot.word)
        count = int(np.count_nonzero(words >> np.uint64(slot.bit) & np.uint64(1)))
        held[engine_id] = held.get(engine_id, 0) + count * group[1]
    return held


def sample_history(sources: Sources) -> float:
    """Add the current counters to the history; returns the seconds until the next sample."""
    return sources.history.add(sources.accounts.now(), _counts(sources), _gauges(sources))


def show_history(sources: Sources) -> RecentHistory:
    """Return the last five minutes."""
    now = sources.accounts.now()
    return sources.history.recent_history(now, _counts(sources), _gauges(sources), unix_s=time.time())


def _gauges(sources: Sources) -> Gauges:
    return Gauges(
        active=sources.proxy.requests_active,
        engines=len(sources.fleet),
        engines_up=sum(status.up for status in sources.fleet),
    )


def _counts(sources: Sources) -> dict[str, Counts]:
    """Return counts by engine; "" for requests that reached no engine of the fleet."""
    sums: dict[str, dict[str, int]] = {"": {}}
    for (_, engine, outcome), count in sources.requests.counts.items():
        failed = outcome[0] == "5" or outcome == BROKEN
        one = sums.setdefault(engine, {})
        one["requests"] = one.get("requests", 0) + count
        one["errors"] = one.get("errors", 0) + (count if failed else 0)
        one["unavailable"] = one.get("unavailable", 0) + (count if outcome == "503" else 0)
    listen = sources.listen()
    if listen is not None:  # 503 by the listener; a request whose body found no room is already counted
        none = sums[""]
        refused = listen.connections_refused + listen.bodies_refused
        none["requests"] = none.get("requests", 0) + listen.connections_refused
        none["errors"] = none.get("errors", 0) + refused
        none["unavailable"] = none.get("unavailable", 0) + refused
    for status in sources.fleet:
        receipts = status.receipts
        sums.setdefault(status.engine_id, {}).update(
            prompt_tokens=receipts.prompt_tokens,
            hit_tokens=receipts.actual_tokens,
            exact=receipts.outcomes.get("exact", 0),
            compared=sum(receipts.outcomes.get(outcome, 0) for outcome in COMPARED),
        )
    return {engine: Counts(**one) for engine, one in sums.items()}


def hot_prefixes(sources: Sources) -> Generator[None, None, list[PrefixView]]:
    """Return the most common prefixes, shorter ones first, so a parent precedes its children. In steps of a
    few engines."""
    now = sources.accounts.now()
    found = sources.accounts.hot.hottest(_PREFIXES_MAX, now)
    hashes = [key for key, _ in found]
    holders = yield from _holders(sources, hashes)
    shown = set(hashes)
    return [
        PrefixView(
            id=f"{key:016x}",
            parent="" if node.parent is None or node.parent not in shown else f"{node.parent:016x}",
            model=node.model,
            tokens=node.tokens,
            rate=node.current_rate(now),
            holders=held,
        )
        for (key, node), held in zip(found, holders, strict=True)
    ]


def _holders(sources: Sources, hashes: list[BlockHash]) -> Generator[None, None, list[dict[str, list[int]]]]:
    """Return, per hash, the engines that hold it on their GPU, and in which groups."""
    found: list[dict[str, list[int]]] = [{} for _ in hashes]
    for model, scope in sources.scopes.models().items():
        rows = scope.index.lookup(hashes)
        for at, status in enumerate(list(sources.fleet)):
            if at % ENGINES_PER_STEP == ENGINES_PER_STEP - 1:
                yield
            slot, layout = scope.index.slot(status.engine_id), status.layout
            if status.base_model != model or slot is None or layout is None:
                continue
            for group in layout.groups:
                words = rows.plane(Plane(GPU, group.group_idx), slot.word)
                for number in np.flatnonzero(words >> np.uint64(slot.bit) & np.uint64(1)).tolist():
                    found[number].setdefault(status.engine_id, []).append(group.group_idx)
    return found


def blocks_held(sources: Sources, status: Engine) -> dict[str, int]:
    """Return the number of distinct blocks on its GPU by group of layers; empty without events."""
    engine, model = None if status.residency is None else status.residency.writer, status.base_model
    if engine is None or engine.layout is None or model is None:
        return {}
    index = sources.scopes.scope(model).index
    return {
        f"group {group.group_idx} ({group.kind})": index.copies(status.engine_id, Plane(GPU, group.group_idx))
        for group in engine.layout.groups
    }


LATEST_SHOWN = 256


class OpsView(Protocol):
    """Pages of the ops port."""

    async def metrics(self) -> bytes:
        """Prometheus text format."""

    async def engines(self) -> list[EngineView]:
        """Every engine as seen by the router."""

    async def problems(self) -> Sequence[Finding]:
        """Problems of engines and router that hold now."""

    async def receipts(self, request_id: str = "") -> Sequence[ReceiptView | msgspec.Raw]:
        """The latest receipts, oldest first; with ``request_id`` all stored ones of this request."""

    async def requests(self) -> Sequence[LiveRequest]:
        """Requests in progress, oldest first."""

    async def answers(self, request_id: str = "") -> Sequence[EndedRequest]:
        """The latest ended requests, oldest first; with ``request_id`` all stored ones that match it."""

    async def sessions(self, session: str = "") -> Sequence[SessionView]:
        """The latest sessions, the latest first; with ``session`` all kept ones whose name begins so."""

    async def history(self) -> RecentHistory:
        """The last five minutes."""

    async def prefixes(self) -> Sequence[PrefixView]:
        """Return the most common prompt prefixes, shorter ones first."""


class LocalView:
    """Views of this process, from its live objects."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def metrics(self) -> bytes:
        return await run_cooperatively(page_steps(families(self._sources)))

    async def engines(self) -> list[EngineView]:
        """Return the state of each engine; the load includes requests of siblings and replicas."""
        return await run_cooperatively(_engine_views(self._sources))

    async def problems(self) -> Sequence[Finding]:
        return await run_cooperatively(current_findings(self._sources))

    async def receipts(self, request_id: str = "") -> list[ReceiptView]:
        log = self._sources.accounts.receipts.kept
        found = (
            [one for one in log if is_named(one[0], request_id)] if request_id else last(log, LATEST_SHOWN)
        )
        return [view_receipt(Receipt(*kept)) for kept in found]

    async def answers(self, request_id: str = "") -> list[EndedRequest]:
        return ended_requests(self._sources.requests, LATEST_SHOWN, request_id)

    async def sessions(self, session: str = "") -> list[SessionView]:
        return await run_cooperatively(sessions(self._sources, session))

    async def history(self) -> RecentHistory:
        return show_history(self._sources)

    async def requests(self) -> list[LiveRequest]:
        return live_requests(self._sources.requests)

    async def prefixes(self) -> list[PrefixView]:
        """Return the most common prompt prefixes."""
        return await run_cooperatively(hot_prefixes(self._sources))


def _mode(status: Engine) -> str | None:
    """Return how its hits are predicted."""
    if status.shadow is not None or status.residency is None:
        return None if status.shadow is None else "shadow"
    mode = status.residency.writer.mode
    return "partial" if mode == "native" and status.has_unseen_caches else mode


def _engine_views(sources: Sources) -> Generator[None, None, list[EngineView]]:
    """Return the state of each engine, in steps of a few."""
    others, found = sources.others(), []
    for at, status in enumerate(list(sources.fleet)):
        if at % ENGINES_PER_STEP == ENGINES_PER_STEP - 1:
            yield
        if not status.closed:
            found.append(_viewed(sources, status, others))
    return found


def _viewed(s: Sources, status: Engine, others: Mapping[str, OthersLoad] | None) -> EngineView:
    now = s.accounts.now()
    engine = None if status.residency is None else status.residency.writer
    return EngineView(
        engine=status.engine_id,
        up=status.up,
        problem=status.problem,
        on_hold=status.held,
        asleep=status.asleep,
        models=[card.id for card in status.models],
        frontend=status.frontend,
        available=status.breaker.allows(now),
        publishes_events=status.publishes_events,
        kv_usage=status.kv_usage,
        kv_cached=None if engine is None else engine.cached_share(status.pool_blocks),
        blocks_held=blocks_held(s, status),
        feed=status.feed,
        feed_state=status.feed_state,
        followed_by=None if s.shared is None else s.shared.follower(status.engine_id),
        mode=_mode(status),
        scheme=None if engine is None else engine.scheme,
        assumed_scheme=None if engine is None else engine.assumed,
        layout=None if engine is None else engine.layout,
        facts=[] if engine is None else list(engine.found_facts),
        shared_stores=[] if engine is None else sorted(engine.stores),
        rejected_events={} if engine is None else dict(engine.rejected),
        unknown_events={} if engine is None else dict(engine.unknown_types),
        unusable_events=status.unusable_events,
        load=status.load.current(now, others_at(status.engine_id, others)),
        receipts=status.receipts.outcomes,
        drifting=status.receipts.drifting,
        contradicting=status.receipts.contradicting,
        probe=_proofs(status),
        hit_share=status.hit_share,
        first_tokens=status.first_tokens.summary(guessed=status.rates.model.guessed),
        cache_worth_s_per_minute=status.receipts.worth.per_minute(now),
    )


def _proofs(engine: Engine) -> dict[str, str]:
    """Return the verdict of everything that it was asked to prove, with the reason where that is no proof."""
    found = {} if engine.probe is None else engine.probe.summary()
    salts = {} if engine.salt_proof is None else engine.salt_proof.apis
    return found | {f"cache_salt of {path}": one.text for path, one in salts.items()}


def store_views(s: Sources) -> list[StoreView]:
    """Return the state of each store that is followed here."""
    found = []
    for feed in s.stores or ():
        settings = feed.settings
        loaders = [
            engine.engine_id
            for engine in s.fleet
            if engine.residency is not None and settings.name in engine.residency.writer.stores
        ]
        counts = msgspec.structs.asdict(feed.stats)
        found.append(
            StoreView(
                store=settings.name, kind=settings.kind, model=settings.model, loaders=loaders, **counts
            )
        )
    return found
