"""The worker's half: hands the jobs of each step to a transfer engine and reports how they ended.

One object per rank. Methods carry vLLM's names. What always holds: a request is reported as received once,
when its load job ended here, failed or not, and together with the job's result; loads begin before stores of
the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from connectors.layout.blocks import CacheView
from connectors.layout.tensors import view_of_tensors
from connectors.messages.jobs import StepJobs, StepResults
from connectors.messages.tally import Tally
from connectors.transfer.base import StreamMark, TransferEngine, TransferJob, TransferResult
from connectors.worker.joined_stores import JoinedStores

log = logging.getLogger(__name__)


EngineFactory = Callable[[CacheView, str], TransferEngine]
"""Makes the transfer engine for a registered cache; the text is its device, ``cpu`` or ``cuda:0``."""


class OffloadWorker:
    """Moves one rank's blocks. ``register_kv_caches`` comes before everything else."""

    def __init__(
        self, kv_cache_config: Any, make_engine: EngineFactory, *, join_stores: bool = False
    ) -> None:
        """``join_stores``: give the engine all stores of a step as one job, where one deadline fits all."""
        self.tally = Tally()
        self._joined = JoinedStores() if join_stores else None
        self._kv_cache_config = kv_cache_config
        self._make_engine = make_engine
        self._engine: TransferEngine | None = None
        self._waiting: dict[int, str] = {}
        """Load jobs under way and the requests that wait for them."""
        self._ended: list[TransferResult] = []
        self._before_forward: StreamMark | None = None
        """Taken before the step's forward pass was launched, if the step has loads."""

    @property
    def engine(self) -> TransferEngine:
        if self._engine is None:
            raise RuntimeError("register_kv_caches comes before any transfer")
        return self._engine

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the rank's KV cache: layer name -> tensor, or list of state tensors.

        Raises ``LayoutError`` for a cache that cannot be copied safely.
        """
        view = view_of_tensors(self._kv_cache_config, kv_caches)
        device = device_of(kv_caches)
        self.use_engine(self._make_engine(view, device))
        pieces = sum(len(region.piece_offsets) for group in view.groups for region in group.regions)
        log.info(
            "offloading %d groups of %d blocks on %s: rows of %d bytes, %d pieces per block of all groups",
            len(view.groups), view.num_blocks, device, view.row_bytes, pieces,
        )  # fmt: skip

    def use_engine(self, engine: TransferEngine) -> None:
        """Move blocks with this engine, for caches that are not registered as tensors."""
        self._engine = engine

    def bind(self, step: StepJobs) -> None:
        """Hear of a step before its forward pass is launched.

        vLLM asks for loads only after that, to launch the pass early. Whatever their blocks still need (being
        zeroed, or copied from) is enqueued already, and no request of this pass reads or writes them: loads
        wait for this point of the computing stream and run beside the pass, not after it.
        """
        self._before_forward = self.engine.mark() if step.loads else None

    def start_load_kv(self, step: StepJobs) -> None:
        """Begin the step's loads. A job without blocks is one that the scheduler knows cannot be done."""
        after, self._before_forward = self._before_forward, None
        for job in step.loads:
            self._waiting[job.job_id] = step.load_requests[job.job_id]
            if job.groups:
                self.engine.submit(job, after)
            else:
                self._ended.append(_impossible(job))

    def wait_for_save(self, step: StepJobs) -> None:
        """Begin the step's stores, after its forward pass was launched; waits for nothing."""
        if not step.stores:
            return
        after = self.engine.mark()
        for job in [self._joined.join(step.stores)] if self._joined is not None else step.stores:
            self.engine.submit(job, after)

    def poll(self) -> tuple[set[str], set[str]]:
        """(Requests whose load ended since the last call, those of them that failed)."""
        if self._engine is not None:
            results = self._engine.poll()
            self._ended += results if self._joined is None else self._joined.apart(results)
        finished: set[str] = set()
        failed: set[str] = set()
        for result in self._ended:
            request_id = self._waiting.pop(result.job_id, None)
            if request_id is not None:
                finished.add(request_id)
                if not result.ok:
                    failed.add(request_id)
        return finished, failed

    def take_results(self) -> StepResults | None:
        """Results of all jobs that the last ``poll`` saw ended; None: there are none."""
        if not self._ended:
            return None
        results, self._ended = self._ended, []
        for result in results:
            self.tally.transfer(result)
        return StepResults(results)

    def shutdown(self) -> None:
        """Let what runs end and free everything; may be called again."""
        if self._engine is not None:
            self._engine.close()


def device_of(kv_caches: Mapping[str, Any]) -> str:
    """``cpu``, ``cuda:0``, ...: where the first registered tensor lies."""
    for cache in kv_caches.values():
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        return str(tensor.device)
    raise ValueError("vLLM registered no KV caches")


def _impossible(job: TransferJob) -> TransferResult:
    reason = "its blocks were gone before the load could begin"
    return TransferResult(job.job_id, job.direction, ok=False, seconds=0.0, bytes_by_group={}, error=reason)
