"""A lossy network between one publisher and a ``FeedMachine``, in virtual time; for the property tests.

Restarts tear the connections: frames in flight are lost, and the machine sees the disconnect before
anything of the new process reaches it. Live messages may be dropped, repeated or come late; replay answers
may be cut short, keep a hole at their end, be repeated, shuffled, or never come.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import xxhash

from kvatlas.publisher.events import AllBlocksCleared, BlockRemoved, DecodedBatch, Event
from kvatlas.router.feeds.actions import Apply, Forget, RequestReplay
from kvatlas.router.feeds.base import FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import Frame
from kvatlas.router.feeds.machine import FeedMachine

SETTINGS = FeedSettings(
    hold_batches_max=64,
    recent_batches_max=32,
    hold_s_max=10.0,
    resync_backoff_s=5.0,
    resync_backoff_s_max=20.0,
)


class Sent(NamedTuple):
    """Published batches: the process's number and the seq."""

    process: int
    seq: int


def make_frame(
    process: int, seq: int, ts: float, publisher_id: bytes | None = None, *, clear: bool = False
) -> Frame:
    # Never empty: an empty batch of a publisher with an id is a heartbeat.
    events: list[Event] = [AllBlocksCleared()] if clear else [BlockRemoved([1], "GPU", 0)]
    batch = DecodedBatch(ts, events, 0, publisher_id, [])
    digest = xxhash.xxh3_64_intdigest(f"{process}/{seq}/{ts}".encode())
    return Frame(seq, batch, digest, 100, publisher_id)


class Simulation:
    """Drives the machine; checks at every applied batch that order and process are right."""

    def __init__(
        self,
        seed: int,
        *,
        ring: int,
        has_replay: bool = True,
        with_ids: bool = False,
        settings: FeedSettings = SETTINGS,
    ) -> None:
        self.random = random.Random(seed)
        self.ring = ring
        self.with_ids = with_ids
        self.may_mix = not has_replay and not with_ids
        """Nothing tells a new process from the old one where the seq happens to fit; it must not be READY."""
        self.mixed = False
        self.now = 100.0
        self.process = 0
        self.published: list[Frame] = []
        self.origin: dict[float, Sent] = {}  # a batch is known again by its time stamp
        self.late: list[Frame] = []
        self.answer: list[Frame | None] = []
        self.request: RequestReplay | None = None
        self.request_due = 0.0
        self.applied: list[Sent] = []
        self.stats = FeedStats()
        self.machine = FeedMachine(settings, self.stats, has_replay=has_replay)

    # The machine's side.

    def do(self, actions: list[object]) -> None:
        for action in actions:
            match action:
                case Apply(batch=batch):
                    sent = self.origin[batch.ts]
                    if self.applied and sent.process != self.applied[-1].process:
                        assert self.may_mix, "two processes mixed"
                        self.mixed = True
                    elif self.applied:
                        assert sent.seq > self.applied[-1].seq, "out of order or twice"
                    self.applied.append(sent)
                case Forget():
                    self.applied.clear()
                    self.mixed = False
                case RequestReplay():
                    self.request = action
                    self.request_due = self.now + action.delay_s
                    self.answer = []

    def live(self, frame: Frame) -> None:
        self.do(self.machine.live(self.now, frame))

    # The publisher's side.

    def publish(self, fate: str, *, clear: bool = False) -> None:
        self.now += 0.01
        publisher_id = b"process %8d" % self.process if self.with_ids else None
        seq = len(self.published)
        frame = make_frame(self.process, seq, self.now, publisher_id, clear=clear)
        self.origin[self.now] = Sent(self.process, seq)
        self.published.append(frame)
        if fate == "late":
            self.late.append(frame)
        elif fate != "drop":
            self.live(frame)
            if fate == "twice":
                self.live(frame)

    def deliver_late(self) -> None:
        if self.late:
            self.live(self.late.pop(self.random.randrange(len(self.late))))

    def restart(self, *, unheard: int) -> None:
        self.disconnect()
        self.process += 1
        self.published = []
        for _ in range(unheard):
            self.publish("drop")

    def disconnect(self) -> None:
        self.late.clear()
        self.do(self.machine.disconnected(self.now))

    def connect(self) -> None:
        self.do(self.machine.connected(self.now))

    def serve_replay(self, fault: str) -> None:
        """The publisher answers the open request; ``feed_replay`` hands the answer over bit by bit."""
        if self.request is None or self.now < self.request_due or self.answer:
            return
        start = self.request.from_seq
        answer: list[Frame | None] = [f for f in self.published[-self.ring :] if f.seq >= start]
        if fault == "silent":
            answer = []
        elif fault == "cut":
            answer = answer[: self.random.randint(0, len(answer))]
        elif fault == "hole":
            answer = [*answer[: self.random.randint(0, len(answer))], None]
        elif fault == "repeated":
            answer = [frame for frame in answer for _ in range(2)] + [None]
        elif fault == "shuffled":
            self.random.shuffle(answer)
            answer.append(None)
        else:
            answer.append(None)
        self.answer = answer
        if not answer:
            self.fail_replay()

    def fail_replay(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            self.do(self.machine.replay_failed(self.now, request.request_id))

    def feed_replay(self, count: int) -> None:
        for _ in range(count):
            if self.request is None or not self.answer:
                return
            request, item = self.request, self.answer.pop(0)
            if item is None:
                self.request = None
                self.do(self.machine.replay_ended(self.now, request.request_id))
            else:
                self.do(self.machine.replayed(self.now, request.request_id, item))
                if not self.answer and self.request is request:
                    self.fail_replay()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    def settle(self, *, batches: int = 3) -> None:
        """No more faults, time passes: whatever can be repaired is."""
        self.connect()
        while self.late:
            self.deliver_late()
        for _ in range(batches):
            self.publish("ok")
        for _ in range(200):
            self.tick(0.5)
            self.serve_replay("ok")
            self.feed_replay(10_000)

    @property
    def expected(self) -> list[Sent]:
        """All that the running process has published."""
        return [Sent(self.process, frame.seq) for frame in self.published]

    @property
    def state(self) -> FeedState:
        return self.stats.state
