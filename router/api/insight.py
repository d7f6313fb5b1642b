"""Data of the status page, read from live objects: requests, sessions, the last minutes, hot prefixes, blocks
held."""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterable
from itertools import islice
from typing import TypeVar

import numpy as np

from publisher.events import BlockHash
from router.api.answers import EndedRequest, LiveRequest, PrefixView, SessionView
from router.api.metrics_page import Sources
from router.index.base import GPU, Plane
from router.observe.history import Counts, Gauges, RecentHistory
from router.observe.receipts import COMPARED
from router.observe.requests import BROKEN, RequestRecord, RequestTracker
from router.placement.engine import Engine

T = TypeVar("T")
_PREFIXES_MAX = 60
_REQUESTS_MAX = 1000
SESSIONS_SHOWN = 25
# Shortest request id that is recognised inside a longer text.
_ID_CHARS_MIN = 8


def live_requests(tracker: RequestTracker) -> list[LiveRequest]:
    """Return the requests in progress, oldest first, at most a thousand."""
    now = tracker.clock()
    ordered = sorted(tracker.live, key=lambda record: record.arrived_s)[:_REQUESTS_MAX]
    return [
        LiveRequest(
            request_id=record.request_id,
            path=record.path,
            model=record.model,
            tenant=record.tenant,
            **record.session_fields(),
            engine=record.engine,
            stage=_stage(record),
            age_s=now - record.arrived_s,
            attempts=record.attempts,
            why={name.removeprefix("kvatlas."): value for name, value in record.why().items()},
        )
        for record in ordered
    ]


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
    """Whether ``asked`` is this request's id, its beginning, or an engine's id made of it
    (``chatcmpl-ID``)."""
    return request_id.startswith(asked) or (len(request_id) >= _ID_CHARS_MIN and request_id in asked)


def _ended(record: RequestRecord, unix_offset_s: float) -> EndedRequest:
    ended_s = record.arrived_s if record.ended_s is None else record.ended_s
    usage, first_s = record.usage, record.first_s
    return EndedRequest(
        at_s=ended_s + unix_offset_s,
        request_id=record.request_id,
        path=record.path,
        model=record.model,
        tenant=record.tenant,
        **record.session_fields(),
        engine=record.engine,
        status=record.outcome,
        attempts=record.attempts,
        waited_s=record.waited_s,
        first_token_s=None if first_s is None else first_s - record.arrived_s,
        duration_s=ended_s - record.arrived_s,
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
    )


def sessions(sources: Sources, session: str = "") -> Generator[None, None, list[SessionView]]:
    """Return the latest sessions, the latest first; with ``session`` all whose name begins so. One step for
    each (``router.openai.members.run_cooperatively``)."""
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


def hot_prefixes(sources: Sources) -> list[PrefixView]:
    """Return the most common prefixes, shorter ones first, so a parent precedes its children."""
    now = sources.accounts.now()
    found = sources.accounts.hot.hottest(_PREFIXES_MAX, now)
    hashes = [key for key, _ in found]
    holders = _holders(sources, hashes)
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


def _holders(sources: Sources, hashes: list[BlockHash]) -> list[dict[str, list[int]]]:
    """Return, per hash, the engines that hold it on their GPU, and in which groups."""
    found: list[dict[str, list[int]]] = [{} for _ in hashes]
    for model, scope in sources.scopes.models().items():
        rows = scope.index.lookup(hashes)
        for status in sources.fleet:
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
