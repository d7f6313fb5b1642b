"""``FaultyOffloadConnector``: the offload connector with loads that lie on demand, for tests.

``kv_connector_extra_config.control`` names a file, read again for every load: the group whose blocks are
cleared after they were copied; empty: none. Loaded by module path: it is no part of the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from kvatlas.connectors.layout import CacheView
from kvatlas.connectors.offload import EXTRA_CONFIG, HybridOffloadConnector
from kvatlas.connectors.settings import OffloadSettings
from kvatlas.connectors.transfer.base import Direction, TransferEngine, TransferJob
from kvatlas.connectors.transfer.host import PinnedHostPool
from kvatlas.connectors.transfer.host_engine import HostTransferEngine
from kvatlas.connectors.worker.worker import EngineFactory, EngineWithPool


class FaultyOffloadConnector(HybridOffloadConnector):
    def settings(self) -> OffloadSettings:
        return OffloadSettings.parse(self.extra_config, EXTRA_CONFIG, others=["control"])

    def engine_factory(self) -> EngineFactory:
        control = Path(self.extra_config["control"])
        slots = self.slots(self.settings())

        def make(view: CacheView, device: str) -> TransferEngine:
            pool = PinnedHostPool(slots * view.row_bytes, view.row_bytes)

            def fault(job: TransferJob, copy: Callable[[], None]) -> None:
                copy()
                if job.direction is Direction.LOAD and (group := control.read_text()):
                    clear(view, job, int(group))

            return EngineWithPool(HostTransferEngine(view, pool, fault=fault), pool)

        return make


def clear(view: CacheView, job: TransferJob, group_idx: int) -> None:
    """Zero the blocks of one group that the job just filled."""
    pages = next(group for group in view.groups if group.group_idx == group_idx)
    for moves in job.groups:
        if moves.group_idx != group_idx:
            continue
        for block_id in moves.block_ids.tolist():
            for region in pages.regions:
                for offset in region.piece_offsets:
                    address = region.base_address + block_id * region.block_stride_bytes + offset
                    ctypes.memset(address, 0, region.piece_bytes)
