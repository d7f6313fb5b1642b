"""Which engines may read one another's blocks: those that agree on everything a block's bytes depend on.

A block hash names tokens, nothing else. So every key in a shared store begins with the digest of a namespace:
model, weights, element types, layout, group specs, parallel sizes and rank, hash scheme and seed, format. Two
engines that differ in any of it have different keys and never meet; what it consists of can be read in the
log of both. Both halves of a connector compute it from the same configuration; a ``ticket`` with every job
proves that they came to the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.store.base import DIGEST_BYTES, FORMAT_VERSION

# What tells one set of model weights from another, cheaply enough for every start of an engine.
#
# Two engines may serve different weights under one name: a local path that means something else on another
# host, a fine-tune copied over its base. Weights in a directory are therefore sampled: name, size and a few
# kilobytes of every weight file, and of the model's configuration. Weights from a hub are named by the
# commit that was resolved.


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIGURATION = "config.json"
_FILES_MAX = 256
_SAMPLE_BYTES = 4096
_SAMPLES = 4


def weights_digest(model: str) -> str:
    """Hexadecimal digest of the weights at this path; empty where it is no local file or directory.

    Files that cannot be read count by name and size only.
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
_NOT_ABOUT_BYTES = frozenset({"is_index_group_leader", "is_draft"})
"""Fields of a spec that say how it is scheduled, or whose layer it is."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """``fields``: all that counts but the rank, as text by name. ``ranks``: (tp, pp, dcp) of each rank.

    ``engine``: this engine's own name, from start to end. ``private_reason``: why nobody else can have this
    namespace; empty where it can be shared. An *epoch* is 0 at start; every later one is this engine's alone:
    after a reset nobody can say who else has the same weights.
    """

    fields: Mapping[str, str]
    ranks: tuple[tuple[int, int, int], ...]
    engine: str
    private_reason: str = ""

    def digest(self, rank: int, epoch: int = 0) -> bytes:
        """Name of this rank's blocks in this epoch, ``DIGEST_BYTES`` long."""
        tp, pp, dcp = self.ranks[rank]
        named = {**self.fields, "tp_rank": str(tp), "pp_rank": str(pp), "dcp_rank": str(dcp)}
        if epoch:
            named["epoch"] = f"{epoch} of {self.engine}"
        text = json.dumps(named, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def digests(self, epoch: int = 0) -> tuple[bytes, ...]:
        """Of every rank, in order; of ranks that hold the same, one."""
        return tuple(dict.fromkeys(self.digest(rank, epoch) for rank in range(len(self.ranks))))

    def ticket(self, epoch: int) -> int:
        """One number that says the epoch and vouches for the fields; below 2**52."""
        return int.from_bytes(self.digest(0)[:4], "big") << _EPOCH_BITS | epoch

    def read_ticket(self, ticket: int) -> int:
        """The epoch. ValueError: it was written under other fields than these."""
        epoch = ticket & (1 << _EPOCH_BITS) - 1
        if ticket != self.ticket(epoch):
            raise ValueError(f"the other half of this engine has another namespace; here: {self.describe()}")
        return epoch

    def describe(self) -> str:
        """For logs and errors: every field, one line."""
        named = "; ".join(f"{name}={value}" for name, value in sorted(self.fields.items()))
        return f"{self.digest(0).hex()} ({len(self.ranks)} ranks; {named})"


def namespace_of(vllm_config: Any, kv_cache_config: Any, *, label: str = "", replicas: int = 1) -> Namespace:
    """The namespace of a vLLM engine. ``label``: chosen by the operator, to keep fleets apart.

    ``replicas``: so many neighbouring tensor-parallel ranks hold the same, and have one name for it.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    seed, private_reason = _hash_seed(vllm_config)
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    files = weights_digest(str(model.model))
    fields = {
        "format": str(FORMAT_VERSION),
        # What a page's bytes mean is the attention kernels' business, and those change between releases.
        "vllm": _vllm_release(),
        "label": label,
        # The same weights may lie elsewhere on another host.
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
    """``major.minor``."""
    import vllm  # noqa: PLC0415

    return ".".join(vllm.__version__.split(".")[:2])


def _hash_seed(vllm_config: Any) -> tuple[str, str]:
    """(the hash every chain begins with, why it is nobody else's)."""
    from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed  # noqa: PLC0415

    name = vllm_config.cache_config.prefix_caching_hash_algo
    hash_fn = get_hash_fn_by_name(name)
    # Where the environment gives no seed, asking twice shows whether there is a fixed one.
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
    """One group's spec as text. Groups of like layers count by one of them, as the engine core sees them."""
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
    """A draft model's layers lie in the same groups: its name and method count."""
    config = vllm_config.speculative_config
    if config is None:
        return ""
    draft = getattr(config, "model", None)
    return f"{getattr(config, 'method', None)}:{draft}:{weights_digest(str(draft)) if draft else ''}"


def _plain(value: Any) -> Any:
    """As JSON can hold it, the same in every process: no addresses, no order of sets."""
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
