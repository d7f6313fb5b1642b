"""One engine, a bad network and a feed, in virtual time: the block pool is the truth the index is held to.

Everything a real run has is here but sockets: ``HybridBlockPool`` makes the events, they are encoded and
parsed as on the wire, the ledger makes snapshots, ``FeedMachine`` decides, ``FleetResidency`` holds. The
network drops, repeats, delays and reorders live messages, cuts connections, cuts, shuffles and loses answers,
and the engine restarts, resets its cache and forgets what its replay buffer cannot hold. One seed draws all
of it.

Every prompt of an era (a process, between two resets) has tokens of its own, so that a block tells its era.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from kvatlas.publisher.block_hash import NO_EXTRAS, HashScheme
from kvatlas.publisher.block_pool import HybridBlockPool
from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    DecodedBatch,
    encode_batch,
    to_block_hash,
)
from kvatlas.publisher.groups import GroupSpec
from kvatlas.publisher.snapshot import SnapshotLedger
from kvatlas.router.feeds.actions import Action, Adopt, Apply, Forget, RequestReplay, RequestSnapshot
from kvatlas.router.feeds.base import Cut, FeedSettings, FeedState, FeedStats
from kvatlas.router.feeds.frames import Frame, parse_live
from kvatlas.router.feeds.machine import FeedMachine
from kvatlas.router.index.base import Plane
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.tools.trace_verification import ProbePrompt

SETTINGS = FeedSettings(
    hold_batches_max=48, recent_batches_max=32, resync_backoff_s=2.0, resync_backoff_s_max=8.0
)
LAYOUTS = (
    (GroupSpec(0, "full_attention", 16),),
    (GroupSpec(0, "full_attention", 16), GroupSpec(1, "sliding_window", 16, sliding_window=48)),
    (GroupSpec(0, "full_attention", 32), GroupSpec(1, "sliding_window", 16, sliding_window=48)),
)
Held = Counter[tuple[int, BlockHash]]


class Engine:
    """A process: its pool, and what its publisher sent, by seq; ``truth[seq]`` is what it then held."""

    def __init__(self, number: int, groups: tuple[GroupSpec, ...], *, blocks: int, identified: bool) -> None:
        self.number = number
        self.publisher_id = b"process%9d" % number if identified else None
        self.scheme = HashScheme(hash_block_size=16)
        self.groups = groups
        self.pool = HybridBlockPool(groups, num_blocks=blocks, scheme=self.scheme)
        self.ledger = SnapshotLedger()
        self.frames: list[Frame] = []
        self.truth: list[Held] = []
        self.cleared: list[bool] = []
        self.eras: list[int] = []
        self.era = 0

    def tokens(self, rng: random.Random) -> list[int]:
        """A prompt of this era that shares its beginning with others."""
        shared_prefix = rng.randrange(4)
        own = 100_000 * (self.number * 50 + self.era) + 1000 * shared_prefix
        shared = [own + n for n in range(rng.choice((32, 64, 96)))]
        return shared + [own + 500 + rng.randrange(400) for _ in range(rng.randrange(40))]

    def work(self, rng: random.Random) -> None:
        """One request, start to end."""
        request = self.pool.request(self.tokens(rng))
        if self.pool.start(request) is not None:
            while (chunk := self.pool.next_chunk(request, 64)) and self.pool.compute(request, chunk):
                self.pool.end_step()
        self.pool.finish(request)

    def reset(self) -> None:
        if self.pool.reset():
            self.era += 1

    def publish(self, now: float) -> Frame | None:
        """Events since the last batch, as one batch; none without events."""
        events = self.pool.take_events()
        if not events:
            return None
        payload = encode_batch(now, events, 0, self.publisher_id)
        self.ledger.apply(decode_batch(payload))
        frame = parse_live([b"", len(self.frames).to_bytes(8, "big"), payload])
        self.frames.append(frame)
        self.truth.append(self.held())
        self.eras.append(self.era)
        self.cleared.append(any(isinstance(event, AllBlocksCleared) for event in events))
        return frame

    def held(self) -> Held:
        found: Held = Counter()
        for group in self.groups:
            for wire, copies in self.pool.resident(group.group_idx).items():
                found[group.group_idx, to_block_hash(wire)] += copies
        return found

    def snapshot(self) -> tuple[list[bytes], Cut]:
        """Chunks, and the cut they are of."""
        snapshot = self.ledger.snapshot()
        while snapshot.step():
            pass
        return snapshot.chunks, Cut(len(self.frames) - 1, self.publisher_id)


def credited(fleet: FleetResidency, groups: tuple[GroupSpec, ...], blocks: list[BlockHash]) -> Held:
    """Blocks that the index shows for engine ``e``, of all ever stored; further copies unseen."""
    found: Held = Counter()
    slot = fleet.index.slot("e")
    if slot is None:
        return found
    rows = fleet.index.lookup(blocks)
    for group in groups:
        words = rows.plane(Plane("GPU", group.group_idx), slot.word)
        for block, word in zip(blocks, words.tolist(), strict=True):
            if word >> slot.bit & 1:
                found[group.group_idx, block] += 1
    return found


class World:
    """See the module's docstring. ``check`` is called after every step and raises ``AssertionError``."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now = 100.0
        self.groups = rng.choice(LAYOUTS)
        self.blocks = rng.choice((24, 40, 90))
        self.snapshots = rng.random() < 0.6
        self.has_replay = rng.random() < 0.8 or not self.snapshots
        self.identified = rng.random() < 0.7 or not self.has_replay
        self.ring = rng.choice((0, 4, 12, 10_000)) if self.snapshots else rng.choice((4, 12, 10_000, 10_000))
        self.engine = self._process(0)
        self.noticed = True
        """The feed's connection is known to be cut since the last restart."""
        self.fleet = FleetResidency(ModelFacts(), MemoryIndex())
        self.stats = FeedStats()
        self.machine = FeedMachine(
            SETTINGS, self.stats, has_replay=self.has_replay, has_snapshot=self.snapshots
        )
        self.known_as: dict[int, tuple[Engine, int]] = {}
        self.followed: tuple[Engine, int] | None = None
        """Process and seq of what was applied last."""
        self.late: list[Frame] = []
        self.request: RequestReplay | RequestSnapshot | None = None
        self.due = 0.0
        self.answer: list[Frame | DecodedBatch | Cut | None] = []
        self.answered_by: Engine | None = None
        self.connected = False
        self.block_of: dict[BlockHash, tuple[int, int]] = {}
        """Process and era of every block ever stored."""
        self.era_floor = 0
        """Era of the last clear applied."""
        self.taken: tuple[object, ...] = ()

    def _process(self, number: int) -> Engine:
        return Engine(number, self.groups, blocks=self.blocks, identified=self.identified)

    # The feed's side.

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(batch=batch):
                    self._applied(batch)
                case Forget():
                    self.fleet.forget("e")
                    self.followed, self.era_floor = None, 0
                case Adopt():
                    self.fleet.adopt("e")
                    cut = next(piece for piece in self.taken if isinstance(piece, Cut))
                    assert self.answered_by is not None
                    # An empty engine is anybody's.
                    self.followed = (self.answered_by, cut.seq) if cut.seq >= 0 else None
                    self.era_floor = 0
                case RequestReplay() | RequestSnapshot():
                    asked_rightly = self.has_replay if isinstance(action, RequestReplay) else self.snapshots
                    assert asked_rightly, "asked for what there is not"
                    self._unstage()
                    self.request, self.due, self.answer = action, self.now + action.delay_s, []

    def _applied(self, batch: DecodedBatch) -> None:
        engine, seq = self.known_as[id(batch)]
        if self.followed is not None:
            assert engine is self.followed[0], "a batch of another process on top of what is known"
            assert seq > self.followed[1], "out of order, or twice"
        self.fleet.apply("e", batch)
        self.followed = engine, seq
        if engine.cleared[seq]:
            self.era_floor = engine.eras[seq]
        assert batch.rejected == []

    def hear(self, frame: Frame) -> None:
        self.do(self.machine.live(self.now, frame))

    def _unstage(self) -> None:
        if isinstance(self.request, RequestSnapshot):
            self.fleet.unstage("e")

    # What happens.

    def publish(self, fate: str) -> None:
        self.now += 0.01
        frame = self.engine.publish(self.now)
        if frame is None:
            return
        self.known_as[id(frame.batch)] = self.engine, frame.seq
        for event in frame.batch.events:
            if isinstance(event, BlockStored):
                for wire in event.block_hashes:
                    block = to_block_hash(wire)
                    self.block_of[block] = self.engine.number, self.engine.era
        if not self.connected or not self.noticed:
            return
        if fate == "late":
            self.late.append(frame)
        elif fate != "drop":
            self.hear(frame)
            if fate == "twice":
                self.hear(frame)

    def deliver_late(self) -> None:
        if self.late and self.connected:
            self.hear(self.late.pop(self.rng.randrange(len(self.late))))

    def restart(self) -> None:
        """A new process; the feed learns of the cut connection later, by ``disconnect``."""
        self.engine = self._process(self.engine.number + 1)
        self.late.clear()
        self.noticed = not self.connected

    def disconnect(self) -> None:
        self.late.clear()
        if self.connected:
            self.do(self.machine.disconnected(self.now))
        self.connected, self.noticed = False, True

    def connect(self) -> None:
        if not self.noticed:
            self.disconnect()
        if not self.connected:
            self.connected = True
            self.do(self.machine.connected(self.now))

    def serve(self, fault: str) -> None:
        """The engine answers the open request; ``deliver`` hands the answer over bit by bit."""
        if self.request is None or self.now < self.due or self.answer:
            return
        if isinstance(self.request, RequestSnapshot):
            self._serve_snapshot(fault)
        elif self.noticed:
            self._serve_replay(self.request, fault)

    def _serve_snapshot(self, fault: str) -> None:
        if fault == "silent" or (not self.identified and not self.noticed):
            self.fail()
            return
        chunks, cut = self.engine.snapshot()
        pieces: list[Frame | DecodedBatch | Cut | None] = [decode_batch(chunk) for chunk in chunks]
        if fault in {"cut", "hole"}:
            pieces = [*pieces[: self.rng.randint(0, len(pieces))], None]  # breaks off
        else:
            pieces.append(cut)
        self.answer, self.answered_by = pieces, self.engine

    def _serve_replay(self, request: RequestReplay, fault: str) -> None:
        kept = self.engine.frames[-self.ring :] if self.ring else []
        answer: list[Frame | DecodedBatch | Cut | None] = [f for f in kept if f.seq >= request.from_seq]
        match fault:
            case "silent":
                answer = []
            case "cut":
                answer = answer[: self.rng.randint(0, len(answer))]
            case "hole":
                answer = [*answer[: self.rng.randint(0, len(answer))], None]
            case "repeated":
                answer = [frame for frame in answer for _ in range(2)] + [None]
            case "shuffled":
                self.rng.shuffle(answer)
                answer.append(None)
            case _:
                answer.append(None)
        self.answer = answer
        if not answer:
            self.fail()

    def fail(self) -> None:
        request = self.request
        self._unstage()
        self.request = None
        match request:
            case RequestReplay(request_id=number):
                self.do(self.machine.replay_failed(self.now, number))
            case RequestSnapshot(request_id=number):
                self.do(self.machine.snapshot_failed(self.now, number, unsupported=False))

    def deliver(self, count: int) -> None:
        for _ in range(count):
            request = self.request
            if request is None or not self.answer:
                return
            item = self.answer.pop(0)
            if isinstance(request, RequestSnapshot):
                self._deliver_piece(request, item)
            elif item is None:
                self.request = None
                self.do(self.machine.replay_ended(self.now, request.request_id))
            elif isinstance(item, Frame):
                self.do(self.machine.replayed(self.now, request.request_id, item))
                if not self.answer and self.request is request:
                    self.fail()

    def _deliver_piece(self, request: RequestSnapshot, item: Frame | DecodedBatch | Cut | None) -> None:
        if not self.machine.wants(request.request_id):
            self._unstage()
            self.request, self.answer = None, []
        elif item is None:
            self.fail()
        elif isinstance(item, DecodedBatch):
            self.fleet.stage("e", item)
        elif isinstance(item, Cut):
            self.taken = (item,)
            actions = self.machine.snapshot_taken(self.now, request.request_id, item)
            if not any(isinstance(action, Adopt) for action in actions):
                self._unstage()
            self.request = None
            self.do(actions)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.machine.tick(self.now))

    # Truth.

    def held(self) -> Held:
        return credited(self.fleet, self.groups, list(self.block_of))

    def check(self) -> None:
        """Invariants of every moment."""
        held = self.held()
        processes = {self.block_of[block][0] for _, block in held}
        oldest = min((self.block_of[block][1] for _, block in held), default=self.era_floor)
        if self.followed is None:
            assert not held, "credited, though everything was to be forgotten"
            return
        engine, seq = self.followed
        assert processes <= {engine.number}, f"credited from processes {processes}, follows {engine.number}"
        assert oldest >= self.era_floor, "credited, though a clear took it"
        if self.stats.state is FeedState.READY:
            truth = engine.truth[seq] if seq >= 0 else Counter()
            assert set(held) == set(truth), f"READY, and wrong by {set(held) ^ set(truth)}"
            assert self.fleet.index.physical("e", "GPU") == sum(truth.values()), "READY, copies wrong"

    def settle(self) -> None:
        """No more faults, time passes: whatever can be repaired is."""
        self.connect()
        while self.late:
            self.deliver_late()
        published = len(self.engine.frames)
        while len(self.engine.frames) < published + 3:  # news shows what was lost before it
            self.engine.era += 1  # prompts not sent before
            self.engine.work(self.rng)
            self.publish("ok")
        for _ in range(80):
            self.tick(0.5)
            self.serve("ok")
            self.deliver(10_000)
            self.check()

    def check_settled(self) -> None:
        """Invariants after quiescence."""
        engine, stats = self.engine, self.stats
        last = len(engine.frames) - 1
        assert self.followed == (engine, last), f"follows {self.followed}, not the last batch {last}"
        if self.snapshots or (self.has_replay and self.ring >= len(engine.frames)):
            assert stats.state is FeedState.READY, f"{stats.state} {stats.reason}"
            assert stats.missing_batches == 0
        else:
            assert stats.state in {FeedState.READY, FeedState.DEGRADED}
        assert self.fleet.index.check_integrity() == []
        assert self.fleet.index.stats().residencies == len(self.held()), "something is left from elsewhere"
        if stats.state is FeedState.READY:
            for _ in range(4):
                self._check_prediction(engine.tokens(self.rng))

    def _check_prediction(self, tokens: list[int]) -> None:
        predicted = self.fleet.predict(ProbePrompt(tokens, NO_EXTRAS), ["e"])["e"]
        if predicted.mode == "unknown":
            return  # no prompt of this process was stored from its beginning
        expected = self.engine.pool.find_hit(self.engine.pool.request(tokens))
        assert predicted.hit_tokens == expected, f"predicted {predicted}, is {expected}"


FATES = ("ok", "ok", "ok", "ok", "drop", "late", "twice")
FAULTS = ("ok", "ok", "ok", "silent", "cut", "hole", "repeated", "shuffled")


def steps(world: World) -> Iterator[tuple[str, Callable[[], None]]]:
    """A script of its own for every seed."""
    rng = world.rng

    def busy() -> None:
        for _ in range(rng.randint(1, 3)):
            world.engine.work(rng)
        world.publish(rng.choice(FATES))

    def empty() -> None:
        world.engine.reset()
        world.publish(rng.choice(FATES))

    actions: dict[str, tuple[int, Callable[[], None]]] = {
        "work": (50, busy),
        "late": (8, world.deliver_late),
        "serve": (16, lambda: world.serve(rng.choice(FAULTS))),
        "deliver": (16, lambda: world.deliver(rng.randint(1, 12))),
        "fail": (1, world.fail),
        "tick": (8, lambda: world.tick(rng.choice((0.1, 1.0, 4.0, 11.0)))),
        "reset": (2, empty),
        "restart": (2, world.restart),
        "disconnect": (2, world.disconnect),
        "connect": (8, world.connect),
    }
    names, weights = list(actions), [weight for weight, _ in actions.values()]
    for name in rng.choices(names, weights, k=rng.randint(20, 160)):
        yield name, actions[name][1]


def run(seed: int) -> World:
    """One history, judged at every step."""
    world = World(seed)
    for _, step in steps(world):
        step()
        world.check()
    world.settle()
    world.check_settled()
    return world
