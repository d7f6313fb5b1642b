"""SGLang's own ``UnifiedRadixCache`` beside ours: run by vLLM's interpreter, which has torch.

    python -m tests.support.real_radix WHEEL SEEDS [windows | states]

Random requests, several at a time, go through both, with and without host memory, with each write policy, and
with EAGLE. Hits, evictions and events must be equal, and with them what each holds. Half of the caches have
the wheel's compiled tree, SGLang's default; the others its tree in Python. Prints the number of events.

Modules of the wheel that the cache does not need for this are stand-ins, and its C++ hash is written in
Python. Its ``HiCacheController`` and pools need CUDA: here both count pages, and a copy or load ends when
``check_hicache_events`` is called.

With ``windows`` or ``states`` the cache has a sliding window or Mamba states too, which ours has not. Its
events must then tell of the full-attention part what the tree in Python holds, and no hit may be above what
they tell; with ``write_back`` they may tell of more in host memory. Prints for each policy the events, the
hits below, the pages that were published twice in a medium, and those of host memory that were only told.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import random
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import msgspec

from kvatlas.publisher.block_hash import SGLANG, HashScheme, PromptExtras
from kvatlas.publisher.block_pool import PoolRequest
from kvatlas.publisher.events import encode_sglang_batch
from kvatlas.publisher.pool.radix import RadixPool, WritePolicy
from tests.support.sglang_wire import Wheel

PAGE = 4
CHUNK = 16
PLAIN = HashScheme(SGLANG, "", PAGE, tagged=False)
_CACHE = "sglang.srt.mem_cache."
_RUST = _CACHE + "rust_tree_core.mem_cache"
_TREE = ("cache_action", "component_type", "session_ref_tracker", "unified_tree_core")
_PARTS = ("", ".base", ".full", ".mamba", ".swa")
_REAL = {
    *(_CACHE + name for name in ("unified_radix_cache", "radix_cache", "events", "evict_policy", "utils")),
    *(_CACHE + name for name in ("cache_init_params", "base_prefix_cache", "hicache_storage")),
    *(_CACHE + "unified_cache." + name for name in (*_TREE, "unified_tree_core_interface")),
    *(_CACHE + "unified_cache.components" + name for name in _PARTS),
    _CACHE + "rust_tree_core.adapter",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.environ",
    "sglang.srt.utils.rank_consensus_checker",
}


def _native_hash(key: Sequence[Any], prior: bytes | None, page_size: int) -> list[str]:
    """As ``fill_regular_page`` and ``fill_bigram_page`` (mem_cache/cpp_utils/hash_binding.cpp)."""
    tokens, digest, made = list(key), prior or b"", []
    for start in range(0, len(tokens), page_size):
        units = tokens[start : start + page_size]
        flat = [token for unit in units for token in unit] if key.is_bigram else units  # type: ignore[attr-defined]
        words = b"".join(token.to_bytes(4, "little") for token in flat)
        digest = hashlib.sha256(digest + words).digest()
        made.append(digest.hex())
    return made


class Pages:
    """Free pages of one pool, as its allocator counts them."""

    device = "cpu"
    anchor_entry = SimpleNamespace(host_pool=SimpleNamespace(shared_allocation_domain=None))

    def __init__(self, count: int, size: int = PAGE) -> None:
        """``size``: tokens per page."""
        self.count, self._size = count, size
        self.clear()

    def clear(self) -> None:
        self.free_pages = list(range(self.count))

    def available_size(self) -> int:
        return len(self.free_pages) * self._size

    schedulable_available_size = available_size

    def alloc(self, num_tokens: int) -> Any:
        import torch  # noqa: PLC0415  # only vLLM's environment has it

        if num_tokens > self.available_size():
            return None
        size = self._size
        taken = [self.free_pages.pop() for _ in range(num_tokens // size)]
        return torch.tensor([page * size + at for page in taken for at in range(size)], dtype=torch.int64)

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        pages = [int(index) // self._size for index in indices[:: self._size]]
        assert not set(pages) & set(self.free_pages)
        self.free_pages += pages

    def free(self, indices: Any, pool: object = None) -> None:
        self.free_segment(indices)

    def mamba_full_cache_donor(self) -> None:
        return None


class Controller:
    """``HiCacheController`` without transfers: what it was asked for is complete when it is looked at."""

    enable_storage = False

    def __init__(
        self, policy: WritePolicy, device: Pages, host: Pages, windows: tuple[Pages, Pages] | None = None
    ) -> None:
        """``windows``: the pools for them on the device and in host memory."""
        self.write_policy, self.mem_pool_host, self._device = policy, host, device
        self._windows = windows
        self.reset()

    def reset(self) -> None:
        self.ack_write_queue: list[Any] = []
        self.ack_load_queue: list[Any] = []

    def write(self, device_indices: Any, *, node_id: int, extra_pools: Any = None, **_: Any) -> Any:
        extra = extra_pools or ()
        sizes = [len(transfer.device_indices) for transfer in extra]
        if self._windows is not None and sum(sizes) > self._windows[1].available_size():
            return None
        for transfer, size in zip(extra, sizes, strict=True):
            transfer.host_indices = self._windows[1].alloc(size) if self._windows else None
        self.ack_write_queue.append(self._ack(node_id))
        return self.mem_pool_host.alloc(len(device_indices))

    def load(self, *, host_indices: Any, node_id: int, extra_pools: Any = None, **_: Any) -> Any:
        extra = extra_pools or ()
        sizes = [len(transfer.host_indices) for transfer in extra]
        if self._windows is not None and sum(sizes) > self._windows[0].available_size():
            return None
        for transfer, size in zip(extra, sizes, strict=True):
            transfer.device_indices = self._windows[0].alloc(size) if self._windows else None
        self.ack_load_queue.append(self._ack(node_id))
        return self._device.alloc(len(host_indices))

    def start_writing(self) -> None:
        """Nothing is merged."""

    def _ack(self, node_id: int) -> Any:
        return SimpleNamespace(finish_event=MagicMock(), node_ids=[node_id], num_tokens_by_pool=None)


class Request:
    """A request of both: its fields as ``Req`` has them, and ours."""

    def __init__(self, ours: PoolRequest) -> None:
        self.ours, self.pages = ours, 0
        self.rid = self.session_id = self.kv_rotation_base = self.extra_key = None
        self.priority = self.swa_host_hit_length = self.mamba_host_hit_length = 0
        self.cache_salt = ours.extras.cache_salt
        self.origin_input_ids = array("q", ours.token_ids)
        self.is_finished = False
        self.lock: Any = None
        self.last_node: Any = None
        self.swa_branching_seqlen = None
        self.kv = SimpleNamespace(
            cache_inserted_len=0, mamba_pool_idx=None, get_evicted_seqlen=lambda _component: 0
        )

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.ours.token_ids)

    def get_fill_ids(self) -> array[int]:
        return self.full_untruncated_fill_ids

    def finished(self) -> bool:
        return self.is_finished


class Pair:
    """One small cache of each kind."""

    def __init__(self, rng: random.Random, policy: WritePolicy | None, core: str, *, eagle: bool) -> None:
        import torch  # noqa: PLC0415

        self._rng = rng
        self._api = importlib.import_module(_CACHE + "base_prefix_cache")
        self._module = importlib.import_module(_CACHE + "unified_radix_cache")
        pages = rng.randint(14, 30)
        host_pages = 0 if policy is None else rng.randint(2, rng.choice((12, 50)))
        self._device, host = Pages(pages), Pages(host_pages)
        # One row for each of few requests: where its tokens are.
        self._rows = torch.zeros((4, 256), dtype=torch.int64)
        self.theirs = self._made(eagle=eagle, core=core)
        if policy is not None:
            set_up(self.theirs, Controller(policy, self._device, host), host)
        self.theirs.take_events()  # that of its construction
        self._live: dict[int, Request] = {}
        self._past: list[list[int]] = []
        self.ours = RadixPool(
            num_blocks=pages + 1,
            scheme=msgspec.structs.replace(PLAIN, lookahead=int(eagle)),
            chunk_tokens_max=CHUNK,
            host_pages=host_pages,
            write_policy=policy or "write_through",
        )

    def _made(self, *, eagle: bool, core: str) -> Any:
        rows = SimpleNamespace(req_to_token=self._rows, write=self._rows.__setitem__)
        params = importlib.import_module(_CACHE + "cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self._device,
            page_size=PAGE,
            is_eagle=eagle,
            enable_kv_cache_events=True,
            tree_components=(self._module.ComponentType.FULL,),
            tree_core_backend=core,
        )
        return self._module.UnifiedRadixCache(params)

    def step(self) -> int:
        """Start, continue or end some requests in both; returns the number of their events."""
        rng = self._rng
        if len(self._live) < len(self._rows) and rng.random() < 0.7:
            self._start()
        for row, request in list(self._live.items()):
            ours = request.ours
            left = ours.num_tokens - ours.num_computed
            if not left:
                ours.append(rng.choice((1, 2)))
                left = 1
            if self._compute(row, request, min(left, rng.randint(1, CHUNK))):
                chance = rng.random()
                if chance < 0.4:
                    self._end(row, request, finished=chance < 0.3)
            else:
                self._end(row, request, finished=False)
        self.ours.end_step()
        self.ours.check_integrity()
        if rng.random() < 0.4:
            return 0  # transfers are under way meanwhile
        if self.theirs.cache_controller is not None:
            self.theirs.check_hicache_events()
        told, theirs = self.ours.take_events(), self.theirs.take_events()
        assert encode_sglang_batch(0.0, told) == msgspec.msgpack.encode([0.0, theirs, 0]), (told, theirs)
        if not self._live and rng.random() < 0.1:
            self.theirs.reset()
            self._device.clear()
            assert self.ours.reset()
        return len(theirs)

    def _start(self) -> None:
        prompt = [self._rng.choice((1, 2)) for _ in range(self._rng.randint(1, 40))]
        if self._past and self._rng.random() < 0.6:
            again = self._rng.choice(self._past)
            prompt = (again[: self._rng.randint(1, len(again))] + prompt[: self._rng.randint(1, 12)])[:40]
        self._past = [*self._past[-5:], prompt]
        salt = self._rng.choice((None, None, "s"))
        request = Request(self.ours.request(prompt, PromptExtras(cache_salt=salt)))
        hit = self.ours.start(request.ours)
        key = self._module.RadixKey(array("q", prompt[:-1]), cache_salt=salt)
        found = self.theirs.match_prefix(self._api.MatchPrefixParams(key=key))
        if hit is None:
            return
        prefix = int(found.device_prefix_len)
        request.last_node = found.last_device_node
        if found.host_hit_length:
            load = self._api.InitLoadBackParams(found.best_match_node, found.host_hit_length, None, request)
            loaded, request.last_node = self.theirs.init_load_back(load)
            prefix += loaded
        assert hit == prefix, (hit, prefix, found)
        row = next(row for row in range(len(self._rows)) if row not in self._live)
        self._rows[row, :prefix] = self.theirs.path_device_indices(request.last_node)
        request.lock = self.theirs.lock(request.last_node)
        request.kv.req_pool_idx, request.kv.cache_protected_len = row, prefix
        request.pages = prefix // PAGE
        self._live[row] = request

    def _compute(self, row: int, request: Request, num_tokens: int) -> bool:
        ours = request.ours
        is_prompt = ours.num_computed + num_tokens <= ours.num_prompt_tokens
        fits = self.ours.compute(ours, num_tokens)
        total = ours.num_computed if fits else ours.num_computed + num_tokens
        wanted = -(-total // PAGE) - request.pages
        short = wanted * PAGE - self._device.available_size()
        if short > 0:
            self.theirs.evict_for_alloc(self._api.EvictParams(num_tokens=short))
        taken = self._device.alloc(wanted * PAGE)
        assert fits == (taken is not None)
        if not fits:
            return False
        self._rows[row, request.pages * PAGE : (request.pages + wanted) * PAGE] = taken
        request.pages += wanted
        if is_prompt:
            self.theirs.checkpoint_into_tree(request, up_to=total)
            self.ours.end_step()
        return True

    def _end(self, row: int, request: Request, *, finished: bool) -> None:
        if finished:
            request.is_finished = True
            self.theirs.checkpoint_into_tree(request, up_to=request.ours.num_computed)
            self.ours.finish(request.ours)
        else:
            self.ours.preempt(request.ours)
        first = -(-request.kv.cache_protected_len // PAGE) * PAGE
        self._device.free_segment(self._rows[row, first : request.pages * PAGE])
        self.theirs.unlock(request.lock)
        del self._live[row]


class WindowPages:
    """``SWATokenToKVPoolAllocator`` without memory: each page of full attention has one for the windows."""

    device = "cpu"

    def __init__(self, pages: int, window_pages: int, size: int = PAGE) -> None:
        self.full_attn_allocator, self.swa_attn_allocator = Pages(pages, size), Pages(window_pages, size)
        self._windows: dict[int, int] = {}

    def full_available_size(self) -> int:
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        return self.swa_attn_allocator.available_size()

    def mamba_full_cache_donor(self) -> None:
        return None

    def alloc(self, num_tokens: int) -> Any:
        if num_tokens > min(self.full_available_size(), self.swa_available_size()):
            return None
        taken = self.full_attn_allocator.alloc(num_tokens)
        self.set_full_to_swa_mapping(taken, self.swa_attn_allocator.alloc(num_tokens))
        return taken

    def set_full_to_swa_mapping(self, indices: Any, windows: Any) -> None:
        self._windows.update(zip(indices.tolist(), windows.tolist(), strict=True))

    def clear_full_to_swa_mapping(self, indices: Any) -> None:
        for index in indices.tolist():
            del self._windows[index]

    def translate_swa_indices_for_transfer(self, indices: Any) -> Any:
        return indices.new_tensor([self._windows[index] for index in indices.tolist()])

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.free_swa_segment(indices)
        self.full_attn_allocator.free_segment(indices)

    def free_full_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.full_attn_allocator.free_segment(indices)

    def free_swa_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.swa_attn_allocator.free_segment(self.translate_swa_indices_for_transfer(indices))
        self.clear_full_to_swa_mapping(indices)


class Hybrid:
    """A cache with full attention and another part, and what its events tell: by medium, the pages."""

    def __init__(self, rng: random.Random) -> None:
        import torch  # noqa: PLC0415

        self._rng = rng
        self._api = importlib.import_module(_CACHE + "base_prefix_cache")
        self._module = importlib.import_module(_CACHE + "unified_radix_cache")
        self._kinds = self._module.ComponentType
        self._row = torch.zeros((1, 64), dtype=torch.int64)
        self.cache = self._made()
        self.cache.take_events()
        self._told: dict[str, set[int]] = {"GPU": set(), "CPU_PINNED": set()}

    def _made(self) -> Any:
        raise NotImplementedError

    def _serve(self, prompt: list[int], found: Any) -> None:
        raise NotImplementedError

    def _cache(self, part: Any, allocator: Any, rows: Any, **params: Any) -> Any:
        return self._module.UnifiedRadixCache(
            importlib.import_module(_CACHE + "cache_init_params").CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=allocator,
                page_size=PAGE,
                enable_kv_cache_events=True,
                tree_components=(self._kinds.FULL, part),
                tree_core_backend="python",
                **params,
            )
        )

    def step(self) -> Counter[str]:
        """Serve one request; returns what its events were, and whether a hit was below the predicted one."""
        prompt = [self._rng.choice((1, 2)) for _ in range(self._rng.randint(1, 40))]
        key = self._module.RadixKey(array("q", prompt[:-1]), None)
        found = self.cache.match_prefix(self._api.MatchPrefixParams(key=key))
        counted = Counter({"below": int(self._is_below(key, found))})
        self._serve(prompt, found)
        if self.cache.cache_controller is not None:
            self.cache.check_hicache_events()
        for event in self.cache.take_events():
            told, hashes = self._told[event.medium.value], set(event.block_hashes)
            counted["events"] += 1
            if type(event).__name__ == "BlockStored":
                counted[f"twice {event.medium.value}"] += len(told & hashes)
                told |= hashes
            else:
                told -= hashes
        held = self._held()
        assert self._told["GPU"] == held["GPU"]
        assert self._told["CPU_PINNED"] >= held["CPU_PINNED"]
        counted["only told"] += len(self._told["CPU_PINNED"] - held["CPU_PINNED"])
        return counted

    def _is_below(self, key: Any, found: Any) -> bool:
        """Whether the hit is below what the events tell of full attention; it is never above."""
        value_of = importlib.import_module(_CACHE + "utils").hash_str_to_int64
        told = self._told["GPU"] | self._told["CPU_PINNED"]
        hashes = _native_hash(key[: len(key) // PAGE * PAGE], None, PAGE)
        pages = next((at for at, page in enumerate(hashes) if value_of(page) not in told), len(hashes))
        hit = int(found.device_prefix_len) + int(found.host_hit_length)
        assert hit <= pages * PAGE, (hit, pages)
        return hit < pages * PAGE

    def _held(self) -> dict[str, set[int]]:
        value_of = importlib.import_module(_CACHE + "utils").hash_str_to_int64
        held: dict[str, set[int]] = {"GPU": set(), "CPU_PINNED": set()}
        for node in self.cache.tree_core._node_arena.values():
            data = node.component_data[0]
            for medium, value in (("GPU", data.value), ("CPU_PINNED", data.host_value)):
                if node.parent is not None and value is not None:
                    held[medium] |= {value_of(block) for block in node.hash_value}
        return held


class States(Hybrid):
    """The other part are Mamba states, one at the end of each inserted prompt."""

    def _made(self) -> Any:
        self._pages = Pages(self._rng.randint(14, 30))
        self._slots = Pages(self._rng.randint(3, 8), size=1)
        pool = importlib.import_module(_CACHE + "memory_pool").HybridReqToTokenPool
        made = {"req_to_token": self._row, "mamba_allocator": self._slots}
        rows = type("_Rows", (pool,), made)()
        cache = self._cache(self._kinds.MAMBA, self._pages, rows, enable_mamba_extra_buffer=True)
        states = cache.components[self._kinds.MAMBA]
        states.mamba_checkpoint_grid, states.mamba_max_states_per_path = PAGE, -1
        return cache

    def _serve(self, prompt: list[int], found: Any) -> None:
        api, cache, pages, slots = self._api, self.cache, self._pages, self._slots
        node, prefix, end = found.last_device_node, int(found.device_prefix_len), len(prompt) // PAGE * PAGE
        if end <= prefix:
            return
        lock = cache.lock(node)
        short, states = end - prefix - pages.available_size(), 1 - slots.available_size()
        if short > 0 or states > 0:
            cache.evict_for_alloc(api.EvictParams(num_tokens=max(0, short), mamba_num=max(0, states)))
        taken, slot = pages.alloc(end - prefix), slots.alloc(1)
        if taken is None or slot is None:
            for allocator, got in ((pages, taken), (slots, slot)):
                if got is not None:
                    allocator.free(got)
        else:
            self._row[0, :prefix] = cache.path_device_indices(node)[:prefix]
            self._row[0, prefix:end] = taken
            key = self._module.RadixKey(array("q", prompt[:end]), None)
            value = self._row[0, :end].clone()
            done = cache.insert(
                api.InsertParams(key=key, value=value, mamba_value=slot, prev_prefix_len=prefix)
            )
            if done.mamba_exist:
                slots.free(slot)
        cache.unlock(lock)
        assert len(pages.free_pages) + len(self._held()["GPU"]) == pages.count


class Windows(Hybrid):
    """The other part is a sliding window."""

    def __init__(self, rng: random.Random, policy: WritePolicy | None) -> None:
        self._policy = policy
        super().__init__(rng)

    def _made(self) -> Any:
        rng, kinds = self._rng, self._kinds
        base = importlib.import_module(_CACHE + "allocator.swa").SWATokenToKVPoolAllocator
        self._pages = type("_Pages", (WindowPages, base), {})(rng.randint(14, 30), rng.randint(10, 18))
        rows = SimpleNamespace(req_to_token=self._row, write=self._row.__setitem__)
        cache = self._cache(kinds.SWA, self._pages, rows, sliding_window_size=2 * PAGE)
        if self._policy is not None:
            host, windows = (Pages(rng.randint(10, 50)) for _ in range(2))
            pools = self._pages.swa_attn_allocator, windows
            set_up(cache, Controller(self._policy, self._pages.full_attn_allocator, host, pools), host)
            cache.host_pool_group = SimpleNamespace(
                free=lambda indices, pool: (windows if pool == "swa" else host).free_segment(indices),
                get_pool=lambda _pool: windows,
            )
            cache.components[kinds.SWA]._swa_kv_pool_host = windows
            cache.tree_core.has_swa_host_pool = True
        return cache

    def _serve(self, prompt: list[int], found: Any) -> None:
        api, cache, pages = self._api, self.cache, self._pages
        request = Request(RadixPool(num_blocks=2, scheme=PLAIN, chunk_tokens_max=CHUNK).request(prompt))
        request.last_node, prefix = found.last_device_node, int(found.device_prefix_len)
        request.swa_host_hit_length = found.swa_host_hit_length
        if cache.cache_controller is not None and (found.host_hit_length or found.swa_host_hit_length):
            load = api.InitLoadBackParams(found.best_match_node, found.host_hit_length, None, request)
            loaded, request.last_node = cache.init_load_back(load)
            prefix += loaded
        request.lock = cache.lock(request.last_node)
        self._row[0, :prefix] = cache.path_device_indices(request.last_node)[:prefix]
        request.kv.req_pool_idx, request.kv.cache_protected_len = 0, prefix
        end = -(-len(prompt) // PAGE) * PAGE
        short = [
            max(0, end - prefix - size()) for size in (pages.full_available_size, pages.swa_available_size)
        ]
        if any(short):
            cache.evict_for_alloc(api.EvictParams(num_tokens=short[0], swa_num_tokens=short[1]))
        taken = pages.alloc(end - prefix)
        if taken is not None:
            self._row[0, prefix:end] = taken
            for request.is_finished in (False, True):
                cache.checkpoint_into_tree(request, up_to=len(prompt))
            pages.free_segment(self._row[0, request.kv.cache_protected_len : end])
        cache.unlock(request.lock)


def set_up(cache: Any, controller: Controller, host: Pages) -> None:
    """Give a cache host memory, as ``init_hicache`` does."""
    cache.cache_controller, cache.host_pool_group = controller, host
    cache.components[
        importlib.import_module(_CACHE + "unified_radix_cache").ComponentType.FULL
    ]._full_kv_pool_host = host
    cache.tree_core.set_hicache_enabled()
    cache.write_through_threshold = 1 if controller.write_policy == "write_through" else 2
    cache.is_write_back = controller.write_policy == "write_back"
    cache.load_back_threshold = 10


def load_wheel(path: str, directory: str, more: Collection[str] = ()) -> None:
    """Import what the cache needs from the wheel, its compiled tree through ``directory``; ``more``: further
    modules."""
    wheel = Wheel(path, {*_REAL, *more})
    sys.meta_path.insert(0, wheel)
    # An attribute of a stand-in exists before its module is imported, so no ``from`` import.
    vars(importlib.import_module(_CACHE + "utils"))["get_native_hash"] = _native_hash
    import torch  # noqa: F401, PLC0415  # the compiled tree needs its libraries

    spec = importlib.util.spec_from_file_location(_RUST.rpartition(".")[2], wheel.binary(_RUST, directory))
    assert spec is not None
    assert spec.loader is not None
    compiled = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    vars(importlib.import_module(_CACHE + "rust_tree_core.extension"))["bindings"] = compiled
    cache = vars(importlib.import_module(_CACHE + "unified_radix_cache"))
    rust = importlib.import_module(_CACHE + "rust_tree_core.adapter").RustUnifiedTreeCore
    cache["select_tree_core_backend"] = lambda params: params.tree_core_backend
    cache["create_tree_core"] = lambda name, params, components: (
        rust(params) if name == "rust" else cache["UnifiedTreeCore"](params, components)
    )
    session = MagicMock()
    session.try_match_prefix.return_value = None
    cache["StreamingSession"] = lambda _cache: session
    cache["page_interleave_shard_size"] = lambda _allocator: 1
    cache["is_virtual_node"] = lambda _node: False


def main(wheel: str, seeds: int, part: str = "") -> int | dict[str, dict[str, int]]:
    """Returns the number of events that were equal; with a further part what the events were, by policy."""
    policies: tuple[WritePolicy | None, ...] = (None, *get_args(WritePolicy))
    with tempfile.TemporaryDirectory() as directory:
        load_wheel(wheel, directory)
        if part:
            found: dict[str, Counter[str]] = {}
            for seed in range(seeds):
                rng, policy = random.Random(seed), policies[seed % 4] if part == "windows" else None
                one = Windows(rng, policy) if part == "windows" else States(rng)
                counted = found.setdefault(str(policy), Counter())
                counted.update(sum((one.step() for _ in range(80)), Counter()))
            return {policy: dict(counted) for policy, counted in found.items()}
        events = 0
        for seed in range(seeds):
            core = ("rust", "python")[seed // 8 % 2]
            pair = Pair(random.Random(seed), policies[seed % 4], core, eagle=bool(seed // 4 % 2))
            events += sum(pair.step() for _ in range(60))
        return events


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
