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

HashesOf = Callable[[HashScheme], Sequence[BlockHash]]
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


class ShadowStats(msgspec.Struct):
    """Counters for metrics."""

    prompts: int = 0
    """Prompts entered into the assumed caches of engines without events."""
    too_large: int = 0
    """Prompts that do not fit the shadow as a whole: its size is set too small."""


class ShadowPrompt:
    """One prompt as shadows look for it; made once for all of them."""

    __slots__ = ("_hashes_of", "_requests", "token_ids")

    def __init__(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        self.token_ids = token_ids
        self._hashes_of = hashes_of
        self._requests: dict[HashScheme, PoolRequest] = {}

    def request(self, pool: HybridBlockPool) -> PoolRequest:
        """The prompt as pools of this hash scheme see it."""
        request = self._requests.get(pool.scheme)
        if request is None:
            request = pool.request(self.token_ids, hashes=self._hashes_of(pool.scheme))
            self._requests[pool.scheme] = request
        return request


class Shadow:
    """The shadow of one engine.

    Raises ``ValueError`` for groups that vLLM would not run, and for a scheme with look-ahead: a shadow talks
    to nobody, so it needs none, and would miss the hashes of a prompt's last blocks. ``stats`` may be shared.
    """

    __slots__ = ("_pool", "spec", "stats")

    def __init__(self, spec: ShadowSpec, stats: ShadowStats | None = None) -> None:
        if spec.scheme.lookahead:
            raise ValueError("a shadow's hash scheme cannot look ahead")
        self.spec = spec
        self.stats = stats if stats is not None else ShadowStats()
        self._pool = HybridBlockPool(
            spec.groups,
            num_blocks=spec.num_blocks,
            scheme=spec.scheme,
            retention_interval=spec.retention_interval,
            chunk_tokens_max=spec.chunk_tokens_max,
            events=False,
        )

    def lookup(self, prompt: ShadowPrompt) -> tuple[int, int]:
        """Hit and trunk of a prompt, in tokens; changes nothing."""
        if not len(prompt.token_ids):
            return 0, 0
        hit, trunk = self._pool.find_prefix(prompt.request(self._pool))
        return hit, trunk

    def served(self, token_ids: Sequence[int], hashes_of: HashesOf) -> None:
        """The engine has computed this prompt: do the same here."""
        if not len(token_ids):
            return
        pool = self._pool
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

    def reset(self) -> None:
        """The engine restarted, or its prefix cache was reset: its shadow is empty again."""
        self._pool.reset()
