"""Frames of a store, decoded to chunks stored and removed. Without sockets.

- The keys alone of Mooncake's master, where it has no events: ``GET /get_all_keys``, one in a line (run,
  0.3.13.post1).
- Mooncake's master (kv_event_publisher.cpp of mooncake-store, main of November 2026; the released wheels are
  built without it): batches ``[ms, [map, ...], rank]``; a map has ``event_type`` (stored, removed, cleared),
  ``object_key``, ``tenant_id`` and ``medium`` (cpu, disk). The keys of vLLM's MooncakeStoreConnector say the
  rest (``PoolKey``, mooncake/store/data.py, 0.32 and 0.33):
  ``[prefix@]model[namespace]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@HASH``.
- LMCache's coordinator (LMCache #4768, not released): vLLM's batches, topic ``kv@INSTANCE@MODEL`` or
  ``kv@pool:BACKEND@MODEL``, hashes of its own over chunks of tokens. Their blocks are found by their tokens.
- llm-d's file store (event_publisher.py of llmd_fs_backend): vLLM's batches, topic ``kv@MEDIUM@MODEL``, the
  blocks' hashes as vLLM's and no groups: only models with one group are predicted.

Everything that is seen and not used is counted by its reason; of a batch that cannot be read, nothing is
applied, and its store must be forgotten: what it removed is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any

import msgspec

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.event_decoder import decode_in_pieces
from kvatlas.publisher.events import (
    EVENTS_MAX,
    GROUPS_MAX,
    AllBlocksCleared,
    BlockStored,
    Event,
    EventDecodeError,
    to_block_hash,
)
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.index.lmcache import LmcacheChunks
from kvatlas.router.index.stores import StoreChange

# Reasons for not using an event that are counted separately, and characters kept of each.
_REASONS_MAX, _REASON_CHARS_MAX = 16, 80
_KEY_CHARS_MAX = 1024
_KEYS_AT_ONCE = 256
_VLLM_KEY = re.compile(
    r"(.+)@tp_rank:([0-9]{1,4})@pcp([0-9]{1,4})@dcp([0-9]{1,4})@pp_rank:([0-9]{1,4})@group:([0-9]{1,2})"
    r"@([0-9a-f]{16,128})"
)
_MOONCAKE_MEDIA = {"cpu": 0, "disk": 1}
_LLMD_MEDIA = {"SHARED_STORAGE": 0, "OBJECT_STORE": 1}
_DEFAULT_TENANT = "default"


Changes = Sequence[StoreChange | None]
"""Changes in their order; None stands for: everything is gone."""
# Pieces of a batch as they are decoded, None where nothing is ready yet; returns the number of events.
Pieces = Generator[Changes | None, None, int]


class _MooncakeEvent(msgspec.Struct, gc=False):
    event_type: str = ""
    object_key: Annotated[str, msgspec.Meta(max_length=_KEY_CHARS_MAX)] | None = None
    tenant_id: str | None = None
    medium: str | None = None


class _MooncakeBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    rank: Any = None


_MOONCAKE_BATCH = msgspec.msgpack.Decoder(_MooncakeBatch)
_MOONCAKE_EVENT = msgspec.msgpack.Decoder(_MooncakeEvent)


class StoreDecoder:
    """Decodes the frames of one store. ``scheme``: hash scheme of the engines, None while it is unknown."""

    def __init__(self, settings: StoreSettings, scheme: Callable[[], HashScheme | None]) -> None:
        self._settings = settings
        self._keyed_as = settings.keyed_as
        self.unused = Counter[str]()
        """Events that were seen and not used, by reason; at most ``_REASONS_MAX``, and ``other``."""
        self._scheme = scheme
        self._chunks = LmcacheChunks(scheme, self._unused)

    def clear(self) -> None:
        """Discard what was learned of the store's hashes: its state is unknown."""
        self._chunks.clear()

    def decode(self, topic: bytes, payload: bytes) -> Pieces:
        """Decode one batch, piece by piece. Raises ``EventDecodeError``, also behind the first pieces."""
        if self._settings.kind == "mooncake":
            return (yield from self._mooncake(payload))
        middle = self._middle_of(topic.decode(errors="replace"))
        if middle is None:
            return 0
        batch = yield from decode_in_pieces(payload)
        if batch.rejected:
            raise EventDecodeError(batch.rejected[0])
        for name in batch.unknown:
            self._unused(f"event type {name}")
        for event in batch.events:
            yield self._of_event(event, middle)
        return len(batch.events)

    def _unused(self, reason: str) -> None:
        reason = reason[:_REASON_CHARS_MAX]
        self.unused[reason if reason in self.unused or len(self.unused) < _REASONS_MAX else "other"] += 1

    def _mooncake(self, payload: bytes) -> Pieces:
        try:
            batch = _MOONCAKE_BATCH.decode(payload)
            for raw in batch.events:
                event = _MOONCAKE_EVENT.decode(raw)
                if event.tenant_id not in {None, "", _DEFAULT_TENANT}:
                    self._unused(f"tenant {event.tenant_id}")
                elif event.event_type == "cleared":
                    yield (None,)
                elif change := self._of_key(event):
                    yield (change,)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise EventDecodeError(f"no batch of a Mooncake master: {error}") from None
        return len(batch.events)

    def decode_keys(self, text: bytes) -> Generator[list[StoreChange], None, int]:
        """Decode a list of keys, one in each line, as stored in host memory, some at a time; returns their
        number. Nothing tells of a key's medium or tenant."""
        start, count = 0, 0
        while start < len(text):
            changes: list[StoreChange] = []
            for _ in range(_KEYS_AT_ONCE):
                end = text.find(b"\n", start)
                end = len(text) if end < 0 else end
                key = text[start : min(end, start + _KEY_CHARS_MAX + 1)].decode(errors="replace")
                start = end + 1
                if key:
                    count += 1
                    change = self._of_key(_MooncakeEvent("stored", key, None, "cpu"))
                    changes += () if change is None else (change,)
                if start >= len(text):
                    break
            yield changes
        return count

    def _of_key(self, event: _MooncakeEvent) -> StoreChange | None:
        key, stored = event.object_key, event.event_type == "stored"
        if not stored and event.event_type != "removed":
            self._unused(f"event type {event.event_type}")
            return None
        medium = _MOONCAKE_MEDIA.get(event.medium or "")
        found = None if key is None else _VLLM_KEY.fullmatch(key)
        if medium is None or key is None or found is None:
            reason = f"medium {event.medium}" if medium is None else "events without object_key"
            self._unused(reason if key is None or medium is None else "keys of another form than vLLM's")
            return None
        keyed_as, tensor, context, decode, pipeline, group, block = found.groups()
        if keyed_as != self._keyed_as:
            self._unused(f"keys of {keyed_as}")
            return None
        part = self._settings.part_of(int(tensor), int(context), int(decode), int(pipeline))
        if part is None or int(group) >= GROUPS_MAX:
            ranks = f"tp_rank:{tensor}@pcp{context}@dcp{decode}@pp_rank:{pipeline}"
            self._unused(f"ranks beyond the parallel sizes, as {ranks}")
            return None
        return StoreChange(stored, int(group), to_block_hash(bytes.fromhex(block[-16:])), part, medium)

    def _middle_of(self, topic: str) -> str | None:
        """Return the middle of a topic ``kv@MIDDLE@MODEL`` that counts here."""
        first, _, rest = topic.partition("@")
        middle, _, model = rest.partition("@")
        if first != "kv" or not model:
            self._unused(f"topic {topic}")
            return None
        if model != self._keyed_as:
            self._unused(f"topic of {model}")
            return None
        if self._settings.kind == "lmcache":
            instances = self._settings.instances
            if middle not in instances if instances else not middle.startswith("pool:"):
                self._unused(f"instance {middle}")
                return None
        return middle

    def _of_event(self, event: Event, middle: str) -> Changes:
        if isinstance(event, AllBlocksCleared):
            self._chunks.clear()
            return (None,)
        if self._settings.kind == "lmcache":
            if self._scheme() is None and isinstance(event, BlockStored):
                self._unused("chunks before the engines' hash scheme is known")
            medium = 0 if event.medium == "lmcache-l1" else 1
            return self._chunks.changes(event, medium, self._settings.reach.chunk_tokens)
        number = _LLMD_MEDIA.get(event.medium or middle)
        if number is None:
            self._unused(f"medium {event.medium or middle}")
            return ()
        stored = isinstance(event, BlockStored)
        return [StoreChange(stored, 0, to_block_hash(one), 0, number) for one in event.block_hashes]
