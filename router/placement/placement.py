"""A request on its engine: open in the load account and among the prompts in flight, until it is closed.

Always true: a placement is taken out of every book exactly once, whatever it is told and how often; what an
engine's answer teaches (rates, shadows, receipts) is entered only while the engine is in the fleet, since
nobody would take it out of the books again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.fleet.status import Fleet
from router.observe.access_log import Access, AccessLog
from router.observe.receipts import Receipt
from router.openai.request import InboundRequest, Usage
from router.placement.books import Books
from router.placement.decision import Decision
from router.placement.inflight import InflightPrompt
from router.placement.load import Ticket
from router.prompts.prompt import Prompt
from router.proxy.paths import CACHE_RESETS, COMPLETION_PATHS

_REQUEST_ID_BYTES_MAX = 256
"""Clients choose it, and receipts are kept."""


class Bookkeeper:
    """Enters what becomes of placements. ``feed_state`` names the state of an engine's feed, ``clear``
    forgets what its GPU holds."""

    def __init__(
        self, fleet: Fleet, books: Books, *, feed_state: Callable[[str], str], clear: Callable[[str], None]
    ) -> None:
        self._fleet = fleet
        self._books = books
        self._feed_state = feed_state
        self._clear = clear

    def now(self) -> float:
        """The router's clock, in seconds."""
        return self._books.now()

    def close(self, placed: Placed, usage: Usage | None, *, failed: str = "") -> None:
        """Take the request out of every book, and write its receipt."""
        now, books, engine_id = self._books.now(), self._books, placed.engine_id
        if failed:
            books.load.fail(placed.ticket, now)
        else:
            books.load.finish(placed.ticket, now)
        if placed.flying is not None:
            if placed.answered:
                books.inflight.end(placed.flying, now)
            else:  # refused or failed: the engine computed nothing
                books.inflight.drop(placed.flying)
        read = placed.decision.read
        here = self._fleet.get(engine_id) is not None  # else nobody would ever take it out of the books again
        if here and placed.answered and isinstance(read, Prompt):
            if not placed.prefilled:
                books.shadows.served(engine_id, read.token_ids, read.hashes)
            books.receipts.add(self._receipt(placed, usage))
        if books.access is not None and placed.answered and placed.request.path in COMPLETION_PATHS:
            self._log_access(books.access, placed, usage, now)

    def cache_reset(self, engine_id: str) -> None:
        """A reset was passed on and answered. The engine tells of it only with its next batch, so what is
        known goes at once; a reset that it did not carry out leaves us expecting less than there is."""
        self._clear(engine_id)
        self._books.shadows.reset(engine_id)
        self._books.inflight.forget(engine_id)

    def prefilled(self, placed: Placed) -> None:
        """The first token arrived: the prompt is computed, and how long that took is known."""
        now = self._books.now()
        sample = self._books.load.first_token(placed.ticket, now)
        if sample is not None and self._fleet.get(placed.engine_id) is not None:
            self._books.load.rates.observe(placed.engine_id, sample, now)
        if placed.flying is not None:
            self._books.inflight.prefilled(placed.flying)
        read = placed.decision.read
        if isinstance(read, Prompt):
            self._books.shadows.served(placed.engine_id, read.token_ids, read.hashes)

    def _log_access(self, log: AccessLog, placed: Placed, usage: Usage | None, now: float) -> None:
        read, view = placed.decision.read, placed.decision.view
        if not isinstance(read, Prompt) or read.num_prompts > 1:
            log.skip()
            return
        log.add(
            Access(
                arrived_s=time.time() - (now - placed.placed_s),
                model=placed.request.model or "",
                engine_id=placed.engine_id,
                tokens=read.token_ids,
                extras=read.extras,
                streams=placed.request.stream,
                output_tokens=usage.completion_tokens if usage is not None else None,
                predicted_tokens=view.expected_tokens if view.candidate.confidence != "none" else None,
                cached_tokens=usage.cached_tokens if usage is not None else None,
                ttft_s=placed.ttft_s,
                duration_s=now - placed.placed_s,
                queue_s=view.candidate.queue_s,
            )
        )

    def _receipt(self, placed: Placed, usage: Usage | None) -> Receipt:
        view, decision = placed.decision.view, placed.decision
        read = decision.read
        one_prompt = isinstance(read, Prompt) and read.num_prompts == 1  # usage is the sum over all prompts
        predicted = one_prompt and view.candidate.confidence != "none"
        by_medium = view.expected_by_medium
        fallback = decision.index_problem and view.candidate.confidence == "none"
        return Receipt(
            request_id=placed.request.request_id[:_REQUEST_ID_BYTES_MAX].decode("latin-1"),
            engine_id=placed.engine_id,
            model=placed.request.model or "",
            mode="fallback" if fallback else view.mode,
            feed=self._feed_state(placed.engine_id),
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=view.expected_tokens if predicted else None,
            cpu_tokens=by_medium["CPU"] if predicted else 0,
            storage_tokens=by_medium["STORAGE"] if predicted else 0,
            trunk_tokens=view.candidate.trunk_tokens,
            actual_tokens=usage.cached_tokens if usage is not None else None,
            reported_prompt_tokens=usage.prompt_tokens if usage is not None and one_prompt else None,
            reason=decision.choice.reason,
            index_problem=decision.index_problem,
            ttft_s=placed.ttft_s,
        )


class Placed:
    """One request on one engine (``router.openai.request.Placement``)."""

    def __init__(
        self,
        keeper: Bookkeeper,
        request: InboundRequest,
        decision: Decision,
        *,
        ticket: Ticket,
        flying: InflightPrompt | None,
        client_headers: tuple[tuple[bytes, bytes], ...],
        now: float,
    ) -> None:
        engine = decision.view.status.engine
        self.engine_id = engine.engine_id
        self.base_url = engine.base_url
        self.engine_headers: tuple[tuple[bytes, bytes], ...] = (
            () if engine.dp_rank is None else ((b"x-data-parallel-rank", b"%d" % engine.dp_rank),)
        )
        self.client_headers = client_headers
        self.expected_s = decision.choice.cost.wait_s
        self.request = request
        self.decision = decision
        self.ticket = ticket
        self.flying = flying
        self.answered = False
        self.prefilled = False
        self.ttft_s: float | None = None
        self._keeper = keeper
        self.placed_s = now
        self._open = True

    def first_byte(self) -> None:
        """See ``Placement``; only a stream's first byte tells when the prefill was over."""
        self.answered = True
        if self.request.path in CACHE_RESETS:
            self._keeper.cache_reset(self.engine_id)
        if self._open and not self.prefilled and self.request.stream:
            self.prefilled = True
            self.ttft_s = self._keeper.now() - self.placed_s
            self._keeper.prefilled(self)

    def finished(self, usage: Usage | None) -> None:
        self._close(usage, "")

    def failed(self, reason: str) -> None:
        self._close(None, reason)

    def _close(self, usage: Usage | None, failed: str) -> None:
        if self._open:
            self._open = False
            self._keeper.close(self, usage, failed=failed)
