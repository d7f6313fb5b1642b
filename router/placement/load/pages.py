"""KV cache pages of one engine: how many its unfinished requests take, and how long a prompt waits for room.

vLLM admits a waiting prompt only when free blocks cover the whole of it (``Scheduler.schedule`` with
``scheduler_reserve_full_isl``, vLLM 0.32), so an engine whose sequences hold the pool lets prompts wait although
it computes nothing. By Little's law the pool gives back ``blocks / residence_s`` pages a second, and a prompt
waits for what is missing::

    wait_s = (pages of all unfinished requests + pages of this prompt - blocks) * residence_s / blocks

Unfinished requests share pages (system prompts, sub-agents), which a sum over requests counts twice.
``kv_cache_usage_perc`` tells the true number: the ratio to the sum over our running requests scales the sum, and
what the sum does not explain belongs to other clients.

Always true: wait_s >= 0; an engine of unknown pool size or layout has no wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from publisher.groups import Family, GroupSpec
from router.placement.load.others import NEWS

import os
_F = float(os.environ.get("PG", "1"))
_OFF = _F == 0
_M = os.environ.get("PM", "1") == "1"
_STATES_HELD = 2
"""Blocks of a Mamba group per sequence: the running state and the one being written (``MambaManager``, 0.32)."""


@lru_cache(maxsize=4096)
def prompt_pages(groups: Sequence[GroupSpec], tokens: int) -> int:
    """Blocks that a sequence of ``tokens`` holds over all groups of a layout, sharing none.

    A sliding window keeps the blocks that its window touches, a chunk those of the current chunk
    (``SlidingWindowManager``, ``ChunkedLocalAttentionManager`` of vLLM 0.32 free what lies before).
    """
    pages = 0
    for group in groups:
        blocks = -(-tokens // group.block_size)
        if group.family is Family.MAMBA:
            held = blocks if group.mamba_cache_mode == "all" else _STATES_HELD
        else:
            reach = group.sliding_window or group.attention_chunk_size
            held = blocks if not reach else -(-reach // group.block_size) + 1
        pages += blocks if blocks < held else held  # noqa: FURB136
    return pages


class PageAccount:
    """Pages of one engine. ``blocks``: size of its pool, 0 while unknown."""

    __slots__ = (
        "_foreign",
        "_held",
        "_rate",
        "_released",
        "_residence_s",
        "_since_s",
        "_scale",
        "_taken",
        "blocks",
        "groups",
    )

    def __init__(self) -> None:
        self.blocks = 0
        self.groups: Sequence[GroupSpec] = ()
        self._taken = 0  # by our unfinished requests, as if none were shared
        self._held = 0  # of those, by requests that run
        self._scale = 1.0  # pages in use per page counted in ``_held``, at most 1
        self._foreign = 0.0  # pages in use that our requests do not explain
        self._residence_s = 0.0
        self._rate = 0.0
        self._released = 0.0
        self._since_s = -1.0

    def need(self, tokens: int) -> int:
        """Pages of a prompt of ``tokens``; 0 while the layout is unknown."""
        return prompt_pages(self.groups, tokens) if self.groups else 0

    def admit(self, pages: int) -> None:
        """A request that takes ``pages`` was sent."""
        self._taken += pages

    def start(self, pages: int) -> None:
        """It holds them now."""
        self._held += pages

    def restart(self, pages: int) -> None:
        """It does not hold them yet after all."""
        self._held -= pages

    def end(self, pages: int, residence_s: float | None, now: float = 0.0) -> None:
        """A started request ended, which held its pages for ``residence_s`` (None: unknown)."""
        if self.blocks:
            if self._taken * self._scale + self._foreign > self.blocks:
                if self._since_s >= 0:
                    elapsed = now - self._since_s
                    import math
                    k = math.exp(-elapsed / 60.0)
                    # decayed pages and decayed seconds
                    self._released = self._released * k + pages
                    self._rate = self._rate * k + elapsed
                self._since_s = now
            else:
                self._since_s = -1.0
        self._taken -= pages
        self._held -= pages
        if residence_s is not None:
            self._residence_s += (NEWS if self._residence_s else 1.0) * (residence_s - self._residence_s)

    def report(self, usage: float, running: int) -> None:
        """The engine says that a share of its pool is in use by ``running`` requests."""
        used = usage * self.blocks
        if used < self._held:
            self._scale += NEWS * (used / self._held - self._scale)
            self._foreign = 0.0
        else:
            self._scale += NEWS * (1.0 - self._scale)
            self._foreign = used - self._held

    def wait_s(self, tokens: int) -> float:
        """Seconds until a prompt of ``tokens``, sent now, finds room."""
        blocks = self.blocks
        if not blocks or _OFF:
            return 0.0
        taken = self._taken * self._scale + self._foreign
        missing = taken + self.need(tokens) * self._scale - blocks
        if missing <= 0.0:
            return 0.0
        r = self._residence_s / blocks
        if _M and self._rate > 10.0:
            r = self._rate / (self._released * self._scale)
        return _F * missing * r

    def share(self, tokens: int) -> float:
        if not self.blocks:
            return 0.0
        need = self.need(tokens) * self._scale
        if self._taken * self._scale + self._foreign + need <= self.blocks:
            return 0.0
        return min(1.0, need / self.blocks)
