"""State exchanged between workers of one machine: prompts in flight and load.

The messages are those that replicas exchange through Redis (``replication/gossip``), sent over the mesh.
Changes within ``FLUSH_S`` are sent together, so a sibling learns of a placement after ``FLUSH_S`` and the
time it needs to read (measured by ``kvatlas_worker_gossip_delay_seconds``). If replicas share an index,
prompts and load go through it, also between workers. Invariants: sending
never blocks and never fails a request; the entries of a dead worker expire when its replacement sends its
first message, at the latest after ``SILENCE_S`` (load) and ``AGE_S_MAX`` (prompts).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.others_use import OthersUse, Uses
from kvatlas.router.admission.use_reports import UseReports
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.placement.affinity import AffinityMap
from kvatlas.router.placement.engine import NO_PEER_SNAPSHOT, PeerSnapshot
from kvatlas.router.placement.inflight import InflightPrompt
from kvatlas.router.placement.others import OthersLoad
from kvatlas.router.replication.gossip import GossipedInflight
from kvatlas.router.replication.load_gossip import LoadGossip
from kvatlas.router.replication.messages import VERSION, PeerMessages
from kvatlas.router.workers.context import WorkerContext
from kvatlas.router.workers.mesh import MESSAGE_BYTES_MAX, Mesh

FLUSH_S = 0.002
# Minimum pause between two load reports.
_LOAD_S = 0.005
# Minimum pause as a multiple of the time the last report took: at most 2 % of a core.
_LOAD_TIMES = 50
_REPEAT_S = 0.05
_RECOUNT_S = 0.25
# Pause between messages with the totals of all tenants, which repair lost messages.
_WHOLE_S = 0.25
# Maximum number of tenants in one message, some 100 bytes each.
_TENANTS_MAX = 512
_KEYS_MAX = 4096
DELAY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class WorkerMessage(msgspec.Struct, array_like=True, tag=VERSION):
    """Content of one flush. ``sent_s``: time of its first entry, by the machine's monotonic clock."""

    life: int
    sent_s: float
    flights: list[bytes] = []
    load: bytes = b""
    texts: list[tuple[bytes, str]] = []
    """(keys of a text's prefixes, 8 bytes each, engine id)."""
    uses: Uses | None = None
    """Totals per tenant."""


class WorkerGossipStats(msgspec.Struct):
    """Counters for metrics."""

    sent: Annotated[int, "kvatlas_worker_gossip_sent_total"] = 0
    """Messages sent to sibling workers."""
    missed: Annotated[int, "kvatlas_worker_gossip_missed_total"] = 0
    """Messages dropped because a sibling worker's buffer was full."""
    received: Annotated[int, "kvatlas_worker_gossip_received_total"] = 0
    """Messages received from sibling workers."""
    malformed: Annotated[int, "kvatlas_worker_gossip_malformed_total"] = 0
    """Messages of sibling workers that could not be decoded, or had values out of bounds."""
    other_version: Annotated[int, "kvatlas_worker_gossip_other_version_total"] = 0
    """Messages of sibling workers of another version that this one ignored."""
    refused: Annotated[int, "kvatlas_worker_gossip_refused_total"] = 0
    """Tenants' usage values of sibling workers that were refused."""


_ENCODE = msgspec.msgpack.Encoder()


class SharedAffinity(AffinityMap):
    """Affinity map that publishes each text recorded here."""

    def __init__(self, publish: Callable[[Sequence[int], str], None]) -> None:
        super().__init__()
        self._publish = publish

    def record(self, keys: Sequence[int], engine_id: str) -> None:
        super().record(keys, engine_id)
        self._publish(keys, engine_id)

    def receive(self, keys: Sequence[int], engine_id: str) -> None:
        """Record a text of another worker, without publishing it."""
        super().record(keys, engine_id)


class SiblingGossip:
    """Load of the siblings, and the state shared with them.

    ``whole`` False: prompts in flight and load go through a shared index. ``served`` is called with each
    prompt that an engine has computed for a sibling. ``gate`` enforces the tenants' limits over all workers
    together.
    """

    def __init__(
        self,
        worker: WorkerContext,
        own_load: Callable[[float], dict[str, OthersLoad]],
        *,
        clock: Callable[[], float],
        whole: bool = True,
        served: Callable[[InflightPrompt], None] = lambda prompt: None,
        gate: KeyGate | None = None,
    ) -> None:
        self._gate = gate
        self._others = None if gate is None else OthersUse(gate, self._refused)
        self._reports = None if gate is None else UseReports(worker.life, gate.uses, _TENANTS_MAX)
        self._whole_due_s = 0.0
        self.stats = WorkerGossipStats()
        self._messages = PeerMessages(WorkerMessage, self.stats)
        self.delays = Histogram(DELAY_BUCKETS)
        self._clock = clock
        self._whole = whole
        self._name = str(worker.slot)
        self._life = worker.life
        self._mesh = Mesh(worker.mesh, self._on_message)
        started = time.time_ns() >> 10
        self.load = LoadGossip(self._name, own_load, started=started, stats=self.stats)
        self.inflight = GossipedInflight(
            self._name, started, self._add_inflight, served=served, publishes_prefills=False
        )
        self.affinity = SharedAffinity(self._add_text)
        self._lives: dict[int, int] = {}
        self._fields: dict[str, bytes] = {}
        self._snapshot = NO_PEER_SNAPSHOT
        self._count_at_s = 0.0
        self._load_due_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin()

    # -- queries of the planner -----------------------------------------------------------------------

    def peer_state(self) -> PeerSnapshot:
        """Return the siblings' state as reported by themselves."""
        if self._clock() >= self._count_at_s:
            self._count()
        return self._snapshot

    def others(self) -> Mapping[str, OthersLoad]:
        """Return the siblings' in-flight load, by engine."""
        return self._count()

    def _count(self) -> Mapping[str, OthersLoad]:
        now = self._clock()
        load = self.load.others(self._fields, now)
        self._snapshot = PeerSnapshot(load=load) if load else NO_PEER_SNAPSHOT
        self._count_at_s = now + _RECOUNT_S
        return load

    # -- sending --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send and receive until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._mesh.open()
        try:
            self._flush(hello=True)
            while True:
                await asyncio.sleep(_REPEAT_S)
                if self._others is not None:
                    self._others.age(self._clock())
                self._flush()
        finally:
            self._loop = None
            self._mesh.close()

    def _begin(self) -> None:
        """Start a new, empty message."""
        self._flights: list[bytes] = []
        self._texts: list[tuple[bytes, str]] = []
        self._bytes = 0
        self._since_s = 0.0

    def _add_inflight(self, engine_id: str, entry: bytes) -> bool:
        if not self._whole or not self._room(len(entry)):
            return False
        self._flights.append(entry)
        return True

    def _add_text(self, keys: Sequence[int], engine_id: str) -> None:
        if self._whole and keys and self._room(8 * min(len(keys), _KEYS_MAX)):
            self._texts.append((np.array(keys[:_KEYS_MAX], "<u8").tobytes(), engine_id))

    def _room(self, size: int) -> bool:
        """Make room for an entry of ``size`` bytes and schedule a flush; False before the start."""
        if self._loop is None:
            return False
        if self._bytes + size > MESSAGE_BYTES_MAX // 2:
            self._flush()
        if not self._bytes:
            self._since_s = self._clock()
            self._loop.call_later(FLUSH_S, self._flush)
        self._bytes += size + 64
        return True

    def _flush(self, *, hello: bool = False) -> None:
        """Send the pending message, if any. ``hello``: send even an empty one, to announce this life."""
        now = self._clock()
        load = b""
        if self._whole and now >= self._load_due_s and self._loop is not None:
            load = self.load.field(now) or b""
            self._load_due_s = now + max(_LOAD_S, _LOAD_TIMES * (self._clock() - now))
        uses = None if self._loop is None else self._uses(now)
        if not (self._bytes or load or uses or hello):
            return
        message = WorkerMessage(self._life, self._since_s or now, self._flights, load, self._texts, uses)
        self._begin()
        encoded = _ENCODE.encode(message)
        if len(encoded) > MESSAGE_BYTES_MAX:  # load of a very large fleet
            message.load = b""
            encoded = _ENCODE.encode(message)
        missed = self._mesh.broadcast(encoded)
        self.stats.sent += 1
        self.stats.missed += missed
        if load:
            self.load.sent(load, now)

    def _uses(self, now: float) -> Uses | None:
        """Return the changed totals, and every ``_WHOLE_S`` also unchanged ones. None: nothing to send."""
        if self._gate is None or self._reports is None:
            return None
        whole = now >= self._whole_due_s
        names = self._gate.changed(_TENANTS_MAX)
        if not names and not whole:
            return None
        if whole:
            self._whole_due_s = now + _WHOLE_S
        return self._reports.next(names, all_tenants=whole)

    def _refused(self) -> None:
        self.stats.refused += 1

    # -- receiving ------------------------------------------------------------------------------------

    def _on_message(self, sibling: int, encoded: bytes) -> None:
        message = self._messages.read(encoded)
        if message is None:
            return
        now = self._clock()
        self.stats.received += 1
        name = str(sibling)
        if self._lives.get(sibling) != message.life:
            self._lives[sibling] = message.life
            self._fields.pop(name, None)
            self.inflight.lost(name)
            if self._others is not None:
                self._others.forget(sibling)
            # A new process: it has no totals of this worker yet.
            self._whole_due_s = 0.0
            self._count_at_s = 0.0
        if message.load:
            self._fields[name] = message.load
            self._count_at_s = 0.0
        if message.flights:
            self.inflight.receive(message.flights, now)
        for keys, engine_id in message.texts:
            self.affinity.receive(np.frombuffer(keys, "<u8").tolist(), engine_id)
        if message.uses is not None and self._others is not None:
            self._others.receive(sibling, message.uses, now)
        self.delays.observe(max(0.0, now - message.sent_s))
