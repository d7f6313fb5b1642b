"""KV cache events as vLLM puts them on the wire. ``event_decoder.py`` reads them.

A batch is one msgpack array ``[ts, [event, ...], data_parallel_rank, publisher_id?]``. Since vLLM 0.24 an
event is a map tagged ``type``; this module writes that form. Before, it was an array whose first item is the
tag.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, NewType

import msgspec

BlockHash = NewType("BlockHash", int)
"""Unsigned 64-bit form of an engine's block hash: the last 8 bytes, big endian (vLLM's int form)."""

MEDIA = ("GPU", "CPU", "STORAGE")
# Bound on ``group_idx``; the largest hybrid models known have fewer than 10 groups.
GROUPS_MAX = 64

# Most events in one batch. A step that evicts the blocks of 65,536 tokens in 8 groups sends 32,768 removals.
EVENTS_MAX = 1 << 17
# Most blocks in one event: a million tokens at 16 per block.
BLOCKS_MAX = 1 << 16
# Estimated memory of the nested lists of one batch; an empty list takes one byte on the wire and 64 here.
NESTED_BYTES_MAX = 64 << 20
# Most characters kept of an event type's name.
TYPE_CHARS_MAX = 64
# Most unknown types that are counted separately.
UNKNOWN_TYPES_MAX = 16

_U64 = (1 << 64) - 1
WireHash = int | bytes
Hashes = Annotated[list[WireHash], msgspec.Meta(max_length=BLOCKS_MAX)]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
GroupIdx = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]


class EventDecodeError(ValueError):
    """The frame is not a batch; ``str()`` has the reason."""


def _none() -> None:
    """A default that ``omit_defaults`` does not omit: vLLM sends these fields as nil, SGLang omits them."""


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks that now hold the KV of ``token_ids``; fewer hashes than blocks if some are masked.

    ``token_ids`` stays encoded (``msgspec.Raw``): residency does not need it, ``tokens()`` decodes it.
    ``cache_salt`` is SGLang's; vLLM puts a salt into ``extra_keys``.
    """

    block_hashes: Hashes
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: Size
    lora_id: int | None = msgspec.field(default_factory=_none)
    medium: str | None = msgspec.field(default_factory=_none)
    lora_name: str | None = msgspec.field(default_factory=_none)
    extra_keys: list[Any] | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Size | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None

    def tokens(self) -> list[int]:
        """The decoded token ids. Raises ``EventDecodeError`` if they are not a list of integers."""
        try:
            return _TOKENS.decode(self.token_ids)
        except msgspec.MsgspecError as error:
            raise EventDecodeError(f"BlockStored.token_ids: {error}") from None

    def num_tokens(self) -> int:
        """How many token ids the event carries, read from the array header alone."""
        return _array_length(self.token_ids)

    def num_lookahead(self) -> int:
        """The number of tokens after each block that its hash covers (a drafter's, from vLLM 0.33)."""
        return len(self.lookahead_token_ids[0]) if self.lookahead_token_ids else 0


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """One physical copy of each listed block is gone; ``remaining_copy_counts``, if sent, has the rest."""

    block_hashes: Hashes
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: GroupIdx | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: Annotated[list[Size | None], msgspec.Meta(max_length=BLOCKS_MAX)] | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The GPU pool of this data-parallel rank was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class DecodedBatch(msgspec.Struct, gc=False):
    """One batch: its events in order, the reason for each rejected event, the type of each unknown event."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None
    publisher_id: bytes | None
    rejected: list[str]
    unknown: list[str] = []


class _Stored032(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """``BlockStored`` with the 14 fields of vLLM 0.32."""

    # The number of declared fields decides the form of the map's header, even if defaults are omitted: with
    # one more, the bytes would differ from vLLM's.
    block_hashes: Hashes
    parent_block_hash: WireHash | None
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
    def from_event(cls, event: BlockStored) -> _Stored032 | BlockStored:
        """The event in this form; unchanged if it has look-ahead tokens (vLLM 0.33) or SGLang's salt."""
        if event.lookahead_token_ids is not None or event.cache_salt is not None:
            return event
        return cls(*[getattr(event, name) for name in cls.__struct_fields__])


_TOKENS: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])
_ENCODER = msgspec.msgpack.Encoder()


class SglangStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """``BlockStored`` of SGLang (srt/disaggregation/kv_events.py, 0.5.23); its other events are as vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


def to_block_hash(wire: WireHash) -> BlockHash:
    """The 64-bit form of a hash on the wire (int, or raw bytes of any length)."""
    if isinstance(wire, int):
        return BlockHash(wire & _U64)
    return BlockHash(int.from_bytes(wire[-8:], "big"))


def encode_tokens(token_ids: list[int]) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(token_ids))


def encode_batch(
    ts: float,
    events: list[Event],
    data_parallel_rank: int | None = 0,
    publisher_id: bytes | None = None,
) -> bytes:
    """The payload vLLM's publisher would send for these events (map encoding, 0.24 and later).

    ``publisher_id`` is appended by publishers that serve snapshots; old readers ignore it.
    """
    wire = [_Stored032.from_event(event) if isinstance(event, BlockStored) else event for event in events]
    if publisher_id is not None:
        return _ENCODER.encode([ts, wire, data_parallel_rank, publisher_id])
    return _ENCODER.encode([ts, wire, data_parallel_rank])


def encode_sglang_batch(ts: float, events: list[Event], data_parallel_rank: int | None = 0) -> bytes:
    """The payload SGLang's publisher would send for these events."""
    return _ENCODER.encode([ts, [_sglang(event) for event in events], data_parallel_rank])


def _sglang(event: Event) -> object:
    if not isinstance(event, BlockStored):
        return event
    shared = {name: getattr(event, name) for name in SglangStored.__struct_fields__}
    if event.lookahead_token_ids:  # with EAGLE, pairs of tokens
        tokens = [*event.tokens(), event.lookahead_token_ids[-1][0]]
        shared["token_ids"] = msgspec.Raw(_ENCODER.encode(list(pairwise(tokens))))
    return SglangStored(**shared)


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
