"""``kvatlas replay``: the serving index's numbers, always the same, and the same bytes on the wire again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from publisher.event_decoder import decode_batch
from publisher.events import BlockHash
from publisher.zmq_publisher import ZmqPublisher
from router.feeds.base import parse_live
from router.index.base import Plane
from router.index.learn.layout import ModelFacts
from router.index.memory import MemoryIndex
from router.index.model import FleetResidency
from router.tools.capture import TRACE_SOURCE, CapturedFrame, CaptureLine, read_capture
from router.tools.record import RecordSource, SourceRecorder
from router.tools.replay import ReplayOptions, facts_of, run_replay
from router.tools.replay_player import (
    EventPosition,
    JournaledIndex,
    Player,
    PublishEndpoint,
    paced,
    publish_frame,
    publishers,
    topics_of,
)
from router.tools.trace_verification import read_trace
from tests.support.captures import BLOCK, CAPTURES, CLEARED, ENGINE, removed, stored, tokens, write
from tests.support.examples import examples
from tests.support.paths import TRACES
from tests.support.waiting import until

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


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_the_journal_agrees_with_the_serving_index(operations: list[tuple[str, Any, Any]]) -> None:
    ledger, plain = JournaledIndex(), MemoryIndex()
    for number, operation in enumerate(operations):
        ledger.at = EventPosition(number, 0)
        perform(ledger, operation)
        perform(plain, operation)
    for plane in PLANES:
        counts = ledger.counts.get(("e", plane))
        held = ledger.held("e", plane)
        assert len(held) == plain.copies("e", plane) == ledger.copies("e", plane)
        if counts is not None:
            assert (counts.blocks, counts.copies) == (len(held), sum(held.values()))
            assert counts.copies == counts.stored - counts.removed - counts.cleared
    assert ledger.stats().extra_copies == plain.stats().extra_copies
    assert ledger.check_integrity() == []


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
    assert (run.gaps, run.restarts, run.clears, run.undecodable, run.redacted) == (0, 0, 1, 0, False)
    for plane in player.ledger.seen_planes(run.source):
        assert player.ledger.counts[run.source, plane].blocks == fleet.index.copies(run.source, plane) > 0
        assert player.ledger.counts[run.source, plane].unknown_removals == 0
    assert sum(counts.removed for counts in player.ledger.counts.values()) > 0


@pytest.mark.parametrize("path", TRACES[::6], ids=lambda path: path.name)
def test_recorded_counts_are_reproduced(path: Path) -> None:
    player = Player(facts_of([path]))
    frames = {frame.line: frame for frame in read_capture([path])}
    states = 0
    for number, line in read_trace(path):
        if number in frames:
            player.play(frames[number])
        if line.state is not None:
            held = [player.ledger.copies(TRACE_SOURCE, Plane("GPU", g)) for g in range(len(line.state.keys))]
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


def test_gaps_late_frames_duplicates_and_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "c.jsonl",
        [(0, [stored(PROMPT)]), (1, [removed(PROMPT, 5)]), (4, []), (5, [CLEARED]), (6, [stored(PROMPT)])],
    )
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[2], *lines[3:], lines[1]]))
    write(path, [(0, [])])  # an older batch under a known seq: late
    status, said = run(ReplayOptions((path,), samples=1), capsys)
    (stream,) = said["sources"]
    assert status == 0
    assert (stream["gaps"], stream["missing_batches"]) == (1, 2)
    assert (stream["duplicates"], stream["late"], stream["restarts"], stream["clears"]) == (2, 1, 0, 1)
    (plane,) = said["samples"][0]["planes"]
    assert (plane["blocks"], plane["stored"], plane["removed"], plane["cleared"]) == (6, 12, 1, 5)


def test_to_seq_and_diff_of_two_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [stored(PROMPT)]), (1, [removed(PROMPT, 5)]), (2, [])])
    _, said = run(ReplayOptions((path,), to_seq=0, samples=1), capsys)
    assert said["samples"][0]["planes"][0]["blocks"] == 6
    status, said = run(ReplayOptions((path,), diff_seq=0), capsys)
    assert (status, said["same"]) == (1, False)
    (plane,) = said["planes"]
    assert (plane["same"], plane["only_a"], len(plane["only_b"])) == (5, [], 1)
    assert run(ReplayOptions((path,), to_seq=2, diff_seq=1), capsys)[0] == 0


def test_diff_of_two_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", [(0, [stored(PROMPT), stored(PROMPT)])])
    b = write(tmp_path / "b.jsonl", [(0, [stored(PROMPT)])], source="http://other:1")
    assert run(ReplayOptions((a,), diff=a), capsys)[0] == 0
    status, said = run(ReplayOptions((a,), diff=b), capsys)
    assert (status, said["planes"][0]["copies"], said["planes"][0]["same"]) == (1, 6, 6)
    assert run_replay(ReplayOptions((a,), diff=b), as_json=False) == 1


class Kept:
    """A sink that keeps what was recorded."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str, int, bytes]] = []

    def put(self, frames: list[CaptureLine]) -> int:
        self.frames += [(frame.source, frame.topic, frame.seq, frame.payload) for frame in frames]
        return len(frames)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name)
async def test_published_again_it_is_recorded_byte_by_byte(path: Path) -> None:
    frames = list(read_capture([path]))
    kept = Kept()
    context = zmq.Context()
    name = frames[0].source
    endpoint = {name: PublishEndpoint("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")}
    with publishers(endpoint, topics_of(frames), buffer_steps=len(frames), context=context) as opened:
        publisher: ZmqPublisher = opened[name]
        source = RecordSource(name, publisher.endpoint, publisher.replay_endpoint, frames[0].topic)
        early = list(frames[: len(frames) // 2])
        async for frame in paced(iter(early), 0.0):
            publish_frame(publisher, frame)
        recorder = SourceRecorder(source, kept, context=context)
        task = asyncio.create_task(recorder.run())
        await until(lambda: recorder.stats.connected and len(kept.frames) >= len(early), "history")
        for frame in frames[len(early) :]:
            publish_frame(publisher, frame)
            await asyncio.sleep(0)
        await until(lambda: len(kept.frames) >= len(frames), "all frames")
        recorder.finish()
        await task
        assert recorder.stats.history_frames >= len(early)
    context.term()
    assert kept.frames == [(f.source, f.topic, f.seq, f.payload) for f in frames]


async def test_a_restart_in_the_capture_is_a_restart_on_the_wire() -> None:
    kept = Kept()
    frames = [
        CapturedFrame(Path("x"), n, ENGINE, 0.0, "", seq, bytes([n])) for n, seq in enumerate([0, 1, 2, 0, 1])
    ]
    context = zmq.Context()
    endpoint = {ENGINE: PublishEndpoint("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")}
    with publishers(endpoint, {ENGINE: ""}, buffer_steps=9, context=context) as opened:
        publisher = opened[ENGINE]
        for frame in frames:
            publish_frame(publisher, frame)
        source = RecordSource(ENGINE, publisher.endpoint, publisher.replay_endpoint)
        recorder = SourceRecorder(source, kept, context=context)
        task = asyncio.create_task(recorder.run())
        await until(lambda: len(kept.frames) >= 2, "what the restarted engine published")
        recorder.finish()
        await task
    context.term()
    assert [(seq, payload) for _, _, seq, payload in kept.frames] == [(0, b"\x03"), (1, b"\x04")]


def test_publish_needs_an_address_per_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "c.jsonl", [(0, [])])
    write(path, [(0, [])], source="http://b:1")
    assert run_replay(ReplayOptions((path,), publish=("tcp://127.0.0.1:*",)), as_json=True) == 2
    assert "1 addresses for 2 engines (http://engine:8000, http://b:1)" in capsys.readouterr().err
    chosen = ReplayOptions((path,), publish=("tcp://127.0.0.1:*",), source="http://b:1", stay_s=0, speed=0)
    status, said = run(chosen, capsys)
    assert (status, [s["source"] for s in said["sources"]]) == (0, ["http://b:1"])
    assert msgspec.json.encode(said)
