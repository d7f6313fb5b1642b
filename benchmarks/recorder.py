"""Rate that ``kvatlas record`` sustains, beside a subscriber that only receives.

    PYTHONPATH=. python benchmarks/recorder.py [--rate EVENTS_PER_S] [--seconds S] [--json]

A publisher process (``kvatlas.publisher.zmq_publisher``) sends batches of 16 stored events of one block each,
as ``index.py`` ingests them, at ``--rate`` events per second. Two processes follow it, one after the other: a
bare subscriber (receives, looks at the seq, keeps nothing) and the recorder (``SourceRecorder`` into a
``CaptureWriter``, ``.jsonl.gz``). Said of each: CPU seconds per million events (all its threads, ZMQ's too),
and how far behind the publisher it was when that had ended; of the recorder also what is missing. The capture
is read again: every frame must be there, in order, with its bytes.

Then the same recorder above its limit: a publisher that never pauses, with a replay buffer of 1,000 batches
and a queue of 8 MB. What does not fit is lost, and must be counted to the last frame.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import zmq

from benchmarks.index import payloads
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.tools.capture import read_capture
from kvatlas.router.tools.capture_writer import QUEUE_BYTES_MAX, CaptureWriter
from kvatlas.router.tools.recorder import RecordSource, SourceRecorder, record

EVENTS_PER_BATCH = 16
DISTINCT_BATCHES = 4096
TICK_S = 0.002
ANY = "tcp://127.0.0.1:*"


class Work(msgspec.Struct, frozen=True):
    """Load of a publisher: ``batches`` at ``rate`` events per second, 0 for as fast as it can."""

    batches: int
    rate: int
    buffer_steps: int = 10_000
    queue_bytes: int = QUEUE_BYTES_MAX


class Told(msgspec.Struct):
    """Result of one follower."""

    frames: int
    cpu_s: float
    reading_cpu_s: float
    """Of that, the thread that receives and orders (without ZMQ's own thread)."""
    heard_at: float
    """When the last batch was received, monotonic."""
    done_at: float
    """When all of it was kept."""
    lost: int = 0
    overflowed: int = 0
    file_bytes: int = 0
    last_seq: int = 0


def corpus() -> list[bytes]:
    """The payloads, the same in every process; batch number n is ``corpus()[n % DISTINCT_BATCHES]``."""
    return payloads(1, DISTINCT_BATCHES * EVENTS_PER_BATCH, EVENTS_PER_BATCH, random.Random(7))


async def engine(pipe: Connection, work: Work) -> None:
    """Prints its address; sends batch 0 until a subscriber has it, then the rest; prints start and end.

    A batch now and then follows, to show what of the last ones was lost, until told to stop."""
    sent = corpus()
    publisher = ZmqPublisher(ANY, replay_endpoint=ANY, buffer_steps=work.buffer_steps)
    publisher.start()
    pipe.send((publisher.endpoint, publisher.replay_endpoint))
    while not pipe.poll():
        publisher.renumber(0)
        publisher.publish_payload(sent[0])
        await asyncio.sleep(0.01)
    pipe.recv()
    began = time.monotonic()
    while publisher.next_seq < work.batches:
        due = work.batches
        if work.rate:
            due = min(due, 1 + int((time.monotonic() - began) * work.rate / EVENTS_PER_BATCH))
        for seq in range(publisher.next_seq, min(due, publisher.next_seq + 256)):
            publisher.publish_payload(sent[seq % DISTINCT_BATCHES])
        await asyncio.sleep(0 if publisher.next_seq < due else TICK_S)
    pipe.send((began, time.monotonic()))
    while not pipe.poll():
        await asyncio.sleep(0.01)
        publisher.publish_payload(sent[publisher.next_seq % DISTINCT_BATCHES])
    publisher.close()


def bare(events: str, heard: Callable[[], None], work: Work) -> Told:
    """Receive everything, and do nothing with it."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.RCVHWM, 100_000)
        socket.subscribe(b"")
        socket.connect(events)
        socket.recv_multipart()
        heard()
        frames, seq, before, reading = 1, 0, time.process_time(), time.thread_time()
        while seq < work.batches - 1:
            _, seq_frame, _ = socket.recv_multipart()
            seq = int.from_bytes(seq_frame, "big")
            frames += seq > 0
        cpu, now = time.process_time() - before, time.monotonic()
        reading = time.thread_time() - reading
    return Told(frames, cpu, reading, now, now, last_seq=seq)


async def recorder(source: RecordSource, heard: Callable[[], None], work: Work, path: Path) -> Told:
    """Record everything."""
    writer = CaptureWriter(path, queue_bytes_max=work.queue_bytes)
    following = SourceRecorder(source, writer)
    stop = asyncio.Event()
    recording = asyncio.create_task(record([following], stop=stop, seconds=None, ended=lambda: writer.ended))
    stats = following.stats
    while stats.first_seq is None:  # noqa: ASYNC110  # a recorder has no event for it
        await asyncio.sleep(0.01)
    heard()
    before, reading = time.process_time(), time.thread_time()
    while (stats.last_seq or 0) < work.batches - 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    heard_at = time.monotonic()
    stop.set()
    await recording
    reading = time.thread_time() - reading
    writer.close()
    cpu, done_at = time.process_time() - before, time.monotonic()
    written = writer.stats
    lost, overflowed = stats.lost_frames, written.overflowed_frames
    last = stats.last_seq or 0
    times = (cpu, reading, heard_at, done_at)
    return Told(written.frames, *times, lost, overflowed, written.bytes_written, last)


def engine_process(pipe: Connection, work: Work) -> None:
    asyncio.run(engine(pipe, work))


def follower_process(pipe: Connection, work: Work, path: Path | None) -> None:
    """``bare`` without a ``path``, else the recorder."""
    events, replay = pipe.recv()

    def heard() -> None:
        pipe.send("heard")

    if path is None:
        pipe.send(bare(events, heard, work))
    else:
        pipe.send(asyncio.run(recorder(RecordSource("engine", events, replay), heard, work, path)))


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process of its own, and the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        yield ours
        child.join()
    finally:
        child.kill()


def follow(work: Work, path: Path | None) -> dict[str, float]:
    """One follower and one publisher; the figures of both."""
    with process(engine_process, work) as engine_pipe, process(follower_process, work, path) as pipe:
        pipe.send(engine_pipe.recv())
        pipe.recv()
        engine_pipe.send("go")
        began, ended = engine_pipe.recv()
        told: Told = pipe.recv()
        engine_pipe.send("stop")
    m_events = work.batches * EVENTS_PER_BATCH / 1e6
    figures = {
        "published_events_per_s": m_events * 1e6 / (ended - began),
        "cpu_s_per_m_events": told.cpu_s / m_events,
        "reading_cpu_s_per_m_events": told.reading_cpu_s / m_events,
        "heard_behind_s": told.heard_at - ended,
    }
    if path is None:
        return figures
    kept = check(path)
    if kept != told.frames:
        raise RuntimeError(f"{told.frames} frames were said to be written, {kept} are in the file")
    return figures | {
        "kept_events_per_s": kept * EVENTS_PER_BATCH / (told.done_at - began),
        "written_behind_s": told.done_at - ended,
        "frames": told.frames,
        "lost_frames": told.lost,
        "overflowed_frames": told.overflowed,
        "uncounted_frames": told.last_seq + 1 - told.frames - told.lost - told.overflowed,
        "file_mb": told.file_bytes / 1e6,
    }


def check(path: Path) -> int:
    """Frames in the capture; every one must have the bytes of its seq, and seqs must rise."""
    sent, count, last = corpus(), 0, -1
    for frame in read_capture([path]):
        if frame.seq <= last or frame.payload != sent[frame.seq % DISTINCT_BATCHES]:
            raise RuntimeError(f"line {frame.line} is not the batch of seq {frame.seq} after {last}")
        count, last = count + 1, frame.seq
    return count


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rate", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    batches = int(args.rate * args.seconds / EVENTS_PER_BATCH)
    paced, flood = Work(batches, args.rate), Work(batches, 0, buffer_steps=1_000, queue_bytes=8 << 20)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "bare": follow(paced, None),
            "recorder": follow(paced, Path(folder) / "paced.jsonl.gz"),
            "above_the_limit": follow(flood, Path(folder) / "flood.jsonl.gz"),
        }
    for name in ("cpu", "reading_cpu"):
        ours, theirs = (results[who][f"{name}_s_per_m_events"] for who in ("recorder", "bare"))
        results["recorder"][f"{name}_times_bare"] = ours / theirs
    if args.json:
        print(msgspec.json.encode(results).decode())
        return
    for who, figures in results.items():
        for what, figure in figures.items():
            print(f"{who:<16} {what:<26} {figure:>14,.2f}")


if __name__ == "__main__":
    main()
