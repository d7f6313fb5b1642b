"""vLLM's ``MultiConnector`` with checked children and separate statistics.

Calls that are simply forwarded to every child are vLLM's code. This module has the differences common to both
roles: settings with names and clear errors, layouts as preferences if possible, statistics by the children's
names. Invariant: either every child was made or none is left running.
"""

from __future__ import annotations

import copy
from typing import Any

from connectors.compat import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    MultiConnector,
    require_tested_vllm,
)
from connectors.multi.children import Child, check_hma, children_of, read_children, required_layout
from connectors.multi.messages import (
    MultiHandshake,
    MultiKvEvents,
    MultiMetadata,
    MultiPromMetrics,
    MultiStats,
    RunningSaves,
)


class ConnectorGroup(MultiConnector):
    """The children, and methods common to both roles. vLLM makes one object per role."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ``ConfigError`` for invalid settings, and errors of the children's constructors."""
        require_tested_vllm(type(self).__name__)
        self._children = children_of(vllm_config)
        check_hma(self._children, vllm_config)
        self._connectors: list[Any] = []
        try:
            super().__init__(_for_vllm(vllm_config), role, kv_cache_config)
        except BaseException:
            self.shutdown()
            raise

    @property
    def children(self) -> list[tuple[Child, Any]]:
        """Each child and its connector, in the order of the settings."""
        return list(zip(self._children, self._connectors, strict=True))

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[Any, Any]]:
        """Override: vLLM's parser supports neither names nor a child's engine id."""
        return [(child.connector_class, child.vllm_config(vllm_config)) for child in children_of(vllm_config)]

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
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether every child supports the sleep mode of vLLM 0.33."""
        return all(
            child.connector_class.supports_sleep_mode(child.transfer_config)
            for child in read_children(kv_transfer_config.kv_connector_extra_config)
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

    def get_kv_connector_stats(self) -> MultiStats | None:
        report = MultiStats()
        for child, connector in self.children:
            stats = connector.get_kv_connector_stats()
            if stats is not None and not stats.is_empty():
                report[child.name] = stats
        return report if report.data else None


class MultiWorkerPart(ConnectorGroup):
    """The worker part: pass each child its part of a step and merge the results.

    Invariant: a request's blocks are reported as saved once, when the last child that saves them is done.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._saves = RunningSaves()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._saves.announce(own_message(connector_metadata, MultiMetadata).saves)
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for child, connector in enumerate(self._connectors):
            ended = connector.get_transfer_results(finished_req_ids)
            results.finished_recving |= ended.finished_recving | ended.failed_recving
            results.failed_recving |= ended.failed_recving
            results.finished_sending |= self._saves.ended(child, ended.finished_sending)
        return results

    def get_handshake_metadata(self) -> MultiHandshake | None:
        parts = [connector.get_handshake_metadata() for connector in self._connectors]
        return None if all(part is None for part in parts) else MultiHandshake(tuple(parts))

    def get_kv_connector_kv_cache_events(self) -> MultiKvEvents | None:
        found = [connector.get_kv_connector_kv_cache_events() for connector in self._connectors]
        parts = {child: events for child, events in enumerate(found) if events is not None}
        return MultiKvEvents(parts) if parts else None


def own_message(message: Any, expected: type[Any]) -> Any:
    """Return the message. ``TypeError`` if it is not of this connector's other half."""
    if not isinstance(message, expected):
        raise TypeError(f"expected {expected.__name__} of several connectors, got {type(message).__name__}")
    return message


def _for_vllm(vllm_config: Any) -> Any:
    """The configuration for vLLM's constructor: children without names, each with a role."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = settings = copy.copy(vllm_config.kv_transfer_config)
    entries = settings.kv_connector_extra_config["connectors"]
    plain = [{"kv_role": settings.kv_role, **entry} for entry in entries]
    for entry in plain:
        entry.pop("name", None)
    settings.kv_connector_extra_config = {"connectors": plain}
    return config
