"""KV cache pages of one engine: pages of its unfinished requests, and the wait of a prompt for room.

vLLM starts a waiting prompt only when free blocks cover all of it (``Scheduler.schedule`` with
``scheduler_reserve_full_isl``, vLLM 0.32). An engine whose sequences hold the pool lets prompts wait although
it computes nothing::

    wait_s = (pages of all unfinished requests + pages of this prompt - blocks) / pages released per second

Invariants: a wait is not negative; an engine of unknown pool size or layout has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.placement.others import NEWS

# Blocks of a Mamba group per sequence: the running state and the next one (``MambaManager``, vLLM 0.32).
_STATES_HELD: Final = 2
# Time constant of the measured rate of release.
_RATE_MEMORY_S: Final = 60.0
# Seconds of waiting before the measured rate replaces Little's law.
_RATE_SECONDS_MIN: Final = 10.0


@lru_cache(maxsize=4096)
def prompt_pages(groups: Sequence[GroupSpec], tokens: int) -> int:
    """Return the blocks that a sequence of ``tokens`` holds over all groups of a layout, sharing none.

    A sliding window keeps the blocks that its window touches, a local chunk those of the current chunk:
    ``SlidingWindowManager`` and ``ChunkedLocalAttentionManager`` of vLLM 0.32 free the blocks before.
    """
    pages = 0
    for group in groups:
        blocks = -(-tokens // group.block_size)
        reach = group.sliding_window or group.attention_chunk_size
        if group.family is Family.RING:
            held = 1
        elif group.family is Family.MAMBA:
            held = blocks if group.mamba_cache_mode == "all" else _STATES_HELD
        else:
            # One block more than the window fills: it rarely begins at a block's edge.
            held = -(-reach // group.block_size) + 1 if reach else blocks
        pages += min(blocks, held)
    return pages


class PageAccount:
    """Pages of one engine, all sizes in blocks of its pool."""

    __slots__ = (
        "_blocks",
        "_ended_s",
        "_foreign",
        "_groups",
        "_held",
        "_per_token",
        "_released",
        "_residence_s",
        "_scale",
        "_seconds",
        "_taken",
        "free",
        "surely_fits_tokens",
    )

    def __init__(self) -> None:
        self.free = math.inf
        """Pages left by unfinished requests; negative if prompts wait, infinite while unknown."""
        self.surely_fits_tokens = math.inf
        """Prompts with at most this many tokens find room now: one comparison for every engine and
        decision."""
        self._blocks = 0
        self._groups: Sequence[GroupSpec] = ()
        # Pages per token of a prompt, at most.
        self._per_token = 0.0
        # Of our unfinished requests, without sharing.
        self._taken = 0
        # Of those, pages of requests that have begun.
        self._held = 0
        # Pages in use per page in ``_held``, at most 1.
        self._scale = 1.0
        # Pages in use that our requests do not explain.
        self._foreign = 0.0
        # Mean time for which a request holds its pages.
        self._residence_s = 0.0
        # Decayed sums over the time in which prompts waited.
        self._released = self._seconds = 0.0
        # Time of the last end, if prompts waited then.
        self._ended_s: float | None = None

    def configure(self, blocks: int, groups: Sequence[GroupSpec]) -> None:
        """Set the size of the pool and the layout of its groups; 0 blocks or no groups: unknown."""
        if blocks != self._blocks or groups is not self._groups:
            self._blocks, self._groups = blocks, groups
            self._per_token = sum([1 / group.block_size for group in groups])
            self._settle()

    def need(self, tokens: int) -> int:
        """Return the pages of a prompt, shared ones included; 0 while the layout is unknown. Prompts that do
        not fit the pool together take it one after the other."""
        if not self._groups or tokens <= 0:
            return 0
        pages = prompt_pages(self._groups, tokens)
        return min(pages, self._blocks) if self._blocks else pages

    def wait_s(self, tokens: int, behind: int = 0) -> float:
        """Return the seconds until a prompt sent now has room, if it precedes ``behind`` pages of waiting
        prompts."""
        missing = (self.need(tokens) - behind) * self._scale - self.free
        return missing * self._release_s if missing > 0.0 else 0.0

    def used_share(self, tokens: int) -> float:
        """Return the share of the pool that unfinished requests hold, with a prompt of ``tokens``; 1 while
        unknown."""
        if not self._blocks or not self._groups:
            return 1.0
        left = self.free - self.need(tokens) * self._scale
        return min(1.0, max(0.0, 1.0 - left / self._blocks))

    def admit(self, pages: int) -> None:
        """Count a request that was sent."""
        if pages:
            self._taken += pages
            self._settle()

    def start(self, pages: int) -> None:
        """Count its pages as held."""
        self._held += pages

    def unstart(self, pages: int) -> None:
        """Undo ``start``: the request waits."""
        self._held -= pages

    def end(self, pages: int, residence_s: float, now: float) -> None:
        """Remove a started request, which held its pages for ``residence_s``."""
        self._residence_s += (NEWS if self._residence_s else 1.0) * (residence_s - self._residence_s)
        # Releases without waiting prompts say nothing of the highest rate: only intervals between two ends
        # with waiting prompts count.
        if self.free >= 0:
            self._ended_s = None
        else:
            if self._ended_s is not None:
                passed_s = now - self._ended_s
                kept = math.exp(-passed_s / _RATE_MEMORY_S)
                self._released = self._released * kept + pages
                self._seconds = self._seconds * kept + passed_s
            self._ended_s = now
        if pages:
            self._taken -= pages
            self._held -= pages
            self._settle()

    def report(self, usage: float) -> None:
        """Correct the account by the share of the pool that the engine reports as used."""
        # Requests share pages (system prompts, sub-agents), which a sum over requests counts twice.
        # ``vllm:kv_cache_usage_perc`` is the true number: its ratio to the sum over our running requests
        # scales the sum, and usage beyond the sum belongs to other clients.
        used = usage * self._blocks
        explained = used / self._held if used < self._held else 1.0
        self._scale += NEWS * (explained - self._scale)
        self._foreign = max(0.0, used - self._held)
        self._settle()

    @property
    def _release_s(self) -> float:
        """Seconds in which one page is released."""
        # Measured while prompts wait, otherwise Little's law (``blocks / residence_s``). The measured rate is
        # lower if prompts are large: two prompts of 0.4 pools leave a fifth of the pool unused.
        if self._seconds >= _RATE_SECONDS_MIN and self._released:
            return self._seconds / (self._released * self._scale)
        return self._residence_s / self._blocks

    def _settle(self) -> None:
        if not self._blocks or not self._groups:
            self.free = self.surely_fits_tokens = math.inf
            return
        self.free = self._blocks - self._taken * self._scale - self._foreign
        self.surely_fits_tokens = (self.free - len(self._groups)) / self._per_token

    def check_integrity(self) -> list[str]:
        """Return one sentence per contradiction."""
        if 0 <= self._held <= self._taken:
            return []
        return [f"pages held {self._held} are not within the pages taken {self._taken}"]
