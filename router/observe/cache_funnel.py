"""The cache funnel: tokens held, delivered and missed, by model and tenant."""

from __future__ import annotations

import msgspec

from kvatlas.router.observe.receipts import FUNNEL_FIELDS, KeptReceipt

OTHER = "other"
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

    def add(self, kept: KeptReceipt) -> None:
        """Count one receipt, if its hit was predicted and reported."""
        model, prompt, chosen, delivered, reported = kept[2], kept[5], kept[6], kept[9], kept[10]
        if chosen is None or delivered is None or prompt is None:
            return
        tenant, held, why, elsewhere_s, seen, isolated, salted = kept[FUNNEL_FIELDS]
        # Plain comparisons: each of ``min`` and ``max`` costs as much as ten of them.
        held = chosen if held < chosen else held  # noqa: FURB136
        held = prompt if prompt < held else held  # noqa: FURB136
        counts = self.counts.get((model, tenant)) or self._of(model, tenant)
        counts.prompt += prompt
        counts.held += held
        counts.chosen += chosen
        counts.delivered += delivered
        missed = counts.missed
        if held < prompt:
            new = prompt - held
            if seen > held:
                evicted = min(seen, prompt) - held
                new -= evicted
                missed["evicted"] = missed.get("evicted", 0) + evicted
            if isolated:
                isolated = min(isolated, new)
                new -= isolated
                missed["isolated"] = missed.get("isolated", 0) + isolated
            cold = "salted" if salted else "new"
            missed[cold] = missed.get(cold, 0) + new
        if chosen < held:
            missed[why or "choice"] = missed.get(why or "choice", 0) + held - chosen
            counts.elsewhere_s += elsewhere_s
        if delivered < chosen:
            lost = "lost" if reported is None or reported == prompt else "template"
            missed[lost] = missed.get(lost, 0) + chosen - delivered

    def _of(self, model: str, tenant: str) -> FunnelCounts:
        key = (model, tenant) if len(self.counts) < FUNNELS_MAX else (OTHER, OTHER)
        return self.counts.setdefault(key, FunnelCounts())
