"""Rules of windows and Mamba states (``router/placement/radix_parts.py``) beside SGLang's own cache.

    python -m tests.support.real_parts WHEEL SEEDS

Random conversations and prompts with common beginnings, one or several at a time, go through the wheel's
``UnifiedRadixCache`` with a sliding window or Mamba states beside full attention, with pages of 1, 16 and 64
tokens and pools that are too small for all. The rules get its events and the prompts that are sent, as the
router has them. Prints for each part and page size how many look-ups of prompts of which pages of full
attention were there took what was predicted, and how many of these were below full attention.

Where a request's states are taken and its window's pages freed is written here as in ``schedule_batch.py``
and ``batch_result_processor.py``, which need CUDA.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
from array import array
from collections import Counter
from math import lcm
from types import SimpleNamespace
from typing import Any

from kvatlas.publisher.block_hash import SGLANG, HashScheme, block_hashes
from kvatlas.publisher.events import to_block_hash
from kvatlas.router.placement.radix_parts import RadixParts, SentPrompt, States, TreePool, Windows
from tests.support.real_radix import _CACHE, Pages, WindowPages, load_wheel

PAGES = (1, 16, 64)
_ROWS, _TOKENS = 4, 40 * 64
# Tokens that leave the window before its pages are freed (SGLANG_SWA_EVICTION_INTERVAL).
_FREED_EVERY = 128


class Rows:
    """``HybridReqToTokenPool`` without memory: rows of token positions, and the tracking slots of each."""

    enable_mamba_extra_buffer_lazy = False
    mamba_ping_pong_track_buffer_size = 2

    def __init__(self, slots: Pages) -> None:
        import torch  # noqa: PLC0415  # only vLLM's environment has it

        self.req_to_token = torch.zeros((_ROWS, _TOKENS), dtype=torch.int64)
        self.mamba_allocator = slots
        self.mamba_pool = SimpleNamespace(replayssm_write_pos=None, copy_from=lambda *_: None)

    def write(self, at: Any, values: Any) -> None:
        self.req_to_token[at] = values

    @staticmethod
    def translate_mamba_indices(indices: Any) -> Any:
        return indices

    @staticmethod
    def get_mamba_ping_pong_keep_idx(request: Any) -> int:
        return int(request.kv.mamba_last_track_idx)

    @staticmethod
    def get_mamba_ping_pong_other_idx(index: int) -> int:
        return 1 - index

    @staticmethod
    def donate_mamba_ping_pong_slot(request: Any, new_slot: Any) -> Any:
        at = request.kv.mamba_last_track_idx
        given = request.kv.mamba_ping_pong_track_buffer[at].unsqueeze(-1).clone()
        request.kv.mamba_ping_pong_track_buffer[at] = new_slot[0]
        return given

    def free_mamba_cache(self, request: Any, mamba_ping_pong_track_buffer_to_keep: int | None = None) -> None:
        kv = request.kv
        self.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(0))
        kv.mamba_pool_idx = None
        if kv.mamba_ping_pong_track_buffer is not None:
            for at in {0, 1} - {mamba_ping_pong_track_buffer_to_keep}:
                self.mamba_allocator.free(kv.mamba_ping_pong_track_buffer[at : at + 1])
            kv.mamba_ping_pong_track_buffer = None


class Kv(SimpleNamespace):
    """``ReqKvInfo``: what a request holds."""

    holds_kv = True

    def get_evicted_seqlen(self, component: Any) -> int:
        return int(self.evicted)

    def set_evicted_seqlen(self, component: Any, tokens: int) -> None:
        self.evicted = tokens

    def swa_dead_lo(self, page: int) -> int:
        return int(self.cache_protected_len)

    @property
    def holds_mamba(self) -> bool:
        return self.mamba_pool_idx is not None


class Request:
    """A request: its fields as ``Req`` has them, its row, and the router's side of it."""

    def __init__(self, prompt: list[int], answer: list[int], row: int) -> None:
        self.tokens, self.prompt_len, self.row = prompt + answer, len(prompt), row
        self.rid = self.session_id = self.kv_rotation_base = self.extra_key = self.cache_salt = None
        self.priority = 0
        self.origin_input_ids = array("q", prompt)
        self.is_finished, self.lock, self.last_node, self.swa_branching_seqlen = False, None, None, None
        self.branching: int | None = None
        self.computed, self.allocated = 0, 0
        self.kv = Kv(
            cache_inserted_len=0,
            cache_protected_len=0,
            evicted=0,
            req_pool_idx=row,
            mamba_pool_idx=None,
            mamba_ping_pong_track_buffer=None,
            mamba_last_track_idx=1,
            mamba_next_track_idx=0,
            mamba_last_track_seqlen=None,
            mamba_prev_track_seqlen=None,
        )
        self.sent: SentPrompt | None = None

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.tokens)

    def get_fill_ids(self) -> array[int]:
        return array("q", self.tokens[: self.computed])

    def finished(self) -> bool:
        return self.is_finished


class Engine:
    """A small engine of the wheel's cache, and the rules that follow it."""

    def __init__(self, rng: random.Random, part: str, page: int, in_flight: int) -> None:
        self._rng, self._page, self._in_flight, self._part = rng, page, in_flight, part
        self._api = importlib.import_module(_CACHE + "base_prefix_cache")
        self._module = importlib.import_module(_CACHE + "unified_radix_cache")
        kinds, self._scheme = self._module.ComponentType, HashScheme(SGLANG, "", page, tagged=False)
        # The longest prompts have 24 pages; pools that are too small for a few of them.
        unit = 8 if page == 1 else 1
        self._unit, pages = unit * page, rng.randint(90, 200) * unit
        self._chunk = rng.choice((8, 12, 64)) * self._unit
        self._extra = page > 1 or rng.random() < 0.5
        self._grid = self._unit if self._extra else 1
        self._interval = 4 * self._unit
        self.rules: RadixParts
        pool = TreePool(page, pages, self._chunk)
        if part == "windows":
            base = importlib.import_module(_CACHE + "allocator.swa").SWATokenToKVPoolAllocator
            window = rng.randint(1, 4) * self._unit - rng.randint(0, page - 1)
            room = max(pages // rng.randint(2, 4), (in_flight + 1) * 26 * unit)
            self._allocator = type("_Pages", (WindowPages, base), {})(pages, room, page)
            self.rules = Windows(pool, room, window)
            other, slots, more = kinds.SWA, Pages(0, 1), {"sliding_window_size": window}
        else:
            room = rng.randint(5, 12) + 4 * in_flight
            self._allocator, slots = Pages(pages, page), Pages(room, 1)
            self.rules = States(pool, room, 3 if self._extra else 1)
            other, more = kinds.MAMBA, {"enable_mamba_extra_buffer": self._extra}
        base_rows = importlib.import_module(_CACHE + "memory_pool").HybridReqToTokenPool
        self.rows = type("_Rows", (Rows, base_rows), {})(slots)
        self.cache = self._module.UnifiedRadixCache(
            importlib.import_module(_CACHE + "cache_init_params").CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self._allocator,
                page_size=page,
                enable_kv_cache_events=True,
                tree_components=(kinds.FULL, other),
                tree_core_backend="python",
                **more,
            )
        )
        if part == "states":
            states = self.cache.components[kinds.MAMBA]
            states.mamba_checkpoint_grid, states.mamba_max_states_per_path = self._grid, -1
        self.cache.take_events()
        self._live: list[Request] = []
        self._past: list[list[int]] = []
        self.counted: Counter[str] = Counter()

    def step(self) -> None:
        """Start a request if there is room, and let each in flight go on."""
        if len(self._live) < self._in_flight and self._rng.random() < 0.8:
            self._start()
        for request in list(self._live):
            self._go_on(request)
            self._tell()
        assert not self.rules.check_integrity()

    def _start(self) -> None:
        rng, unit = self._rng, self._unit
        fresh = [rng.randrange(1 << 20) for _ in range(rng.randint(1, 12 * unit))]
        prompt = fresh
        if self._past and rng.random() < 0.8:
            before = rng.choice(self._past[-12:])
            # The next turn of a conversation, or another prompt with the same beginning.
            cut = len(before) if rng.random() < 0.6 else rng.randint(1, len(before))
            prompt = (before[:cut] + fresh)[: 24 * unit]
        if rng.random() < 0.1 and self._past:
            prompt = rng.choice(self._past)[: 24 * unit]
        answer = [rng.randrange(1 << 20) for _ in range(rng.randint(1, rng.choice((2, 6 * unit))))]
        row = next(row for row in range(_ROWS) if all(one.row != row for one in self._live))
        request = Request(prompt, answer, row)
        hashes = list(map(to_block_hash, block_hashes(prompt, self._scheme)))
        predicted, full = self.rules.find(hashes, len(prompt))
        request.sent = self.rules.sent(hashes, len(prompt))
        key = self._module.RadixKey(array("q", prompt[:-1]), cache_salt=None)
        found = self.cache.match_prefix(self._api.MatchPrefixParams(key=key))
        prefix = int(found.device_prefix_len)
        if full:
            self.counted["lookups"] += 1
            self.counted["exact"] += predicted * self._page == prefix
            self.counted["above"] += predicted * self._page > prefix
            self.counted["below full attention"] += prefix < full * self._page
        request.last_node, request.branching = found.last_device_node, found.mamba_branching_seqlen
        request.computed = request.allocated = request.kv.cache_protected_len = prefix
        if prefix:
            self.rows.req_to_token[row, :prefix] = self.cache.path_device_indices(request.last_node)[:prefix]
        request.lock = self.cache.lock(request.last_node)
        if self._part == "states":
            slots = self.rows.mamba_allocator
            wanted = 3 if self._extra else 1
            if (short := wanted - slots.available_size()) > 0:
                self.cache.evict_for_alloc(self._api.EvictParams(num_tokens=0, mamba_num=short))
            taken = slots.alloc(wanted)
            request.kv.mamba_pool_idx = taken[0]
            if self._extra:
                request.kv.mamba_ping_pong_track_buffer = taken[1:]
        self._live.append(request)

    def _go_on(self, request: Request) -> None:
        """Compute a chunk of the prompt, or an answer's token, or all that is left of the answer."""
        kv = request.kv
        if request.computed < request.prompt_len:
            end = min(request.prompt_len, request.computed + self._chunk)
            self._allocate(request, end)
            self._track_prefill(request, end)
            request.computed = end
            self.cache.checkpoint_into_tree(request, up_to=end)
            if end == request.prompt_len and self._rng.random() < 0.5:
                # The answer's first token is faster than the events, or slower.
                self._tell()
            if end == request.prompt_len:
                assert request.sent is not None
                self.rules.started(request.sent)
            return
        for _ in range(self._rng.choice((1, len(request.tokens)))):
            if request.computed == len(request.tokens) - 1:
                break
            self._free_windows(request, request.computed)
            self._allocate(request, request.computed + 1)
            request.computed += 1
            if self._extra and request.computed % lcm(self._grid, self._interval) == 0:
                kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = (
                    kv.mamba_last_track_seqlen,
                    request.computed,
                )
                kv.mamba_last_track_idx = kv.mamba_next_track_idx
                kv.mamba_next_track_idx = 1 - kv.mamba_next_track_idx
        if request.computed == len(request.tokens) - 1:
            self._end(request)

    def _track_prefill(self, request: Request, end: int) -> None:
        """``_mamba_radix_cache_v2_req_prepare_for_extend``."""
        if self._part != "states" or not self._extra:
            return
        kv, begin = request.kv, request.computed
        steps = (end - begin) // self._grid
        if not steps:
            return
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = 1 - kv.mamba_next_track_idx
        kv.mamba_last_track_seqlen = begin + steps * self._grid
        branch = request.branching
        if branch is not None and begin < branch < end and (branch - begin) % self._grid == 0:
            kv.mamba_last_track_seqlen = branch

    def _free_windows(self, request: Request, tokens: int) -> None:
        """``maybe_evict_swa``."""
        window = self.cache.sliding_window_size
        if self._part == "windows" and tokens - window >= request.kv.evicted + _FREED_EVERY:
            importlib.import_module(_CACHE + "common").free_swa_out_of_window_slots(
                request,
                tokens,
                sliding_window_size=window,
                page_size=self._page,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self._allocator,
                component_type=self._module.ComponentType.SWA,
            )

    def _allocate(self, request: Request, end: int) -> None:
        page, cache, allocator = self._page, self.cache, self._allocator
        wanted = -(-end // page) * page - -(-request.allocated // page) * page
        if not wanted:
            return
        sizes = (
            (allocator.full_available_size, allocator.swa_available_size)
            if self._part == "windows"
            else (allocator.available_size, lambda: wanted)
        )
        short = [max(0, wanted - size()) for size in sizes]
        if any(short):
            cache.evict_for_alloc(self._api.EvictParams(num_tokens=short[0], swa_num_tokens=short[1]))
        taken = allocator.alloc(wanted)
        assert taken is not None
        start = -(-request.allocated // page) * page
        self.rows.req_to_token[request.row, start : start + wanted] = taken
        request.allocated = start + wanted

    def _end(self, request: Request) -> None:
        request.is_finished = True
        self.cache.checkpoint_into_tree(request, up_to=request.computed)
        page, kv = self._page, request.kv
        row = self.rows.req_to_token[request.row]
        first = -(-kv.cache_protected_len // page) * page
        dead = max(first, kv.evicted)
        if self._part == "windows":
            if dead > first:
                self._allocator.free_full_segment(row[first:dead])
            self._allocator.free_segment(row[dead : request.allocated])
        else:
            self._allocator.free_segment(row[first : request.allocated])
        self.cache.unlock(request.lock)
        self._live.remove(request)
        assert request.sent is not None
        if self._rng.random() < 0.5:
            self._tell()
        self.rules.ended(request.sent, len(request.tokens) - request.prompt_len, computed=True)
        self._past.append(request.tokens)

    def _tell(self) -> None:
        for event in self.cache.take_events():
            hashes = list(map(to_block_hash, event.block_hashes))
            if type(event).__name__ == "BlockStored":
                parent = event.parent_block_hash
                self.rules.stored(hashes, None if parent is None else to_block_hash(parent))
            else:
                self.rules.removed(hashes)


def main(wheel: str, seeds: int) -> dict[str, dict[str, int]]:
    """Returns the counts by part, page size and whether several requests were in flight."""
    with tempfile.TemporaryDirectory() as directory:
        load_wheel(wheel, directory, {_CACHE + "common"})
        mamba = vars(importlib.import_module(_CACHE + "unified_cache.components.mamba"))
        plain = SimpleNamespace(
            mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False, mamba_max_states_per_path=-1)
        )
        mamba["get_exec"] = lambda: plain
        common = vars(importlib.import_module(_CACHE + "common"))
        common["ceil_align"] = lambda tokens, size: -(-tokens // size) * size
        found: dict[str, dict[str, int]] = {}
        for part in ("windows", "states"):
            for page in PAGES:
                for in_flight in (1, _ROWS):
                    counted: Counter[str] = Counter()
                    for seed in range(seeds):
                        engine = Engine(random.Random(seed), part, page, in_flight)
                        for _ in range(300):
                            engine.step()
                        counted.update(engine.counted)
                    found[f"{part}, pages of {page}, {in_flight} in flight"] = dict(counted)
        return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2])), indent=1))
