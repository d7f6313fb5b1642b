"""The hit rules read backwards, against the hit rules, over random models and residencies."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from publisher.events import SpecClass
from router.index.hit_rules import order_matters
from router.index.learn.layout import CacheLayout
from router.tools.explain_state import needs
from tests.router.index.rules.layouts import evaluate_one, models, residencies
from tests.support.examples import examples

cases = st.tuples(models(), st.integers(1, 420)).flatmap(
    lambda case: st.tuples(st.just(case[0]), st.just(case[1]), residencies(*case))
)


@settings(max_examples=examples(150), deadline=None)
@given(cases)
def test_a_class_alone_reaches_as_far_as_its_needs_are_met(
    case: tuple[CacheLayout, int, dict[int, set[int]]],
) -> None:
    layout, num_tokens, units = case
    assume(not order_matters(layout))
    unit = layout.hash_block_size

    def met(spec_class: SpecClass, boundary: int) -> bool:
        return all(
            any(all(end // unit - 1 in units[group] for group in spec_class.group_idxs) for end in need.ends)
            for need in needs(layout, spec_class, boundary, num_tokens)
        )

    boundaries = range(layout.alignment, num_tokens, layout.alignment)
    by_class = evaluate_one(layout, num_tokens, units, detail=True).by_class
    for spec_class, reached in zip(layout.classes, by_class, strict=True):
        assert reached[0] == max((end for end in boundaries if met(spec_class, end)), default=0)
