"""The cache funnel: tokens held, delivered and missed, by model and tenant."""

from __future__ import annotations

import msgspec

from kvatlas.router.observe.first_token import OTHER
from kvatlas.router.observe.receipts import Receipt

# Pairs of model and tenant with separate counts.
FUNNELS_MAX = 1024


class FunnelCounts(msgspec.Struct):
    """Prompt tokens of requests whose hit was predicted and reported, stage by stage."""

    prompt: int = 0
    held: int = 0
    """Held by the engine that holds most of each prompt."""
    chosen: int = 0
    """Held by the chosen engine."""
    delivered: int = 0
    """Reported by engines."""
    missed: dict[str, int] = msgspec.field(default_factory=dict)
    elsewhere_s: float = 0.0


class CacheFunnel:
    """Counts by model and tenant."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], FunnelCounts] = {}

    def add(self, receipt: Receipt) -> None:
        """Count one receipt, if its hit was predicted and reported."""
        chosen, delivered, prompt = receipt.predicted_tokens, receipt.actual_tokens, receipt.prompt_tokens
        if chosen is None or delivered is None or prompt is None:
            return
        held = receipt.held_tokens if receipt.held_tokens > chosen else chosen  # noqa: FURB136
        held = prompt if prompt < held else held  # noqa: FURB136
        counts = self.counts.get((receipt.model, receipt.tenant)) or self._of(receipt.model, receipt.tenant)
        counts.prompt += prompt
        counts.held += held
        counts.chosen += chosen
        counts.delivered += delivered
        missed = counts.missed
        if held < prompt:
            new, seen = prompt - held, receipt.seen_tokens
            if seen > held:
                evicted = min(seen, prompt) - held
                new -= evicted
                missed["evicted"] = missed.get("evicted", 0) + evicted
            if receipt.isolated_tokens:
                isolated = min(receipt.isolated_tokens, new)
                new -= isolated
                missed["isolated"] = missed.get("isolated", 0) + isolated
            why = "salted" if receipt.salted else "new"
            missed[why] = missed.get(why, 0) + new
        if chosen < held:
            why = receipt.missed or "choice"
            missed[why] = missed.get(why, 0) + held - chosen
            counts.elsewhere_s += receipt.elsewhere_s
        if delivered < chosen:
            reported = receipt.reported_prompt_tokens
            why = "lost" if reported is None or reported == prompt else "template"
            missed[why] = missed.get(why, 0) + chosen - delivered

    def _of(self, model: str, tenant: str) -> FunnelCounts:
        key = (model, tenant) if len(self.counts) < FUNNELS_MAX else (OTHER, OTHER)
        return self.counts.setdefault(key, FunnelCounts())
