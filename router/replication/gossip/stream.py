"""Sends entries to the streams of prompts in flight, without anybody waiting for it.

Always true: entries of one stream are sent in order and at once, as another replica may be about to place a
prompt with the same prefix; those that the server does not take are dropped, as replicas stop counting a
prompt by themselves.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from router.replication.redis.client import Client
from router.replication.redis.connection import pack
from router.replication.redis.errors import IndexUnavailable

_WAITING_MAX = 4096
_ENTRIES_KEPT = 1024
_KEPT_S = 60
_SEND_S = 0.5


class InflightStream:
    """``put`` and go on; ``run`` as a task."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_WAITING_MAX)

    def put(self, key: bytes, entry: bytes) -> bool:
        """Have an entry sent to the stream at ``key``; False if too many wait."""
        try:
            self._waiting.put_nowait((key, entry))
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Send what waits, until cancelled; replies are not waited for."""
        while True:
            key, entry = await self._waiting.get()
            add = pack("XADD", key, "MAXLEN", "~", _ENTRIES_KEPT, "*", "f", entry)
            with suppress(IndexUnavailable):
                connection = self._client.pipelined(key)
                await connection.send(add + pack("EXPIRE", key, _KEPT_S), 2, _SEND_S)
