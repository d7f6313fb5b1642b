"""Decode batches of KV events, in every encoding since vLLM 0.20.

A batch is decoded in one call; if that fails or the batch is large, event by event. A missing field or a
wrong value rejects that event only and is reported in ``DecodedBatch.rejected``. Fields that may be None may
be absent too (SGLang omits them); unknown fields are ignored. ``DecodedBatch.unknown`` names events of an
unknown type. The first event of such a type makes its batch take the slow path; later ones are skipped
directly.

Invariant: for any bytes, ``decode_batch`` returns a batch or raises ``EventDecodeError``, nothing else. A
batch has at most ``EVENTS_MAX`` events, an event at most ``BLOCKS_MAX`` blocks, and their nested lists (extra
keys, look-ahead tokens) take at most ``NESTED_BYTES_MAX`` together.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import reduce
from operator import or_
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from kvatlas.publisher.events import (
    EVENTS_MAX,
    NESTED_BYTES_MAX,
    TYPE_CHARS_MAX,
    UNKNOWN_TYPES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Event,
    EventDecodeError,
    GroupIdx,
    Hashes,
    Size,
    WireHash,
    encode_tokens,
)

_Result = TypeVar("_Result")
_Event = TypeVar("_Event")

_REASON_LENGTH_MAX = 200
# Larger batches are decoded event by event; a batch of this size takes a millisecond.
_AT_ONCE_BYTES_MAX = 1 << 18
_PIECE_BYTES = 1 << 16
# Cost added to each event's bytes, so that many small events fill a piece too.
_EVENT_BYTES = 200
_CONTAINERS = bytes(range(0x80, 0xA0))
_CONTAINER_BYTES = 64


class _TooMuchNestedError(ValueError):
    """The nested lists of an event would take too much memory."""


class _Batch(msgspec.Struct, Generic[_Event], array_like=True, gc=False):
    ts: float
    events: list[_Event]
    data_parallel_rank: int | None = None
    publisher_id: Any = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: Any = None
    publisher_id: Any = None


_NIL = msgspec.Raw(b"\xc0")


class _ArrayStored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: Hashes
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Size | None = None


class _MapStored(msgspec.Struct, tag="BlockStored", kw_only=True, gc=False):
    """``BlockStored`` with its nested lists undecoded."""

    block_hashes: Hashes
    parent_block_hash: WireHash | None = None
    token_ids: msgspec.Raw
    block_size: Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = _NIL
    cache_salt: str | None = None


class _ArrayRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _MapTag(msgspec.Struct, gc=False):
    type: str


class _ArrayTag(msgspec.Struct, array_like=True, gc=False):
    type: str


_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class _MapDecoders:
    """Decoders of events encoded as maps.

    Each unknown type met becomes one more member of their unions, an event without fields, so that batches
    with such events are decoded in one call too. The result does not depend on which types were met before.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        kinds = [msgspec.defstruct("Skipped", [], tag=name, gc=False) for name in names]
        self.names = dict(zip(kinds, names, strict=True))
        events: Any = reduce(or_, kinds, Event)
        event: Any = reduce(or_, kinds, _MapStored | BlockRemoved | AllBlocksCleared)
        self.batch: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Batch[events])
        self.event: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(event)

    def with_type(self, name: str) -> _MapDecoders:
        """Decoders that skip this type too; unchanged at ``UNKNOWN_TYPES_MAX`` types."""
        names = tuple(self.names.values())
        if name in names or len(names) >= UNKNOWN_TYPES_MAX or len(name) > TYPE_CHARS_MAX:
            return self
        return _MapDecoders((*names, name))


class _Maps:
    """The decoders in use, shared by all streams of the process."""

    now = _MapDecoders()


_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_BYTES = msgspec.msgpack.Decoder(bytes)
_BINARY = frozenset({0xC4, 0xC5, 0xC6})
_MAP_TAG = msgspec.msgpack.Decoder(_MapTag)
_ARRAY_TAG = msgspec.msgpack.Decoder(_ArrayTag)
_EXTRA_KEYS: msgspec.msgpack.Decoder[list[Any] | None] = msgspec.msgpack.Decoder(list[Any] | None)
_LOOKAHEAD: msgspec.msgpack.Decoder[list[list[int]] | None] = msgspec.msgpack.Decoder(list[list[int]] | None)
_PAIRS: msgspec.msgpack.Decoder[list[tuple[int, int]]] = msgspec.msgpack.Decoder(list[tuple[int, int]])
# Bytes before the first item of a long msgpack array, by its first byte.
_HEADS = {0xDC: 3, 0xDD: 5}
_ARRAY_EVENT: msgspec.msgpack.Decoder[_ArrayStored | _ArrayRemoved | _ArrayCleared] = msgspec.msgpack.Decoder(
    _ArrayStored | _ArrayRemoved | _ArrayCleared
)


def decode_batch(payload: bytes | memoryview) -> DecodedBatch:
    """Decode one payload frame. Raises ``EventDecodeError`` if it is not a batch."""
    return finish(decode_in_pieces(payload))


def decode_in_pieces(payload: bytes | memoryview) -> Generator[None, None, DecodedBatch]:
    """``decode_batch`` as a generator that yields after each piece of a few milliseconds."""
    if len(payload) <= _AT_ONCE_BYTES_MAX:
        maps = _Maps.now
        try:
            batch = maps.batch.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass
        else:
            return _known_alone(batch, maps.names)
    return (yield from _decode_by_event(payload))


def _known_alone(batch: _Batch[Any], names: dict[type, str]) -> DecodedBatch:
    """The batch without events of the types in ``names``; ``unknown`` lists their names."""
    events = batch.events
    unknown = [names[type(event)] for event in events if type(event) in names] if names else []
    if unknown:
        events = [event for event in events if type(event) not in names]
    publisher_id = _publisher_id(batch.publisher_id)
    rejected: list[str] = []
    if any(type(event) is BlockStored and _has_pairs(event) for event in events):
        events, rejected = _split_pairs(events)
    return DecodedBatch(batch.ts, events, batch.data_parallel_rank, publisher_id, rejected, unknown)


def _has_pairs(event: BlockStored) -> bool:
    """Whether the tokens of an event are pairs: SGLang's pages with EAGLE (``record_store``,
    srt/mem_cache/events.py, 0.5.23)."""
    data = memoryview(event.token_ids)
    return data[_HEADS.get(data[0], 1) :][:1].tobytes() == b"\x92"


def _split_pairs(events: list[Event]) -> tuple[list[Event], list[str]]:
    """Return the events with single tokens, and the reasons for those that are rejected."""
    kept: list[Event] = []
    rejected: list[str] = []
    nested = _Nested()
    for event in events:
        try:
            kept.append(_single(event, nested) if type(event) is BlockStored and _has_pairs(event) else event)
        except (msgspec.MsgspecError, _TooMuchNestedError) as error:
            rejected.append(str(error)[:_REASON_LENGTH_MAX])
    return kept, rejected


def _single(event: BlockStored, nested: _Nested) -> BlockStored:
    """Return an event of pairs with their first tokens, and the second one at each block's end as its
    look-ahead. Raises ``_TooMuchNestedError``, or an error of the decoder."""
    pairs, size = nested.decode(event.token_ids, _PAIRS), event.block_size
    ends = range(size, len(pairs) + 1, size) if size else ()
    event.token_ids = encode_tokens([first for first, _ in pairs])
    event.lookahead_token_ids = [[pairs[end - 1][1]] for end in ends]
    return event


def finish(steps: Generator[None, None, _Result]) -> _Result:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result


def _decode_by_event(payload: bytes | memoryview) -> Generator[None, None, DecodedBatch]:
    try:
        batch = _RAW_BATCH.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise EventDecodeError(f"batch is not [ts, [event, ...], rank]: {error}") from None
    events: list[Event] = []
    rejected: list[str] = []
    unknown: list[str] = []
    texts: dict[str, str] = {}
    nested, piece = _Nested(), 0
    for raw in batch.events:
        event: Event | str | None
        try:
            event = _decode_event(raw := _unwrapped(raw), nested)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, _TooMuchNestedError) as error:
            event = _unknown_type(raw)
            if event is None:
                reason = str(error)[:_REASON_LENGTH_MAX]
                rejected.append(texts.setdefault(reason, reason))
        if isinstance(event, str):
            unknown.append(texts.setdefault(event, event))
        elif event is not None:
            events.append(event)
        piece += _EVENT_BYTES + len(memoryview(raw))
        if piece >= _PIECE_BYTES:
            piece = 0
            yield
    rank = batch.data_parallel_rank
    if rank is not None and not isinstance(rank, int):
        rejected.append(f"data_parallel_rank is {type(rank).__name__}, expected int")
        rank = None
    return DecodedBatch(batch.ts, events, rank, _publisher_id(batch.publisher_id), rejected, unknown)


class _Nested:
    """Decode the nested lists of one batch within ``NESTED_BYTES_MAX``."""

    def __init__(self) -> None:
        self._left = NESTED_BYTES_MAX

    def decode(self, raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[_Result]) -> _Result:
        """Decode a value. Raises ``_TooMuchNestedError``, or an error of the decoder."""
        data = bytes(raw)
        containers = len(data) - len(data.translate(None, _CONTAINERS))
        size = 4 * len(data) + _CONTAINER_BYTES * containers
        if size > self._left:
            raise _TooMuchNestedError(f"nested lists of more than {NESTED_BYTES_MAX} bytes in one batch")
        self._left -= size
        return decoder.decode(data)


def _decode_event(raw: msgspec.Raw, nested: _Nested) -> Event | str:
    """The event, or the name of its type if that type is skipped."""
    event: _MapStored | _ArrayStored | BlockRemoved | _ArrayRemoved | AllBlocksCleared | _ArrayCleared
    if not _is_array(raw):
        maps = _Maps.now
        event = maps.event.decode(raw)
        if isinstance(event, BlockRemoved | AllBlocksCleared):
            return event
        if type(event) in maps.names:
            return maps.names[type(event)]
    else:
        event = _ARRAY_EVENT.decode(raw)
    if isinstance(event, _MapStored | _ArrayStored):
        fields = msgspec.structs.asdict(event)
        fields["extra_keys"] = nested.decode(event.extra_keys, _EXTRA_KEYS)
        if isinstance(event, _MapStored):
            fields["lookahead_token_ids"] = nested.decode(event.lookahead_token_ids, _LOOKAHEAD)
        stored = BlockStored(**fields)
        return _single(stored, nested) if _has_pairs(stored) else stored
    if isinstance(event, _ArrayRemoved):
        return BlockRemoved(**msgspec.structs.asdict(event))
    return AllBlocksCleared()


def _unknown_type(raw: msgspec.Raw) -> str | None:
    """Name of the event's type if it is unknown; None for an event that is malformed."""
    is_map = not _is_array(raw)
    try:
        name = _MAP_TAG.decode(raw).type if is_map else _ARRAY_TAG.decode(raw).type
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not name or name in _KNOWN_TYPES:
        return None
    if is_map:
        _Maps.now = _Maps.now.with_type(name)
    return name[:TYPE_CHARS_MAX]


def _unwrapped(raw: msgspec.Raw) -> msgspec.Raw:
    """The event itself, where a publisher encodes events one by one as bytes (llm-d's file store)."""
    inner = _BYTES.decode(raw) if memoryview(raw)[0] in _BINARY else b""
    return msgspec.Raw(inner) if inner else raw


def _is_array(raw: msgspec.Raw) -> bool:
    """Whether this is a msgpack array; otherwise it is a map, or no event."""
    first = memoryview(raw)[0]
    return 0x90 <= first <= 0x9F or first in {0xDC, 0xDD}


def _publisher_id(value: Any) -> bytes | None:
    return value if isinstance(value, bytes) else None
