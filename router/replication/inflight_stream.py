"""Appends entries to the streams of prompts in flight, without blocking the caller.

Invariant: entries of one stream are sent in order and immediately, as another replica may be about to place a
prompt with the same prefix; entries that cannot be sent are dropped, as replicas expire prompts themselves.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from router.replication.redis.client import Client
from router.replication.redis.connection import IndexUnavailable, pack

_WAITING_MAX = 4096
_ENTRIES_KEPT = 1024
_KEPT_S = 60
_SEND_S = 0.5


class InflightStream:
    """Sender of stream entries: ``put`` queues an entry; ``run`` sends the queue."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_WAITING_MAX)

    def put(self, key: bytes, entry: bytes) -> bool:
        """Queue an entry for the stream at ``key``; False if the queue is full."""
        try:
            self._waiting.put_nowait((key, entry))
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Send queued entries until cancelled, without waiting for replies."""
        while True:
            key, entry = await self._waiting.get()
            add = pack("XADD", key, "MAXLEN", "~", _ENTRIES_KEPT, "*", "f", entry)
            with suppress(IndexUnavailable):
                connection = self._client.pipelined(key)
                await connection.send(add + pack("EXPIRE", key, _KEPT_S), 2, _SEND_S)
