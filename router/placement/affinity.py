"""Text affinity: engines that received similar texts, for prompts without token ids. Shadows of engines
without events.

A text is known by the chained hashes of its chunks (each key covers the whole text up to its chunk's end), so
the deepest known key is the longest known prefix. The map keeps, per key, the engines that received it last.
Its tokens are an estimate, bytes / 4, and enter the same cost as real hits: an engine that received all of a
conversation is preferred only while its queue is shorter than the time its cache saves.

Bounded: at most ``keys_max`` keys, the least recently used are evicted first, and ``engines_max`` engines per
key. Evictions by engines are not seen; therefore real or shadow hits replace this wherever token ids exist.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from publisher.block_hash import HashScheme
from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import BlockHash, Family, GroupSpec
from router.fleet.marks import EngineMark, EngineMarks

# Typical for English text with vocabularies of 32k-256k tokens.
BYTES_PER_TOKEN = 4


class AffinitySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds; a key takes about 200 bytes."""

    keys_max: int = 100_000
    engines_max: int = 4


class AffinityStats(msgspec.Struct):
    """Counters for metrics."""

    lookups: Annotated[int, "kvatlas_affinity_lookups_total"] = 0
    """Requests placed by the text of their prompt because its tokens were unknown."""
    matched: Annotated[int, "kvatlas_affinity_matched_total"] = 0
    """Of these, requests whose text began like an earlier one."""
    evicted: Annotated[int, "kvatlas_affinity_evicted_total"] = 0
    """Texts evicted because there were too many."""


class AffinityMap:
    """Text-prefix keys -> the engines that received them, most recent last."""

    def __init__(self, settings: AffinitySettings | None = None) -> None:
        self.settings = settings or AffinitySettings()
        self.stats = AffinityStats()
        self._marks = EngineMarks()
        self._engines: OrderedDict[int, tuple[EngineMark, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """For each engine that received a prefix of this text: the number of leading chunks."""
        self.stats.lookups += 1
        found: dict[str, int] = {}
        for count, key in enumerate(keys, start=1):
            engines = self._engines.get(key)
            if engines is None:
                break
            for mark in engines:
                if mark.here:
                    found[mark.engine_id] = count
        self.stats.matched += bool(found)
        return found

    def record(self, keys: Sequence[int], engine_id: str) -> None:
        """Note that this text went to this engine."""
        known, most, mark = self._engines, self.settings.engines_max, self._marks.of(engine_id)
        # touch the shortest prefix last, so that chains are evicted at their deep end
        for key in reversed(keys):
            engines = known.get(key, ())
            if not engines or engines[-1] is not mark:
                others = tuple([other for other in engines if other.here and other is not mark])
                known[key] = (*others[-(most - 1) :], mark) if most > 1 else (mark,)
            known.move_to_end(key)
        while len(known) > self.settings.keys_max:
            known.popitem(last=False)
            self.stats.evicted += 1

    def forget(self, engine_id: str) -> None:
        """Drop an engine that restarted or left."""
        self._marks.forget(engine_id)


def text_tokens(num_chunks: int, chunk_bytes: int) -> int:
    """Estimated tokens of ``num_chunks`` text chunks."""
    return num_chunks * chunk_bytes // BYTES_PER_TOKEN


# Shadows: the assumed cache of engines without events, from the router's own requests to them.
#
# A shadow is a block pool of the engine's groups and size (publisher/block_pool.py, without events) that
# receives every prompt the router sent there: allocation, LRU eviction and retention are the engine's own
# rules, so a shadow evicts what the engine evicts. A history without eviction would not; its hits, and with
# them the load account, would become ever more wrong.
#
# One group of full attention, the usual case, needs no block pool (``_PrefixLru``): that takes a tenth of the
# time, and answers the same (tests/router/placement/test_shadow.py).
#
# Unknown to a shadow: generated tokens, and requests of other routers. So its hits are marked (confidence
# "shadow"; ``ShadowSpec.assumed`` names fields that were not configured), and may be too long by what others
# evicted and too short by what generation added.
#
# A prompt is applied whole, once, when its prefill is over or its answer has ended; until then it counts
# through ``inflight.py``. Invariants: a shadow holds at most ``num_blocks`` blocks, and no request stays
# open.


HashesOf = Callable[[HashScheme], Sequence[BlockHash]]
"""The prompt's block hashes under a scheme (``Prompt.hashes``)."""


class ShadowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool of an engine, as configured; the defaults are vLLM's where vLLM has one.

    ``assumed`` names the fields that were not configured, for explanations and the doctor.
    """

    groups: tuple[GroupSpec, ...] = (GroupSpec(0, "full_attention", 16),)
    num_blocks: int = 16_384
    """No default in vLLM (it depends on free memory): 262,144 tokens at block size 16, a small engine. A
    shadow that is too small evicts early and loses hits; one that is too large promises hits that are gone.
    """
    scheme: HashScheme = HashScheme()
    """Any scheme distinguishes prefixes; the one with which the router hashes prompts anyway costs
    nothing."""
    retention_interval: int | None = 0
    chunk_tokens_max: int = 8192
    assumed: tuple[str, ...] = ("groups", "num_blocks", "retention_interval")


class ShadowStats(msgspec.Struct):
    """Counters for metrics."""

    prompts: Annotated[int, "kvatlas_shadow_prompts_total"] = 0
    """Prompts entered into the assumed caches of engines without events."""
    too_large: Annotated[int, "kvatlas_shadow_too_large_total"] = 0
    """Prompts larger than the whole shadow: its size is set too small."""


class ShadowPrompt:
    """One prompt for look-ups in shadows; made once for all of them."""

    __slots__ = ("_hashes", "_hashes_of", "token_ids")

    def __init__(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        self.token_ids = token_ids
        self._hashes_of = hashes_of
        self._hashes: dict[HashScheme, list[BlockHash]] = {}

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        """Return the prompt's hashes under this scheme."""
        hashes = self._hashes.get(scheme)
        if hashes is None:
            hashes = self._hashes[scheme] = list(self._hashes_of(scheme))
        return hashes


class _Pool:
    """A block pool that computes whole prompts, one after the other."""

    __slots__ = ("_pool",)

    def __init__(self, spec: ShadowSpec) -> None:
        self._pool = HybridBlockPool(
            spec.groups,
            num_blocks=spec.num_blocks,
            scheme=spec.scheme,
            retention_interval=spec.retention_interval,
            chunk_tokens_max=spec.chunk_tokens_max,
            events=False,
        )

    def reset(self) -> None:
        self._pool.reset()

    def _request(self, num_tokens: int, hashes: list[BlockHash]) -> PoolRequest:
        # The hashes say it all, and copying thousands of ids costs more than a look-up.
        return self._pool.request([0] * num_tokens, hashes=hashes)

    def lookup(self, num_tokens: int, hashes: list[BlockHash]) -> tuple[int, int]:
        return self._pool.find_prefix(self._request(num_tokens, hashes))

    def serve(self, num_tokens: int, hashes: list[BlockHash]) -> bool:
        pool, request = self._pool, self._request(num_tokens, hashes)
        if pool.start(request) is None:
            return False
        served = True
        while served and (chunk := pool.next_chunk(request)) > 0:
            served = pool.compute(request, chunk)
        pool.finish(request)
        return served


class _PrefixLru:
    """The same for one group of full attention: its hashes in the order in which they will be evicted.

    A prompt's blocks are freed last block first, so a block is never held without those before it, and a hit
    is found by halving. Differs from the pool by one copy: vLLM computes the last block of a prompt of whole
    blocks again, and keeps both until the old one is evicted.
    """

    __slots__ = ("_block_size", "_blocks_max", "_held")

    def __init__(self, spec: ShadowSpec) -> None:
        # Raises for what a pool of this kind cannot be.
        HybridBlockPool(spec.groups, num_blocks=min(spec.num_blocks, 2), scheme=spec.scheme, events=False)
        self._block_size = spec.groups[0].block_size
        self._blocks_max = spec.num_blocks - 1  # but the null block
        self._held: OrderedDict[BlockHash, None] = OrderedDict()
        self.reset()

    def reset(self) -> None:
        self._held.clear()

    def lookup(self, num_tokens: int, hashes: list[BlockHash]) -> tuple[int, int]:
        held, low, high = self._held, 0, (num_tokens - 1) // self._block_size
        if high and hashes[high - 1] in held:
            low = high
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low * self._block_size, low * self._block_size

    def serve(self, num_tokens: int, hashes: list[BlockHash]) -> bool:
        whole, rest = divmod(num_tokens, self._block_size)
        room = self._blocks_max - (rest > 0)
        if whole > room:
            return False
        held = self._held
        known = self.lookup(num_tokens, hashes)[0] // self._block_size
        held.update(dict.fromkeys(hashes[known:whole]))
        # Moves each to the end, the last block first.
        deque(map(held.move_to_end, reversed(hashes[:whole])), maxlen=0)
        for _ in range(len(held) - room):
            held.popitem(last=False)
        return True


class Shadow:
    """The shadow of one engine.

    Raises ``ValueError`` for groups that vLLM would not run, and for a scheme with look-ahead, which would
    miss the hashes of a prompt's last blocks. ``stats`` may be shared.
    """

    __slots__ = ("_cache", "spec", "stats")

    def __init__(self, spec: ShadowSpec, stats: ShadowStats | None = None) -> None:
        if spec.scheme.lookahead:
            raise ValueError("a shadow's hash scheme cannot look ahead")
        self.spec = spec
        self.stats = stats if stats is not None else ShadowStats()
        is_plain = (
            len(spec.groups) == 1
            and spec.groups[0].family is Family.FULL
            and not spec.groups[0].is_eagle
            and spec.groups[0].block_size == spec.scheme.hash_block_size
        )
        self._cache = _PrefixLru(spec) if is_plain else _Pool(spec)

    def lookup(self, prompt: ShadowPrompt) -> tuple[int, int]:
        """Return hit and shared prefix of a prompt, in tokens; changes nothing."""
        if not len(prompt.token_ids):
            return 0, 0
        return self._cache.lookup(len(prompt.token_ids), prompt.hashes(self.spec.scheme))

    def served(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        """Apply a prompt that the engine has computed."""
        if not len(token_ids):
            return
        self.stats.prompts += 1
        if not self._cache.serve(len(token_ids), list(hashes_of(self.spec.scheme))):
            self.stats.too_large += 1

    def reset(self) -> None:
        """Empty the shadow: the engine restarted, or its prefix cache was reset."""
        self._cache.reset()
