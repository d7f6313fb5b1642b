"""``kvatlas replay --index``: the capture played into a shared index too, and read back from it.

A writer mirrors the ledger to the server as a router does while the capture plays; a reader with a connection
of its own then tells what another replica would see. Each run uses a namespace of its own, which soon
expires, so that a fleet on the same server notices nothing. Both sides are in one process: another one that
writes is what ``kvatlas verify --index`` is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable

import msgspec

from router.feeds.base import FeedState
from router.index.base import Plane
from router.index.learn.layout import ModelFacts
from router.replication.leases import Leases
from router.replication.mirror import MirroredIndex, engine_facts
from router.replication.reader import SharedReader
from router.replication.redis.client import Client
from router.replication.redis.connection import IndexUnavailable
from router.replication.settings import IndexSettings
from router.tools.index_verify import shown_pairs
from router.tools.replay_player import JournaledIndex, Player
from router.tools.trace_writer import CONNECT_S, trace_settings

# What two states of residency differ in: two captures, or one capture at two points.


class PlaneDiff(msgspec.Struct, frozen=True):
    """One plane of one engine, blocks as 16 hexadecimal digits; ``copies`` counts blocks held in both, but in
    different numbers of copies."""

    source: str
    medium: str
    group: int
    same: int
    only_a: list[str]
    only_b: list[str]
    copies: int

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b or self.copies)


def diff(a: Player, b: Player) -> list[PlaneDiff]:
    """Every plane that either state knows. Engines are paired by name; where each state has one, they are a
    pair whatever their names."""
    names_a, names_b = ([run.source for run in player.runs] for player in (a, b))
    pairs = [(name, name) for name in dict.fromkeys([*names_a, *names_b])]
    if len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    found = []
    for name_a, name_b in pairs:
        label = name_a if name_a == name_b else f"{name_a} / {name_b}"
        planes = {*a.ledger.seen_planes(name_a), *b.ledger.seen_planes(name_b)}
        found += [_plane(label, plane, a, name_a, b, name_b) for plane in sorted(planes)]
    return found


def _plane(label: str, plane: Plane, a: Player, name_a: str, b: Player, name_b: str) -> PlaneDiff:
    held_a, held_b = a.ledger.held(name_a, plane), b.ledger.held(name_b, plane)
    both = held_a.keys() & held_b.keys()
    return PlaneDiff(
        label,
        plane.medium,
        plane.group_idx,
        len(both),
        hex_blocks(held_a.keys() - held_b.keys()),
        hex_blocks(held_b.keys() - held_a.keys()),
        sum(held_a[block] != held_b[block] for block in both),
    )


def hex_blocks(blocks: Iterable[int]) -> list[str]:
    """Blocks as 16 hexadecimal digits, sorted."""
    return [f"{block:016x}" for block in sorted(blocks)]


_MODEL = "capture"


class SharedPlay:
    """A player whose residency is mirrored, and the reader of it. Use as ``async with opened(..)``."""

    def __init__(self, writing: Client, reading: Client, facts: ModelFacts) -> None:
        ledger = JournaledIndex()
        self._mirror = MirroredIndex(writing, _MODEL, memory=ledger)
        self._leases = Leases(writing, _MODEL, "writer")
        self._reading = reading
        self.player = Player(facts, ledger=ledger, index=self._mirror)

    async def take(self, sources: Iterable[str]) -> None:
        """Become the writer of every engine of the capture. Raises ``IndexUnavailable``, ``IndexRefused``."""
        for source in sources:
            token = await self._leases.acquire(source)
            if token is None:
                raise IndexUnavailable("lease", "held by somebody else")
            await self._mirror.take_over(source, token)

    async def keep(self) -> None:
        """Write as the capture plays, and renew the leases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._mirror.run())
            while True:
                await asyncio.sleep(self._reading.settings.renew_s)
                with contextlib.suppress(IndexUnavailable):  # a lease lost for long is seen as a difference
                    await self._leases.renew(self._mirror.mirrored())

    async def compare(self) -> list[PlaneDiff]:
        """Every plane, A the memory replay and B what the reader sees, once all is written.

        Raises ``IndexUnavailable`` or ``IndexRefused``.
        """
        fleet, ledger = self.player.fleet, self.player.ledger
        for run in self.player.runs:
            seat = fleet.residency(run.source).seat()
            facts = engine_facts(fleet.engine(run.source), seat, FeedState.READY, run.missing_batches)
            self._mirror.describe(run.source, facts)
        await self._mirror.flush()
        shown = await shown_pairs(self._reading, SharedReader(self._reading), _MODEL)
        found = []
        for source in sorted(shown.keys() | {run.source for run in self.player.runs}):
            seen: dict[Plane, set[int]] = {plane: set() for plane in ledger.seen_planes(source)}
            for plane, block in shown.get(source, ()):
                seen.setdefault(plane, set()).add(block)
            found += [_shared_plane(source, plane, ledger, seen[plane]) for plane in sorted(seen)]
        return found


@contextlib.asynccontextmanager
async def opened(
    index: IndexSettings, facts: ModelFacts, sources: Iterable[str]
) -> AsyncIterator[SharedPlay]:
    """Both connections, and the writer at work. Raises ``IndexUnavailable`` or ``IndexRefused``."""
    settings = trace_settings(index.url, f"replay-{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        writing, reading = Client(settings), Client(settings)
        for client in (writing, reading):
            stack.push_async_callback(client.close)
            if not await client.start(CONNECT_S):
                raise IndexUnavailable("connection", client.last_error or "no connection in time")
        play = SharedPlay(writing, reading, facts)
        await play.take(sources)
        keeping = asyncio.create_task(play.keep())
        try:
            yield play
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def _shared_plane(source: str, plane: Plane, ledger: JournaledIndex, seen: set[int]) -> PlaneDiff:
    held = {int(block) for block in ledger.held(source, plane)}
    return PlaneDiff(
        source,
        plane.medium,
        plane.group_idx,
        len(held & seen),
        hex_blocks(held - seen),
        hex_blocks(seen - held),
        0,
    )
