"""Imports of vLLM names that move between versions, and the tested versions.

vLLM's connector interface is experimental: almost every release added or removed methods. The names imported
here exist in every tested version. Importing this module raises an error for any other version, before any
data is touched: vLLM imports a connector's class while it reads its configuration, before it loads weights.
Set ``ALLOW_UNTESTED`` to a version's ``major.minor`` to try that version.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import vllm

log = logging.getLogger(__name__)

# ``major.minor`` of the vLLM releases that the test suite has run with.
TESTED_VERSIONS = ("0.32", "0.33")
# Environment variable: ``major.minor`` of one more version that may be used at the user's risk.
ALLOW_UNTESTED = "KVATLAS_ALLOW_UNTESTED_VLLM"

_REMEDY = "install one of these, or a release of kvatlas that was tested with yours"


def check_vllm_version(who: str, version: str | None = None) -> None:
    """Raise ``RuntimeError`` unless ``who`` was tested with this vLLM (or ``version``), or it is allowed."""
    found = vllm.__version__ if version is None else version
    minor = ".".join(found.split(".")[:2])
    if minor in TESTED_VERSIONS:
        return
    tested = f"{who} was tested with vLLM {', '.join(f'{known}.x' for known in TESTED_VERSIONS)}"
    if os.environ.get(ALLOW_UNTESTED) == minor:
        log.warning("%s, not with %s; continuing because %s=%s", tested, found, ALLOW_UNTESTED, minor)
        return
    raise RuntimeError(
        f"{tested}, this is vLLM {found}: {_REMEDY}, or set {ALLOW_UNTESTED}={minor} to try it untested"
    )


check_vllm_version("kvatlas")

try:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorPromMetrics,
    )
    from vllm.v1.core.kv_cache_utils import (
        generate_block_hash_extra_keys,
        maybe_convert_block_hash,
        resolve_kv_cache_block_sizes,
        to_event_extra_keys,
    )
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise RuntimeError(
        f"vLLM {vllm.__version__} lacks what the kvatlas connectors need ({error}); tested with "
        f"{', '.join(TESTED_VERSIONS)}: {_REMEDY}"
    ) from error

__all__ = [
    "ALLOW_UNTESTED",
    "TESTED_VERSIONS",
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "MultiConnector",
    "MultiKVConnectorPromMetrics",
    "SupportsHMA",
    "check_vllm_version",
    "generate_block_hash_extra_keys",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "maybe_convert_block_hash",
    "require_tested_vllm",
    "resolve_kv_cache_block_sizes",
    "share_vllm_log",
    "to_event_extra_keys",
    "wait_for_ranks",
]

_PROBES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        KVConnectorBase_V1,
        (
            "bind_gpu_block_pool",
            "build_connector_worker_meta",
            "get_loaded_kv_cache_group_ids",
            "get_transfer_results",
            "handle_preemptions",
            "has_pending_block_frees",
            "has_pending_push_work",
            "on_new_request",
            "requires_kv_delivery",
            "reset_cache",
        ),
    ),
    (SupportsHMA, ("request_finished_all_groups",)),
    (KVConnectorWorkerMetadata, ("aggregate",)),
)


def require_tested_vllm(connector: str, version: str | None = None) -> None:
    """Raise ``RuntimeError`` unless this vLLM (or ``version``) is tested, or allowed, and has all methods."""
    check_vllm_version(connector, version)
    found = vllm.__version__ if version is None else version
    for owner, names in _PROBES:
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            raise RuntimeError(
                f"{connector}: {owner.__name__} of this vLLM ({found}) lacks {', '.join(missing)}: {_REMEDY}"
            )


def wait_for_ranks() -> bool:
    """Wait for every rank of this engine. Returns False immediately if there is no process group."""
    import torch  # noqa: PLC0415 - only workers need it
    from vllm.distributed import parallel_state  # noqa: PLC0415

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    try:
        group = parallel_state.get_inner_dp_world_group()
    except AssertionError:
        group = parallel_state.get_world_group()
    group.barrier()
    return True


def share_vllm_log() -> None:
    """Send the connectors' log to vLLM's handlers; vLLM's server configures no other logger."""
    ours, theirs = logging.getLogger("connectors"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    ours.setLevel(theirs.level)
