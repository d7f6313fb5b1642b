"""Settings: what is accepted, and that everything else is refused with the key, the value and the remedy."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvatlas.connectors.settings import ConfigError, OffloadSettings, size_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("2k", 2000),
        ("64KiB", 65536),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert size_bytes(text, "host_bytes") == size


@pytest.mark.parametrize("text", [0, -1, True, None, 1.5, "", "much", "8 GiBs", "GiB", "-1GiB", "0"])
def test_no_sizes(text: object) -> None:
    with pytest.raises(ConfigError, match=r"host_bytes = .*8GiB"):
        size_bytes(text, "host_bytes")


def test_defaults() -> None:
    settings = OffloadSettings.parse({"host_bytes": "1GiB"}, "extra")
    assert settings == OffloadSettings(host_bytes=1 << 30)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({}, "extra.host_bytes"),
        ({"host_bytes": 1, "host_byte": 2}, "extra.host_byte"),
        ({"host_bytes": 1, "policy": "fifo"}, "extra.policy"),
        ({"host_bytes": 1, "policy": 3}, "extra.policy"),
        ({"host_bytes": 1, "hint_share": 0}, "extra.hint_share"),
        ({"host_bytes": 1, "hint_share": 1.5}, "extra.hint_share"),
        ({"host_bytes": 1, "pinned_source_blocks_max": 0}, "extra.pinned_source_blocks_max"),
        ({"host_bytes": 1, "pinned_source_blocks_max": 1.1}, "extra.pinned_source_blocks_max"),
        ({"host_bytes": 1, "lookup_deadline_s": "1"}, "extra.lookup_deadline_s"),
        ({"host_bytes": 1, "lookup_deadline_s": float("nan")}, "extra.lookup_deadline_s"),
        ({"host_bytes": 1, "load_min_tokens": 0}, "extra.load_min_tokens"),
        ({"host_bytes": 1, "store_generated": "no"}, "extra.store_generated"),
        ({"host_bytes": 1, "store_threshold": 0}, "extra.store_threshold"),
        ({"host_bytes": 1, "layout": "NHD"}, "extra.layout"),
    ],
)
def test_refused(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadSettings.parse(extra, "extra")
    assert caught.value.key == key
    assert caught.value.remedy in str(caught.value)


def test_keys_that_others_read_are_left_to_them() -> None:
    assert OffloadSettings.parse({"host_bytes": 1, "store": {}}, "extra", others=["store"]).host_bytes == 1


def test_errors_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", 3, "give 4")))
    assert (error.key, error.value, error.remedy) == ("a.b", 3, "give 4")
    assert str(error) == "a.b = 3: give 4"
