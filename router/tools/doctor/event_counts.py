"""Counts over an engine's raw event messages: their form, not the resulting residency."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from kvatlas.publisher.events import (
    UNKNOWN_TYPES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
)
from kvatlas.router.feeds.frames import Frame

_DIGESTS_MAX = 4096
_SAMPLES_MAX = 5
_NAMES_MAX = 64
_HEAD: msgspec.msgpack.Decoder[list[msgspec.Raw]] = msgspec.msgpack.Decoder(list[msgspec.Raw])


class GroupStores(msgspec.Struct):
    """Number of ``BlockStored`` events of one group by how much of their span they list."""

    full: int = 0
    masked: int = 0
    """Events that list fewer blocks than the span has."""
    empty: int = 0
    """Events that list no block."""


class EventCounts(msgspec.Struct):
    """Counts since the doctor started; ``digests`` are of whole messages, time stamp included."""

    batches: int = 0
    events: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    encodings: Counter[str] = msgspec.field(default_factory=Counter)
    hash_forms: Counter[str] = msgspec.field(default_factory=Counter)
    media: Counter[str] = msgspec.field(default_factory=Counter)
    groups: dict[int, GroupStores] = msgspec.field(default_factory=dict)
    without_group: int = 0
    lora_names: set[str] = msgspec.field(default_factory=set)
    rejected: int = 0
    rejections: list[str] = msgspec.field(default_factory=list)
    unknown_types: Counter[str] = msgspec.field(default_factory=Counter)
    ranks: set[int] = msgspec.field(default_factory=set)
    lookahead: int = 0
    digests: deque[tuple[int, int]] = msgspec.field(default_factory=lambda: deque(maxlen=_DIGESTS_MAX))

    def add(self, frame: Frame, payload: bytes) -> None:
        self.digests.append((frame.seq, frame.digest))
        if frame.batch is None:
            return
        self.batches += 1
        encoding = event_encoding(payload)
        if encoding is not None:
            self.encodings[encoding] += 1
        self._add_batch(frame.batch)

    def _add_batch(self, batch: DecodedBatch) -> None:
        self.rejected += len(batch.rejected)
        self.rejections += batch.rejected[: _SAMPLES_MAX - len(self.rejections)]
        for name in batch.unknown:
            if name in self.unknown_types or len(self.unknown_types) < UNKNOWN_TYPES_MAX:
                self.unknown_types[name] += 1
        if batch.data_parallel_rank is not None and len(self.ranks) < _NAMES_MAX:
            self.ranks.add(batch.data_parallel_rank)
        self.events += len(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._add_stored(event)
            elif isinstance(event, BlockRemoved):
                self.removed += 1
            elif isinstance(event, AllBlocksCleared):
                self.cleared += 1

    def _add_stored(self, event: BlockStored) -> None:
        self.stored += 1
        self.media[event.medium or "GPU"] += 1
        self.without_group += event.group_idx is None
        for wire in event.block_hashes[:1]:
            self.hash_forms["int" if isinstance(wire, int) else "bytes"] += 1
        if event.lora_name is not None and len(self.lora_names) < _NAMES_MAX:
            self.lora_names.add(event.lora_name)
        if event.lookahead_token_ids:
            self.lookahead = max(self.lookahead, len(event.lookahead_token_ids[0]))
        stores = self.groups.setdefault(event.group_idx or 0, GroupStores())
        listed, span = len(event.block_hashes), event.num_tokens()
        if not listed:
            stores.empty += 1
        elif listed * event.block_size < span:
            stores.masked += 1
        else:
            stores.full += 1


def event_encoding(payload: bytes) -> str | None:
    """Return ``map`` (vLLM 0.24 and later) or ``array``, by the batch's first event; None without events."""
    try:
        events = _HEAD.decode(_HEAD.decode(payload)[1])
        first = memoryview(events[0])[0]
    except (msgspec.MsgspecError, IndexError, RecursionError):
        return None
    return "array" if 0x90 <= first <= 0x9F or first in {0xDC, 0xDD} else "map"
