"""Interface of a store of block values that several engines share, the frame of a value, and namespaces.

Keys are opaque bytes with a namespace prefix, values are whole rows with a frame. Every call ends by its
deadline, or as soon after it as its wait can be interrupted (a hung network file system cannot). A thread
that must not block leaves the call to another thread. A missing, corrupt or foreign value is a counted miss
and never raises; a store that cannot be reached raises ``StoreUnavailable``.

Engines share blocks only if all inputs of a block's bytes are equal. A block hash covers tokens only, so
every key begins with the digest of a namespace: model, weights, element types, layout, group specs, parallel
sizes and rank, hash scheme and seed, format. Engines that differ in any of these have different keys; both
log their fields. Both halves of a connector compute the namespace from the same configuration, and the
``ticket`` in every job verifies that they are equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvatlas.connectors.store.frame import DIGEST_BYTES, FORMAT_VERSION


class StoreUnavailable(Exception):  # noqa: N818
    """The store is unreachable, or did not answer by the deadline."""


class BlockStore(Protocol):
    """A shared store. Thread-safe."""

    name: str
    """``ownership`` in KV events."""

    def register_buffer(self, buffer: memoryview) -> None:
        """Register the memory of all values; it stays valid until ``close``. Call it once, before
        transfers."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; ``deadline_s``: seconds from now for the whole call."""

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Write values; an existing one is kept or replaced by an equal one. True: other engines can read
        it."""

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Fill each buffer with its key's value of exactly its length. False: a miss, with the buffer
        undefined.

        Buffers are written to until the call returns, never afterwards.
        """

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Remove bad values; absent ones are no error."""

    def counters(self) -> dict[str, int]:
        """Counts of errors, misses and other events since the start, by reason; they only grow."""

    def close(self) -> None: ...


def close_within(store: BlockStore, timeout_s: float) -> bool:
    """Close a store whose client may wait for a lost server. False: it still waits after ``timeout_s``."""
    thread = threading.Thread(target=store.close, name="kvatlas-store-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


class Deadline:
    """A point in time, ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Counters:
    """Named counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[reason] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGURATION = "config.json"
_FILES_MAX = 256
_SAMPLE_BYTES = 4096
_SAMPLES = 4


def weights_digest(model: str) -> str:
    """Hexadecimal digest of the weights at this path; empty if it is no local file or directory.

    An unreadable file contributes its name only.

    Digest that distinguishes model weights, cheap enough for every engine start.

    Two engines may serve different weights under one name: a local path with other content on another host, a
    fine-tune copied over its base model. So weights in a directory are sampled: name, size and a few
    kilobytes of every weight file and of the model's configuration. Weights from a hub are identified by the
    resolved commit.
    """
    path = Path(model)
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            found = (
                file for file in path.iterdir() if file.suffix in _WEIGHTS or file.name == _CONFIGURATION
            )
            files = sorted(found)[:_FILES_MAX]
        else:
            return ""
    except OSError:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            parts = [f"{file.name}\0{size}\0".encode()]
            for sample in range(_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                parts.append(opened.read(_SAMPLE_BYTES))
            return b"".join(parts)
    except OSError:
        return f"{file.name}\0unreadable\0".encode()


_EPOCH_BITS = 20
EPOCHS_MAX = 1 << _EPOCH_BITS
# Fields of a spec without effect on bytes: scheduling, owner of the layer.
_NOT_ABOUT_BYTES = frozenset({"is_index_group_leader", "is_draft"})


@dataclass(frozen=True, slots=True)
class Namespace:
    """Inputs of the keys of one engine.

    ``fields``: all inputs except the rank, as text by name. ``ranks``: (tp, pp, dcp) of each rank.
    ``engine``: id of this engine's run. ``private_reason``: reason why no other engine can have this
    namespace; empty if it can be shared. The *epoch* is 0 at start; later epochs are private to this engine,
    because other engines may have other weights after a reset.
    """

    fields: Mapping[str, str]
    ranks: tuple[tuple[int, int, int], ...]
    engine: str
    private_reason: str = ""

    def digest(self, rank: int, epoch: int = 0) -> bytes:
        """Digest for this rank's blocks in this epoch, ``DIGEST_BYTES`` long."""
        tp, pp, dcp = self.ranks[rank]
        named = {**self.fields, "tp_rank": str(tp), "pp_rank": str(pp), "dcp_rank": str(dcp)}
        if epoch:
            named["epoch"] = f"{epoch} of {self.engine}"
        text = json.dumps(named, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def digests(self, epoch: int = 0) -> tuple[bytes, ...]:
        """Digests of all ranks, in order; one for ranks that hold the same KV."""
        return tuple(dict.fromkeys(self.digest(rank, epoch) for rank in range(len(self.ranks))))

    def ticket(self, epoch: int) -> int:
        """One number below 2**52 with the epoch and a checksum of the fields."""
        return int.from_bytes(self.digest(0)[:4], "big") << _EPOCH_BITS | epoch

    def read_ticket(self, ticket: int) -> int:
        """The epoch of a ticket. ValueError if it was made with other fields."""
        epoch = ticket & (1 << _EPOCH_BITS) - 1
        if ticket != self.ticket(epoch):
            raise ValueError(f"the other half of this engine has another namespace; here: {self.describe()}")
        return epoch

    def describe(self) -> str:
        """All fields in one line, for logs and errors."""
        named = "; ".join(f"{name}={value}" for name, value in sorted(self.fields.items()))
        return f"{self.digest(0).hex()} ({len(self.ranks)} ranks; {named})"


def namespace_of(vllm_config: Any, kv_cache_config: Any, *, label: str = "", replicas: int = 1) -> Namespace:
    """Make the namespace of a vLLM engine. ``label``: chosen by the operator to separate fleets.

    ``replicas``: number of neighbouring tensor-parallel ranks that hold the same KV and share one digest.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    seed, private_reason = _hash_seed(vllm_config)
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    files = weights_digest(str(model.model))
    fields = {
        "format": str(FORMAT_VERSION),
        # The attention kernels define the meaning of a page's bytes, and they change between releases.
        "vllm": _vllm_release(),
        "label": label,
        # The same weights may have another path on another host.
        "model": os.path.basename(str(model.model).rstrip("/")) if files else str(model.model),
        "revision": str(model.revision),
        "commit": str(commit),
        "files": files,
        "overrides": _short(_plain(model.hf_overrides)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "device": str(vllm_config.device_config.device_type),
        "attention": str(vllm_config.attention_config.backend),
        "layout": str(kv_cache_config.kv_cache_layout or getattr(cache, "kv_cache_layout", None)),
        "groups": json.dumps([_group(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]),
        "hash_block_tokens": str(kv_cache_config.hash_block_size),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": seed,
        "speculative": _speculative(vllm_config),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
        "dcp": str(parallel.decode_context_parallel_size),
    }
    engine = str(vllm_config.kv_transfer_config.engine_id)
    return Namespace(fields, _ranks(parallel, replicas), engine, private_reason)


def _vllm_release() -> str:
    """vLLM's ``major.minor``."""
    import vllm  # noqa: PLC0415

    return ".".join(vllm.__version__.split(".")[:2])


def _hash_seed(vllm_config: Any) -> tuple[str, str]:
    """(First hash of every chain, reason why it is private to this engine)."""
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    name = vllm_config.cache_config.prefix_caching_hash_algo
    hash_fn = get_hash_fn_by_name(name)
    # Without a seed in the environment, two calls show whether vLLM uses a fixed one.
    seeds = resolve_none_hash_seed(hash_fn), resolve_none_hash_seed(hash_fn)
    if seeds[0] != seeds[1]:
        engine = str(vllm_config.kv_transfer_config.engine_id)
        return f"random:{engine}", (
            f"block hashes by {name} begin with a random seed in this engine: nothing will be shared. Set "
            "PYTHONHASHSEED to one number for all engines, or choose --prefix-caching-hash-algo sha256"
        )
    return hash_fn(seeds[0]).hex(), ""


def _ranks(parallel: Any, replicas: int) -> tuple[tuple[int, int, int], ...]:
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dcp = max(1, parallel.decode_context_parallel_size)
    return tuple((at % tp // replicas * replicas, at // tp, at % tp % dcp) for at in range(tp * pp))


def _group(spec: Any) -> str:
    """One group's spec as text. A group with a spec per layer is described by its first, as in the engine
    core."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner:
        spec = next(iter(inner.values()))
    named = {
        field.name: _plain(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in _NOT_ABOUT_BYTES
    }
    named["page_size_bytes"] = int(spec.page_size_bytes)
    return f"{type(spec).__name__}:{spec.block_size}x{spec.page_size_bytes}B:{_short(named)}"


def _speculative(vllm_config: Any) -> str:
    """Method and name of a draft model, whose layers are in the same groups."""
    config = vllm_config.speculative_config
    if config is None:
        return ""
    draft = getattr(config, "model", None)
    return f"{getattr(config, 'method', None)}:{draft}:{weights_digest(str(draft)) if draft else ''}"


def _plain(value: Any) -> Any:
    """Convert to JSON types, equal in every process: no addresses, sorted sets."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(inner) for inner in value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(getattr(value, "__qualname__", value))


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
