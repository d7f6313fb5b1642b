"""Settings of a store that engines share, and what follows from them: keys and parts of its chunks."""

from __future__ import annotations

import re
from itertools import product
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvatlas.publisher.events import GROUPS_MAX
from kvatlas.router.index.places import OWNER_CHARS_MAX, Reach
from kvatlas.router.index.store_parts import PARTS_MAX, Parts

StoreKind = Literal["mooncake", "lmcache", "llmd-files"]
_NAME = re.compile(r"[A-Za-z0-9._-]+")


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
    events: tuple[str, ...] = ()
    """ZMQ addresses that it publishes at, e.g. `tcp://mooncake:19998`. Give several where removals come from
    another process (llm-d's evictor), and none with `keys_url`."""
    keys_url: str | None = None
    """Mooncake: address of the master's HTTP service (`metrics_port`), e.g. `http://mooncake:9003`, whose
    `/get_all_keys` is read again and again. Set it in place of `events` if the master is built without these,
    as the released wheels are."""
    keys_every_s: float = 10.0
    """Seconds between two reads of `keys_url`. Set it longer if the master holds millions of keys, or shorter
    if the engines' loads of what was just stored matter."""
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
        if bool(self.events) is (self.keys_url is not None) or not self.model:
            raise ValueError(
                "events and model: give at least one address, or (Mooncake) keys_url instead, and the served "
                "model's name"
            )
        self._check_keys()
        self._check_sizes()
        if self.chunk_tokens is not None and self.kind == "mooncake":
            raise ValueError("chunk_tokens: Mooncake's chunks are blocks; leave it out")
        if self.ttl_s is not None and not 1.0 <= self.ttl_s <= 1e9:
            raise ValueError(f"ttl_s: {self.ttl_s} is not at least 1 second")
        if self.instances and self.kind != "lmcache":
            raise ValueError(f"instances: {self.kind} has none; leave it out")

    def _check_keys(self) -> None:
        if self.keys_url is None:
            return
        if self.kind != "mooncake":
            raise ValueError(f"keys_url: {self.kind} has no list of keys; give its events")
        parts = urlsplit(self.keys_url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"keys_url: {self.keys_url!r} is not http://HOST:PORT")
        if not 0.5 <= self.keys_every_s <= 3600.0:
            raise ValueError(f"keys_every_s: {self.keys_every_s} is not from 0.5 to 3600 seconds")

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
