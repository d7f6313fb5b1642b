"""Release numbers of engines: one reading for the fleet and for the doctor."""

from __future__ import annotations

import pytest

from kvatlas.router.fleet.versions import Version, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32.1+cpu", (0, 32, 1)),
        ("v0.32.1", (0, 32, 1)),
        ("0.11.0rc2.dev9+g1234567", (0, 11, 0)),
        ("0.1.dev1+g1234567", (0, 1, 0)),
        ("0.10.1.1", (0, 10, 1)),
        ("1.0", (1, 0, 0)),
        ("0.10-nightly", (0, 10, 0)),
        ("20261130.1", None),
        ("0.20261130", None),
        ("nightly", None),
        ("0", None),
        ("\u0660.\u0661", None),
        ("", None),
    ],
)
def test_a_version_is_its_first_three_numbers(text: str, version: Version | None) -> None:
    assert parse_version(text) == version
