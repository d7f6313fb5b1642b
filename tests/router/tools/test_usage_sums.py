"""The usage record added up as ``docs/tenants.md`` says."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any

import msgspec

from kvatlas.router.observe.usage import UsageLine
from tests.router.simulation.test_capture_and_fit import captured
from tests.support.paths import ROOT

NOVEMBER_S = 1793491200  # 2026-11-01 UTC
NAMES = (
    "tenant",
    "requests",
    "computed",
    "device",
    "host",
    "store",
    "generated",
    "unsure",
    "contradicted",
)


def line(**changes: Any) -> UsageLine:
    base = captured(duration_s=1.0)
    told = base | {"tenant": "acme", "key": "k1", "arrived_s": NOVEMBER_S + 5.0} | changes
    return msgspec.convert(told, UsageLine)


def documented() -> str:
    """The query of the page; the table ``usage`` stands for the files."""
    text = (ROOT / "docs" / "tenants.md").read_text()
    found = re.search(r"duckdb -c \"\n(.*?)\"\n", text, re.DOTALL)
    assert found is not None
    query, files = re.subn(r"read_json\([^)]*\)", "usage", found[1])
    assert files == 1
    return query


def summed(*lines: UsageLine) -> list[dict[str, Any]]:
    """The query in another database. It has every field of the record, and no other."""
    fields = [each for each in UsageLine.__struct_fields__ if each not in {"hash_ids", "start_ids"}]
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"CREATE TABLE usage ({', '.join(fields)})")
        places = ", ".join("?" * len(fields))
        for one in lines:
            values = [getattr(one, each) for each in fields]
            database.execute(f"INSERT INTO usage VALUES ({places})", values)
        cursor = database.execute(documented())
        assert tuple(column[0] for column in cursor.description) == NAMES
        return [dict(zip(NAMES, row, strict=True)) for row in cursor]


def test_each_tenant_has_the_tokens_of_its_requests_in_the_period() -> None:
    million = {"computed_tokens": 1_000_000, "device_tokens": 0, "generated_tokens": 0}
    acme, other = summed(
        line(**million),
        line(computed_tokens=0, device_tokens=500_000, host_tokens=10, store_tokens=20, generated_tokens=0),
        line(tenant="other", computed_tokens=7, device_tokens=0, generated_tokens=1_000_000),
        line(**million, arrived_s=NOVEMBER_S - 1.0),
        line(**million, arrived_s=NOVEMBER_S + 30 * 86400.0),
    )
    assert (acme["tenant"], acme["requests"]) == ("acme", 2)
    tokens = [acme[name] for name in ("computed", "device", "host", "store", "generated")]
    assert tokens == [1_000_000, 500_000, 10, 20, 0]
    assert (other["tenant"], other["computed"], other["generated"]) == ("other", 7, 1_000_000)


def test_requests_without_computation_are_left_out() -> None:
    found = summed(
        line(),
        line(status=429, outcome="429", engine="", computed_tokens=None),
        line(status=502, outcome="502"),
        line(status=0, outcome="unseen"),
        line(status=0, outcome="client_gone"),
        line(status=0, outcome="client_gone", engine=""),
    )
    assert [row["requests"] for row in found] == [3]


def test_unconfirmed_lines_are_counted() -> None:
    (row,) = summed(
        line(verified=False),
        line(verified=True),
        line(verified=None),
        line(computed_is="measured", generated_is="measured"),
        line(computed_is="estimated", generated_is="counted", outcome="client_gone", status=0),
        line(computed_is="estimated", generated_is="measured"),
        line(generated_is="counted"),
    )
    assert (row["requests"], row["contradicted"], row["unsure"]) == (7, 1, 3)


def test_every_field_of_the_record_is_described() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    part = text[text.index("## The usage record") :]
    for name in msgspec.structs.fields(UsageLine):
        assert f"`{name.name}`" in part, name.name
