"""Event frames of stores, written from their sources, read on 2026-11-29.

- Mooncake's master: mooncake-store/src/kv_event/kv_event_publisher.cpp
  (https://github.com/kvcache-ai/Mooncake, 0d1884d6): empty topic; numbers from 1, one more for each event
  that its queue dropped; no replay. The wheel ``mooncake-transfer-engine-non-cuda`` 0.3.13.post1 is built
  without them, so that a real master says nothing.
- llm-d's file store: llmd_fs_backend/event_publisher.py (https://github.com/llm-d/llm-d-kv-cache, 0774186d).
- LMCache's coordinator: https://github.com/LMCache/LMCache/pull/4768 (open).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from kvatlas.publisher.block_pool import PoolRequest
from kvatlas.publisher.events import BlockStored, Event, WireHash, encode_tokens, to_block_hash

MODEL = "kvatlas-demo"
CHUNK_TOKENS = 64
"""Of LMCache's chunks here."""
_encode = msgspec.msgpack.Encoder().encode


def mooncake_key(
    digest: bytes,
    model: str = MODEL,
    *,
    tp: int = 0,
    pp: int = 0,
    pcp: int = 0,
    dcp: int = 0,
    group: int = 0,
) -> str:
    """The key of an object of vLLM's MooncakeStoreConnector (``PoolKey``, mooncake/store/data.py, 0.33)."""
    return f"{model}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group}@{digest.hex()}"


def mooncake_event(
    kind: str, key: str | None, medium: str | None = "cpu", *, tenant: str = "default", legacy: bool = True
) -> dict[str, Any]:
    """One event of the master."""
    names = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
    event: dict[str, Any] = {"event_id": 7, "timestamp": 1_790_000_000_000, "event_type": kind}
    if legacy:
        event["type"] = names.get(kind, kind)
    event |= {"model_name": None, "block_size": None, "additional_salt": None, "lora_name": None}
    event |= {"tenant_id": tenant, "backend_id": "mooncake-0", "medium": medium, "dp_rank": 0}
    if kind == "cleared":
        return event
    event["group_id"] = None
    if key is not None:
        event["object_key"] = key
    event["seq_hashes"] = []
    if legacy:
        event["block_hashes"] = []
    event["base_block_idx"] = None
    if kind == "stored":
        event |= {"parent_hash": None, "token_ids": None}
        if legacy:
            event["parent_block_hash"] = None
    return event


def mooncake_payload(events: Iterable[dict[str, Any]]) -> bytes:
    return _encode([1_790_000_000_000, list(events), 0])


def llmd_payload(*events: list[Any]) -> bytes:
    """A batch of llm-d's file store: each event is encoded by itself."""
    return _encode([1.5, [_encode(event) for event in events]])


def llmd_stored(hashes: Sequence[int], medium: str = "SHARED_STORAGE") -> list[Any]:
    return ["BlockStored", list(hashes), 0, [], 0, None, medium]


def llmd_removed(hashes: Sequence[int], medium: str = "SHARED_STORAGE") -> list[Any]:
    return ["BlockRemoved", list(hashes), medium]


def lmcache_hashes(tokens: Sequence[int], size: int, extra: bytes = b"") -> list[bytes]:
    """Hashes of a prompt's chunks; its own are BLAKE3, of the same width."""
    found: list[bytes] = []
    parent = bytes(12) + extra
    for end in range(size, len(tokens) + 1, size):
        words = b"".join(token.to_bytes(4, "big") for token in tokens[end - size : end])
        parent = hashlib.sha256(parent + words).digest()
        found.append(parent)
    return found


def lmcache_stored(
    tokens: Sequence[int], at: int, size: int, medium: str = "lmcache-l2-s3", extra: bytes = b""
) -> list[Any]:
    """The event of a prompt's chunk number ``at``."""
    hashes = lmcache_hashes(tokens, size, extra)
    parent = hashes[at - 1] if at else None
    return [
        "BlockStored",
        [hashes[at]],
        parent,
        list(tokens[at * size : (at + 1) * size]),
        size,
        None,
        medium,
    ]


def lmcache_payload(*events: list[Any]) -> bytes:
    return _encode([1.5, list(events), None])


class StorePublisher:
    """A store's socket: numbers its batches, from 1."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.endpoint = endpoint
        self.topic = topic.encode()
        self.number = 0
        self.sent = 0
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(endpoint)

    def send(self, payload: bytes, *, skipped: int = 0) -> None:
        """Publish a batch; ``skipped``: numbers left out before it."""
        self.number += 1 + skipped
        self.sent += 1
        self._socket.send_multipart([self.topic, self.number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._socket.close(linger=0)


class MooncakeStore(StorePublisher):
    """A stand-in for a Mooncake master and what its clients hold: block hashes, in the order of storing."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.held: dict[WireHash, None] = {}

    def put(self, blocks: Iterable[WireHash]) -> list[WireHash]:
        """Store the blocks that are not held; returns them."""
        new = [block for block in dict.fromkeys(blocks) if block not in self.held]
        self.held.update(dict.fromkeys(new))
        self._tell("stored", new)
        return new

    def evict(self, count: int) -> None:
        """Remove the blocks that were stored first."""
        gone = list(self.held)[:count]
        for block in gone:
            del self.held[block]
        self._tell("removed", gone)

    def _tell(self, kind: str, blocks: list[WireHash]) -> None:
        if blocks:
            keys = [mooncake_key(to_block_hash(block).to_bytes(8, "big")) for block in blocks]
            self.send(mooncake_payload(mooncake_event(kind, key) for key in keys))


class MooncakeTier:
    """vLLM's MooncakeStoreConnector in a simulated engine with full attention, in place of its ``HostTier``:
    it stores what the pool stores, looks prompts up in the store from the first token on, and publishes what
    it stored as ``cpu`` (mooncake/store/worker.py, 0.33)."""

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store

    def follow(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, BlockStored):
                told += [
                    BlockStored([block], None, encode_tokens([]), 16, medium="cpu", group_idx=0)
                    for block in self._store.put(event.block_hashes)
                ]
        return told

    def reach(self, request: PoolRequest, hit: int) -> int:
        size = 16
        blocks = request.known_hashes()[: (request.num_tokens - 1) // size]
        count = next((at for at, block in enumerate(blocks) if block not in self._store.held), len(blocks))
        return max(hit, count * size)


class FileStore:
    """A stand-in for llm-d's file store: engines tell what they wrote, its evictor what is gone, each with
    numbers of its own."""

    def __init__(self, endpoint: str, evictor: str) -> None:
        topic = f"kv@SHARED_STORAGE@{MODEL}"
        self._writer, self._evictor = StorePublisher(endpoint, topic), StorePublisher(evictor, topic)
        self.held: dict[WireHash, None] = {}

    @property
    def sent(self) -> int:
        return self._writer.sent + self._evictor.sent

    def put(self, blocks: Iterable[WireHash]) -> None:
        """Store the blocks that are not held."""
        new = [block for block in dict.fromkeys(blocks) if block not in self.held]
        self.held.update(dict.fromkeys(new))
        if new:
            self._writer.send(llmd_payload(llmd_stored(list(map(to_block_hash, new)))))

    def evict(self, count: int) -> None:
        """Remove the blocks that were stored first."""
        gone = list(self.held)[:count]
        for block in gone:
            del self.held[block]
        if gone:
            self._evictor.send(llmd_payload(llmd_removed(list(map(to_block_hash, gone)))))

    def close(self) -> None:
        self._writer.close()
        self._evictor.close()


class FileTier:
    """vLLM's OffloadingConnector over that store, in place of an engine's ``HostTier``: it is asked for the
    blocks behind the GPU hit, and its own events are the store's."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def follow(self, events: Iterable[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, BlockStored):
                self._store.put(event.block_hashes)
        return []

    def reach(self, request: PoolRequest, hit: int) -> int:
        blocks = request.known_hashes()[: (request.num_tokens - 1) // 16]
        at = hit // 16
        while at < len(blocks) and blocks[at] in self._store.held:
            at += 1
        return max(hit, at * 16)


class ChunkStore(StorePublisher):
    """A stand-in for a pool that LMCache's engines share, as its coordinator tells of it: chunks of tokens
    under hashes of its own."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, f"kv@pool:s3@{MODEL}")
        self.held: dict[WireHash, None] = {}

    def put(self, tokens: Sequence[int]) -> None:
        """Store the whole chunks of a prompt that are not held."""
        hashes = lmcache_hashes(tokens, CHUNK_TOKENS)
        new = [at for at, chunk in enumerate(hashes) if chunk not in self.held]
        self.held.update(dict.fromkeys(hashes[at] for at in new))
        if new:
            self.send(lmcache_payload(*(lmcache_stored(tokens, at, CHUNK_TOKENS) for at in new)))

    def evict(self, count: int) -> None:
        """Remove the chunks that were stored first."""
        gone = list(self.held)[:count]
        for chunk in gone:
            del self.held[chunk]
        if gone:
            self.send(lmcache_payload(["BlockRemoved", gone, "lmcache-l2-s3"]))


class ChunkTier:
    """LMCache in an engine, in place of its ``HostTier``: it stores the whole chunks of what the pool stores,
    and looks prompts up from their first chunk on."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._prefixes: dict[WireHash | None, list[int]] = {None: []}
        """Hash of a block -> the tokens up to its end."""

    def follow(self, events: Iterable[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, BlockStored):
                tokens = self._prefixes[event.parent_block_hash]
                for at, block in enumerate(event.block_hashes):
                    tokens = [*tokens, *event.tokens()[16 * at : 16 * (at + 1)]]
                    self._prefixes[block] = tokens
                self._store.put(tokens)
        return []

    def reach(self, request: PoolRequest, hit: int) -> int:
        chunks = lmcache_hashes(request.token_ids[: request.num_tokens - 1], CHUNK_TOKENS)
        held = self._store.held
        count = next((at for at, chunk in enumerate(chunks) if chunk not in held), len(chunks))
        return max(hit, count * CHUNK_TOKENS)
