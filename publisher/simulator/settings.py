"""Settings of a simulated engine, and its group presets.

One frozen struct holds every default; the command line and the demo use it too. Durations are in seconds,
sizes in tokens or blocks as named. ``resolve_groups`` turns a preset name into group specs with the layout of
a real model family, small enough for a laptop.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvatlas.publisher.block_hash import ALGORITHMS, DEFAULT_SEED, SGLANG, HashScheme
from kvatlas.publisher.groups import Family, GroupSpec, hash_unit

DEMO_TOKENIZER_DIR = Path(__file__).resolve().parent.parent / "assets" / "demo_tokenizer"
# Longest context of the demo model (``model_max_length`` of its tokenizer_config.json).
MODEL_LENGTH_MAX = 32_768
_VERSION = re.compile(r"0\.(30|31|32|33)\.\d+")
_SIZE_MAX = 1 << 24
_RATE_S_MAX = 3600
_PORT_MAX = (1 << 16) - 1
_MAY_BE_ZERO = frozenset({"host_blocks", "dp_rank", "seed"})
# States held at once: the running state, the one before it, the hit's, and its private copy.
_ALIGNED_STATES = 4


CrashPoint = Literal["before_answer", "after_first_byte", "after_answer"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulated engine. One process serves one data-parallel rank.

    ``publisher/simulator/scheduler.py`` has the formula of a step's duration.
    """

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """HTTP port; 0 takes a free one."""
    model: str = "kvatlas-demo"
    """Name of the served model."""
    root: str = ""
    """The `root` of its model card, where vLLM has the path or name it was started with; the default is the
    model's name."""
    kind: Literal["vllm", "sglang"] = "vllm"
    """The engine's software. `sglang` has one full-attention group, and events, `/server_info` and gauges as
    SGLang 0.5.23."""
    speculative_algorithm: Literal["EAGLE"] | None = None
    """With kind `sglang`, SGLang's `--speculative-algorithm`: its pages are of token pairs then. Nothing is
    drafted."""
    frontend: Literal["python", "rust"] = "python"
    """vLLM's API server that it answers like; `rust` (VLLM_USE_RUST_FRONTEND=1) makes other tokens of some
    chats."""
    groups: str | tuple[GroupSpec, ...] = "full"
    """Layout of the KV cache: a preset, or explicit group specs."""
    block_size: int = 16
    """Tokens per block of a preset."""
    decode_context_parallel_size: int = 1
    """Ranks of decode context parallelism, for full attention and Mamba groups: a block of full attention has
    this many times the tokens of one rank's block."""
    num_blocks: int = 8192
    """Blocks of the KV cache, all groups together."""
    hash_algo: str = "sha256"
    """Hash algorithm of block hashes, as vLLM's `--prefix-caching-hash-algo`."""
    hash_seed: str = DEFAULT_SEED
    """Seed of block hashes (vLLM: PYTHONHASHSEED); the default is vLLM's."""
    retention_interval: int | None = 0
    """vLLM's `--prefix-cache-retention-interval` in tokens; `none` keeps every block."""
    int_hashes: bool = True
    """Publish 64-bit hashes, as vLLM does by default, instead of whole digests."""
    prefill_s_per_token: float = 5e-5
    """Seconds of a step per prompt token it computes."""
    decode_s_per_token: float = 0.01
    """Seconds of a step that decodes."""
    host_blocks: int = 0
    """Blocks of host memory behind the pool, as with a connector, or with SGLang's
    `--enable-hierarchical-cache`; 0 for none."""
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] | None = None
    """With kind `sglang` and `host_blocks`, SGLang's `--hicache-write-policy`; `none`: `write_through`."""
    load_s_per_token: float = 2e-6
    """Seconds to load one token from host memory."""
    max_num_seqs: int = 64
    """Most sequences in one step, as in vLLM."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, as in vLLM."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """vLLM's `--scheduling-policy`: with `priority`, requests with a lower `priority` value run first; `fcfs`
    ignores the value."""
    max_model_len: int | None = None
    """Longest context in tokens; `none`: as much as fits the pool, up to the tokenizer's limit."""
    publish_events: bool = True
    """Whether KV events are published."""
    events_port: int = 0
    """Port of the event socket of rank 0; 0 takes a free one."""
    replay_port: int = 0
    """Port of the replay socket of rank 0; 0 takes a free one."""
    load_port: int | None = None
    """With kind `sglang`, port of the socket at which rank 0 publishes its load (`--load-publish-endpoint`);
    0 takes a free one, `none`: no socket."""
    enable_scale_out: bool = True
    """Serve the endpoints that render chats; off by default in vLLM."""
    drops_salt: str = ""
    """Paths, separated by commas, whose `cache_salt` is dropped without an error, as by older releases of
    vLLM (`/v1/messages` before 0.29)."""
    dp_rank: int = 0
    """Data-parallel rank of this engine."""
    seed: int = 0
    """Seed of the generated text."""
    natural_output_tokens_max: int = 256
    """Longest answer to a request without `max_tokens`."""
    characters: Literal["words", "mixed"] = "words"
    """Content of the generated text: words of one token each, or also characters of several (emoji, CJK)."""
    stream_interval: int = 1
    """Tokens in each event of a stream after the first one, as vLLM's `--stream-interval`."""
    tokenizer_dir: str = str(DEMO_TOKENIZER_DIR)
    """Directory with `tokenizer.json`."""
    version: str = "0.32.0"
    """vLLM release shown by `/version`; the answers of prefill engines differ between 0.30 and 0.33."""
    role: Literal["prefill", "decode", "both"] | None = None
    """Role of the engine in disaggregated serving; `none`: no connector."""
    kv_connector: Literal["nixl", "mooncake", "offloading"] = "nixl"
    """The connector of an engine with a role: NixlConnector in pull mode, MooncakeConnector, or
    OffloadingConnector with a `p2p` tier. The last, with `host_blocks`, also lets engines without a role pull
    from each other."""
    handshake_timeout_s: float = 30.0
    """How long a pull waits for an engine that is gone: `VLLM_P2P_HANDSHAKE_TIMEOUT_S`."""
    bootstrap_port: int = 8998
    """Port of a prefill engine's Mooncake bootstrap server; 0 takes a free one."""
    engine_id: str | None = None
    """Id of the engine for block exchange; `none`: a new one at each start."""
    side_channel_port: int = 0
    """Port of the side channel, through which other engines request blocks; 0 takes a free one."""
    kv_lease_s: float = 30.0
    """Seconds that blocks are kept for another engine: NixlConnector's `kv_lease_duration`, Mooncake's
    `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, offloading's `unbound_store_timeout_s`."""
    transfer_s_per_block: float = 2e-5
    """Seconds to read one block of one group from another engine."""
    block_bytes: int = 65_536
    """Size of one block of one group in bytes, for the connector's metrics."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """Handling of a request whose load fails, as in vLLM."""
    dies_at: CrashPoint | None = None
    """Point of the first answer at which the engine crashes, for tests: `before_answer`, `after_first_byte`,
    `after_answer`."""


def release(version: str) -> tuple[int, int]:
    """Parse major and minor number. Raises ``ValueError`` for a release that is not simulated."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise ValueError(f"version = {version!r}: expected 0.30, 0.31, 0.32 or 0.33 and a patch, like 0.32.0")
    return 0, int(match[1])


def gemma3_like(block_size: int, window: int = 512) -> tuple[GroupSpec, ...]:
    """Five sliding-window layers for each full one; vLLM lists the full group last."""
    windows = [GroupSpec(i, "sliding_window", block_size, sliding_window=window) for i in range(5)]
    return (*windows, GroupSpec(5, "full_attention", block_size))


def gptoss_like(block_size: int) -> tuple[GroupSpec, ...]:
    """Equal numbers of full and sliding-window layers, and a short window."""
    window = GroupSpec(1, "sliding_window", block_size, sliding_window=128)
    return (GroupSpec(0, "full_attention", block_size), window)


def full_attention(block_size: int) -> tuple[GroupSpec, ...]:
    return (GroupSpec(0, "full_attention", block_size),)


def mamba_hybrid(block_size: int) -> tuple[GroupSpec, ...]:
    """Three linear-attention layers for each full one, states kept at block boundaries."""
    states = [GroupSpec(i, "mamba", block_size, mamba_cache_mode="align") for i in range(1, 4)]
    return (GroupSpec(0, "full_attention", block_size), *states)


PRESETS = {
    "gemma3-like": gemma3_like,
    "gptoss-like": gptoss_like,
    "full": full_attention,
    "mamba-hybrid": mamba_hybrid,
}


def check_settings(settings: EngineSettings) -> None:
    """Check values. Raises ``ValueError`` naming setting, value and valid values."""
    if settings.hash_algo not in ALGORITHMS:
        raise ValueError(f"hash_algo = {settings.hash_algo!r}: expected one of {', '.join(ALGORITHMS)}")
    release(settings.version)
    _check_kind(settings)
    if settings.decode_context_parallel_size != 1:
        _check_absent(settings, "decode context parallelism", "role", "host_blocks")
        kinds = {group.kind for group in resolve_groups(settings)} - {"full_attention", "mamba"}
        if kinds:
            raise ValueError(
                f"decode_context_parallel_size = {settings.decode_context_parallel_size}: expected 1 with "
                f"{', '.join(sorted(kinds))} groups; vLLM runs it with full attention and Mamba only"
            )
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least: float = 0 if isinstance(value, float) or name in _MAY_BE_ZERO else 1
        most: float = _RATE_S_MAX if isinstance(value, float) else _SIZE_MAX
        if name.endswith("port"):
            least, most = 0, _PORT_MAX
        elif name == "retention_interval":
            least = 0
        elif name == "seed":
            least, most = -math.inf, math.inf
        if not least <= value <= most:
            raise ValueError(f"{name} = {value}: expected {least} to {most}")


def _check_kind(settings: EngineSettings) -> None:
    if settings.kind == "sglang":
        groups = resolve_groups(settings)
        if len(groups) > 1 or groups[0].family is not Family.FULL:
            raise ValueError(
                f"groups = {settings.groups!r}: kind = 'sglang' has one full-attention group (full)"
            )
        _check_absent(settings, "kind = 'sglang'", "role", "decode_context_parallel_size")
        if settings.load_port is not None and not settings.publish_events:
            raise ValueError(f"load_port = {settings.load_port}: SGLang needs publish_events for it")
        return
    for name in ("speculative_algorithm", "load_port", "hicache_write_policy"):
        value = getattr(settings, name)
        if value is not None:
            raise ValueError(f"{name} = {value!r}: simulated with kind = 'sglang' only")


def _check_absent(settings: EngineSettings, beside: str, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value and value != 1:
            raise ValueError(f"{name} = {value!r}: not simulated with {beside}; leave it out")


def resolve_groups(settings: EngineSettings) -> tuple[GroupSpec, ...]:
    """Make the group specs as events show them: blocks of full attention reach over all ranks of decode
    context parallelism. Raises ``ValueError`` for an unknown preset or no group."""
    groups, ranks = settings.groups, settings.decode_context_parallel_size
    if isinstance(groups, str):
        try:
            groups = PRESETS[groups](settings.block_size)
        except KeyError:
            known = ", ".join(PRESETS)
            raise ValueError(f"groups: unknown group preset {settings.groups!r}; known: {known}") from None
    if not groups:
        raise ValueError("an engine needs at least one KV cache group")
    return tuple(
        replace(group, block_size=group.block_size * ranks) if group.family is Family.FULL else group
        for group in groups
    )


def hash_scheme(settings: EngineSettings, groups: tuple[GroupSpec, ...]) -> HashScheme:
    if settings.kind == "sglang":
        ahead = int(settings.speculative_algorithm is not None)
        return HashScheme(SGLANG, "", hash_unit(groups), ahead, tagged=False)
    return HashScheme(algo=settings.hash_algo, seed=settings.hash_seed, hash_block_size=hash_unit(groups))


def blocks_needed(groups: tuple[GroupSpec, ...], num_tokens: int, chunk_tokens: int) -> int:
    """Most blocks that one request of ``num_tokens`` holds at once, over all groups."""
    # A window or chunked group frees blocks behind it, so it holds its span plus one chunk being computed,
    # plus one block for an unaligned start. An aligned Mamba group holds a few states at any length.
    total = 0
    for group in groups:
        size = group.block_size
        dense = math.ceil(num_tokens / size)
        if group.family is Family.WINDOW and group.sliding_window:
            dense = min(dense, math.ceil((group.sliding_window - 1 + chunk_tokens) / size) + 1)
        elif group.family is Family.CHUNKED and group.attention_chunk_size:
            dense = min(dense, math.ceil((group.attention_chunk_size + chunk_tokens) / size) + 1)
        elif group.mamba_cache_mode == "align":
            dense = min(dense, _ALIGNED_STATES)
        elif group.family is Family.RING:
            dense = 1
        total += dense
    return total


def model_length(settings: EngineSettings, groups: tuple[GroupSpec, ...]) -> int:
    """Longest context of one request in tokens.

    Raises ``ValueError`` if ``max_model_len`` does not fit the pool; vLLM refuses to start then.
    """
    usable = settings.num_blocks - 1  # block 0 is the null block
    chunk = settings.max_num_batched_tokens
    wanted = settings.max_model_len or MODEL_LENGTH_MAX
    if blocks_needed(groups, wanted, chunk) <= usable:
        return wanted
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(groups, middle, chunk) <= usable:
            low = middle
        else:
            high = middle - 1
    if settings.max_model_len is not None or low < 2:
        raise ValueError(
            f"max_model_len = {wanted} tokens needs {blocks_needed(groups, wanted, chunk)} blocks, "
            f"num_blocks = {settings.num_blocks} leaves {usable}: at most {low} tokens fit"
        )
    return low
