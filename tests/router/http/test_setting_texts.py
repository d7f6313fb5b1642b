"""Descriptions of the types of settings, for messages of errors."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from kvatlas.router.http.setting_texts import expected, misfit


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Literal["on"], "on"),
        (Literal["on", "off"], "one of on, off"),
        (int | Literal["auto"], "a whole number or auto"),
        (int | str, "a whole number or a text"),
        (tuple[str, ...], "a list of texts"),
        (list[dict[str, int]], "a list of values"),
        (dict[str, float], "a table of numbers"),
        (dict[str, Any], "a table"),
    ],
)
def test_the_type_of_a_setting_in_words(kind: Any, words: str) -> None:
    assert expected(kind) == words


def test_the_choice_that_was_meant() -> None:
    kind = Literal["cache", "random"]
    assert misfit("Cache", kind) == "expected one of cache, random; did you mean cache?"
    assert misfit(3, kind) == "expected one of cache, random"
