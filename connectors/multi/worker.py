"""A rank's part of several connectors: hands each its share of a step and merges what they answer.

What always holds: a request's blocks are reported as saved once, when the last child that saves them is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from connectors.compat import KVConnectorMetadata, KVConnectorTransferResults
from connectors.multi.group import ConnectorGroup, own_message
from connectors.multi.messages import (
    MultiHandshake,
    MultiKvEvents,
    MultiMetadata,
    MultiWorkerMetadata,
    SavesUnderWay,
)


class MultiWorkerPart(ConnectorGroup):
    """What vLLM asks of a worker's connector, asked of every child."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._saves = SavesUnderWay()

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The memory pool of the one child that has one. ``RuntimeError``: several have."""
        found = [
            (child.name, context)
            for child, connector in self.children
            if (context := connector.get_mem_pool_context()) is not None
        ]
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise RuntimeError(f"{names} each want the KV cache in a memory pool of their own; configure one")
        return found[0][1] if found else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.each(lambda connector: connector.register_kv_caches(kv_caches))

    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33)."""
        self.each(lambda connector: connector.unregister_kv_caches())

    def restore_kv_caches(self) -> None:
        """After sleep."""
        self.each(lambda connector: connector.restore_kv_caches())

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.each(lambda connector: connector.set_host_xfer_buffer_ops(copy_operation))

    def get_handshake_metadata(self) -> MultiHandshake | None:
        parts = self.each(lambda connector: connector.get_handshake_metadata())
        return None if all(part is None for part in parts) else MultiHandshake(tuple(parts))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        parts = own_message(kv_connector_metadata, MultiMetadata).parts
        for connector, part in zip(self._connectors, parts, strict=True):
            connector.handle_preemptions(part)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        metadata = own_message(connector_metadata, MultiMetadata)
        self._saves.announce(metadata.saves)
        for connector, part in zip(self._connectors, metadata.parts, strict=True):
            connector.bind_connector_metadata(part)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.each(lambda connector: connector.clear_connector_metadata())
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.each(lambda connector: connector.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.each(lambda connector: connector.wait_for_layer_load(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.each(lambda connector: connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs))

    def wait_for_save(self) -> None:
        self.each(lambda connector: connector.wait_for_save())

    def finish_forward(self) -> None:
        self.each(lambda connector: connector.finish_forward())

    def reset_capture_state(self) -> None:
        self.each(lambda connector: connector.reset_capture_state())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for child, connector in enumerate(self._connectors):
            ended = connector.get_transfer_results(finished_req_ids)
            results.finished_recving |= ended.finished_recving | ended.failed_recving
            results.failed_recving |= ended.failed_recving
            results.finished_sending |= self._saves.ended(child, ended.finished_sending)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*self.each(lambda connector: connector.get_block_ids_with_load_errors()))

    def get_kv_connector_kv_cache_events(self) -> MultiKvEvents | None:
        found = self.each(lambda connector: connector.get_kv_connector_kv_cache_events())
        parts = {child: events for child, events in enumerate(found) if events is not None}
        return MultiKvEvents(parts) if parts else None

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        parts = self.each(lambda connector: connector.build_connector_worker_meta())
        return None if all(part is None for part in parts) else MultiWorkerMetadata(tuple(parts))
