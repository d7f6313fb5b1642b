"""Steps of a plan for two engines: what each sends, and what it does with the end.

A prompt computed elsewhere has two placements, of ``PrefillStep`` and ``DecodeStep``. Both enter the accounts
when the decision is made, so the decode engine's place is reserved while the prefill runs. The decode engine
does no prefill: nothing is learned about rates. While the blocks are transferred, vLLM serves later requests,
so hits on them count only after events. Its ``cached_tokens`` are the prefill engine's hit, so the prediction
is compared there. Invariant: each placement ends once, independently of the other.
"""

from __future__ import annotations

from typing import Any

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.observe.receipts import Leg
from kvatlas.router.pd.settings import PREFILLER
from kvatlas.router.placement.candidate import Hit
from kvatlas.router.placement.placement import Placement, Split, Step

_OK = 200
_NO_CONNECTOR_S = 60.0
"""How long a prefill engine that handed nothing over is not asked again; a connector comes with a restart."""


class PrefillStep(Step):
    """The prefill, for another engine. Its answer comes when the prefill is over, like a stream's first
    token."""

    leg: Leg = "prefill"

    def sent(self, placement: Placement) -> None:
        """Implement ``Step``."""
        placement.version = placement.engine.version

    def nothing_held(self, placement: Placement) -> None:
        """Implement ``Step``."""
        placement.engine.rests_until = placement.now() + _NO_CONNECTOR_S


class DecodeStep(Step):
    """The decode, behind the prefill of another engine; ``prefill`` None: it is over."""

    leg: Leg = "decode"

    def __init__(self, split: Split, prefill: Placement | None) -> None:
        self._split, self._prefill = split, prefill
        self.hit = Hit() if split.prefill is None else split.prefill.candidate.hit

    def sent(self, placement: Placement) -> None:
        """Implement ``Step``."""
        placement.body, placement.prefill = self._split.body, self._prefill
        placement.expected_s = placement.decision.choice.cost.queue_s + self._split.transfer_s

    def facts(self) -> dict[str, Any]:
        """Implement ``Step``."""
        return {"kvatlas.transfer_tokens": self._split.lacks_tokens}


class SidecarStep(DecodeStep):
    """The decode engine's sidecar makes both requests, like llm-d's: it asks the prefill engine that is named
    in the head, and returns that engine's error, if it gives one, instead of an answer.

    The answer tells neither the end of the prefill nor its hit, so the prefill has no receipt.
    """

    alone = True

    def __init__(self, split: Split, prefill: Placement) -> None:
        super().__init__(split, None)
        self._helper = prefill
        self.prefill_engine = prefill.engine_id

    def sent(self, placement: Placement) -> None:
        """Implement ``Step``."""
        super().sent(placement)
        helper = self._helper
        placement.body, placement.watched = None, True
        placement.expected_s += helper.expected_s
        if not placement.request.stream:
            helper.end_unobserved()
        # One name only: llm-d's sidecar asks the first of a list, or any.
        placement.engine_headers += ((PREFILLER, endpoint_of(helper.base_url).encode()),)
        placement.asked()

    def refused(self, status: int, wait_s: float) -> bool:
        """Implement ``Step``: either engine may have failed. It counts against the prefill engine: a decode
        engine at fault then computes its prompts itself, and their errors count against it."""
        self._helper.refused(status, wait_s)
        return True

    def begun(self) -> None:
        """Implement ``Step``."""
        self._helper.answered(_OK)
        self._helper.first_byte(_OK)
        self._helper.finished(None)

    def ended(self, placement: Placement, failed: str) -> None:
        """Implement ``Step``."""
        self._helper.finished(None)
