"""Log lines stay short, whatever a client, an engine or Redis put into them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog

from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.replication.registry import IndexRefused, parse_view

LONG = "x" * 12_000_000
KEPT: dict[str, Any] = {"a": "text", "b": 1, "c": 0.5, "d": None, "e": True, "f": ["m", "n"], "g": {"h": 1}}


@pytest.mark.parametrize(
    "value",
    [LONG, LONG.encode(), [LONG] * 1000, {LONG: LONG}, [[[[LONG]]]], ValueError(LONG), 1 << 100_000],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_any_length_is_cut(value: Any, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    structlog.get_logger().warning("not used", problem=value, **KEPT)
    line = capfd.readouterr().err
    assert len(line) < 50_000
    assert {key: json.loads(line)[key] for key in KEPT} == KEPT


def test_a_foreign_value_in_place_of_the_schema_is_cut_in_the_log() -> None:
    fields = dict.fromkeys((b"epoch", b"p", b"w", b"home", b"used"), b"1") | {b"schema": LONG.encode()}
    with pytest.raises(IndexRefused) as refused:
        parse_view(fields)
    assert len(str(refused.value)) < 400
