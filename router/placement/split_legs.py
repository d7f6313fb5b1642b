"""Placements of a request on two engines: one computes the prompt, the other one fetches it and answers.

Both enter the accounts when the decision is made, so the decode engine's place is reserved while the prefill
runs. The decode engine does no prefill: nothing is learned about rates. While the blocks are transferred,
vLLM serves later requests, so hits on them count only after events. Its ``cached_tokens`` are the prefill
engine's hit, so the prediction is compared there. Invariant: each placement ends once, independently of the
other.

``PullPlacement`` is on one engine, which fetches a prefix from another one's host memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from kvatlas.publisher.groups import Family
from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.pd.settings import KV_SOURCE, PREFILLER
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.engine import Accounts, Engine
from kvatlas.router.placement.placement import Decision, Placement, Split
from kvatlas.router.placement.pull import PullOrder, PullOutcome, Pulls
from kvatlas.router.proxy.attempt import Fields

_OK = 200


class PrefillPlacement(Placement):
    """The prefill. Its answer comes when the prefill is over, like a stream's first token. ``rest_s``: how
    long the engine gets no prefill requests if it hands nothing over."""

    _is_answer = False
    _leg = "prefill"
    __slots__ = ("_rest_s", "_untimed")

    def __init__(
        self,
        request: InboundRequest,
        decision: Decision,
        accounts: Accounts,
        *,
        waited_s: float,
        rest_s: float,
    ) -> None:
        as_stream = msgspec.structs.replace(request, stream=True)
        super().__init__(as_stream, decision, accounts, client_headers=(), waited_s=waited_s)
        self._rest_s = rest_s
        self._untimed = False
        self.version = self.engine.version

    def end_unobserved(self) -> None:
        """The end will not be reported: infer it from the engine's running-requests gauge."""
        self._untimed = True
        self.engine.load.unseen(self._ticket, self.now(), lambda: None)

    def nothing_held(self) -> None:
        """Implement ``Attempt``."""
        self.engine.rests_until = self.now() + self._rest_s

    def facts(self) -> dict[str, Any]:
        """Implement ``Attempt``."""
        return super().facts() | {"kvatlas.leg": "prefill"}


class DecodePlacement(Placement):
    """The decode. ``split``: decision about the handoff."""

    _leg = "decode"
    __slots__ = ("_gap_s", "_split")

    def __init__(
        self,
        request: InboundRequest,
        decision: Decision,
        split: Split,
        accounts: Accounts,
        *,
        client_headers: Fields,
        prefill: PrefillPlacement | None,
    ) -> None:
        self._split = split
        self._gap_s: float | None = None
        super().__init__(request, decision, accounts, client_headers=client_headers, later=True)
        self.body = split.body
        self.prefill = prefill
        self.expected_s = decision.choice.cost.queue_s + split.transfer_s

    def handed_over(self, gap_s: float) -> None:
        """Implement ``Attempt``."""
        self._gap_s = gap_s

    def facts(self) -> dict[str, Any]:
        """Implement ``Attempt``."""
        return super().facts() | {
            "kvatlas.leg": "decode",
            "kvatlas.transfer_tokens": self._split.lacks_tokens,
            "kvatlas.gap_s": self._gap_s,
        }

    @property
    def _reported_hit(self) -> Hit:
        prefill = self._split.prefill
        return Hit() if prefill is None else prefill.candidate.hit

    def _served(self) -> None:
        shadow = self.engine.shadow
        if shadow is not None and all(group.family is Family.FULL for group in shadow.spec.groups):
            super()._served()

    def _learn(self, usage: Usage | None, feed: str) -> None:
        """Learn nothing: the usage reports the prefill engine's hit."""


class SidecarPlacement(DecodePlacement):
    """The decode engine's sidecar makes both requests, like llm-d's: it asks the prefill engine that is named
    in the head, and returns that engine's error, if it gives one, instead of an answer.

    The answer tells neither the end of the prefill nor its hit, so the prefill has no receipt.
    """

    __slots__ = ("_helper",)

    def __init__(
        self,
        request: InboundRequest,
        decision: Decision,
        split: Split,
        accounts: Accounts,
        *,
        client_headers: Fields,
        prefill: PrefillPlacement,
    ) -> None:
        self._helper = prefill
        super().__init__(
            request,
            decision,
            split,
            accounts,
            client_headers=client_headers,
            prefill=None,
        )
        self.body = None
        self.watched = True
        self.expected_s += prefill.expected_s
        if not request.stream:
            prefill.end_unobserved()
        # One name only: llm-d's sidecar asks the first of a list, or any.
        self.engine_headers += ((PREFILLER, endpoint_of(prefill.base_url).encode()),)
        self.asked()

    def next_best(self, count: int) -> tuple[str, ...]:
        """Implement ``Attempt``: the others may have another version than the prefill engine."""
        return ()

    def refused(self, status: int, wait_s: float) -> bool:
        """Implement ``Attempt``: either engine may have failed. It counts against the prefill engine:
        a decode engine at fault then computes its prompts itself, and their errors count against it."""
        self._helper.refused(status, wait_s)
        return self._end(None, "status")

    @property
    def _prefill_engine(self) -> str:
        return self._helper.engine_id

    def _begun(self, now: float) -> None:
        super()._begun(now)
        self._helper.answered(_OK)
        self._helper.first_byte(_OK)
        self._helper.finished(None)

    def _ended(self, usage: Usage | None, failed: str) -> None:
        self._helper.finished(None)
        super()._ended(usage, failed)


class PullPlacement(Placement):
    """The engine pulls a part of the prompt from another one's host memory, and computes the rest."""

    __slots__ = ("_judged", "_order", "_pulls")

    def __init__(
        self,
        request: InboundRequest,
        decision: Decision,
        order: PullOrder,
        pulls: Pulls,
        accounts: Accounts,
        *,
        client_headers: Fields,
        waited_s: float,
    ) -> None:
        self._order, self._pulls = order, pulls
        self._judged = False
        """Its end is counted: an answer that breaks off later is no second one."""
        super().__init__(
            request,
            decision,
            accounts,
            client_headers=client_headers,
            waited_s=waited_s,
        )
        pulls.begin(self.engine, order, self.asked_s)
        if request.carried:
            source = endpoint_of(order.source.engine.base_url)
            self.engine_headers += ((KV_SOURCE, source.encode()),)
            self.watched = True
        else:
            self.kv_source = order.kv_source

    def facts(self) -> dict[str, Any]:
        """Implement ``Attempt``."""
        order = self._order
        return super().facts() | {
            "kvatlas.pull_source": order.source.engine_id,
            "kvatlas.pull_tokens": order.pull.tokens,
        }

    def next_best(self, count: int) -> tuple[str, ...]:
        """Implement ``Attempt``: the others may be the source itself, or of another version."""
        return ()

    def _ended(self, usage: Usage | None, failed: str) -> None:
        super()._ended(usage, failed)
        if failed and not self._judged:
            # The router's own doing (an engine that is drained, our limits) says nothing of the pair.
            outcome: PullOutcome = "unsent" if self.blameless else "failed"
            self._pulls.end(self.engine.engine_id, self._order, outcome, self.now())

    def _learn(self, usage: Usage | None, feed: str) -> None:
        super()._learn(usage, feed)
        # At once, unlike the receipt: the next decision must not choose a bad pair again.
        predicted_s = None if self._first_token is None else self._first_token.total_s
        self._judged = True
        known = usage is not None and self._predicted
        came = self._order.came_tokens(usage.cached_tokens) if known and usage is not None else None
        outcome = self._pulls.judge(self._order, came, predicted_s, self._ttft_s)
        self._pulls.end(self.engine.engine_id, self._order, outcome, self.now())


def lacking(engine: Engine, hit: Hit, prompt_tokens: int) -> int:
    """Prompt tokens that would be transferred to this engine."""
    # Models with Mamba layers always receive their state, so their full-attention prefix counts; it is no hit
    # for the engine alone.
    has = hit.soon_tokens
    layout = engine.layout
    if layout is not None and _has_mamba(layout):
        has = max(has, hit.shared_prefix_tokens)
    return max(0, prompt_tokens - has)


@lru_cache(maxsize=256)
def _has_mamba(layout: CacheLayout) -> bool:
    return any(c.family is Family.MAMBA for c in layout.classes)


def give_hint(
    request: InboundRequest, placement: Placement, prefill: PrefillPlacement | None, accounts: Accounts
) -> None:
    """Give a request's retention hint to the engines that obey it."""
    if request.retention is None:
        return
    source, hint = request.retention
    for one in (placement, prefill):
        if one is not None and one.engine.obeys_hints:
            one.retention = hint
            accounts.retention.stats.sent[source] += 1
