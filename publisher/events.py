"""KV cache events as vLLM puts them on the wire. ``event_decoder.py`` reads them.

A batch is one msgpack array ``[ts, [event, ...], data_parallel_rank, publisher_id?]``. Since vLLM 0.24 an
event is a map tagged ``type``; this module writes that form. Before, it was an array whose first item is the
tag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
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


# KV cache groups of a model, and the spec classes vLLM looks up jointly.
#
# A group is the set of layers that share one block table; groups with the same kind, block size and window
# form one spec class, in which a block counts as present only if every group of the class holds it.
# Facts: vLLM 0.32 ``KVCacheSpecKind`` and ``HybridKVCacheCoordinator``.


class Family(StrEnum):
    """Lookup rule of a group; several kinds share one."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    MAMBA = "mamba"
    RING = "ring"
    """One block per request of any length; never part of a lookup."""
    UNUSED = "unused"
    """Never part of the engine's lookup (encoder-only, cross attention)."""


_FAMILY_OF_KIND = {
    "full_attention": Family.FULL,
    "mla_attention": Family.FULL,
    "sink_full_attention": Family.FULL,
    "sliding_window": Family.WINDOW,
    "sliding_window_mla": Family.WINDOW,
    "chunked_local_attention": Family.CHUNKED,
    "mamba": Family.MAMBA,
    "circular_buffer": Family.RING,
    "encoder_only_attention": Family.UNUSED,
    "cross_attention": Family.UNUSED,
}


# Assumed hash blocks in a block that was never published whole: more than any prompt has.
_UNSEEN_HASH_BLOCKS = 1 << 20


class GroupSpec(msgspec.Struct, frozen=True):
    """One KV cache group; sizes in tokens. ``kind`` is vLLM's name for the spec kind."""

    group_idx: int
    kind: str
    block_size: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    mamba_cache_mode: str | None = None
    is_eagle: bool = False
    partial_only: bool = False
    """Only parts of its blocks were published: ``block_size`` is that of a hash block; the real blocks are
    longer than any prefix stored there."""
    cacheable: bool = True
    """False: a window that is rebuilt by replay (``bounded_replay``, vLLM 0.32) and publishes nothing."""
    apart: bool = False
    """A drafter's group whose layers differ from the model's in a way that no event shows (number and size of
    heads): it forms its own class, apart from groups with the same spec."""

    @property
    def is_hidden(self) -> bool:
        """Whether it has no prefix cache (``prefix_cacheable`` of vLLM 0.32): no event, no lookup."""
        return not self.cacheable or self.family in {Family.RING, Family.UNUSED}

    @property
    def lookup_block_size(self) -> int:
        return self.block_size * _UNSEEN_HASH_BLOCKS if self.partial_only else self.block_size

    @property
    def family(self) -> Family:
        """The lookup rule of this group. Raises ``ValueError`` for an unknown kind."""
        try:
            return _FAMILY_OF_KIND[self.kind]
        except KeyError:
            raise ValueError(f"group {self.group_idx}: unknown kv_cache_spec_kind {self.kind!r}") from None


class SpecClass(msgspec.Struct, frozen=True):
    """Groups that are looked up jointly, and the spec they share."""

    spec: GroupSpec
    group_idxs: tuple[int, ...]

    @property
    def family(self) -> Family:
        return self.spec.family

    @property
    def block_size(self) -> int:
        return self.spec.lookup_block_size

    @property
    def label(self) -> str:
        """Short name for tables and receipts, e.g. ``sliding_window/16 w128``, chunks as ``c8192``; ``/>16``
        if the blocks are longer than the published parts."""
        more = ">" if self.spec.partial_only else ""
        window = f" w{self.spec.sliding_window}" if self.spec.sliding_window else ""
        chunk = f" c{self.spec.attention_chunk_size}" if self.spec.attention_chunk_size else ""
        return f"{self.spec.kind}/{more}{self.spec.block_size}{window}{chunk}"


def spec_classes(groups: tuple[GroupSpec, ...]) -> tuple[SpecClass, ...]:
    """Spec classes of a model: full attention first, then by first group; hidden groups are omitted."""
    members: dict[GroupSpec, list[GroupSpec]] = {}
    for group in sorted(groups, key=lambda g: g.group_idx):
        if group.is_hidden:
            continue
        key = msgspec.structs.replace(group, group_idx=-1, is_eagle=False)
        members.setdefault(key, []).append(group)
    classes = [_spec_class(spec, joined) for spec, joined in members.items()]
    return tuple(sorted(classes, key=lambda c: (c.family is not Family.FULL, c.group_idxs[0])))


def _spec_class(spec: GroupSpec, members: list[GroupSpec]) -> SpecClass:
    """Make a class; it drops its last block if any member feeds a drafter, as vLLM looks them up as one."""
    eagle = any(group.is_eagle for group in members)
    idxs = tuple(group.group_idx for group in members)
    return SpecClass(msgspec.structs.replace(spec, group_idx=idxs[0], is_eagle=eagle), idxs)


def scheduler_block_size(groups: tuple[GroupSpec, ...]) -> int:
    """Alignment of a hit in tokens: the least common multiple of all block sizes."""
    return math.lcm(*(group.lookup_block_size for group in groups))


def hash_unit(groups: Sequence[GroupSpec]) -> int:
    """Default number of tokens in a hash block: the greatest common divisor of the block sizes that are
    looked up (``resolve_kv_cache_block_sizes``, vLLM 0.32)."""
    return math.gcd(*[g.block_size for g in groups if not g.is_hidden] or [g.block_size for g in groups])
