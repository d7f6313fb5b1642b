"""The CPU engine: the contract of all engines, and what is its own (faults, bounds)."""

from __future__ import annotations

from connectors.layout import CacheView
from connectors.transfer.host import HostTransferEngine
from tests.connectors.transfer_host.contract import PoolPart, TransferEngineContract


class TestHostTransferEngine(TransferEngineContract):
    def make_engine(self, view: CacheView, pool: PoolPart) -> HostTransferEngine:
        return HostTransferEngine(view, pool)
