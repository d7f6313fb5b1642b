"""Tables are whole in 80 columns, and one row is one line where no width is set."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.simulation.demo.table import Tally, _compare
from kvatlas.router.tools.capture_writer import CaptureWriter
from kvatlas.router.tools.event_order import RecordStats
from kvatlas.router.tools.index import addressed
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
        for figure in figures:
            assert figure in text


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
