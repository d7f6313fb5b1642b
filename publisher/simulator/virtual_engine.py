"""A simulated engine on a virtual clock, without sockets and events."""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.scheduler import Scheduler, Step, StepCosts
from kvatlas.publisher.simulator.settings import EngineSettings, hash_scheme, resolve_groups


def eventless(settings: EngineSettings, clock: Callable[[], float]) -> tuple[HybridBlockPool, Scheduler]:
    groups = resolve_groups(settings)
    pool = HybridBlockPool(
        groups,
        num_blocks=settings.num_blocks,
        scheme=hash_scheme(settings, groups),
        retention_interval=settings.retention_interval,
        dcp_world_size=settings.decode_context_parallel_size,
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
    """A simulated engine on a virtual clock: same pool, same scheduler, no sockets and no waiting.

    ``submit`` requests in the order of their arrival; ``advance`` to any later time in seconds.
    ``first_token_s`` has the time of each request's first token by request id. Invariants: time never goes
    back; the state at a time does not depend on the steps of ``advance``.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._now = 0.0
        self._step: Step | None = None
        self._step_ends_s = 0.0
        self._pool, self.scheduler = eventless(settings, lambda: self._now)
        self.first_token_s: dict[str, float] = {}

    def submit(self, request: SimRequest, now: float) -> None:
        """Add a request that arrives at ``now``."""
        self.advance(now)
        self.scheduler.add(request)
        if self._step is None:
            self._begin()

    def advance(self, until: float) -> None:
        """Run all steps that end up to ``until``."""
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
