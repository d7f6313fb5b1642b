"""The order of a capture: nothing twice or backwards, what is missing is counted, whatever arrives when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.router.feeds.actions import RequestReplay
from kvatlas.router.tools.capture_writer import CaptureLine
from kvatlas.router.tools.event_order import CaptureOrder, RecordStats
from tests.support.examples import examples


def frame(seq: int, run: int = 0) -> CaptureLine:
    return CaptureLine("e", 1.0, "", seq, b"%d/%d" % (run, seq))


class Stream:
    """An engine's publisher and what of it reaches the recorder: a live queue, and answers from its ring."""

    def __init__(self, *, has_replay: bool, ring: int, hold_bytes_max: int = 1 << 20) -> None:
        self.stats = RecordStats("e")
        self.order = CaptureOrder(self.stats, has_replay=has_replay, hold_bytes_max=hold_bytes_max)
        self.written: list[CaptureLine] = []
        self.run = 0
        self.sent = 0
        self.ring = ring
        self.queue: list[CaptureLine] = []
        self.serving: RequestReplay | None = None
        self.answer: list[CaptureLine] = []

    def publish(self, *, heard: bool) -> None:
        if heard:
            self.queue.append(frame(self.sent, self.run))
        self.sent += 1

    def restart(self) -> None:
        self.run, self.sent, self.serving = self.run + 1, 0, None

    def hear(self) -> None:
        if self.queue:
            self.order.live(self.queue.pop(0))
            self.written += self.order.take()

    def serve(self, hole: int | None = None) -> None:
        """Begin to answer the open request from the ring as it is, perhaps without its nth frame.

        Not without the stream's first one: a ring that has dropped it looks the same.
        """
        if self.order.request is not None and self.serving is None:
            self.serving = self.order.request
            first = max(self.serving.from_seq, self.sent - self.ring)
            self.answer = [frame(seq, self.run) for seq in range(first, self.sent)]
            if hole is not None and hole < len(self.answer) and self.answer[hole].seq > 0:
                del self.answer[hole]

    def deliver(self, count: int) -> None:
        for _ in range(count):
            if self.serving is None:
                return
            if not self.order.holds:
                self.hear()
            if not self.answer or not self.order.replayed(self.serving, self.answer.pop(0)):
                request, self.serving = self.serving, None
                self.order.response_ended(request)
            self.written += self.order.take()

    def settle(self) -> None:
        while self.queue or not self.order.settled:
            self.hear()
            self.serve()
            self.deliver(10)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.booleans()),
        st.tuples(st.just("burst"), st.integers(1, 30)),
        st.tuples(st.just("hear"), st.integers(1, 10)),
        st.tuples(st.just("serve"), st.none() | st.integers(0, 5)),
        st.tuples(st.just("deliver"), st.integers(1, 10)),
    ),
    max_size=60,
)


def play(stream: Stream, steps: list[tuple[str, object]]) -> None:
    for name, value in steps:
        match name, value:
            case "publish", bool(heard):
                stream.publish(heard=heard)
            case "burst", int(count):
                for _ in range(count):
                    stream.publish(heard=True)
            case "hear", int(count):
                for _ in range(count):
                    stream.hear()
            case "serve", hole:
                stream.serve(hole if isinstance(hole, int) else None)
            case "deliver", int(count):
                stream.deliver(count)
    stream.publish(heard=True)  # shows what was missing before it
    stream.settle()


@settings(max_examples=examples(300))
@given(STEPS, st.booleans(), st.sampled_from([0, 3, 20, 10_000]))
def test_seqs_rise_and_the_lost_are_counted(
    steps: list[tuple[str, object]], has_replay: bool, ring: int
) -> None:
    stream = Stream(has_replay=has_replay, ring=ring)
    play(stream, steps)
    seqs = [line.seq for line in stream.written]
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == stream.sent - 1
    assert stream.stats.restarts == 0
    assert stream.stats.lost_frames == seqs[-1] - seqs[0] + 1 - len(seqs)
    if has_replay and ring == 10_000:
        assert seqs == list(range(stream.sent))


@settings(max_examples=examples(200))
@given(STEPS, STEPS, st.sampled_from([0, 5, 10_000]))
def test_a_restart_begins_a_new_sequence(
    before: list[tuple[str, object]], after: list[tuple[str, object]], ring: int
) -> None:
    """The old process was heard to its end; of the new one nothing is written out of order, or twice."""
    stream = Stream(has_replay=True, ring=ring)
    for _ in range(3):
        stream.publish(heard=True)
    play(stream, before)
    old = len(stream.written)
    stream.restart()
    play(stream, after)
    new = stream.written[old:]
    seqs = [line.seq for line in new]
    assert seqs == sorted(set(seqs))
    if stream.stats.restarts:
        assert stream.stats.restarts == 1
        assert {line.payload.split(b"/")[0] for line in new} == {b"1"}


def test_an_answer_that_runs_ahead_of_a_slow_reader_is_no_restart_and_no_loss() -> None:
    """Half of the stream lies in the socket's queue, and the ring is beyond it already."""
    stream = Stream(has_replay=True, ring=4)
    stream.publish(heard=True)
    stream.settle()
    stream.publish(heard=False)
    for _ in range(40_000):
        stream.publish(heard=True)
    stream.hear()
    stream.serve()
    stream.deliver(10)
    stream.settle()
    assert [line.seq for line in stream.written] == [0, *range(2, 40_002)]
    assert (stream.stats.restarts, stream.stats.lost_frames) == (0, 1)


def test_a_hole_in_an_answer_is_asked_for_again() -> None:
    stream = Stream(has_replay=True, ring=100)
    for _ in range(20):
        stream.publish(heard=False)
    stream.serve(hole=7)
    stream.deliver(100)
    assert stream.stats.history_frames == 7
    stream.publish(heard=True)
    stream.settle()
    assert [line.seq for line in stream.written] == list(range(21))
    assert stream.stats.history_frames == 20, "all but the last, which was heard"


def test_batches_beyond_the_buffer_are_requested_afterwards() -> None:
    stream = Stream(has_replay=True, ring=10_000, hold_bytes_max=30)
    for _ in range(200):
        stream.publish(heard=True)
        stream.hear()
    stream.settle()
    stream.publish(heard=True)
    stream.settle()
    assert [line.seq for line in stream.written] == list(range(201))
