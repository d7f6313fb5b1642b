"""Which engines a request may name: those of the configuration and of sources, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.sidecar import Allowed
from tests.support.examples import examples


@pytest.mark.parametrize(
    ("pattern", "endpoint", "expected"),
    [
        ("10.0.0.7:8000", "10.0.0.7:8000", True),
        ("10.0.0.7:8000", "10.0.0.7:8001", False),
        ("10.0.0.7:8000", "10.0.0.8:8000", False),
        ("10.4.0.0/16:8000", "10.4.255.1:8000", True),
        ("10.4.0.0/16:8000", "10.5.0.1:8000", False),
        ("10.4.0.0/16:8000", "10.4.0.1.evil.example:8000", False),
        ("[fd00::/8]:8000", "[fd12::1]:8000", True),
        ("[fd00::/8]:8000", "[fe80::1]:8000", False),
        ("[fd00::1]:8000", "[fd00:0::1]:8000", True),
        ("10.0.0.0/8:8000", "[::ffff:10.0.0.1]:8000", False),
        ("prefill.svc:8000", "Prefill.svc:8000", True),
        ("prefill.svc:8000", "prefill.svc.evil:8000", False),
    ],
)
def test_patterns(pattern: str, endpoint: str, expected: bool) -> None:
    assert (endpoint in Allowed([pattern])) is expected


def test_what_a_source_names_is_allowed_as_long_as_it_does() -> None:
    allowed = Allowed([])
    assert "10.0.0.1:8000" not in allowed
    allowed.listed = frozenset({"10.0.0.1:8000"})
    assert "10.0.0.1:8000" in allowed
    assert "10.0.0.1:22" not in allowed


@pytest.mark.parametrize("text", ["", "10.0.0.1", ":8000", "10.0.0.1:0", "10.0.0.1:70000", "10.4.1.0/16:80"])
def test_a_pattern_that_is_none_is_said_to_be_so(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT|has host bits set"):
        Allowed([text])


_NETWORK = Allowed(["10.4.0.0/16:8000"])


@settings(max_examples=examples(200))
@given(st.text(st.sampled_from("014.x:[]/@"), max_size=20), st.sampled_from([80, 8000]))
def test_no_name_slips_into_a_network(host: str, port: int) -> None:
    if f"{host}:{port}" in _NETWORK:
        assert port == 8000
        assert host.strip("[]").startswith("10.4.")
