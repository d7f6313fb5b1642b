"""KV cache events as vLLM puts them on the wire, and a decoder for every encoding since 0.20.

A batch is one msgpack array ``[ts, [event, ...], data_parallel_rank, publisher_id?]``. From 0.24 on an
event is a map tagged ``type``; before that it is an array whose first item is the tag. Decoding tries the
whole batch at once and, where that fails or the batch is large, event by event: an unknown event type, a
missing field or a wrong value costs that event only and is reported in ``DecodedBatch.rejected``. Unknown
fields are ignored.

Always true: ``decode_batch`` either returns a batch or raises ``EventDecodeError``; it never raises
anything else, whatever the bytes. A batch has at most ``EVENTS_MAX`` events, an event ``BLOCKS_MAX`` blocks,
and what is nested in all of them (extra keys, look-ahead tokens) takes ``NESTED_BYTES_MAX`` at most.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, NewType, TypeVar

import msgspec

BlockHash = NewType("BlockHash", int)
"""Unsigned 64-bit form of an engine's block hash: the last 8 bytes, big endian (vLLM's int form)."""

MEDIA = ("GPU", "CPU", "STORAGE")
GROUPS_MAX = 64
"""Bound on ``group_idx``; the largest hybrid models known have fewer than 10 groups."""

EVENTS_MAX = 1 << 17
"""Of one batch. A step that evicts the blocks of 65,536 tokens in 8 groups removes 32,768, one by one."""
BLOCKS_MAX = 1 << 16
"""Of one event: a million tokens at 16 per block."""
NESTED_BYTES_MAX = 64 << 20
"""Estimated memory of the nested lists of one batch; an empty list takes one byte on the wire and 64 here."""

_U64 = (1 << 64) - 1
_WireHash = int | bytes
_Hashes = Annotated[list[_WireHash], msgspec.Meta(max_length=BLOCKS_MAX)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_GroupIdx = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]


class EventDecodeError(ValueError):
    """The batch frame itself cannot be read; ``str()`` says why."""


class _TooMuchNestedError(ValueError):
    """An event whose nested lists would take too much memory."""


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that now hold the KV of ``token_ids``; fewer hashes than blocks when some were masked.

    ``token_ids`` stays encoded (``msgspec.Raw``): residency does not need it, ``tokens()`` decodes it.
    """

    block_hashes: _Hashes
    parent_block_hash: _WireHash | None
    token_ids: msgspec.Raw
    block_size: _Size
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None

    def tokens(self) -> list[int]:
        """The decoded token ids. Raises ``EventDecodeError`` if they are not a list of integers."""
        try:
            return _TOKENS.decode(self.token_ids)
        except msgspec.MsgspecError as error:
            raise EventDecodeError(f"BlockStored.token_ids: {error}") from None

    def num_tokens(self) -> int:
        """How many token ids the event carries, read from the array header alone."""
        return _array_length(self.token_ids)


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """One physical copy of each listed block is gone (see ``remaining_copy_counts`` where present)."""

    block_hashes: _Hashes
    medium: str | None
    group_idx: _GroupIdx | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: Annotated[list[_Size | None], msgspec.Meta(max_length=BLOCKS_MAX)] | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The GPU pool of this data-parallel rank was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class DecodedBatch(msgspec.Struct, gc=False):
    """One batch: its events in order, and why each event that could not be read was left out."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None
    publisher_id: bytes | None
    rejected: list[str]


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    publisher_id: Any = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: Any = None
    publisher_id: Any = None


_NIL = msgspec.Raw(b"\xc0")


class _ArrayStored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Hashes
    parent_block_hash: _WireHash | None
    token_ids: msgspec.Raw
    block_size: _Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = _NIL
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Size | None = None


class _MapStored(msgspec.Struct, tag="BlockStored", gc=False):
    """``BlockStored`` with its nested lists undecoded."""

    block_hashes: _Hashes
    parent_block_hash: _WireHash | None
    token_ids: msgspec.Raw
    block_size: _Size
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: msgspec.Raw = _NIL
    group_idx: _GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: _Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = _NIL


class _ArrayRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: _GroupIdx | None = None


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Stored032(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """``BlockStored`` with the 14 fields of 0.32: the number of fields decides the form of the map's header,
    whether they are sent or not, so one more would make the bytes differ from vLLM's."""

    block_hashes: _Hashes
    parent_block_hash: _WireHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    @classmethod
    def of(cls, event: BlockStored) -> _Stored032 | BlockStored:
        """The event in this form; one with look-ahead tokens (0.33) stays as it is."""
        if event.lookahead_token_ids is not None:
            return event
        return cls(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.locality,
            event.ownership,
            event.session_id,
        )


_TOKENS: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])
_BATCH = msgspec.msgpack.Decoder(_Batch)
_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_MAP_EVENT: msgspec.msgpack.Decoder[_MapStored | BlockRemoved | AllBlocksCleared] = msgspec.msgpack.Decoder(
    _MapStored | BlockRemoved | AllBlocksCleared
)
_EXTRA_KEYS: msgspec.msgpack.Decoder[list[Any] | None] = msgspec.msgpack.Decoder(list[Any] | None)
_LOOKAHEAD: msgspec.msgpack.Decoder[list[list[int]] | None] = msgspec.msgpack.Decoder(list[list[int]] | None)
_ARRAY_EVENT: msgspec.msgpack.Decoder[_ArrayStored | _ArrayRemoved | _ArrayCleared] = msgspec.msgpack.Decoder(
    _ArrayStored | _ArrayRemoved | _ArrayCleared
)
_ENCODER = msgspec.msgpack.Encoder()
_REASON_LENGTH_MAX = 200
_AT_ONCE_BYTES_MAX = 1 << 18
"""Larger batches are decoded event by event; a batch of this size takes a millisecond."""
_PIECE_BYTES = 1 << 16
_EVENT_BYTES = 200
"""What one event of a few bytes is reckoned with in a piece."""
_CONTAINERS = bytes(range(0x80, 0xA0))
_CONTAINER_BYTES = 64
_Result = TypeVar("_Result")


def to_block_hash(wire: _WireHash) -> BlockHash:
    """The 64-bit form of a hash as it stands on the wire (int, or raw bytes of any length)."""
    if isinstance(wire, int):
        return BlockHash(wire & _U64)
    return BlockHash(int.from_bytes(wire[-8:], "big"))


def encode_tokens(token_ids: list[int]) -> msgspec.Raw:
    """Token ids in the form ``BlockStored.token_ids`` holds them."""
    return msgspec.Raw(_ENCODER.encode(token_ids))


def encode_batch(
    ts: float,
    events: list[Event],
    data_parallel_rank: int | None = 0,
    publisher_id: bytes | None = None,
) -> bytes:
    """The payload vLLM's publisher would send for these events (map encoding, 0.24 and later).

    ``publisher_id`` is appended where the publisher serves snapshots; old readers ignore it.
    """
    wire = [_Stored032.of(event) if isinstance(event, BlockStored) else event for event in events]
    if publisher_id is not None:
        return _ENCODER.encode([ts, wire, data_parallel_rank, publisher_id])
    return _ENCODER.encode([ts, wire, data_parallel_rank])


def decode_batch(payload: bytes | memoryview) -> DecodedBatch:
    """Decode one payload frame. Raises ``EventDecodeError`` when it is not a batch at all."""
    return finish(decode_in_pieces(payload))


def decode_in_pieces(payload: bytes | memoryview) -> Generator[None, None, DecodedBatch]:
    """``decode_batch`` as a generator that can be left alone after each piece of some milliseconds."""
    if len(payload) <= _AT_ONCE_BYTES_MAX:
        try:
            batch = _BATCH.decode(payload)
            return DecodedBatch(
                batch.ts, batch.events, batch.data_parallel_rank, _publisher_id(batch.publisher_id), []
            )
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass
    return (yield from _decode_by_event(payload))


def finish(steps: Generator[None, None, _Result]) -> _Result:
    """What a generator returns, all its steps taken at once."""
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
    reasons: dict[str, str] = {}
    nested, piece = _Nested(), 0
    for raw in batch.events:
        try:
            events.append(_decode_event(raw, nested))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, _TooMuchNestedError) as error:
            reason = str(error)[:_REASON_LENGTH_MAX]
            rejected.append(reasons.setdefault(reason, reason))
        piece += _EVENT_BYTES + len(memoryview(raw))
        if piece >= _PIECE_BYTES:
            piece = 0
            yield
    rank = batch.data_parallel_rank
    if rank is not None and not isinstance(rank, int):
        rejected.append(f"data_parallel_rank is {type(rank).__name__}, expected int")
        rank = None
    return DecodedBatch(batch.ts, events, rank, _publisher_id(batch.publisher_id), rejected)


class _Nested:
    """Decodes the nested lists of one batch as long as they take little memory together."""

    def __init__(self) -> None:
        self._left = NESTED_BYTES_MAX

    def decode(self, raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[_Result]) -> _Result:
        """The value. Raises ``_TooMuchNestedError``, or what the decoder does."""
        data = bytes(raw)
        containers = len(data) - len(data.translate(None, _CONTAINERS))
        size = 4 * len(data) + _CONTAINER_BYTES * containers
        if size > self._left:
            raise _TooMuchNestedError(f"nested lists of more than {NESTED_BYTES_MAX} bytes in one batch")
        self._left -= size
        return decoder.decode(data)


def _decode_event(raw: msgspec.Raw, nested: _Nested) -> Event:
    first = memoryview(raw)[0]
    event: _MapStored | _ArrayStored | BlockRemoved | _ArrayRemoved | AllBlocksCleared | _ArrayCleared
    if not (0x90 <= first <= 0x9F or first in (0xDC, 0xDD)):  # not a msgpack array: the map form
        event = _MAP_EVENT.decode(raw)
        if isinstance(event, BlockRemoved | AllBlocksCleared):
            return event
    else:
        event = _ARRAY_EVENT.decode(raw)
    if isinstance(event, _MapStored | _ArrayStored):
        fields = msgspec.structs.asdict(event)
        fields["extra_keys"] = nested.decode(event.extra_keys, _EXTRA_KEYS)
        if isinstance(event, _MapStored):
            fields["lookahead_token_ids"] = nested.decode(event.lookahead_token_ids, _LOOKAHEAD)
        return BlockStored(**fields)
    if isinstance(event, _ArrayRemoved):
        return BlockRemoved(**msgspec.structs.asdict(event))
    return AllBlocksCleared()


def _publisher_id(value: Any) -> bytes | None:
    return value if isinstance(value, bytes) else None


def _array_length(raw: msgspec.Raw) -> int:
    """Length of a msgpack array from its header; 0 for anything that is not an array."""
    view = memoryview(raw)
    first = view[0] if view else 0
    if 0x90 <= first <= 0x9F:
        return first & 0x0F
    if first == 0xDC:
        return int.from_bytes(view[1:3], "big")
    if first == 0xDD:
        return int.from_bytes(view[1:5], "big")
    return 0
