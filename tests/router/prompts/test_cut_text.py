"""What one text has in common with another that was tokenized before."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.prompts.cuts import CutText
from tests.support.examples import examples

PIECES = st.lists(st.text("ab\uff5c", max_size=3).map("|".__add__), min_size=1, max_size=9)


def cut(pieces: list[str]) -> CutText:
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    return CutText("".join(pieces), tuple(starts), tuple(starts))


@settings(max_examples=examples(500), deadline=None)
@given(PIECES, PIECES, st.integers(0, 9), st.integers(0, 9), st.booleans())
@example(["|a", "|b", "|"], ["|b", "|b", "|"], 0, 3, False)
@example(["|a", "|b"], ["a"], 1, 1, True)
@example(["|a", "|b", "|"], ["|c"], 1, 2, False)
def test_all_pieces_that_both_begin_with_and_none_more(
    own: list[str], new: list[str], same: int, rejoins: int, glued: bool
) -> None:
    """The other text shares some pieces, goes its own way, and may come back to the same."""
    text = "".join([*own[:same], *new, *own[rejoins:]])
    text = text.replace("|", "", 1) if glued else text
    before = cut(own)
    expected = max(
        number
        for number, start in enumerate(before.starts)
        if text.startswith(before.text[:start]) and (not number or text.startswith("|", start))
    )
    assert before.num_shared(text, lambda at_text, at: at_text.startswith("|", at)) == expected
