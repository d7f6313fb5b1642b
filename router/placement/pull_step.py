"""The step of a plan that fetches a prefix from another engine's host memory: what it sends, and what it does
with the end."""

from __future__ import annotations

from typing import Any

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.openai.request import Usage
from kvatlas.router.pd.settings import KV_SOURCE
from kvatlas.router.placement.own_pulls import PullOrder, PullOutcome, Pulls
from kvatlas.router.placement.placement import Placement, Step


class PullStep(Step):
    """The engine pulls a part of the prompt from another one's host memory, and computes the rest."""

    alone = True

    def __init__(self, order: PullOrder, pulls: Pulls) -> None:
        self._order, self._pulls = order, pulls
        self._judged = False
        """Its end is counted: an answer that breaks off later is no second one."""

    def sent(self, placement: Placement) -> None:
        """Implement ``Step``."""
        order = self._order
        self._pulls.begin(placement.engine, order, placement.asked_s)
        if placement.request.carried:
            source = endpoint_of(order.source.engine.base_url)
            placement.engine_headers += ((KV_SOURCE, source.encode()),)
            placement.watched = True
        else:
            placement.kv_source = order.kv_source

    def facts(self) -> dict[str, Any]:
        """Implement ``Step``."""
        order = self._order
        return {"kvatlas.pull_source": order.source.engine_id, "kvatlas.pull_tokens": order.pull.tokens}

    def learned(
        self, placement: Placement, usage: Usage | None, predicted_s: float | None, ttft_s: float | None
    ) -> None:
        """Implement ``Step``."""
        # At once, unlike the receipt: the next decision must not choose a bad pair again.
        self._judged = True
        came = None if usage is None else self._order.came_tokens(usage.cached_tokens)
        self._end(placement, self._pulls.judge(self._order, came, predicted_s, ttft_s))

    def ended(self, placement: Placement, failed: str) -> None:
        """Implement ``Step``."""
        if failed and not self._judged:
            # The router's own doing (an engine that is drained, our limits) says nothing of the pair.
            self._end(placement, "unsent" if placement.blameless else "failed")

    def _end(self, placement: Placement, outcome: PullOutcome) -> None:
        self._pulls.end(placement.engine.engine_id, self._order, outcome, placement.now())
