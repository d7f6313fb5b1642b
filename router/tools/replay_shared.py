"""``kvatlas replay --index``: the capture is also written to a shared index and read back.

A writer mirrors the residency to the server as a router does while the capture plays; a reader with a
separate connection then reads what another replica would see. Each run uses a separate namespace that expires
soon, so that a fleet on the same server is not affected. Both sides run in one process; ``kvatlas verify
--index`` uses a separate writing process.
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

# Differences between two states of residency: two captures, or one capture at two points.


class PlaneDiff(msgspec.Struct, frozen=True):
    """Differences in one plane of one engine, blocks as 16 hexadecimal digits.

    ``copies`` counts the blocks held in both states with different numbers of copies.
    """

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
    """Compare every plane that either state has.

    Engines are paired by name; if each state has a single engine, the two are paired regardless of their
    names.
    """
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
    """Format blocks as 16 hexadecimal digits, sorted."""
    return [f"{block:016x}" for block in sorted(blocks)]


_MODEL = "capture"


class SharedReplay:
    """A player whose residency is mirrored to the shared index, and its reader.

    Use ``async with open_shared_replay(..)``.
    """

    def __init__(self, writing: Client, reading: Client, facts: ModelFacts) -> None:
        ledger = JournaledIndex()
        self._mirror = MirroredIndex(writing, _MODEL, memory=ledger)
        self._leases = Leases(writing, _MODEL, "writer")
        self._reading = reading
        self.player = Player(facts, ledger=ledger, index=self._mirror)

    async def acquire(self, sources: Iterable[str]) -> None:
        """Acquire the lease of every engine of the capture. Raises ``IndexUnavailable``, ``IndexRefused``."""
        for source in sources:
            token = await self._leases.acquire(source)
            if token is None:
                raise IndexUnavailable("lease", "held by another replica")
            await self._mirror.take_over(source, token)

    async def run(self) -> None:
        """Write while the capture plays, and renew the leases, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._mirror.run())
            while True:
                await asyncio.sleep(self._reading.settings.renew_s)
                with contextlib.suppress(IndexUnavailable):  # a lease lost for long appears as a difference
                    await self._leases.renew(self._mirror.mirrored())

    async def compare(self) -> list[PlaneDiff]:
        """Compare every plane once all is written: A is the memory replay, B what the reader sees.

        Raises ``IndexUnavailable`` or ``IndexRefused``.
        """
        fleet, ledger = self.player.fleet, self.player.ledger
        for run in self.player.runs:
            query = fleet.residency(run.source).query()
            facts = engine_facts(fleet.engine(run.source), query, FeedState.READY, run.missing_batches)
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
async def open_shared_replay(
    index: IndexSettings, facts: ModelFacts, sources: Iterable[str]
) -> AsyncIterator[SharedReplay]:
    """Open both connections and start the writer. Raises ``IndexUnavailable`` or ``IndexRefused``."""
    settings = trace_settings(index.url, f"replay-{secrets.token_hex(6)}")
    async with contextlib.AsyncExitStack() as stack:
        writing, reading = Client(settings), Client(settings)
        for client in (writing, reading):
            stack.push_async_callback(client.close)
            if not await client.start(CONNECT_S):
                raise IndexUnavailable("connection", client.last_error or "no connection in time")
        play = SharedReplay(writing, reading, facts)
        await play.acquire(sources)
        keeping = asyncio.create_task(play.run())
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
