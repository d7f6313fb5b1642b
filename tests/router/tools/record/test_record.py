"""``kvatlas record``: nothing lost between history and live, losses are reported, files stay readable."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import BlockStored, encode_batch, encode_tokens
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.tools.capture import read_capture
from kvatlas.router.tools.capture_writer import CaptureLine, CaptureWriter
from kvatlas.router.tools.record import RecordOptions, resolve, run_record
from kvatlas.router.tools.recorder import RecordSource, SourceRecorder
from kvatlas.router.tools.redaction import redact
from kvatlas.router.tools.replay import facts_of
from kvatlas.router.tools.replay_player import Player
from kvatlas.router.tools.trace_file import RecordingError
from tests.support.captures import BLOCK, CAPTURES, stored, tokens
from tests.support.examples import some
from tests.support.paths import ROOT, TRACES
from tests.support.waiting import until

ANY = "tcp://127.0.0.1:*"


class Kept:
    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.payloads: list[bytes] = []

    def put(self, frames: list[CaptureLine]) -> int:
        self.seqs += [frame.seq for frame in frames]
        self.payloads += [frame.payload for frame in frames]
        return len(frames)


class Stage:
    """A publisher and a recorder of it, on a context of their own."""

    def __init__(self, *, replay: bool, buffer_steps: int = 10_000) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.publisher = ZmqPublisher(
            ANY, replay_endpoint=ANY if replay else None, buffer_steps=buffer_steps, context=self.context
        )
        self.kept = Kept()
        source = RecordSource("engine", self.publisher.endpoint, self.publisher.replay_endpoint)
        self.recorder = SourceRecorder(source, self.kept, context=self.context)
        self.stats = self.recorder.stats

    def publish(self, *seqs: int) -> None:
        for seq in seqs:
            self.publisher.renumber(seq)
            self.publisher.publish_payload(b"%d" % seq)

    def miss(self, *seqs: int) -> None:
        """Batches that only the replay socket has."""
        for seq in seqs:
            self.publisher.renumber(seq + 1)
            self.publisher._ring.append((seq, b"%d" % seq))

    async def __aenter__(self) -> Stage:
        self.publisher.start()
        self._task = asyncio.create_task(self.recorder.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.recorder.finish()
        await self._task
        self.publisher.close()
        self.context.term()

    async def live(self) -> None:
        """The subscription has arrived at the publisher, which ``connected`` and a batch, that may come with
        the history, do not show: a message that is no batch comes through."""
        no_batch = (b"", b"no batch")
        await until(
            lambda: self.stats.malformed,
            meanwhile=lambda: self.publisher._pub.send_multipart(no_batch, zmq.NOBLOCK),
        )

    async def subscribed(self) -> None:
        """A live batch comes through."""
        await self.live()
        self.publisher.publish_payload(b"first")
        await until(lambda: b"first" in self.kept.payloads)


async def test_history_then_live_without_a_seam() -> None:
    stage = Stage(replay=True)
    stage.publish(*range(500))
    async with stage:
        await stage.live()
        stage.publish(*range(500, 700))
        await until(lambda: stage.stats.last_seq == 699)
    assert stage.kept.seqs == list(range(700))
    assert stage.kept.payloads == [b"%d" % n for n in range(700)]
    assert (stage.stats.lost_frames, stage.stats.restarts) == (0, 0)
    assert stage.stats.history_frames >= 500


async def test_a_gap_is_asked_for_again() -> None:
    stage = Stage(replay=True)
    async with stage:
        await stage.subscribed()
        stage.publish(1)
        stage.miss(2, 3)
        stage.publish(4, 5)
        await until(lambda: stage.stats.last_seq == 5)
    assert stage.kept.seqs == [0, 1, 2, 3, 4, 5]
    assert (stage.stats.gaps, stage.stats.lost_frames, stage.stats.restarts) == (1, 0, 0)


@pytest.mark.parametrize("replay", [True, False])
async def test_batches_that_cannot_be_recovered_are_counted(replay: bool) -> None:
    stage = Stage(replay=replay)
    async with stage:
        await stage.subscribed() if replay else await until(lambda: stage.stats.connected)
        await until(lambda: stage.kept.seqs, meanwhile=lambda: stage.publish(1))
        stage.publish(7, 8)
        await until(lambda: stage.stats.last_seq == 8)
    assert stage.kept.seqs[-2:] == [7, 8]
    assert (stage.stats.gaps, stage.stats.lost_frames, stage.stats.restarts) == (1, 6 if replay else 5, 0)


async def test_history_that_rolled_past_is_no_loss() -> None:
    stage = Stage(replay=True, buffer_steps=3)
    stage.publish(*range(9))
    async with stage:
        await until(lambda: stage.stats.last_seq == 8)
    assert stage.kept.seqs == [6, 7, 8]
    assert (stage.stats.first_seq, stage.stats.lost_frames) == (6, 0)


async def test_history_that_begins_after_what_was_held() -> None:
    """The ring has rolled past the frame that showed the gap: it is written first, nothing restarts."""

    stage = Stage(replay=True, buffer_steps=2)
    async with stage:
        await stage.subscribed()
        stage.publish(1)
        await until(lambda: stage.stats.last_seq == 1)
        stage.publish(5, 6, 7, 8, 9)  # 2..4 are lost, the ring holds 8 and 9
        await until(lambda: stage.stats.last_seq == 9)
    assert stage.kept.seqs == [0, 1, 5, 6, 7, 8, 9]
    assert (stage.stats.gaps, stage.stats.lost_frames, stage.stats.restarts) == (1, 3, 0)


async def test_a_restarted_engine_is_recorded_from_its_first_batch() -> None:
    stage = Stage(replay=True)
    stage.publish(0, 1, 2)
    async with stage:
        await stage.live()
        await until(lambda: stage.stats.last_seq == 2)
        stage.publish(3)
        await until(lambda: stage.stats.last_seq == 3)
        stage.publisher.renumber(0)
        stage.publisher._ring.append((0, b"again 0"))
        stage.publisher.renumber(1)
        stage.publisher.publish_payload(b"again 1")
        await until(lambda: b"again 1" in stage.kept.payloads)
    assert stage.kept.seqs == [0, 1, 2, 3, 0, 1]
    assert stage.kept.payloads[-2:] == [b"again 0", b"again 1"]
    assert (stage.stats.restarts, stage.stats.lost_frames) == (1, 0)


@pytest.mark.parametrize("first", [0, 5])
async def test_a_silent_replay_socket_ends_in_live_frames(first: int) -> None:
    """A stream that is heard from its first frame needs no history, so nothing need have failed there."""
    stage = Stage(replay=False)
    with stage.context.socket(zmq.ROUTER) as silent:
        silent.bind(ANY)
        endpoint = silent.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        source = RecordSource("engine", stage.publisher.endpoint, endpoint)
        settings = FeedSettings(replay_timeout_s=0.05)
        stage.recorder = SourceRecorder(source, stage.kept, settings=settings, context=stage.context)
        stage.stats = stage.recorder.stats
        stage.publisher.renumber(first)
        async with stage:
            await stage.subscribed()
            stage.publish(first + 1, first + 2)
            await until(lambda: stage.stats.last_seq == first + 2)
            silent.close(linger=0)
    assert stage.kept.seqs == [first, first + 1, first + 2]
    assert stage.stats.replay_failures >= (first > 0)


def fill(writer: CaptureWriter, count: int, size: int = 4000, *, settle: bool = False) -> None:
    for seq in range(count):
        writer.put([CaptureLine("e", 1.0, "", seq, os.urandom(size))])
        while settle and writer._queued_bytes:
            pass
    writer.close()


def test_written_captures_are_readable(tmp_path: Path) -> None:
    for name in ("c.jsonl", "c.jsonl.gz"):
        writer = CaptureWriter(tmp_path / name)
        payloads = [os.urandom(n % 50) for n in range(300)]
        for seq, payload in enumerate(payloads):
            writer.put([CaptureLine("http://e:1", 5.25, "kv", seq, payload)])
        writer.close()
        frames = list(read_capture([tmp_path / name]))
        assert [frame.payload for frame in frames] == payloads
        assert {(f.source, f.recv_ts, f.topic) for f in frames} == {("http://e:1", 5.25, "kv")}
    first = json.loads((tmp_path / "c.jsonl").read_bytes().splitlines()[0])
    assert list(first) == ["source", "recv_ts", "topic", "seq", "payload_b64"]


def test_rotation_keeps_the_newest_pieces_below_the_limit(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c.jsonl.gz", rotate_bytes=1 << 20, total_bytes_max=3 << 20)
    fill(writer, 1500)
    pieces = sorted(tmp_path.iterdir())
    assert pieces == list(writer.pieces)
    assert writer.stats.deleted_files >= 1
    assert sum(piece.stat().st_size for piece in pieces) <= 3 << 20
    assert all(piece.stat().st_size <= 1 << 20 for piece in pieces)
    seqs = [frame.seq for frame in read_capture(pieces)]
    assert seqs == list(range(seqs[0], 1500))


def test_a_single_file_ends_at_the_limit(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c.jsonl.gz", total_bytes_max=2 << 20)
    fill(writer, 2000)
    assert writer.ended
    assert writer.stats.full
    assert (tmp_path / "c.jsonl.gz").stat().st_size <= 2 << 20
    assert [f.seq for f in read_capture([tmp_path / "c.jsonl.gz"])] == list(range(writer.stats.frames))


def test_an_overflowing_queue_is_counted(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c.jsonl.gz", queue_bytes_max=20_000)
    with writer._changed:  # the writer's thread cannot run
        frames = [CaptureLine("e", 1.0, "", seq, bytes(4000)) for seq in range(6)]
        assert (writer.put(frames[:1]), writer.put(frames[1:]), writer.put(frames)) == (1, 3, 0)
    writer.close()
    assert (writer.stats.frames, writer.stats.overflowed_frames) == (4, 8)
    assert [frame.seq for frame in read_capture([tmp_path / "c.jsonl.gz"])] == [0, 1, 2, 3]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "c.jsonl.gz")
    writer._file.close()
    fill(writer, 10)
    assert "closed file" in writer.stats.failure
    assert writer.ended


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl.gz").write_bytes(b"precious")
    with pytest.raises(RecordingError, match="exists already"):
        CaptureWriter(tmp_path / "c.jsonl.gz")
    with pytest.raises(RecordingError, match="ends in"):
        CaptureWriter(tmp_path / "c.txt")
    with pytest.raises(RecordingError, match="No such file"):
        CaptureWriter(tmp_path / "none" / "c.jsonl")


@pytest.mark.parametrize("path", some([*TRACES[::4], *CAPTURES], 5), ids=lambda path: path.name)
def test_redaction_keeps_residency_and_takes_every_token(path: Path) -> None:
    plain, blank = Player(facts_of([path])), Player(facts_of([path]))
    for frame in read_capture([path]):
        payload = redact(frame.payload)
        assert payload is not None
        plain.play(frame)
        blank.play(frame._replace(payload=payload))
        before, after = decode_batch(frame.payload), decode_batch(payload)
        assert len(before.events) == len(after.events)
        for old, new in zip(before.events, after.events, strict=True):
            if isinstance(old, BlockStored) and isinstance(new, BlockStored):
                assert new.tokens() == [0] * old.num_tokens()
                assert (new.block_hashes, new.parent_block_hash) == (old.block_hashes, old.parent_block_hash)
            else:
                assert old == new
    if "report_full" not in path.name:  # recognising re-reports needs the tokens
        assert plain.index.counts == blank.index.counts


def test_salts_go_and_adapters_stay() -> None:
    keys = [["lora-a", "secret"], [["image-hash", 3]], None]
    event = BlockStored([1, 2, 3], None, encode_tokens([5] * 48), BLOCK, 1, "GPU", "lora-a", keys, 0)
    payload = redact(encode_batch(1.0, [event]))
    assert payload is not None
    assert b"secret" not in payload
    (found,) = decode_batch(payload).events
    assert isinstance(found, BlockStored)
    assert found.extra_keys == [["lora-a", "redacted"], [["image-hash", 3]], None]


def test_of_an_event_of_an_unknown_type_only_the_type_stays() -> None:
    encode = msgspec.msgpack.encode
    for event in ({"type": "New", "token_ids": [5], "note": "secret"}, ["New", [5], "secret"]):
        payload = redact(encode([1.0, [event, {"type": "AllBlocksCleared"}], 0]))
        assert payload is not None
        assert msgspec.msgpack.decode(payload)[1] == [
            {"type": "New"} if isinstance(event, dict) else ["New"],
            {"type": "AllBlocksCleared"},
        ]


def test_a_salt_in_a_field_goes() -> None:
    event = BlockStored([1], None, encode_tokens([5] * BLOCK), BLOCK, cache_salt="secret")
    payload = redact(encode_batch(1.0, [event]))
    assert payload is not None
    assert b"secret" not in payload
    (found,) = decode_batch(payload).events
    assert isinstance(found, BlockStored)
    assert found.cache_salt == "redacted"


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01\x91\x81\xa4type\x07\x00", b"\x93\x01\x91\x05\x00"]
)
def test_frames_that_cannot_be_redacted_are_not_written(payload: bytes, tmp_path: Path) -> None:
    assert redact(payload) is None
    writer = CaptureWriter(tmp_path / "c.jsonl", redacted=True)
    writer.put([CaptureLine("e", 1.0, "", 0, payload)])
    writer.close()
    assert writer.stats.unredactable_frames == 1
    assert [frame.payload for frame in read_capture([tmp_path / "c.jsonl"])] == [b""]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("events=nonsense", "not a tcp:// or ipc:// address"),
        ("events=tcp://h:1,what=1", "'what=1' is not one of"),
        ("replay=tcp://h:1", "events= is missing"),
        ("http://127.0.0.1:9", "give events=tcp://.. too"),
        ("nonsense", "expected http://HOST:PORT"),
    ],
)
def test_a_bad_engine_is_refused(engine: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve([engine])


def test_bad_options_end_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = "events=tcp://127.0.0.1:9"
    for engines, options, told in (
        ([], RecordOptions(tmp_path / "a.jsonl"), "no engine"),
        ([good, good], RecordOptions(tmp_path / "a.jsonl"), "named twice"),
        ([good], RecordOptions(tmp_path / "a.jsonl", seconds=-1), "--seconds: -1"),
        ([good], RecordOptions(tmp_path / "a.txt"), "ends in .jsonl"),
        (["events=tcp://:x"], RecordOptions(tmp_path / "a.jsonl", seconds=1), "invalid address"),
    ):
        assert run_record(engines, options, as_json=True) == 2
        assert told in capsys.readouterr().err


def test_an_engine_that_is_not_reached_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RecordOptions(tmp_path / "a.jsonl", seconds=0.2)
    assert run_record(["events=tcp://127.0.0.1:9"], options, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["complete"], said["sources"][0]["connected"]) == (False, False)
    table = RecordOptions(tmp_path / "b.jsonl", seconds=0.2, redact=True)
    assert run_record(["events=tcp://127.0.0.1:9"], table, as_json=False) == 1
    out = capsys.readouterr().out
    assert "0 frames in" in out
    assert "--hash-scheme" in out


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_close_the_file(number: int, tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, context=context)
    publisher.start()
    for _ in range(50):
        publisher.publish([stored(tokens(3 * BLOCK))])
    path = tmp_path / "c.jsonl.gz"
    engine = f"events={publisher.endpoint},replay={publisher.replay_endpoint},source=e"
    command = [sys.executable, "-m", "kvatlas", "record", "--engine", engine, "-o", str(path), "--json"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    await until(lambda: path.exists() and path.stat().st_size > 0)  # flushed: all history is in
    process.send_signal(number)
    out, _ = await process.communicate()
    publisher.close()
    context.term()
    assert process.returncode == 0
    assert json.loads(out)["sources"][0]["frames"] == 50
    with gzip.open(path) as lines:
        assert len(lines.readlines()) == 50
