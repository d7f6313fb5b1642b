"""Tables are whole in 80 columns, and one row is one line where no width is set."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.simulation.demo.table import Tally, _compare
from kvatlas.router.tools import capture
from kvatlas.router.tools.capture_writer import CaptureWriter
from kvatlas.router.tools.event_order import RecordStats
from kvatlas.router.tools.explain import EngineForecast, RouterAnswer, RouterEngine, RouterHit, TargetForecast
from kvatlas.router.tools.explain import _router_table as router_table
from kvatlas.router.tools.explain import _target_line as target_line
from kvatlas.router.tools.explain import _target_table as target_table
from kvatlas.router.tools.index import EngineLine, ScopeLine, _print_diffs, _print_scope, addressed
from kvatlas.router.tools.index_verifier import EngineDiff
from kvatlas.router.tools.ops_client import WIDTH_PIPED, output_console
from kvatlas.router.tools.record import _table as record_table
from kvatlas.router.tools.replay import sample_table, stream_table
from kvatlas.router.tools.replay_player import PlaneSample, Sample, SourceRun
from kvatlas.router.tools.trace_verification import verify_trace
from kvatlas.router.tools.verify import _table as verify_table
from tests.support.paths import DATA

TRACES = DATA / "traces"
ENGINE = "http://10.20.30.40:8000"


def drawn(table: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def cells(table: RenderableType) -> list[list[str]]:
    """Its rows, by words."""
    return [line.split() for line in drawn(table, 200).splitlines() if line.startswith(ENGINE)]


def streams() -> RenderableType:
    return stream_table([SourceRun(ENGINE, 123_456, 0, 123_459, 1_234_567, 12, 34, 5, 6, 7, 8, 9)])


def samples() -> RenderableType:
    planes = [
        PlaneSample(engine, 123_459, "GPU", 11, 12_345, 12_399, 123_456, 111_111, 222, 333, 44)
        for engine in (ENGINE, f"{ENGINE}#dp1")
    ]
    return sample_table([Sample(123_456, 3600.5, planes)])


def recording(folder: Path) -> RenderableType:
    writer = CaptureWriter(folder / "c.jsonl.gz")
    writer.close()
    stats = RecordStats(
        ENGINE, connected=True, frames=123_456, history_frames=10_000, first_seq=0, last_seq=123_459,
        gaps=12, lost_frames=345, restarts=3, malformed=1,
    )  # fmt: skip
    return record_table([stats], writer)


def test_tables_are_whole_in_80_columns(tmp_path: Path) -> None:
    wanted = {
        streams: ("123,456", "1,234,567", "0..123459", "restarts", "bad"),
        samples: ("3600.5", "123459", "GPU 11", "111,111", "unknown", "333", "44"),
        lambda: recording(tmp_path): ("123,456", "10,000", "0..123459", "345", "malformed", "reached"),
    }
    for table, figures in wanted.items():
        text = drawn(table(), 80)
        assert "…" not in text
        assert all(line.strip() for line in text.splitlines()), "no line between rows"
        for figure in figures:
            assert figure in text


@pytest.mark.parametrize(
    ("fault", "style"),
    [({}, ""), ({"connected": False}, "red"), ({"lost_frames": 1}, "red"), ({"malformed": 1}, "red")],
)
def test_a_recording_that_lacks_something_is_red(tmp_path: Path, fault: dict[str, Any], style: str) -> None:
    writer = CaptureWriter(tmp_path / "c.jsonl.gz")
    writer.close()
    table = record_table([RecordStats(**{"source": ENGINE, "connected": True, **fault})], writer)
    assert [row.style for row in table.rows] == [style]


@pytest.mark.parametrize(("quiet", "terminal"), [(True, True), (False, False), (False, True)])
def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, terminal: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(capture, "Console", lambda **_: Console(file=out, force_terminal=terminal))
    assert len(list(capture.with_progress(iter([None] * 3), "frames", quiet=quiet))) == 3  # type: ignore[list-item]
    assert ("frames" in out.getvalue()) == (terminal and not quiet)


def test_a_target_is_shown_with_each_engines_first_token() -> None:
    forecasts = [EngineForecast(ENGINE, 1.2, 0.0), EngineForecast(f"{ENGINE}0", 2.5, 0.25)]
    slo = TargetForecast(2.25, forecasts)
    assert cells(target_table(slo)) == [[ENGINE, "1,200"], [f"{ENGINE}0", "2,500", "250"]]
    assert target_line(slo, None) == "target in 2,250 ms: 1 of 2 would miss it"
    assert target_line(slo, {"wait_s": 3.0}).endswith("; refused for a wait of 3,000 ms")


def test_an_explanation_shows_hits_costs_and_where_the_match_ended() -> None:
    engines = [
        RouterEngine(ENGINE, "ready", "native", "", RouterHit(1024, 512), 2048, None, {"total_s": 0.5}),
        RouterEngine(f"{ENGINE}0", "none", ended_by={"spec_class": "full", "at_token": 16}),
        RouterEngine(f"{ENGINE}1", "none", why_unknown="sleeps", cost={"total_s": None}),
    ]
    answer = RouterAnswer({"tokens_estimated": 9}, {"engine": ENGINE, "reason": "cost"}, engines)
    assert cells(router_table(answer)) == [
        [ENGINE, "ready", "native", "1,024", "512", "2,048", "500.0"],
        [f"{ENGINE}0", "none", "0", "0", "0", "full", "at", "16"],
        [f"{ENGINE}1", "none", "0", "0", "0", "sleeps"],
    ]
    assert f"a prompt of 9 tokens: {ENGINE} (cost)" in drawn(router_table(answer), 200)


def test_the_index_is_shown_with_leases_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    leased = EngineLine(ENGINE, 3, 7, "r0", 4.25, 1, "ready", 2, "native")
    free = EngineLine(f"{ENGINE}0", 4, 8, "", 0.0, 0, "unknown", 0, "unknown")
    _print_scope(ScopeLine("m", 12_345, 96.4, "ab", 16, 2, 0, [leased, free], {"r0": 1, "r1": 0}))
    diffs = [EngineDiff(ENGINE, "ready", "r0", resident=1000, wrong=2, missing=3)]
    diffs.append(EngineDiff(f"{ENGINE}0", "unknown", gone=True))
    _print_diffs(diffs)
    told = capsys.readouterr().out
    assert [line.split() for line in told.splitlines() if line.startswith(ENGINE)] == [
        [ENGINE, "3", "7", "r0", "4.2", "s", "ready", "(-2)", "native"],
        [f"{ENGINE}0", "4", "8", "free", "unknown", "unknown"],
        [ENGINE, "1,000", "2", "3", "ready", "r0", "(stale)"],
        [f"{ENGINE}0", "0", "0", "0", "unknown", "gone"],
    ]
    assert "m: 12,345 blocks, 96 bytes per block" in told
    assert "replicas: r0 (1), r1 (0)" in told


def test_verify_shortens_names_on_a_narrow_terminal_only() -> None:
    path = max(TRACES.glob("*.jsonl.gz"), key=lambda path: len(path.name))
    results = [verify_trace(path)]
    narrow = drawn(verify_table(results, narrow=True), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" in narrow
    assert results[0].trace in drawn(verify_table(results, narrow=False), WIDTH_PIPED)


def test_without_a_width_nothing_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output_console().width == WIDTH_PIPED
    monkeypatch.setenv("COLUMNS", "80")
    assert output_console().width == 80


def test_the_demo_says_why_round_robin_has_fewer_requests() -> None:
    ours, theirs = Tally(requests=20), Tally(requests=17)
    assert "round-robin (computed 5 s behind) has yet to answer 3 of these requests" in _compare(ours, theirs)
    assert "has yet to" not in _compare(ours, ours)
    assert all(len(line) <= 80 for line in _compare(ours, theirs).splitlines())


def test_an_engine_named_to_index_verify_keeps_the_addresses_that_the_index_knows() -> None:
    known = EngineAddress(
        ENGINE, events="tcp://10.20.30.40:5557", replay="tcp://10.20.30.40:5558", topic="kv"
    )
    assert addressed(known, EngineAddress(ENGINE)) == known
    moved = addressed(known, EngineAddress(ENGINE, events="tcp://127.0.0.1:5557"))
    assert (moved.events, moved.replay, moved.topic) == ("tcp://127.0.0.1:5557", known.replay, "kv")
    assert addressed(known, None) == known
    assert addressed(None, EngineAddress(ENGINE)) == EngineAddress(ENGINE)
