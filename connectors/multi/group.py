"""Several vLLM connectors held together: made and ended as one, asked one after another.

What always holds: either every child was made or none is left running; whatever is asked is asked of every
child, also after one of them has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from connectors.compat import KVConnectorBase_V1, KVConnectorRole, require_tested_vllm
from connectors.multi.children import Child, check_hma, children_of, read_children, required_layout
from connectors.multi.stats import MultiPromMetrics, MultiStats

log = logging.getLogger(__name__)


class ConnectorGroup(KVConnectorBase_V1):
    """The children, and what is the same for both roles. vLLM makes one object per role."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """``ConfigError``: see ``connectors.multi.children``; whatever a child's constructor raises."""
        require_tested_vllm(type(self).__name__)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._children = children_of(vllm_config)
        check_hma(self._children, vllm_config)
        self._connectors: list[Any] = []
        try:
            for child in self._children:
                config = child.vllm_config(vllm_config)
                self._connectors.append(child.connector_class(config, role, kv_cache_config))
        except BaseException:
            self.shutdown()
            raise

    @property
    def children(self) -> list[tuple[Child, Any]]:
        """Each child and its connector, in the order of the settings."""
        return list(zip(self._children, self._connectors, strict=True))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return required_layout(children_of(vllm_config), vllm_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return any(
            child.connector_class.requires_piecewise_for_cudagraph(
                child.transfer_config.kv_connector_extra_config
            )
            for child in read_children(extra_config)
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiStats:
        return MultiStats.rebuild(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        children = children_of(vllm_config)
        return MultiPromMetrics(children, vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether every child can follow the KV cache to where it is after sleep (vLLM 0.33 asks)."""
        return all(
            child.connector_class.supports_sleep_mode(child.transfer_config)
            for child in read_children(kv_transfer_config.kv_connector_extra_config)
        )

    @property
    def requires_kv_delivery(self) -> bool:
        return any(connector.requires_kv_delivery for connector in self._connectors)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(connector.supports_divergent_local_hybrid_hits for connector in self._connectors)

    def get_finished_count(self) -> int | None:
        """Ranks that report each transfer; None: all of them, as soon as one child needs all."""
        counts = {child.name: connector.get_finished_count() for child, connector in self.children}
        known = {count for count in counts.values() if count is not None}
        if len(known) > 1:
            raise RuntimeError(f"connectors expect reports of different numbers of ranks: {counts}")
        return None if None in counts.values() else known.pop()

    def get_kv_connector_stats(self) -> MultiStats | None:
        report = MultiStats()
        for child, connector in self.children:
            stats = connector.get_kv_connector_stats()
            if stats is not None and not stats.is_empty():
                report.add(child.name, child.connector_class, stats)
        return report if report.data else None

    def shutdown(self) -> None:
        """Shut every child down, whatever others raise; the first error is raised at the end."""
        errors: list[Exception] = []
        for connector in self._connectors:
            try:
                connector.shutdown()
            except Exception as error:
                log.exception("shutting %s down failed", type(connector).__name__)
                errors.append(error)
        if errors:
            raise errors[0]

    def each(self, call: Callable[[Any], Any]) -> list[Any]:
        """The answers of all children; none is left out because another has answered."""
        return [call(connector) for connector in self._connectors]


def own_message(message: Any, expected: type[Any]) -> Any:
    """The message itself. ``TypeError``: it is not what this connector's other half sends."""
    if not isinstance(message, expected):
        raise TypeError(f"expected {expected.__name__} of several connectors, got {type(message).__name__}")
    return message
