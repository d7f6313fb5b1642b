"""The scheduler's part of several connectors: chooses who loads, and keeps what they say apart.

What always holds: a request whose load failed is computed next, whichever child could load it; what a rank's
child answers reaches that child's other half only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from connectors.compat import KVConnectorMetadata, SupportsHMA
from connectors.multi.children import Child
from connectors.multi.group import ConnectorGroup, own_message
from connectors.multi.messages import MultiHandshake, MultiKvEvents, MultiMetadata, MultiWorkerMetadata


@dataclass(slots=True)
class _Request:
    """What the scheduler's half remembers of a live request."""

    loader: int | None = None
    """The child whose offer the last look-up returned."""
    must_compute: bool = False
    """A load failed since the request was last admitted."""
    tail_savers: set[int] = field(default_factory=set)
    """Children that took over the request's last, partial blocks."""


class MultiSchedulerPart(ConnectorGroup):
    """What vLLM asks of the scheduler's connector. One writer, on the engine core's thread."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, _Request] = {}
        self._new_saves: dict[str, frozenset[int]] = {}

    # -- requests ------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.each(lambda connector: connector.bind_kv_cache_manager(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.each(lambda connector: connector.bind_gpu_block_pool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = _Request()
        self.each(lambda connector: connector.on_new_request(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The longest offer. Every child is asked every time: some keep state by it."""
        offers = [
            connector.get_num_new_matched_tokens(request, num_computed_tokens)
            for connector in self._connectors
        ]
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        state.loader = None
        if any(tokens is None for tokens, _ in offers):
            return None, False
        loader = max(range(len(offers)), key=lambda child: (offers[child][0], -child))
        if state.must_compute or not offers[loader][0]:
            return 0, False
        state.loader = loader
        tokens, asynchronous = offers[loader]
        return tokens, asynchronous

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._loader(request).get_loaded_kv_cache_group_ids(request)
        return groups

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if num_external_tokens == 0:
            return {}
        sources: dict[Any, int] = self._loader(request).get_external_cache_hit_sources(
            request, num_external_tokens
        )
        return sources

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The child whose offer was taken loads; to the others the request was admitted without a load."""
        loader = self._loader(request) if num_external_tokens else None
        for connector in self._connectors:
            share = num_external_tokens if connector is loader else 0
            connector.update_state_after_alloc(request, blocks, share)
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
        """(Whether any child still saves the blocks, what all of them answer with).

        ``RuntimeError``: two children answer with the same key.
        """
        merged: dict[str, Any] = {}
        said_by: dict[str, str] = {}
        saving: set[int] = set()
        answered = False
        for index, (child, connector) in enumerate(self.children):
            saves, params = _finish(child, connector, request, block_ids)
            if saves:
                saving.add(index)
            for key, value in (params or {}).items():
                if key in merged:
                    clash = f"{said_by[key]} and {child.name}"
                    raise RuntimeError(
                        f"kv_transfer_params of request {request.request_id}: {clash} "
                        f"both answer with {key!r}; configure only one of them"
                    )
                merged[key], said_by[key] = value, child.name
            answered |= params is not None
        state = self._requests.pop(request.request_id, None)
        savers = saving | (state.tail_savers if state is not None else set())
        if savers:
            self._new_saves[request.request_id] = frozenset(savers)
        return bool(saving), merged if answered else None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # -- steps ---------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        parts = self.each(lambda connector: connector.build_connector_meta(scheduler_output))
        saves, self._new_saves = self._new_saves, {}
        return MultiMetadata(tuple(parts), saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Each child gets the output with its own part in it; what it changes there reaches the scheduler."""
        answered = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        parts = (
            [None] * len(self._connectors)
            if answered is None
            else own_message(answered, MultiWorkerMetadata).parts
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
        """All children's KV events, those of each in their order."""
        taken: list[Any] = []
        for child, connector in self.children:
            events = list(connector.take_events())
            if child.tell_apart:
                for event in events:
                    if hasattr(event, "ownership"):
                        event.ownership = child.name
            taken += events
        return taken

    def has_pending_push_work(self) -> bool:
        return any(self.each(lambda connector: connector.has_pending_push_work()))

    def has_pending_block_frees(self) -> bool:
        return any(self.each(lambda connector: connector.has_pending_block_frees()))

    def reset_cache(self) -> bool | None:
        """Reset every child. False: one of them failed; None: none of them can."""
        results = self.each(lambda connector: connector.reset_cache())
        if all(result is None for result in results):
            return None
        return all(result is not False for result in results)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for child, connector in enumerate(self._connectors):
            if told := MultiHandshake.parts_for(child, metadata):
                connector.set_xfer_handshake_metadata(told)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for child, connector in enumerate(self._connectors):
            if told := MultiHandshake.parts_for(child, metadata):
                connector.set_xfer_handshake_metadata_pp_aware(told)

    def _loader(self, request: Any) -> Any:
        state = self._requests.get(request.request_id)
        if state is None or state.loader is None:
            raise RuntimeError(f"request {request.request_id} is to be loaded, but no connector offered to")
        return self._connectors[state.loader]


def _finish(
    child: Child, connector: Any, request: Any, block_ids: tuple[list[int], ...]
) -> tuple[bool, dict[str, Any] | None]:
    if isinstance(connector, SupportsHMA):
        answer: tuple[bool, dict[str, Any] | None] = connector.request_finished_all_groups(request, block_ids)
        return answer
    if len(block_ids) != 1:
        raise RuntimeError(f"{child.name} does not support the hybrid KV cache manager, which is on")
    finished: tuple[bool, dict[str, Any] | None] = connector.request_finished(request, block_ids[0])
    return finished
