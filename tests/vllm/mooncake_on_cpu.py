"""vLLM's MooncakeStoreConnector on the CPU.

Its saves wait for a CUDA event (``MooncakeStoreWorker.wait_for_save``, 0.32 and 0.33). On the CPU a step is
computed when it returns, so that there is nothing to wait for.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector

__all__ = ["MooncakeStoreConnector"]


class _Past:
    """An event that has happened."""

    def record(self) -> None:
        """All before it is done."""

    def synchronize(self) -> None:
        """It has happened."""


torch.cuda.Event = _Past  # type: ignore[misc,assignment]
