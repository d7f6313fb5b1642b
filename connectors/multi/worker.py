"""The worker part of several connectors: pass each child its part of a step and merge the results.

Invariant: a request's blocks are reported as saved once, when the last child that saves them is done.
"""

from __future__ import annotations

from typing import Any

from connectors.compat import KVConnectorMetadata, KVConnectorTransferResults
from connectors.multi.group import ConnectorGroup, own_message
from connectors.multi.messages import MultiHandshake, MultiKvEvents, MultiMetadata, RunningSaves


class MultiWorkerPart(ConnectorGroup):
    """Methods of a worker's connector that treat children separately."""

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
