"""Connectors that do nothing but keep account, for a ``HybridMultiConnector`` to hold.

Each says in every message whose it is and refuses others'; what it was asked, told and made is written down.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvatlas.connectors.multi import HybridMultiConnector
from kvatlas.connectors.reports import OffloadStats


@dataclass
class Meta(KVConnectorMetadata):
    owner: str
    loads: list[str]
    saves: list[str]


@dataclass
class Answers(KVConnectorWorkerMetadata):
    owner: str
    ended: Counter[str]

    def aggregate(self, other: Any) -> Answers:
        assert other.owner == self.owner
        return Answers(self.owner, self.ended + other.ended)


@dataclass
class Account:
    """Calls to one child and its actions."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    offers: dict[str, tuple[int | None, bool]] = field(default_factory=dict)
    finish: dict[str, tuple[bool, dict[str, Any] | None]] = field(default_factory=dict)
    answered: Counter[str] = field(default_factory=Counter)
    taken: list[Any] = field(default_factory=list)
    to_load: list[str] = field(default_factory=list)
    to_save: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    takes_tail: bool = False
    ended: Counter[str] = field(default_factory=Counter)
    started: list[str] = field(default_factory=list)


class Plain(KVConnectorBase_V1):
    """A connector without SupportsHMA."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.owner = str(extra["owner"])
        self.account = Account()
        if extra.get("breaks"):
            raise ValueError(f"{self.owner} breaks")

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._kv_transfer_config.kv_connector_extra_config.get("delivers"))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout")

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise"))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return bool(kv_transfer_config.kv_connector_extra_config.get("sleeps", True))

    def unregister_kv_caches(self) -> None:
        self._log("unregister")

    def restore_kv_caches(self) -> None:
        self._log("restore")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data=data or {})

    def _log(self, *call: Any) -> None:
        self.account.calls.append(call)

    # scheduler

    def on_new_request(self, request: Any) -> None:
        self._log("new", request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._log("lookup", request.request_id)
        return self.account.offers.get(request.request_id, (0, False))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (len(self.owner), 7)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._log("alloc", request.request_id, num_external_tokens)
        if num_external_tokens:
            self.account.to_load.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        account = self.account
        meta = Meta(self.owner, account.to_load, account.to_save)
        account.to_load, account.to_save = [], []
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        answers = connector_output.kv_connector_worker_meta
        if answers is not None:
            assert answers.owner == self.owner
            self.account.answered += answers.ended

    def register_finished_partial_tail(
        self, request: Any, block_ids: Any, partial_tail_offloads: Any
    ) -> bool:
        return self.account.takes_tail

    def _finish(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        saves, params = self.account.finish.get(request.request_id, (False, None))
        if saves:
            self.account.to_save.append(request.request_id)
        return saves, params

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._log("finished", request.request_id, block_ids)
        return self._finish(request)

    def take_events(self) -> list[Any]:
        events, self.account.events = self.account.events, []
        return events

    def get_kv_connector_stats(self) -> OffloadStats | None:
        stats, self.account.stats = self.account.stats, {}
        return OffloadStats(data=stats)

    # worker

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert kv_connector_metadata.owner == self.owner

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._connector_metadata.owner == self.owner
        self.account.started += self._connector_metadata.loads

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        self.account.started += self._connector_metadata.saves

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        account = self.account
        results = KVConnectorTransferResults(account.sending, account.recving, account.failing)
        account.sending, account.recving, account.failing = set(), set(), set()
        return results

    def build_connector_worker_meta(self) -> Answers | None:
        ended, self.account.ended = self.account.ended, Counter()
        return Answers(self.owner, ended) if ended else None

    def shutdown(self) -> None:
        SHUT_DOWN.append(self.owner)


SHUT_DOWN: list[str] = []


class Fake(Plain, SupportsHMA):
    """A connector that keeps groups apart."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._log("finished", request.request_id, block_ids)
        return self._finish(request)


class Resettable(Fake):
    def reset_cache(self) -> bool:
        self._log("reset")
        return not self._kv_transfer_config.kv_connector_extra_config.get("stuck")


def child(owner: str, kind: str = "Fake", **extra: Any) -> dict[str, Any]:
    """Settings of one fake."""
    return {
        "kv_connector": kind,
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"owner": owner, **extra},
    }


def config_of(*children: Any, hma: bool = True, **outer: Any) -> Any:
    """The part of vLLM's configuration that the connector reads."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="HybridMultiConnector",
            kv_connector_module_path="kvatlas.connectors.multi",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": list(children), **outer},
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not hma),
    )


def multi(
    *children: Any, role: Any = KVConnectorRole.SCHEDULER, hma: bool = True
) -> tuple[HybridMultiConnector, list[Account]]:
    """The connector and its children's accounts."""
    connector = HybridMultiConnector(config_of(*children, hma=hma), role, None)
    return connector, [made.account for made in connector.sub_connectors]


def request(request_id: str = "r") -> Any:
    return SimpleNamespace(request_id=request_id)
