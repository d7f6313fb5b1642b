"""Formats that ``kvatlas simulate`` reads: any block size, rows of sessions or without ids, session files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.simulation.requests import Request, WorkloadError, block_hashes
from kvatlas.router.simulation.traces import UnitRange, read
from kvatlas.router.simulation.workload import WorkloadSource
from tests.router.simulation.support import line, write_lines
from tests.router.simulation.test_simulate_command import call


def requests_of(path: Path | str) -> list[Request]:
    return WorkloadSource(name=str(path)).draws([0])[0]


def ids(tokens: int, unit: int, *, tail: bool = True) -> list[int]:
    return list(range(-(-tokens // unit) if tail else tokens // unit))


@given(st.integers(1, 2000), st.lists(st.integers(1, 100_000), min_size=1, max_size=20), st.booleans())
def test_the_unit_is_among_those_that_the_rows_allow(unit: int, lengths: list[int], tail: bool) -> None:
    found = UnitRange()
    for tokens in lengths:
        count = len(ids(tokens, unit, tail=tail))
        found = found.with_tail(tokens, count) if tail else found.whole_only(tokens, count)
    assert found.low <= unit <= found.high
    for each in {found.low, found.best, found.high}:
        assert [len(ids(one, each, tail=tail)) for one in lengths] == [
            len(ids(one, unit, tail=tail)) for one in lengths
        ]


@pytest.mark.parametrize("unit", [16, 48, 64, 512, 1024])
@pytest.mark.parametrize("tail", [True, False])
def test_traces_of_any_block_size(tmp_path: Path, unit: int, tail: bool) -> None:
    lengths = (521, 20_001, 7000)
    lines = [
        line(timestamp=1000 * at, input_length=tokens, hash_ids=ids(tokens, unit, tail=tail))
        for at, tokens in enumerate(lengths)
    ]
    found = read(write_lines(tmp_path / "trace.jsonl", *lines))
    assert {one.unit_tokens for one in found} == {unit}
    assert [len(one.ids) for one in found] == [-(-tokens // unit) for tokens in lengths]
    if not tail:
        tails = [one.ids[-1] for one in found]
        assert len(set(tails)) == 3, "what is left of a prompt is its own where no id tells"
    first = requests_of(tmp_path / "trace.jsonl")[0]
    assert len(block_hashes(first, unit)) == first.num_tokens // unit


def test_a_row_of_another_block_size_is_named(tmp_path: Path) -> None:
    lines = [line(input_length=9000, hash_ids=ids(9000, 16)), line(input_length=9000, hash_ids=ids(9000, 32))]
    with pytest.raises(WorkloadError, match=r":2: hash_ids: 282 ids .* one per 16 tokens, so 563, as in"):
        read(write_lines(tmp_path / "trace.jsonl", *lines))
    stated = line(block_size=64, input_length=9000, hash_ids=ids(9000, 16))
    with pytest.raises(WorkloadError, match=r":1: hash_ids: 563 ids .* expected one per 64 tokens"):
        read(write_lines(tmp_path / "trace.jsonl", stated))


def test_blocks_must_fit_the_traces_unit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", line(input_length=9000, hash_ids=ids(9000, 24)))
    with pytest.raises(ConfigError, match="block_size = 64; a workload identifies tokens in units of 24"):
        call(str(path), "--speed", "1", "--pool", "500")


def turn(session: Any, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"session_id": session, "input_length": tokens, "output_length": 40, **fields}


def test_rows_of_sessions_have_pauses_instead_of_times(tmp_path: Path) -> None:
    rows = [
        turn("a", 600, hash_ids=[1, 2]),
        turn("b", 600, hash_ids=[7, 8]),
        turn("a", 1200, hash_ids=[1, 3, 4], delay=2500),
        turn("a", 1800, hash_ids=[1, 3, 5, 6]),
    ]
    found = requests_of(write_lines(tmp_path / "rows.jsonl", *rows))
    first, other, second, third = found
    assert [one.at_s for one in found] == [0.0, pytest.approx(0.3), 2.5, 2.5]
    assert first.session == second.session == third.session != other.session
    assert second.follows is not None
    assert (second.follows.request, second.follows.think_s) == (0, 2.5)
    assert third.follows is not None
    assert (third.follows.request, third.follows.think_s) == (2, 0.0)
    assert first.ids == (1, 3), "the answer is the start of what the next turn sends"
    assert other.follows is None


def test_rows_of_sessions_with_times_keep_them(tmp_path: Path) -> None:
    rows = [
        turn(1, 600, hash_ids=[1, 2], timestamp=0),
        turn(1, 1200, hash_ids=[1, 3, 4], timestamp=7000),
    ]
    second = requests_of(write_lines(tmp_path / "rows.jsonl", *rows))[1]
    assert second.follows is not None
    assert (second.at_s, second.follows.gap_s, second.follows.think_s) == (7.0, 7.0, None)


def test_prompts_without_ids_are_of_their_own_but_for_the_next_turns_of_a_session(tmp_path: Path) -> None:
    alone = [{"timestamp": 1000 * at, "input_length": 500, "output_length": 9} for at in range(3)]
    found = requests_of(write_lines(tmp_path / "alone.jsonl", *alone))
    assert len({identifier for one in found for identifier in one.ids}) == sum(len(one.ids) for one in found)
    rows = [turn("a", 600), turn("a", 700, delay=1000), turn("a", 300, delay=1000)]
    first, longer, shorter = requests_of(write_lines(tmp_path / "rows.jsonl", *rows))
    shared = sum(a == b for a, b in zip(block_hashes(first, 64), block_hashes(longer, 64), strict=False))
    assert shared == 640 // 64, "the prompt before and its answer"
    assert not set(shorter.ids) & set(longer.ids)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Timestamp,Model,Request tokens,Response tokens"], "found 'Timestamp,Model,Request tokens"),
        (
            ['{"session_id": "a", "turns": [{"text": "hi"}]}'],
            "fields session_id, turns; expected input_",
        ),
        (['{"prompt": "hi"}'], ":1: not a request of a known format: fields prompt; expected"),
        ([json.dumps(turn(True, 600))], "session_id = True: expected a text or a whole number"),
        ([json.dumps(turn("a", 600, delay=-1))], "delay = -1: expected ms"),
        ([json.dumps(line()), json.dumps({**line(), "hash_ids": None})], ":2: hash_ids: expected a list"),
        ([json.dumps(line()), json.dumps(turn("a", 600))], ":2: hash_ids: none here, unlike the first line"),
        (
            [json.dumps(turn("a", 600, timestamp=9000)), json.dumps(turn("a", 700, timestamp=0))],
            ":2: timestamp: before that of the session's previous turn",
        ),
    ],
)
def test_anything_else_is_named(tmp_path: Path, lines: Sequence[str], said: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(WorkloadError, match=said.replace("[", r"\[")):
        requests_of(path)


def entry(t: float, tokens: int, first: int = 0, **fields: Any) -> dict[str, Any]:
    found = {
        "t": t,
        "type": "n",
        "in": tokens,
        "out": 64,
        "hash_ids": [first + i for i in range(tokens // 64)],
    }
    return {**found, **fields}


def session(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "block_size": 64,
        "tool_tokens": 640,
        "system_tokens": 320,
        "requests": entries,
        **fields,
    }


def write_sessions(folder: Path, *sessions: dict[str, Any]) -> list[Path]:
    paths = []
    for number, one in enumerate(sessions):
        paths.append(folder / f"trace_{number}.json.gz")
        paths[-1].write_bytes(gzip.compress(json.dumps(one, indent=1).encode()))
    return paths


def common_blocks(one: Request, other: Request) -> int:
    pairs = zip(block_hashes(one, 64), block_hashes(other, 64), strict=False)
    return sum(a == b for a, b in pairs)


def test_session_files_of_a_folder_are_joined(tmp_path: Path) -> None:
    write_sessions(
        tmp_path,
        session(
            entry(0.0, 1300, api_time=2.0),
            entry(10.0, 1500, think_time=7.0),
            entry(20.0, 1700, api_time=1.0),
            entry(30.0, 1900),
        ),
        session(entry(0.0, 1300, first=500), entry(5.0, 1500, first=500)),
        session(entry(0.0, 1300), tool_tokens=704),
    )
    found = requests_of(tmp_path)
    by_session: dict[int, list[Request]] = {}
    for one in found:
        by_session.setdefault(one.session, []).append(one)
    first, second, third = by_session.values()
    assert [one.at_s for one in first] == [0.0, 10.0, 20.0, 30.0]
    assert [one.at_s for one in second] == [10.0, 15.0], "starts are spread over the longest session's time"
    assert common_blocks(first[0], first[1]) >= 1300 // 64
    assert common_blocks(first[0], second[0]) == 960 // 64, "tools and system prompt of equal length"
    assert common_blocks(first[0], third[0]) == 0, "other tools"
    thinks = [one.follows.think_s for one in first if one.follows is not None]
    assert thinks == [7.0, None, 9.0]
    several = ",".join(map(str, sorted(tmp_path.iterdir())))
    assert requests_of(several) == found


@pytest.mark.parametrize("shift_s", [0.0, 12.0])
def test_sub_agents_start_beside_their_parent(tmp_path: Path, shift_s: float) -> None:
    """Their own times count from the session's start, or from where they begin."""
    inside = [entry(12.0 - shift_s, 700, first=900), entry(14.0 - shift_s, 900, first=900)]
    agent = {"t": 12.0, "type": "subagent", "requests": inside}
    (path,) = write_sessions(tmp_path, session(entry(0.0, 1300), entry(10.0, 1500), agent, entry(40.0, 1700)))
    found = requests_of(path)
    assert [one.at_s for one in found] == [0.0, 10.0, 12.0, 14.0, 40.0]
    parent, child, grown, last = found[1:]
    assert child.follows is not None
    assert (child.follows.request, child.follows.gap_s, child.follows.answered) == (1, 2.0, False)
    assert grown.follows is not None
    assert grown.follows.request == 2
    assert last.follows is not None
    assert last.follows.request == 1, "a turn of the parent follows the parent's"
    assert parent.session == last.session != child.session == grown.session


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "a JSON list; expected a session"),
        ('{"a": 1}', "fields a; expected a session"),
        ("Timestamp,Tokens", "not one JSON object: .* expected a session"),
        (json.dumps(session(entry(0.0, 1300), block_size=None)), "block_size = None"),
        (
            json.dumps(session(entry(0.0, 1300, hash_ids=[1]))),
            r"requests\[0\]: hash_ids: 1 ids for in",
        ),
        (json.dumps(session({"t": "now", "in": 5})), r"requests\[0\]: t = 'now': expected seconds"),
        (json.dumps(session({"t": 0, "type": "subagent"})), r"requests\[0\]: requests: expected a list"),
    ],
)
def test_bad_session_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=f"{path}.*{said}"):
        requests_of(path)


def test_session_files_must_have_one_block_size_and_folders_some_files(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no session files in it"):
        requests_of(tmp_path)
    write_sessions(tmp_path, session(entry(0.0, 1280)), session(entry(0.0, 1280), block_size=32))
    with pytest.raises(WorkloadError, match="block_size = 32: the files before have 64"):
        requests_of(tmp_path)
    with pytest.raises(WorkloadError, match=r"only session files .* can be several"):
        requests_of(f"{write_lines(tmp_path / 'a.jsonl', line())},{tmp_path / 'b.jsonl'}")


def test_lines_in_a_file_called_json_are_lines(tmp_path: Path) -> None:
    assert len(requests_of(write_lines(tmp_path / "trace.json", line(), line()))) == 2


def test_sessions_run_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sessions(tmp_path, session(entry(0.0, 1300), entry(10.0, 1500)), session(entry(0.0, 1300)))
    words = [str(tmp_path), "--closed", "--speed", "1", "--pool", "500", "--policy", "kvatlas,rules"]
    assert call(*words, "--processes", "1") == 0
    out = capsys.readouterr().out
    assert "closed sessions" in out
    assert "answer s" in out
    assert "total s" in out
