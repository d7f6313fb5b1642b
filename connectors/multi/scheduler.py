"""The scheduler part of several connectors: choose the child that loads, keep the children's messages
separate.

Invariants: a request whose load failed is computed next, even if another child could load it. Results of a
rank's child reach that child's other half only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connectors.compat import MultiKVConnectorWorkerMetadata
from connectors.multi.group import ConnectorGroup, own_message
from connectors.multi.messages import MultiHandshake, MultiKvEvents, MultiMetadata


@dataclass(slots=True)
class _Request:
    """State of a live request."""

    must_compute: bool = False
    """A load failed since the request was last admitted."""
    tail_savers: set[int] = field(default_factory=set)
    """Children that took over the request's last, partial blocks."""


class MultiSchedulerPart(ConnectorGroup):
    """Methods of the scheduler's connector that treat children separately.

    Only the engine core's thread calls them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, _Request] = {}
        self._new_saves: dict[str, frozenset[int]] = {}

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = _Request()
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The longest offer."""
        # Every child is called every time, as some keep state in this call.
        offers = [
            connector.get_num_new_matched_tokens(request, num_computed_tokens)
            for connector in self._connectors
        ]
        self._requests_to_connector.pop(request.request_id, None)
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        if any(tokens is None for tokens, _ in offers):
            return None, False
        loader = max(range(len(offers)), key=lambda child: (offers[child][0], -child))
        if state.must_compute or not offers[loader][0]:
            return 0, False
        self._requests_to_connector[request.request_id] = loader
        tokens, asynchronous = offers[loader]
        return tokens, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The child whose offer was taken loads; for the others the request was admitted without a load."""
        if num_external_tokens and request.request_id not in self._requests_to_connector:
            raise RuntimeError(f"request {request.request_id} is to be loaded, but no connector offered to")
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        state = self._requests.get(request.request_id)
        if state is not None and num_external_tokens == 0:
            state.must_compute = False

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        savers = {
            child
            for child, connector in enumerate(self._connectors)
            if connector.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        }
        if savers and (state := self._requests.get(request.request_id)) is not None:
            state.tail_savers = savers
        return bool(savers)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if len(block_ids) != 1 and not self._all_support_hma:
            raise RuntimeError("a connector here does not support the hybrid KV cache manager, which is on")
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    def _aggregate_request_finished(
        self, request: Any, per_connector_fn: Callable[[Any], tuple[bool, dict[str, Any] | None]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(Whether any child still saves the blocks, merged parameters of all children).

        ``RuntimeError`` if two children return the same key.
        """
        # The saving children are recorded, because vLLM's count of saves omits children that only took over
        # partial blocks, and attributes one child's report to another.
        state = self._requests.pop(request.request_id, None)
        savers = set() if state is None else state.tail_savers

        def recorded(connector: Any) -> tuple[bool, dict[str, Any] | None]:
            saves, params = per_connector_fn(connector)
            if saves:
                savers.add(self._connectors.index(connector))
            return saves, params

        answer: tuple[bool, dict[str, Any] | None] = super()._aggregate_request_finished(request, recorded)
        self._extra_async_saves.clear()
        if savers:
            self._new_saves[request.request_id] = frozenset(savers)
        return answer

    def build_connector_meta(self, scheduler_output: Any) -> MultiMetadata:
        parts = super().build_connector_meta(scheduler_output).metadata
        saves, self._new_saves = self._new_saves, {}
        return MultiMetadata(parts, saves=saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the output to each child with its own part; the children's changes reach the scheduler."""
        answered = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        parts = (
            [None] * len(self._connectors)
            if answered is None
            else own_message(answered, MultiKVConnectorWorkerMetadata).metadata
        )
        event_parts = {} if events is None else own_message(events, MultiKvEvents).parts
        try:
            for child, connector in enumerate(self._connectors):
                connector_output.kv_connector_worker_meta = parts[child]
                connector_output.kv_cache_events = event_parts.get(child)
                connector.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = answered
            connector_output.kv_cache_events = events
        for request_id in connector_output.failed_recving:
            if (state := self._requests.get(request_id)) is not None:
                state.must_compute = True

    def take_events(self) -> list[Any]:
        """KV events of all children, in order per child."""
        taken: list[Any] = []
        for child, connector in self.children:
            events = list(connector.take_events())
            if child.tell_apart:
                for event in events:
                    if hasattr(event, "ownership"):
                        event.ownership = child.name
            taken += events
        return taken

    def reset_cache(self) -> bool | None:
        """Reset every child. False if one failed; None if none supports it."""
        results = [connector.reset_cache() for connector in self._connectors]
        if all(result is None for result in results):
            return None
        return all(result is not False for result in results)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for child, connector in enumerate(self._connectors):
            if parts := MultiHandshake.parts_for(child, metadata):
                connector.set_xfer_handshake_metadata(parts)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for child, connector in enumerate(self._connectors):
            if parts := MultiHandshake.parts_for(child, metadata):
                connector.set_xfer_handshake_metadata_pp_aware(parts)
