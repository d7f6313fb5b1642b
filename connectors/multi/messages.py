"""Messages and statistics of a ``HybridMultiConnector``: one part per child.

Plain data, pickled between the engine core and its workers. Parts are the children's own messages and opaque
here. Invariant: each child receives only the parts that its other half sent.

Statistics cross processes as plain dictionaries, and a class method without access to the configuration
rebuilds them. So each part names its class; connectors loaded by module path keep their statistics too. In
Prometheus every child's metrics have its name in an additional label, ``connector``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from connectors.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorPromMetrics,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from connectors.multi.children import Child


@dataclass
class MultiMetadata(MultiKVConnectorMetadata):
    """A step, scheduler to worker: vLLM's metadata, and the children that save ended requests."""

    saves: dict[str, frozenset[int]] = field(default_factory=dict)
    """Requests that ended, and the children (by position) that still save their blocks."""


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """Handshake metadata of a rank's children for other engines."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]

    @staticmethod
    def parts_for(child: int, metadata: Mapping[Any, MultiHandshake]) -> dict[Any, Any]:
        """One child's parts by rank; ranks without a part are omitted."""
        parts = {rank: handshake.parts[child] for rank, handshake in metadata.items()}
        return {rank: part for rank, part in parts.items() if part is not None}


@dataclass(frozen=True)
class _Part:
    child: int
    events: Any


class MultiKvEvents(KVConnectorKVEvents):
    """KV events of the children's workers, by child.

    vLLM merges the containers of several ranks by adding one's "events" to another's. Here the events are the
    children's complete containers, so that each counts its own ranks.
    """

    def __init__(self, parts: Mapping[int, Any]) -> None:
        self.parts = dict(parts)
        self._ranks = 1

    def add_events(self, events: list[Any]) -> None:
        for part in events:
            mine = self.parts.get(part.child)
            if mine is None:
                self.parts[part.child] = part.events
            else:
                mine.add_events(part.events.get_all_events())
                mine.increment_workers(part.events.get_number_of_workers())

    def aggregate(self) -> MultiKvEvents:
        self.parts = {child: events.aggregate() for child, events in self.parts.items()}
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._ranks += count

    def get_all_events(self) -> list[Any]:
        return [_Part(child, events) for child, events in self.parts.items()]

    def get_number_of_workers(self) -> int:
        return self._ranks

    def clear_events(self) -> None:
        for events in self.parts.values():
            events.clear_events()


class RunningSaves:
    """Children of a rank that still save the blocks of ended requests.

    A request's blocks may be freed only when the last save is done. The scheduler announces a request in the
    same step in which the children learn of its end.
    """

    def __init__(self) -> None:
        self._saving: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._saving)

    def announce(self, saves: Mapping[str, Iterable[int]]) -> None:
        for request_id, children in saves.items():
            self._saving[request_id] = set(children)

    def ended(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """Handle the end of a child's saves; returns the requests that no child saves any longer."""
        done: set[str] = set()
        for request_id in request_ids:
            saving = self._saving.get(request_id)
            if saving is not None:
                saving.discard(child)
                if saving:
                    continue
                del self._saving[request_id]
            done.add(request_id)
        return done


LABEL = "connector"


class MultiStats(MultiKVConnectorStats):
    """``data``: child's name -> its statistics."""

    @classmethod
    def rebuild(cls, data: Mapping[str, Mapping[str, Any]]) -> MultiStats:
        """Inverse of ``to_dict``."""
        return cls({name: _class_at(part["source"])(data=part["data"]) for name, part in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data with each part's class (``module:name``), for another process."""
        return {
            name: {"source": f"{type(stats).__module__}:{type(stats).__qualname__}", "data": stats.to_dict()}
            for name, stats in self.data.items()
        }

    def reduce(self) -> dict[str, Any]:
        return {
            f"{name} {what}": value
            for name, values in super().reduce().items()
            for what, value in values.items()
        }


def _class_at(source: str) -> Any:
    module, _, name = source.partition(":")
    return attrgetter(name)(importlib.import_module(module))


class MultiPromMetrics(KVConnectorPromMetrics):
    """Metrics of every child, with its name as a label."""

    def __init__(
        self,
        children: list[Child],
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        shared = {kind: _made_once(metric_class) for kind, metric_class in metric_types.items()}
        self._parts: dict[str, Any] = {}
        for child in children:
            metrics = child.connector_class.build_prom_metrics(
                child.vllm_config(vllm_config),
                shared,
                [*labelnames, LABEL],
                {engine: [*values, child.name] for engine, values in per_engine_labelvalues.items()},
            )
            if metrics is not None:
                self._parts[child.name] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, part in transfer_stats_data.items():
            if name in self._parts:
                self._parts[name].observe(part["data"], engine_idx)


def _made_once(metric_class: Any) -> Any:
    """Cache metrics by name: children of one class make the same ones, which Prometheus registers only
    once."""
    made: dict[str, Any] = {}

    def make(*args: Any, **settings: Any) -> Any:
        name = settings["name"] if "name" in settings else args[0]
        if name not in made:
            made[name] = metric_class(*args, **settings)
        return made[name]

    return make
