"""Statistics of several connectors, kept apart by the children's names.

Reports cross processes as plain dictionaries and are rebuilt by a class method that knows no configuration,
so each part says which class it came from: also connectors loaded by module path keep their statistics. In
Prometheus every child's metrics carry its name in one more label, ``connector``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connectors.compat import KVConnectorPromMetrics, KVConnectorStats
from connectors.multi.children import Child

LABEL = "connector"


@dataclass(frozen=True)
class ChildStats:
    """One child's report and where its class is found (``module:name``)."""

    source: str
    stats: Any


class MultiStats(KVConnectorStats):
    """``data``: child's name -> ``ChildStats``."""

    def add(self, name: str, connector_class: type[Any], stats: Any) -> None:
        source = f"{connector_class.__module__}:{connector_class.__qualname__}"
        self.data[name] = ChildStats(source, stats)

    @classmethod
    def rebuild(cls, data: Mapping[str, Mapping[str, Any]]) -> MultiStats:
        """From ``to_dict``. Children whose class keeps no statistics are left out."""
        parts = {}
        for name, part in data.items():
            module, _, attribute = part["source"].partition(":")
            connector_class: Any = importlib.import_module(module)
            for step in attribute.split("."):
                connector_class = getattr(connector_class, step)
            stats = connector_class.build_kv_connector_stats(part["data"])
            if stats is not None:
                parts[name] = ChildStats(part["source"], stats)
        return cls(data=parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: {"source": part.source, "data": part.stats.to_dict()} for name, part in self.data.items()
        }

    def aggregate(self, other: Any) -> MultiStats:
        """Both reports together, child by child."""
        data = dict(self.data)
        for name, part in other.data.items():
            mine = data.get(name)
            data[name] = part if mine is None else ChildStats(part.source, mine.stats.aggregate(part.stats))
        return MultiStats(data=data)

    def reset(self) -> None:
        for part in self.data.values():
            part.stats.reset()

    def reduce(self) -> dict[str, Any]:
        return {
            f"{name} {what}": value
            for name, part in self.data.items()
            for what, value in part.stats.reduce().items()
        }

    def is_empty(self) -> bool:
        return all(part.stats.is_empty() for part in self.data.values())


class MultiPromMetrics(KVConnectorPromMetrics):
    """Every child's own metrics, each child's with its name as a label."""

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
    """Children of one class ask for the same metrics, which Prometheus registers only once."""
    made: dict[str, Any] = {}

    def make(*args: Any, **settings: Any) -> Any:
        name = settings["name"] if "name" in settings else args[0]
        if name not in made:
            made[name] = metric_class(*args, **settings)
        return made[name]

    return make
