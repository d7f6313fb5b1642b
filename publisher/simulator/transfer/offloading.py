"""OffloadingConnector with a ``p2p`` tier in one engine: blocks kept by the name that the router gave.

As read in vLLM 0.32; it has not been held against real engines. A prefill engine keeps what it computed until
somebody fetches it, or the time is over, and refuses whoever comes later; a decode engine fetches whole
blocks and computes the rest. Parameters that lack a part mean nothing.
"""

from __future__ import annotations

from typing import Any

from publisher.block_pool import PoolRequest
from publisher.simulator.request import SimRequest
from publisher.simulator.transfer.connector import KvConnector
from publisher.simulator.transfer.link import EXCHANGE_S, Address, exchange
from publisher.simulator.transfer.messages import Message, Reply, Take
from publisher.simulator.transfer.mooncake import MooncakeLink
from publisher.simulator.transfer.params import Fault, TransferParams
from publisher.simulator.transfer.stats import TransferStats


class OffloadingBooks(KvConnector):
    """See the module."""

    @property
    def metrics(self) -> TransferStats | None:
        """See ``KvConnector``: its own counters are not played."""
        return None

    def arrived(self, request: SimRequest) -> None:
        """See ``KvConnector``: a prompt is computed whole."""
        asked = request.transfer
        if asked is not None:
            self._report(request, asked)
            asked.do_remote_prefill = _source(asked) is not None

    def reach(self, request: SimRequest) -> int:
        """See ``KvConnector``: whole blocks before the last token."""
        unit = self._pool.layout.alignment
        return (super().reach(request) - 1) // unit * unit if super().reach(request) else 0

    def begin(self, request: SimRequest, pooled: PoolRequest) -> None:
        """See ``KvConnector``: whoever needs nothing tells nobody."""
        super().begin(request, pooled)
        self.unread.clear()

    def finished(self, request: SimRequest, pooled: PoolRequest, reason: str) -> None:
        """See ``KvConnector``."""
        asked = None if request.transfer is None else request.transfer.remote_decoder
        if asked and asked.get("kv_request_id"):
            self._keep(str(asked["kv_request_id"]), pooled, request.prompt)

    def left(self, request: SimRequest, *, loading: bool) -> None:
        """See ``KvConnector``: nobody is told."""
        self.settle(request)

    def _fault(self, params: TransferParams) -> Fault | None:
        return None


class OffloadingLink(MooncakeLink):
    """The side channel."""

    senders = 128
    """vLLM's ``VLLM_P2P_MAX_PEERS``."""

    def __init__(self, connector: OffloadingBooks, **options: Any) -> None:
        super().__init__(connector, bootstrap_port=None, **options)

    async def _meet(self, params: TransferParams) -> tuple[Address, str]:
        found = _source(params)
        if found is None:
            raise OSError("no address to fetch from")
        address, name = found
        await exchange(address, Take(name, self._common), self._books.lease_s + EXCHANGE_S)
        return address, name

    async def _answer(self, message: Message) -> Reply:
        if isinstance(message, Take) and self._books.dropped(message.transfer_id):
            return Reply(error="these blocks have been dropped")
        return await super()._answer(message)


def _source(params: TransferParams) -> tuple[Address, str] | None:
    named = params.remote_prefiller or {}
    host, port, name = (named.get(key) for key in ("remote_host", "remote_port", "kv_request_id"))
    return ((str(host), int(port)), str(name)) if host and port and name else None
