"""Engine and tenant of each response, for all replicas: one key per response in the shared index.

The key is written when the response is created, and read by a replica that does not know the response. No
request waits for a write, and a read has a deadline; the index's content is untrusted. With a key file each
entry is signed with a secret derived from all keys' digests, which no tenant knows and the index does not
hold: an entry is accepted only if a router wrote it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec

from router.fleet.status import HeldResponse
from router.replication.codec import response_key
from router.replication.redis_client import Client
from router.replication.redis_connection import IndexUnavailable, pack

# Seconds for which other replicas can find a response.
KEPT_S = 3600
# Entries that wait for the server; beyond it they are dropped.
_WAITING_MAX = 4096
_SEND_S = 0.5
_ENTRY_BYTES_MAX = 4096
_NO_SECRET = b""


class ResponseStats(msgspec.Struct):
    """Counters for metrics."""

    written: Annotated[int, "kvatlas_responses_written_total"] = 0
    """Responses (`/v1/responses`) whose engine and tenant were written for other replicas."""
    found: Annotated[int, "kvatlas_responses_found_total"] = 0
    """Responses that were not known here and were found in the shared index."""
    missing: Annotated[int, "kvatlas_responses_missing_total"] = 0
    """Responses that were not known here and not found in the shared index, or not in time."""
    dropped: Annotated[int, "kvatlas_responses_dropped_total"] = 0
    """Responses not reported to other replicas, because too many were queued or the index did not respond."""
    refused: Annotated[int, "kvatlas_responses_refused_total"] = 0
    """Entries for responses that were not written by a router with these keys, or could not be decoded."""


class _Entry(msgspec.Struct, array_like=True):
    engine_id: Annotated[str, msgspec.Meta(max_length=512)]
    tenant: Annotated[str, msgspec.Meta(max_length=64)]
    signature: Annotated[bytes, msgspec.Meta(max_length=32)]


_DECODE = msgspec.msgpack.Decoder(_Entry)


class ResponseDirectory:
    """Directory of responses.

    ``secrets``: the current signing secret, then earlier accepted ones; none without keys.
    """

    def __init__(
        self,
        client: Client,
        namespace: str,
        secrets: Callable[[], Sequence[bytes]] = tuple,
        *,
        timeout_s: float,
    ) -> None:
        self.stats = ResponseStats()
        self._client = client
        self._namespace = namespace
        self._secrets = secrets
        self._timeout_s = timeout_s
        self._waiting: asyncio.Queue[tuple[str, HeldResponse]] = asyncio.Queue(_WAITING_MAX)

    def put(self, response_id: str, held: HeldResponse) -> None:
        """Queue an entry to be written soon."""
        try:
            self._waiting.put_nowait((response_id, held))
        except asyncio.QueueFull:
            self.stats.dropped += 1

    async def run(self) -> None:
        """Write queued entries until cancelled, without waiting for replies."""
        while True:
            response_id, held = await self._waiting.get()
            key = response_key(self._namespace, response_id)
            secret = next(iter(self._secrets()), _NO_SECRET)
            entry = msgspec.msgpack.encode(_Entry(*held, _signed(secret, response_id, held)))
            try:
                connection = self._client.pipelined(key)
                await connection.send(pack("SET", key, entry, "EX", KEPT_S), 1, _SEND_S)
                self.stats.written += 1
            except IndexUnavailable:
                self.stats.dropped += 1

    async def find(self, response_id: str) -> HeldResponse | None:
        """Return the entry written by a router; None also if the index does not respond in time."""
        found = await self._read(response_id)
        if found is None:
            self.stats.missing += 1
        else:
            self.stats.found += 1
        return found

    async def _read(self, response_id: str) -> HeldResponse | None:
        entry: object = None
        with suppress(IndexUnavailable, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                entry = await self._client.command("GET", response_key(self._namespace, response_id))
        if not isinstance(entry, bytes):
            return None
        try:
            if len(entry) > _ENTRY_BYTES_MAX:
                raise msgspec.ValidationError("too long")
            said = _DECODE.decode(entry)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.stats.refused += 1
            return None
        held = HeldResponse(said.engine_id, said.tenant)
        secrets = self._secrets() or (_NO_SECRET,)
        if not any(hmac.compare_digest(said.signature, _signed(one, response_id, held)) for one in secrets):
            self.stats.refused += 1
            return None
        return held


def _signed(secret: bytes, response_id: str, held: HeldResponse) -> bytes:
    if not secret:
        return b""
    return hmac.digest(secret, msgspec.msgpack.encode((response_id, *held)), hashlib.sha256)
