"""What pickers and sidecars tell each other in header fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pd.settings import (
    PREFILLED,
    PREFILLERS,
    Prefilled,
    prefilled_field,
    read_endpoints,
    read_prefilled,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"10.0.0.1:8000"], ["10.0.0.1:8000"]),
        ([b"10.0.0.1:8000, p2.svc:8000"], ["10.0.0.1:8000", "p2.svc:8000"]),
        ([b"10.0.0.1:8000", b"[fd00::1]:80"], ["10.0.0.1:8000", "[fd00::1]:80"]),
        ([b"a:1,a:1"], ["a:1"]),
        ([b"http://10.0.0.1:8000", b"10.0.0.1", b"a@b:80", b"a:80/x", b"", b"\xff:80"], []),
        ([b",".join(b"p%d:80" % i for i in range(20))], [f"p{i}:80" for i in range(8)]),
        ([], []),
    ],
)
def test_the_engines_named_are_read_as_llm_d_writes_them(values: list[bytes], expected: list[str]) -> None:
    assert read_endpoints([(b"accept", b"x:1"), *((PREFILLERS, value) for value in values)]) == expected


@given(st.none() | st.integers(0, 7), st.none() | st.integers(0, 10**6))
def test_what_is_told_is_read(place: int | None, cached: int | None) -> None:
    said = Prefilled(place, None if place is None else cached)
    assert read_prefilled([prefilled_field(said)]) == said


@pytest.mark.parametrize("value", [b"", b"1", b"x y", b"0 -1", b"0 12345678901", b"0 1 2"])
def test_anything_else_says_nothing(value: bytes) -> None:
    assert read_prefilled([(PREFILLED, value)]) is None
    assert read_prefilled([]) is None
