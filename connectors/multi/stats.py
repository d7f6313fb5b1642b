"""Statistics of several connectors, separate by child name.

Reports cross processes as plain dictionaries, and a class method without access to the configuration rebuilds
them. So each part names its class; connectors loaded by module path keep their statistics too. In Prometheus
every child's metrics have its name in an additional label, ``connector``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from connectors.compat import KVConnectorPromMetrics, MultiKVConnectorStats
from connectors.multi.children import Child

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
