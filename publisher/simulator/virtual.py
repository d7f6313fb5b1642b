"""A simulated engine on a virtual clock: same pool, same scheduler, no sockets and no waiting.

The caller tells the time: ``submit`` requests in the order of their arrival, ``advance`` to any later moment.
Always true: time never goes back, and what happened up to a moment does not depend on how it was advanced to.
"""

from __future__ import annotations

from collections.abc import Callable

from publisher.block_pool import HybridBlockPool
from publisher.simulator.request import SimRequest
from publisher.simulator.scheduler import Scheduler, Step, StepCosts
from publisher.simulator.settings import EngineSettings, hash_scheme, resolve_groups


def eventless(settings: EngineSettings, clock: Callable[[], float]) -> tuple[HybridBlockPool, Scheduler]:
    """An engine's pool and scheduler for whoever tells the time; events are not written."""
    groups = resolve_groups(settings)
    pool = HybridBlockPool(
        groups,
        num_blocks=settings.num_blocks,
        scheme=hash_scheme(settings, groups),
        retention_interval=settings.retention_interval,
        chunk_tokens_max=settings.max_num_batched_tokens,
        events=False,
    )
    costs = StepCosts(settings.prefill_s_per_token, settings.decode_s_per_token)
    scheduler = Scheduler(
        pool,
        costs=costs,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        clock=clock,
    )
    return pool, scheduler


class VirtualEngine:
    """One engine; seconds of virtual time. ``first_token_s`` holds, by request id, when its answer began."""

    def __init__(self, settings: EngineSettings) -> None:
        self._now = 0.0
        self._step: Step | None = None
        self._step_ends_s = 0.0
        self._pool, self.scheduler = eventless(settings, lambda: self._now)
        self.first_token_s: dict[str, float] = {}

    def submit(self, request: SimRequest, now: float) -> None:
        """A request arrives at ``now``."""
        self.advance(now)
        self.scheduler.add(request)
        if self._step is None:
            self._begin()

    def advance(self, until: float) -> None:
        """Let everything happen that happens before ``until``."""
        while self._step is not None and self._step_ends_s <= until:
            self._now = self._step_ends_s
            for output in self.scheduler.end_step(self._step):
                self.first_token_s.setdefault(output.request.request_id, self._now)
            self._step = None
            if self.scheduler.has_work:
                self._begin()
        self._now = max(self._now, until)

    def _begin(self) -> None:
        self._step = self.scheduler.begin_step()
        self._step_ends_s = self._now + self._step.duration_s
