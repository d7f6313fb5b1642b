"""Numbers and truths as pydantic's lax mode, and so engines, read them."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from kvatlas.router.openai.numbers import lax_true, lax_whole

_BOOL = pydantic.TypeAdapter(bool)
VALUES: list[Any] = [True, False, 1, 0, 1.0, 0.0, 2, -1, 1.5, None, [], {}, [1]]
VALUES += ["1", "0", "on", "OFF", "t", "f", "True", "FALSE", "y", "n", "yes", "no", "2", "", "of use"]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_pydantics_true_values_are_true(value: Any) -> None:
    try:
        expected = _BOOL.validate_python(value)
    except pydantic.ValidationError:
        expected = False
    assert lax_true(value) is expected


def test_a_long_text_is_not_gone_through() -> None:
    assert lax_true("true" + " " * 60)
    assert not lax_true("true" + " " * 61)
    assert lax_whole("1234" + " " * 60) == 1234
    assert lax_whole("1234" + " " * 61) is None
