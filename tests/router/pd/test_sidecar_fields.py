"""What pickers and sidecars tell each other in header fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pd.settings import (
    PREFILLED,
    PREFILLERS,
    RETENTION,
    Prefilled,
    SidecarHints,
    hint_field,
    prefilled_field,
    read_endpoints,
    read_hints,
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


# Retention hints.

HINT, SECRET = b'{"ttl_s":1.5,"value":0.5}', b"s" * 32


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("prefill", [True, False])
def test_a_hint_is_read_for_the_engines_that_it_is_for(own: bool, prefill: bool) -> None:
    field = hint_field(HINT, SECRET, own=own, prefill=prefill)
    expected = SidecarHints(HINT if own else b"", HINT if prefill else b"")
    assert read_hints([(b"accept", b"x"), field], SECRET) == expected


@given(st.binary(max_size=120), st.integers(0, 200), st.integers(1, 255))
def test_no_hint_is_read_that_is_not_signed_under_the_secret(other: bytes, place: int, change: int) -> None:
    name, value = hint_field(HINT, SECRET, own=True, prefill=True)
    place %= len(value)
    bent = value[:place] + bytes([value[place] ^ change]) + value[place + 1 :]
    for given_value in (other, bent, b"o " + HINT, value + b" "):
        assert read_hints([(name, given_value)], SECRET) is None
    assert read_hints([(name, value)], b"t" * 32) is None
    assert read_hints([(name, value)], None) is None
    assert read_hints([], None) == SidecarHints() == read_hints([(b"x", value)], SECRET)
    # Of several fields the first one counts, signed or not.
    assert read_hints([(RETENTION, b""), (name, value)], SECRET) is None
