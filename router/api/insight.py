"""What the page shows of requests under way, hot prefixes and blocks held, read from live objects."""

from __future__ import annotations

import numpy as np

from publisher.events import BlockHash
from router.api.answers import LiveRequest, PrefixView
from router.api.metrics.page import Sources
from router.index.base import Plane
from router.index.media import GPU
from router.observe.requests import RequestRecord, RequestTracker
from router.placement.engine import Engine

_PREFIXES_MAX = 60
_REQUESTS_MAX = 1000


def live_requests(tracker: RequestTracker) -> list[LiveRequest]:
    """Oldest first, a thousand at most."""
    now = tracker.clock()
    ordered = sorted(tracker.live, key=lambda record: record.arrived_s)[:_REQUESTS_MAX]
    return [
        LiveRequest(
            request_id=record.request_id,
            path=record.path,
            model=record.model,
            tenant=record.tenant,
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


def hot_prefixes(sources: Sources) -> list[PrefixView]:
    """Shorter ones first; a parent stands before what lies below it."""
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
            rate=node.at(now),
            holders=held,
        )
        for (key, node), held in zip(found, holders, strict=True)
    ]


def _holders(sources: Sources, hashes: list[BlockHash]) -> list[dict[str, list[int]]]:
    """Per hash: the engines that hold it on their GPU, and in which groups."""
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
    """Distinct blocks on its GPU, by group of layers; empty where no events tell."""
    engine, model = None if status.residency is None else status.residency.writer, status.base_model
    if engine is None or engine.layout is None or model is None:
        return {}
    index = sources.scopes.scope(model).index
    return {
        f"group {group.group_idx} ({group.kind})": index.copies(status.engine_id, Plane(GPU, group.group_idx))
        for group in engine.layout.groups
    }
