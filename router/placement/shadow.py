"""Shadows: what engines without events probably hold, from the router's own requests to them.

A shadow is a block pool of the engine's groups and size (publisher/block_pool.py, without events) that lives
through every prompt the router sent there: allocation, LRU eviction and retention are the engine's own rules,
so a shadow forgets what the engine forgets. A history without eviction would not; its hits, and with them the
load account, would be wrong by ever more.

What a shadow cannot know: generated tokens, and the requests of other routers. So it is marked (confidence
"shadow", and ``ShadowSpec.assumed`` names what was not configured), and its hits may be too long by what
others evicted and too short by what generation added.

A prompt is applied whole, once, when its prefill is over or its answer has ended; until then it counts
through ``inflight.py``. Always true: a shadow holds at most ``num_blocks`` blocks, and no request stays open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from publisher.block_hash import HashScheme
from publisher.block_pool import HybridBlockPool, PoolRequest
from publisher.events import BlockHash
from publisher.groups import GroupSpec

HashesOf = Callable[[HashScheme], list[BlockHash]]
"""The prompt's block hashes under a scheme (``Prompt.hashes``)."""


class ShadowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The block pool of an engine, as configured; the defaults are vLLM's where vLLM has one.

    ``assumed`` names the fields that nobody configured, for explanations and the doctor.
    """

    groups: tuple[GroupSpec, ...] = (GroupSpec(0, "full_attention", 16),)
    num_blocks: int = 16_384
    """No default in vLLM (it depends on free memory): 262,144 tokens at block size 16, a small engine. Too
    small a shadow forgets early and costs some hits; too large a one promises hits that are gone."""
    scheme: HashScheme = HashScheme()
    """Any scheme tells prefixes apart; the one the router hashes prompts with anyway costs nothing."""
    retention_interval: int | None = 0
    chunk_tokens_max: int = 8192
    assumed: tuple[str, ...] = ("groups", "num_blocks", "retention_interval")


class ShadowHit(msgspec.Struct, frozen=True, gc=False):
    """What the shadow of one engine says of one prompt, in tokens."""

    hit_tokens: int
    trunk_tokens: int


class ShadowStats(msgspec.Struct):
    """Counters for metrics."""

    prompts: int = 0
    """Prompts entered into the assumed caches of engines without events."""
    too_large: int = 0
    """Prompts that do not fit the shadow as a whole: its size is set too small."""


class ShadowFleet:
    """The shadows of all engines that publish no events."""

    def __init__(self) -> None:
        self.stats = ShadowStats()
        self._specs: dict[str, ShadowSpec] = {}
        self._pools: dict[str, HybridBlockPool] = {}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._pools

    def add(self, engine_id: str, spec: ShadowSpec) -> None:
        """Begin an empty shadow, or begin it anew with another spec. Raises ``ValueError`` for groups that
        vLLM would not run, and for a scheme with look-ahead: a shadow talks to nobody, so it needs none,
        and would miss the hashes of a prompt's last blocks."""
        if spec.scheme.lookahead:
            raise ValueError(f"{engine_id}: a shadow's hash scheme cannot look ahead")
        self._pools[engine_id] = HybridBlockPool(
            spec.groups,
            num_blocks=spec.num_blocks,
            scheme=spec.scheme,
            retention_interval=spec.retention_interval,
            chunk_tokens_max=spec.chunk_tokens_max,
            events=False,
        )
        self._specs[engine_id] = spec

    def spec(self, engine_id: str) -> ShadowSpec:
        """Raises ``KeyError`` for an engine without a shadow."""
        return self._specs[engine_id]

    def lookup(self, token_ids: Sequence[int], hashes_of: HashesOf) -> dict[str, ShadowHit]:
        """Hit and trunk of a prompt at every engine that has a shadow; changes nothing."""
        found: dict[str, ShadowHit] = {}
        requests: dict[HashScheme, PoolRequest] = {}
        if not token_ids:
            return found
        for engine_id, pool in self._pools.items():
            request = requests.get(pool.scheme)
            if request is None:
                request = pool.request(token_ids, hashes=hashes_of(pool.scheme))
                requests[pool.scheme] = request
            found[engine_id] = ShadowHit(*pool.find_prefix(request))
        return found

    def served(self, engine_id: str, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        """The engine has computed this prompt: do the same in its shadow. Nothing happens without one."""
        pool = self._pools.get(engine_id)
        if pool is None or not token_ids:
            return
        request = pool.request(token_ids, hashes=hashes_of(pool.scheme))
        self.stats.prompts += 1
        if pool.start(request) is None:
            self.stats.too_large += 1
            return
        while (chunk := pool.next_chunk(request)) > 0:
            if not pool.compute(request, chunk):
                self.stats.too_large += 1
                break
        pool.finish(request)

    def reset(self, engine_id: str) -> None:
        """The engine restarted, or its prefix cache was reset: its shadow is empty again."""
        pool = self._pools.get(engine_id)
        if pool is not None:
            pool.reset()

    def forget(self, engine_id: str) -> None:
        """The engine left, or publishes events now."""
        self._pools.pop(engine_id, None)
        self._specs.pop(engine_id, None)
