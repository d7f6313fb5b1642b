"""A placement behind a sidecar: what is reported of the prompt is what the sidecar says."""

from __future__ import annotations

import pytest

from router.openai.request import Usage
from router.pd.settings import Prefilled
from router.placement.split_legs import SidecarPlacement


@pytest.mark.parametrize(
    ("report", "cached"),
    [(Prefilled(0, 512), 512), (Prefilled(0, None), 600), (Prefilled(None, None), 600), (None, 600)],
)
def test_the_hit_is_the_one_of_the_engine_that_computed_the_prompt(
    report: Prefilled | None, cached: int
) -> None:
    """The decode engine may count what it fetched as cached."""
    placement = object.__new__(SidecarPlacement)
    placement._report = report
    usage = placement.corrected(Usage(700, 5, 600))
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (700, cached)
    assert placement.corrected(None) is None
