"""``kvatlas replay``: the serving index's numbers, always the same, and the hits that the engine reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.publisher.block_hash import NO_EXTRAS
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockHash
from kvatlas.router.feeds.frames import parse_live
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.capture import TRACE_SOURCE, read_capture
from kvatlas.router.tools.replay import ReplayOptions, facts_of, run_replay
from kvatlas.router.tools.replay_player import CountingIndex, Player
from kvatlas.router.tools.trace_file import read_trace
from kvatlas.router.tools.trace_verification import ProbePrompt
from tests.support.captures import BLOCK, CAPTURES, CLEARED, removed, stored, tokens, truth, write
from tests.support.examples import examples
from tests.support.paths import TRACES
from tests.vllm.make_captures import RESET_AFTER

PROMPT = tokens(6 * BLOCK)
PLANES = (Plane("GPU", 0), Plane("GPU", 1), Plane("CPU", 0))
OPERATIONS = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(PLANES), st.lists(st.integers(1, 6), max_size=4)),
    st.tuples(st.just("remove"), st.sampled_from(PLANES), st.lists(st.integers(1, 6), max_size=4)),
    st.tuples(st.just("set"), st.sampled_from(PLANES), st.tuples(st.integers(1, 6), st.integers(0, 3))),
    st.tuples(st.just("clear"), st.sampled_from(("GPU", "CPU")), st.none()),
    st.tuples(st.just("forget"), st.none(), st.none()),
)


def perform(index: MemoryIndex, operation: tuple[str, Any, Any]) -> None:
    name, where, what = operation
    if name == "set":
        index.set_copies("e", where, BlockHash(what[0]), what[1])
    elif name == "clear":
        index.clear("e", where)
    elif name == "forget":
        index.forget("e")
    else:
        getattr(index, name)("e", where, [BlockHash(n) for n in what])


@settings(max_examples=examples(200))
@given(st.lists(OPERATIONS, max_size=30))
def test_the_counts_agree_with_the_serving_index(operations: list[tuple[str, Any, Any]]) -> None:
    counting, plain = CountingIndex(), MemoryIndex()
    for operation in operations:
        perform(counting, operation)
        perform(plain, operation)
    for plane in PLANES:
        counts = counting.counts.get(("e", plane))
        held = counting.held("e", plane)
        assert len(held) == plain.copies("e", plane) == counting.copies("e", plane)
        if counts is not None:
            assert (counts.blocks, counts.copies) == (len(held), sum(held.values()))
            assert counts.copies == counts.stored - counts.removed - counts.cleared
    assert counting.stats().extra_copies == plain.stats().extra_copies
    assert counting.check_integrity() == []


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_hits_are_what_the_engine_reported_at_every_seq(path: Path) -> None:
    """All but the first after the cache reset: engines publish the reset with that prompt's own blocks."""
    player = Player(facts_of([path]))
    for frame in read_capture([path]):
        player.play(frame)
        player.fleet.engine(frame.source).finish_detection()
    (source,) = [run.source for run in player.runs]
    player.fleet.forget(source)
    asked = [
        entry
        for number, entry in enumerate(truth(path))
        if entry["after_seq"] is not None and number != RESET_AFTER
    ]
    assert len(asked) > 30
    assert sum(entry["cached_tokens"] > 0 for entry in asked) > 5
    frames = iter(read_capture([path]))
    seq = -1
    for entry in asked:
        while seq < entry["after_seq"]:
            frame = next(frames)
            player.fleet.engine(source).apply(decode_batch(frame.payload))
            seq = frame.seq
        found = player.fleet.predict(ProbePrompt(entry["token_ids"], NO_EXTRAS), [source])
        assert found[source].hit_tokens == entry["cached_tokens"]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_committed_captures_decode_with_every_reader(path: Path) -> None:
    fleet = FleetResidency(ModelFacts())
    player = Player(ModelFacts())
    for number, frame in enumerate(read_capture([path])):
        batch = decode_batch(frame.payload)
        assert batch.rejected == []
        wire = parse_live([frame.topic.encode(), frame.seq.to_bytes(8, "big"), frame.payload])
        assert (wire.seq, wire.fault, wire.batch) == (number, None, batch)
        fleet.apply(frame.source, batch)
        player.play(frame)
    (run,) = player.runs
    assert (run.gaps, run.restarts, run.clears, run.undecodable) == (0, 0, 1, 0)
    for plane in player.index.seen_planes(run.source):
        assert player.index.counts[run.source, plane].blocks == fleet.index.copies(run.source, plane) > 0
        assert player.index.counts[run.source, plane].unknown_removals == 0
    assert sum(counts.removed for counts in player.index.counts.values()) > 0


@pytest.mark.parametrize("path", TRACES[::6], ids=lambda path: path.name)
def test_recorded_counts_are_reproduced(path: Path) -> None:
    player = Player(facts_of([path]))
    frames = {frame.line: frame for frame in read_capture([path])}
    states = 0
    for number, line in read_trace(path):
        if number in frames:
            player.play(frames[number])
        if line.state is not None:
            held = [player.index.copies(TRACE_SOURCE, Plane("GPU", g)) for g in range(len(line.state.keys))]
            assert held == line.state.keys
            states += 1
    assert states or "live" in path.name


def run(options: ReplayOptions, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    status = run_replay(options, as_json=True)
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
def test_equal_captures_give_equal_output(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert run_replay(ReplayOptions((path,), samples=4), as_json=True) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert len(json.loads(said[0])["samples"]) == 4
    run_replay(ReplayOptions((path,)), as_json=False)
    assert "residency over time" in capsys.readouterr().out


def test_to_seq_ends_before_what_comes_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)]), (1, [removed(PROMPT, 5)]), (2, [])])
    for to_seq, blocks in ((0, 6), (1, 5), (None, 5)):
        _, said = run(ReplayOptions((path,), to_seq=to_seq, samples=1), capsys)
        assert said["samples"][0]["planes"][0]["blocks"] == blocks


def test_gaps_late_frames_duplicates_and_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "c.jsonl",
        [(0, [stored(PROMPT)]), (1, [removed(PROMPT, 5)]), (4, []), (5, [CLEARED]), (6, [stored(PROMPT)])],
    )
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[2], *lines[3:], lines[1]]))
    write(path, [(3, [])])  # an older batch that was missing: late
    status, said = run(ReplayOptions((path,), samples=1), capsys)
    (stream,) = said["sources"]
    assert status == 0
    assert (stream["gaps"], stream["missing_batches"]) == (1, 2)
    assert (stream["duplicates"], stream["late"], stream["restarts"], stream["clears"]) == (2, 1, 0, 1)
    (plane,) = said["samples"][0]["planes"]
    assert (plane["blocks"], plane["stored"], plane["removed"], plane["cleared"]) == (6, 12, 1, 5)


def test_a_known_seq_with_other_content_is_another_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the router's feed, whose order this is: what the old process held is gone, and what is missing
    of the new one is counted."""
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)]), (1, []), (2, [])])
    write(path, [(1, [stored(PROMPT[:BLOCK])])])
    _, said = run(ReplayOptions((path,), samples=1), capsys)
    (stream,) = said["sources"]
    assert (stream["restarts"], stream["late"], stream["missing_batches"], stream["last_seq"]) == (1, 0, 1, 1)
    assert said["samples"][0]["planes"][0]["blocks"] == 1
