"""Sends entries to the streams of prompts in flight, without anybody waiting for it.

Always true: entries of one stream are sent in order, all that wait in one script call; those that the server
does not take are dropped, as other replicas stop counting a prompt by themselves.
"""

from __future__ import annotations

import asyncio

from router.replication.redis.client import Client
from router.replication.redis.errors import IndexUnavailable
from router.replication.schema.scripts import APPEND

_WAITING_MAX = 4096
_ENTRIES_KEPT = 1024
_KEPT_S = 60
_AFTER_FAULT_S = 0.05


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
        """Send what waits, until cancelled."""
        while True:
            streams: dict[bytes, list[bytes]] = {}
            key, entry = await self._waiting.get()
            streams[key] = [entry]
            while not self._waiting.empty():
                key, entry = self._waiting.get_nowait()
                streams.setdefault(key, []).append(entry)
            try:
                for key, entries in streams.items():
                    await self._client.run(APPEND, [key], _ENTRIES_KEPT, _KEPT_S, *entries)
            except IndexUnavailable:
                await asyncio.sleep(_AFTER_FAULT_S)
