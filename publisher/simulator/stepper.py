"""Run the scheduler in real time on the event loop.

One task repeats: begin a step, wait for its duration, end it, publish the pool's events of the step as one
batch, deliver the tokens. Consecutive steps are timed from the end of the previous one, so that late wake-ups
of the event loop do not add up.

Invariants: only the event loop's thread uses the scheduler and the pool. A generation's queue gets its
outputs in order and ends with one that has a finish reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, TypeVar

import structlog

from kvatlas.publisher.events import Event
from kvatlas.publisher.pool.host_tier import HeldKey
from kvatlas.publisher.simulator.api_protocol import EngineError
from kvatlas.publisher.simulator.kv_connector import Load
from kvatlas.publisher.simulator.kv_messages import TransferParams
from kvatlas.publisher.simulator.request import FinishReason, SimRequest
from kvatlas.publisher.simulator.scheduler import Output, Scheduler, Step

# Pause before the next try if nothing could be scheduled: blocks are pinned, or a request was preempted.
_BLOCKED_S = 0.001
# Most lag of step timing that is caught up; more is dropped (a suspended laptop).
_LATE_MAX_S = 0.1
# Turns of others come between these pieces of one answer.
_PIECES_AT_ONCE = 16

T = TypeVar("T")

log = structlog.get_logger()


class Piece(NamedTuple):
    """A part of an answer for a waiting client: tokens, or none with a finish reason."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None


class Generation:
    """A running request, as its client sees it: its first token, then ``interval`` tokens at a time."""

    def __init__(self, request: SimRequest, interval: int) -> None:
        self.request = request
        self._interval = interval
        self._sent = 0
        # Bounded by the request's max_tokens.
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()

    @property
    def text(self) -> str:
        return "" if self.request.text is None else self.request.text.whole

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return None if self.request.text is None else self.request.text.stopped_by

    async def finished(self) -> FinishReason:
        reason: FinishReason = "abort"
        async for piece in self.pieces():
            reason = piece.finish_reason or reason
        return reason

    def produced(self, token_id: int, reason: FinishReason | None) -> FinishReason | None:
        """Take the newest token of the request's output; returns why the answer ends, by a stop string too
        (vllm/v1/engine/output_processor.py, 0.32)."""
        text = self.request.text
        if text is not None and text.add(token_id):
            reason = "stop"
        waiting = len(self.request.output) - self._sent
        if reason is not None or not self._sent or waiting >= self._interval:
            self.send(reason)
        return reason

    def end(self) -> None:
        """End it from outside: an answer in progress has one more token, as in vLLM."""
        request = self.request
        if request.output:
            request.output.append(request.next_token())
            if request.text is not None:
                request.text.add(request.output[-1])
        self.send("abort")

    def fail(self) -> None:
        self._pieces.put_nowait(Piece([], "", "error"))

    def send(self, reason: FinishReason | None) -> None:
        """Send what has not been sent."""
        token_ids, self._sent = self.request.output[self._sent :], len(self.request.output)
        text = self.request.text
        said = "" if text is None else text.take(finished=reason is not None)
        self._pieces.put_nowait(Piece(token_ids, said, reason))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the parts as they come, up to and including the one with a finish reason."""
        at_once = 0
        while True:
            # Of what waited for a client that did not read.
            at_once = 0 if self._pieces.empty() else at_once + 1
            if at_once % _PIECES_AT_ONCE == _PIECES_AT_ONCE - 1:
                await asyncio.sleep(0)
            piece = await self._pieces.get()
            yield piece
            if piece.finish_reason is not None:
                return


class Stepper:
    """Run one scheduler. ``publish`` receives the events of each step that has any."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        publish: Callable[[list[Event]], None],
        clock: Callable[[], float],
        recomputes_failed_loads: bool = False,
        stream_interval: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.failed = False
        # Called after changes of the connector's state.
        self.kick: Callable[[], None] = lambda: None
        self._recomputes_failed_loads = recomputes_failed_loads
        self._stream_interval = stream_interval
        self._publish = publish
        self._clock = clock
        self._wake = asyncio.Event()
        self._generations: dict[SimRequest, Generation] = {}

    def submit(self, request: SimRequest) -> Generation:
        """Queue a request; its tokens come through the returned generation."""
        generation = Generation(request, self._stream_interval)
        self._generations[request] = generation
        self.scheduler.add(request)
        self._wake.set()
        return generation

    def check(self) -> None:
        """Raise ``EngineError`` if the engine is dead."""
        if self.failed:
            raise self.failure()

    def failure(self) -> EngineError:
        """Error for a request with finish reason "error"."""
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        if self.failed:
            return EngineError(status, "the engine is dead", kind="EngineDeadError")
        return EngineError(status, "Internal server error", kind="InternalServerError")

    async def prepared(self, preparing: Awaitable[T], transfer: TransferParams | None) -> T:
        """Await a request's checks; if they fail, release the blocks that another engine keeps for it.

        Raises ``EngineError``.
        """
        try:
            return await preparing
        except EngineError:
            connector = self.scheduler.connector
            if connector is not None and transfer is not None and connector.can_read(transfer):
                connector.unread.append(transfer)
                self.kick()
            raise

    def abort(self, *generations: Generation) -> None:
        """Stop generations and free their blocks; no effect on those that are finished."""
        self._abort(lambda generation: generation.send("abort"), *generations)

    def _abort(self, end: Callable[[Generation], None], *generations: Generation) -> None:
        for generation in generations:
            if self._generations.pop(generation.request, None) is not None:
                self.scheduler.abort(generation.request)
                end(generation)
                self.kick()
                # The scheduler checks whether this abort ends the engine.
                self._wake.set()

    def loaded(self, load: Load, intact: bool) -> None:
        """Handle a completed load; without intact content the request gets a wrong answer."""
        self.scheduler.loaded(load.request, load.end, intact=intact)
        self._wake.set()

    def probed(self, request: SimRequest, found: frozenset[HeldKey]) -> None:
        self.scheduler.probed(request, found)
        self._wake.set()

    def load_failed(self, request: SimRequest) -> None:
        """Handle a failed load. What a pull does not bring is computed."""
        recompute = self._recomputes_failed_loads or request.found is not None
        self.scheduler.load_failed(request, recompute=recompute)
        if request.finish_reason is not None and (generation := self._generations.pop(request, None)):
            generation.send(request.finish_reason)
        self._wake.set()

    def abort_all(self) -> None:
        """Stop every generation, as the end of the process does."""
        self._abort(Generation.end, *self._generations.values())

    async def run(self) -> None:
        """Step until cancelled, or until a failure, which is logged and sets ``failed``."""
        try:
            await self._run()
        except Exception:
            log.exception("engine_failed")
            self.failed = True
            self._fail_all()

    async def _run(self) -> None:
        end_s = self._clock()
        while True:
            if not self.scheduler.has_work:
                self._wake.clear()
                await self._wake.wait()
                end_s = self._clock()
            step = self.scheduler.begin_step()
            self.kick()
            if not step.requests:
                await asyncio.sleep(_BLOCKED_S)
            end_s = max(end_s, self._clock() - _LATE_MAX_S) + step.duration_s
            await asyncio.sleep(max(0.0, end_s - self._clock()))
            self._finish_step(step)

    def _finish_step(self, step: Step) -> None:
        outputs = self.scheduler.end_step(step)
        events = self.scheduler.take_events()
        if events:
            self._publish(events)
        for output in outputs:
            self._deliver(output)
        self.kick()

    def _deliver(self, output: Output) -> None:
        generation = self._generations[output.request]
        reason = generation.produced(output.token_id, output.finish_reason)
        if reason is not None:
            del self._generations[output.request]
            self.scheduler.abort(output.request, reason)

    def _fail_all(self) -> None:
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail()
