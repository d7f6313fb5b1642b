"""Invoices from usage records: sums, prices, periods, and lines that cannot be read."""

from __future__ import annotations

import json
import re
import shlex
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.cli import call
from kvatlas.router.observe.usage import UsageLine, UsageLog, UsageSettings
from tests.router.observe.test_usage import numbered
from tests.router.simulation.test_capture_and_fit import captured
from tests.support.paths import ROOT

NOVEMBER_S = 1793491200  # 2026-11-01 UTC


def line(**changes: Any) -> dict[str, Any]:
    base = captured(duration_s=1.0)
    return base | {"tenant": "acme", "key": "k1", "arrived_s": NOVEMBER_S + 5.0} | changes


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert call(["invoice", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def documented() -> list[str]:
    """The command of docs/tenants.md."""
    text = (ROOT / "docs" / "tenants.md").read_text()
    found = re.search(r"```sh\n(kvatlas invoice .*?)```", text, re.DOTALL)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))[1:]


def test_the_documented_command_bills_each_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "usage.jsonl.1", line(computed_tokens=1_000_000, device_tokens=0, generated_tokens=0))
    write(
        tmp_path / "usage.jsonl",
        line(computed_tokens=0, device_tokens=500_000, host_tokens=10, store_tokens=20, generated_tokens=0),
        line(tenant="other", computed_tokens=7, device_tokens=0, generated_tokens=1_000_000),
        line(arrived_s=NOVEMBER_S - 1.0),
        line(arrived_s=NOVEMBER_S + 30 * 86400.0),
    )
    write(tmp_path / "usage.jsonl.worker1", line(status=429, outcome="429", computed_tokens=None))
    words = documented()
    assert call(words) == 0
    table = capsys.readouterr().out
    assert [row.split()[0] for row in table.splitlines() if row.strip()] == [
        "tenant",
        "acme",
        "other",
        "total",
    ]
    found = report(capsys, *words[1:])
    acme, other = found["rows"]
    assert (acme["tenant"], acme["requests"], acme["not_served"]) == ("acme", 2, 1)
    assert acme["tokens"] == {
        "computed": 1_000_000,
        "device": 500_000,
        "host": 10,
        "store": 20,
        "generated": 0,
    }
    assert Decimal(acme["amount"]) == Decimal("0.60") + Decimal("0.03") + Decimal("0.000001") + Decimal(
        "0.000003"
    )
    assert Decimal(found["total"]) == Decimal(acme["amount"]) + Decimal(other["amount"])
    assert f"{Decimal(acme['amount']):.4f}" in table


def test_rows_by_model_and_key_and_what_is_not_vouched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path / "a.jsonl",
        line(model="m", key="k1", verified=False),
        line(model="m", key="k2"),
        line(model="n", key="k1", prompt_tokens=None, cached_tokens=None, outcome="client_gone", status=0),
        line(model="n", key="k1", outcome="client_gone", status=0, engine=""),
    )
    rows = report(capsys, str(path), "--by", "model,key")["rows"]
    assert [(row["model"], row["key"], row["requests"]) for row in rows] == [
        ("m", "k1", 1),
        ("m", "k2", 1),
        ("n", "k1", 1),
    ]
    assert [row["contradicted"] for row in rows] == [1, 0, 0]
    assert [row["unreported"] for row in rows] == [0, 0, 1]


def test_a_line_that_is_being_written_does_not_count_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", line())
    with path.open("a") as file:
        file.write('{"arrived_s": 17')
    assert report(capsys, str(path))["rows"][0]["requests"] == 1


def test_each_line_counts_once_while_files_are_rotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    log = UsageLog(UsageSettings(path=str(path), file_bytes_max=3000, files_max=10_000))
    for number in range(60):
        log.add(numbered(number), 11.0)
    log.start()
    log.close()
    stop = threading.Event()

    def writes() -> None:
        while not stop.is_set():
            for _ in range(20):
                log.add(numbered(0), 11.0)
            log.start()
            log.close()

    writer = threading.Thread(target=writes)
    writer.start()
    try:
        for _ in range(5):
            assert report(capsys, str(path))["rows"][0]["tokens"]["generated"] == sum(range(60))
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--price", "computed"], "--price 'computed': expected NAME=PRICE"),
        (["--price", "cpu=1"], "NAME one of computed, device, host, store, generated"),
        (["--price", "host=-1"], "--price 'host=-1'"),
        (["--price", "host=nan"], "--price 'host=nan'"),
        (["--since", "soon"], "--since soon: expected a date"),
        (["--by", "tenant,colour"], "'colour': expected some of tenant, key, model, engine"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    tmp_path: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", line())
    assert call(["invoice", str(path), *words]) == 2
    assert problem in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["invoice"]) == 2
    assert "at least one usage record" in capsys.readouterr().err
    assert call(["invoice", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no such usage record" in capsys.readouterr().err
    path = write(tmp_path / "a.jsonl", line(), {"timestamp": 1})
    assert call(["invoice", str(path)]) == 2
    assert f"{path}:2: not a line of a usage record" in capsys.readouterr().err


def test_every_field_of_the_record_is_described() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    part = text[text.index("## The usage record") :]
    for name in msgspec.structs.fields(UsageLine):
        assert f"`{name.name}`" in part, name.name
