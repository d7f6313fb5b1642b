"""Decodes batches of KV events, in every encoding since vLLM 0.20.

The whole batch is tried at once and, where that fails or the batch is large, event by event: an unknown event
type, a missing field or a wrong value costs that event only and is reported in ``DecodedBatch.rejected``.
Unknown fields are ignored.

Always true: ``decode_batch`` either returns a batch or raises ``EventDecodeError``; it never raises anything
else, whatever the bytes. A batch has at most ``EVENTS_MAX`` events, an event ``BLOCKS_MAX`` blocks, and what
is nested in all of them (extra keys, look-ahead tokens) takes ``NESTED_BYTES_MAX`` at most.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, TypeVar

import msgspec

from publisher.events import (
    EVENTS_MAX,
    NESTED_BYTES_MAX,
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
)

_Result = TypeVar("_Result")

_REASON_LENGTH_MAX = 200
_AT_ONCE_BYTES_MAX = 1 << 18
"""Larger batches are decoded event by event; a batch of this size takes a millisecond."""
_PIECE_BYTES = 1 << 16
_EVENT_BYTES = 200
"""What one event of a few bytes is reckoned with in a piece."""
_CONTAINERS = bytes(range(0x80, 0xA0))
_CONTAINER_BYTES = 64


class _TooMuchNestedError(ValueError):
    """An event whose nested lists would take too much memory."""


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


class _MapStored(msgspec.Struct, tag="BlockStored", gc=False):
    """``BlockStored`` with its nested lists undecoded."""

    block_hashes: Hashes
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: Size
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: msgspec.Raw = _NIL
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: msgspec.Raw = _NIL


class _ArrayRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


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
