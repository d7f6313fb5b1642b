"""Frames of a store, decoded to chunks stored and removed; settings of stores. Without sockets.

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
from itertools import product
from typing import Annotated, Any, Literal

import msgspec

from kvatlas.publisher.block_hash import HashChain, HashScheme
from kvatlas.publisher.event_decoder import decode_in_pieces
from kvatlas.publisher.events import (
    EVENTS_MAX,
    GROUPS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventDecodeError,
    WireHash,
    to_block_hash,
)
from kvatlas.router.index.places import OWNER_CHARS_MAX, Reach
from kvatlas.router.index.stores import CHUNKS_MAX, PARTS_MAX, STORE_MEDIA_MAX, Parts, StoreChange

StoreKind = Literal["mooncake", "lmcache", "llmd-files"]
# Reasons for not using an event that are counted separately, and characters kept of each.
_REASONS_MAX, _REASON_CHARS_MAX = 16, 80
_KEY_CHARS_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_VLLM_KEY = re.compile(
    r"(.+)@tp_rank:([0-9]{1,4})@pcp([0-9]{1,4})@dcp([0-9]{1,4})@pp_rank:([0-9]{1,4})@group:([0-9]{1,2})"
    r"@([0-9a-f]{16,128})"
)
_MOONCAKE_MEDIA = {"cpu": 0, "disk": 1}
_LLMD_MEDIA = {"SHARED_STORAGE": 0, "OBJECT_STORE": 1}
_DEFAULT_TENANT = "default"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A store that engines of one model share, and which tells what it holds ([feeds.md](feeds.md#stores)).

    The router follows its events, counts the chunks that are there with all their parts, and predicts what
    engines would load. Name a store once per model.
    """

    name: str
    """Name of the store, of letters, digits, `.`, `_` and `-`: its label in metrics and on the page. Give
    each entry another one."""
    kind: StoreKind
    """The publisher: Mooncake's master, LMCache's coordinator, or llm-d's file store. Give the one that the
    engines use."""
    events: tuple[str, ...]
    """ZMQ addresses that it publishes at, e.g. `tcp://mooncake:19998`. Give several where removals come from
    another process (llm-d's evictor)."""
    model: str
    """Served model whose engines load from it. Give one; other models of the same store need entries too."""
    engines: tuple[str, ...] = ()
    """Base URLs of the engines that load from it. Not set: all of the model. Set it if engines of the model
    have other stores, or parallel sizes under which they read other keys."""
    key_model: str | None = None
    """The model's name in the store's keys and topics; for Mooncake, all of a key before `@tp_rank:`, with
    `cache_prefix` and namespace if the engines set them. Not set: `model`, for Mooncake without what precedes
    its last slash. Set it if the status page shows keys of another model as not used."""
    instances: tuple[str, ...] = ()
    """LMCache: instances whose own memory counts. Not set: shared pools. Set it, with `engines`, for the
    memory of a single instance."""
    tensor_parallel: int = 1
    """Mooncake: number of different `tp_rank` under which a chunk is stored: the tensor parallel size; at
    most the number of KV heads with grouped queries, and 1 with MLA. Set it as the engines were started, as
    the next sizes."""
    group_tensor_parallel: dict[str, int] = {}
    """Group number -> `tensor_parallel`, for groups that have another one. Set it for hybrid models, whose
    Mamba groups have the tensor parallel size whatever their other groups have."""
    pipeline_parallel: int = 1
    """Mooncake: the engines' pipeline parallel size. Set it if it is not 1."""
    prefill_context_parallel: int = 1
    """Mooncake: the engines' prefill context parallel size. Set it if it is not 1."""
    decode_context_parallel: int = 1
    """Mooncake: the engines' decode context parallel size. Set it if it is not 1."""
    chunk_tokens: int | None = None
    """Tokens of a chunk. Not set: 256 for LMCache, a block for the others. Set it to LMCache's `chunk_size`;
    for llm-d's file store to its blocks per file, in tokens."""
    ttl_s: float | None = None
    """Seconds after which what was not stored again counts as gone. Not set: 1800 for llm-d's file store,
    which publishes no removals by itself, never for the others. Set it to the age at which the store
    evicts, if its removals are not published."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > OWNER_CHARS_MAX:
            raise ValueError(f"name: {self.name!r} is not 1 to {OWNER_CHARS_MAX} letters, digits, . _ or -")
        if not self.events or not self.model:
            raise ValueError("events and model: give at least one address, and the served model's name")
        self._check_sizes()
        if self.chunk_tokens is not None and self.kind == "mooncake":
            raise ValueError("chunk_tokens: Mooncake's chunks are blocks; leave it out")
        if self.ttl_s is not None and not 1.0 <= self.ttl_s <= 1e9:
            raise ValueError(f"ttl_s: {self.ttl_s} is not at least 1 second")
        if self.instances and self.kind != "lmcache":
            raise ValueError(f"instances: {self.kind} has none; leave it out")

    def _check_sizes(self) -> None:
        for key in ("tensor_parallel", "pipeline_parallel", "prefill_context_parallel"):
            if not 1 <= getattr(self, key) <= PARTS_MAX:
                raise ValueError(f"{key}: {getattr(self, key)} is not from 1 to {PARTS_MAX}")
        if self.decode_context_parallel < 1 or self.tensor_parallel % self.decode_context_parallel:
            raise ValueError(
                f"decode_context_parallel: {self.decode_context_parallel} does not divide tensor_parallel, "
                f"{self.tensor_parallel}"
            )
        for group, size in self.group_tensor_parallel.items():
            if not group.isdecimal() or int(group) >= GROUPS_MAX or not 1 <= size <= PARTS_MAX:
                raise ValueError(f"group_tensor_parallel: {group} = {size} is not GROUP = SIZE")
        if self._shards * self.pipeline_parallel * self.prefill_context_parallel > PARTS_MAX:
            raise ValueError(f"a chunk of more than {PARTS_MAX} parts: check the parallel sizes")
        if self.chunk_tokens is not None and not 1 <= self.chunk_tokens <= 1 << 16:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} is not from 1 to 65536")

    @property
    def _shards(self) -> int:
        return max([self.tensor_parallel, *self.group_tensor_parallel.values()])

    @property
    def keyed_as(self) -> str:
        """Name of the model in keys and topics."""
        if self.key_model is not None:
            return self.key_model
        return self.model.rstrip("/").rpartition("/")[2] if self.kind == "mooncake" else self.model

    @property
    def reach(self) -> Reach:
        """How engines find blocks in it."""
        default = 256 if self.kind == "lmcache" else 0
        return Reach(self.kind != "llmd-files", self.chunk_tokens or default)

    @property
    def expires_s(self) -> float | None:
        """``ttl_s``, or its default."""
        return 1800.0 if self.ttl_s is None and self.kind == "llmd-files" else self.ttl_s

    @property
    def parts(self) -> Parts:
        """Parts of its chunks."""
        return Parts(
            self._shards * self.prefill_context_parallel * self.pipeline_parallel,
            {
                int(group): self._bits(size)
                for group, size in (
                    {str(number): self.tensor_parallel for number in range(GROUPS_MAX)}
                    | self.group_tensor_parallel
                ).items()
                if size < self._shards
            },
        )

    def _bits(self, shards: int) -> int:
        ranks = product(range(shards), range(self.prefill_context_parallel), range(self.pipeline_parallel))
        return sum(1 << self._number(*rank) for rank in ranks)

    def _number(self, tensor: int, context: int, pipeline: int) -> int:
        return (pipeline * self.prefill_context_parallel + context) * self._shards + tensor

    def part_of(self, tensor: int, context: int, decode: int, pipeline: int) -> int | None:
        """Number of the part with these ranks; None for ranks that these sizes do not have."""
        fits = context < self.prefill_context_parallel and pipeline < self.pipeline_parallel
        # DCP divides TP (``_init_lookup_key_prefixes``, mooncake/store/worker.py, 0.33).
        if not fits or tensor >= self._shards or decode != tensor % self.decode_context_parallel:
            return None
        return self._number(tensor, context, pipeline)


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
        self._chunks = _LmcacheChunks(scheme, self._unused)

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
            medium = 0 if event.medium == "lmcache-l1" else 1
            return self._chunks.changes(event, medium, self._settings.reach.chunk_tokens)
        number = _LLMD_MEDIA.get(event.medium or middle)
        if number is None:
            self._unused(f"medium {event.medium or middle}")
            return ()
        stored = isinstance(event, BlockStored)
        return [StoreChange(stored, 0, to_block_hash(one), 0, number) for one in event.block_hashes]


class _LmcacheChunks:
    """LMCache's hash of a chunk -> the engines' hash at its end, found by the chunk's tokens."""

    def __init__(self, scheme: Callable[[], HashScheme | None], unused: Callable[[str], None]) -> None:
        self._scheme_now = scheme
        self._unused = unused
        self._scheme: HashScheme | None = None
        # Full hashes of the engines, and who has which: two of LMCache's for one is a salt or an adapter,
        # which its events do not tell.
        self._ends: dict[bytes, bytes] = {}
        self._owner: dict[bytes, bytes] = {}

    def clear(self) -> None:
        self._ends.clear()
        self._owner.clear()

    def changes(self, event: BlockStored | BlockRemoved, medium: int, size: int) -> list[StoreChange | None]:
        """Changes that an event of chunks of ``size`` tokens means."""
        found: list[StoreChange | None] = []
        if isinstance(event, BlockRemoved):
            for key in map(_as_bytes, event.block_hashes):
                end = self._ends.get(key)
                if end is not None and self._owner.get(end) == key:
                    found.append(_change(end, medium, stored=False))
            return found
        scheme = self._scheme_now()
        if scheme != self._scheme:
            self._scheme = scheme
            self.clear()
            found.append(None)
        end = None if scheme is None else self._end_of(event, size, scheme)
        if end is None:
            return found
        if len(self._ends) >= CHUNKS_MAX:
            oldest = self._ends.pop(next(iter(self._ends)))
            self._owner.pop(oldest, None)
            found += [_change(oldest, number, stored=False) for number in range(STORE_MEDIA_MAX)]
        key = _as_bytes(event.block_hashes[0])
        self._ends[key] = end
        if self._owner.setdefault(end, key) == key:
            return [*found, _change(end, medium, stored=True)]
        self._unused("chunks with one text and two hashes (salts, adapters)")
        self._owner[end] = b""
        return [*found, *(_change(end, number, stored=False) for number in range(STORE_MEDIA_MAX))]

    def _end_of(self, event: BlockStored, size: int, scheme: HashScheme) -> bytes | None:
        """The engines' hash at the end of a chunk; None if it cannot be known."""
        parent = event.parent_block_hash
        before = None if parent is None else self._ends.get(_as_bytes(parent))
        if size % scheme.hash_block_size or scheme.lookahead:
            self._unused("chunks that blocks do not divide")
        elif len(event.block_hashes) != 1 or event.num_tokens() != size:
            self._unused(f"events of other than one chunk of {size} tokens")
        elif parent is not None and before is None:
            self._unused("chunks behind unknown ones")
        else:
            chain = HashChain(scheme, parent=before)
            try:
                chain.extend(event.tokens())
            except EventDecodeError:
                self._unused("tokens that are no numbers")
                return None
            return chain.whole()[-1]
        return None


def _change(end: bytes, medium: int, *, stored: bool) -> StoreChange:
    return StoreChange(stored, 0, to_block_hash(end), 0, medium)


def _as_bytes(value: WireHash) -> bytes:
    return value if isinstance(value, bytes) else (value & (1 << 64) - 1).to_bytes(8, "big")
