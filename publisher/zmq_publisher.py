"""Publish event batches over ZMQ as vLLM does: a PUB socket, and a ROUTER that replays recent batches.

Live message: ``[topic, seq, payload]``; ``seq`` is 8 bytes big endian, starts at 0 and grows by one per
batch. Replay: a DEALER or REQ peer sends ``[b"", start_seq]``. The reply has ``[b"", topic, seq, payload]``
for every batch still in the ring with ``seq >= start_seq``, then ``[b"", b"", ff * 8, b""]``. Frames are
byte-identical to those of vLLM 0.32's ``ZmqEventPublisher``.

With a ledger, every payload ends in a 16-byte publisher id, and an empty batch marks each idle second. A peer
of the replay socket that sends ``[b"", b"snapshot"]`` receives the complete content of the engine in one
message ``[b"", cut, publisher_id, chunk, ...]``: the form of vLLM #57789, on the replay socket.

For asyncio programs: ``publish`` never blocks (a PUB socket drops messages for a peer whose queue is full).
The loop serves replay in slices, so that a long answer blocks neither the program nor live batches. Use an
instance from the loop's thread only. Deviation from vLLM: the PUB endpoint is always bound.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Generator

import msgspec
import zmq

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import Event, encode_batch, encode_sglang_batch
from kvatlas.publisher.snapshot import REQUEST, UNAVAILABLE, SnapshotLedger

# Seq frame of the message that ends a replay answer: -1 as a signed 64-bit number (vLLM's ``END_SEQ``).
END_SEQ = b"\xff" * 8

# Replay messages sent before yielding to the loop: about half a millisecond.
_SLICE_MESSAGES = 128
# Cost of one snapshot shard in a slice, in replay messages.
_SHARD_COST = 16
_HEARTBEAT_S = 1.0
# Sentinel for the end of an answer; a message is never empty.
_DONE: list[bytes] = []
# Most replay answers in progress. Further requests are dropped and counted; their senders retry.
_ANSWERS_MAX = 64


class PublisherStats(msgspec.Struct):
    """Counters of one publisher."""

    batches: int = 0
    replays: int = 0
    replayed_batches: int = 0
    bad_replay_requests: int = 0
    dropped_replay_requests: int = 0
    snapshots: int = 0
    snapshots_refused: int = 0
    """Requests for a snapshot that was unavailable or too large."""
    heartbeats: int = 0


def rank_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of one data-parallel rank: tcp port + rank, as vLLM does; port ``0`` or ``*`` stays.

    Raises ``ValueError`` for a rank other than 0 on a transport that has no such rule.
    """
    if data_parallel_rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    host, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon:
        raise ValueError(f"cannot offset {endpoint!r} for rank {data_parallel_rank}: not tcp or inproc")
    if port in ("0", "*"):
        return endpoint
    return f"{host}:{int(port) + data_parallel_rank}"


class ZmqPublisher:
    """One engine's (and data-parallel rank's) event stream.

    ``endpoint`` and ``replay_endpoint`` may end in ``:*``; the attributes of the same names hold the bound
    addresses. Call ``start`` inside the running loop to serve replay. ``clock`` gives the batch time stamp
    (seconds since the epoch). ``ledger`` enables snapshots; the publisher keeps it up to date. ``sglang``
    writes payloads of SGLang, which has the same sockets and no snapshots. Raises
    ``zmq.ZMQError`` when an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        clock: Callable[[], float] = time.time,
        ledger: SnapshotLedger | None = None,
        snapshot_bytes_max: int = 256 << 20,
        sglang: bool = False,
    ) -> None:
        self.stats = PublisherStats()
        # Id of this run of the publisher; None without snapshots.
        self.publisher_id = os.urandom(16) if ledger is not None else None
        self._ledger = ledger
        self._sglang = sglang
        self._snapshot_bytes_max = snapshot_bytes_max
        self._published = False
        self._heartbeat: asyncio.TimerHandle | None = None
        self.topic = topic
        self.data_parallel_rank = data_parallel_rank
        self._topic = topic.encode()
        self._clock = clock
        self._next_seq = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._answers: deque[Generator[list[bytes] | None, None, None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slice_handle: asyncio.Handle | None = None
        self._replay: zmq.Socket[bytes] | None = None
        # Terminated by ``close``, which waits for its sockets; after that the ports are free.
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        if context is None:
            context = self._own_context = zmq.Context()
        self._pub = context.socket(zmq.PUB)
        try:
            # vLLM's default: a slow subscriber loses batches beyond it and repairs the gap by replay.
            self._pub.set_hwm(hwm)
            self.endpoint = _bind(self._pub, rank_endpoint(endpoint, data_parallel_rank))
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                # A ROUTER drops messages beyond its peer's queue; a whole answer has to fit.
                self._replay.set_hwm(max(1000, buffer_steps + 1))
                self.replay_endpoint = _bind(self._replay, rank_endpoint(replay_endpoint, data_parallel_rank))
        except BaseException:
            self.close()
            raise

    @property
    def next_seq(self) -> int:
        """Seq of the next batch; the number of batches published so far."""
        return self._next_seq

    @property
    def closed(self) -> bool:
        return self._pub.closed

    def renumber(self, next_seq: int) -> None:
        """Set the seq of the next batch, to publish a recorded stream."""
        # A lower seq means a restarted engine: earlier batches are no longer replayed.
        if next_seq < self._next_seq:
            self._ring.clear()
        self._next_seq = next_seq

    def publish(self, events: list[Event], *, ts: float | None = None) -> int:
        """Send one batch; returns its seq. Never blocks. Raises ``RuntimeError`` after ``close``."""
        timestamp = self._clock() if ts is None else ts
        if self._sglang:
            payload = encode_sglang_batch(timestamp, events, self.data_parallel_rank)
        else:
            payload = encode_batch(timestamp, events, self.data_parallel_rank, self.publisher_id)
        return self.publish_payload(payload)

    def publish_payload(self, payload: bytes) -> int:
        """Send an already encoded batch; returns its seq. With snapshots it must end in ``publisher_id``."""
        if self._pub.closed:
            raise RuntimeError("the publisher is closed")
        seq = self._next_seq
        self._next_seq = seq + 1
        if self._ledger is not None:
            # Before the batch is sent: a snapshot cut at this seq must contain it.
            self._ledger.apply(decode_batch(payload))
            self._published = True
        # Store before sending: a peer that saw a seq live can also have it replayed.
        self._ring.append((seq, payload))
        self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self.stats.batches += 1
        return seq

    def start(self) -> None:
        """Serve replay and snapshots from the running event loop until ``close``."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        if self._ledger is not None:
            self._heartbeat = self._loop.call_later(_HEARTBEAT_S, self._send_heartbeat)
        if self._replay is None:
            return
        self._loop.add_reader(self._replay.fileno(), self._take_requests, self._replay)
        self._take_requests(self._replay)

    def close(self) -> None:
        """Stop immediately and close the sockets; a second call does nothing.

        Without a shared ``context``, the ports are free when it returns.
        """
        if self._slice_handle is not None:
            self._slice_handle.cancel()
            self._slice_handle = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        for answer in self._answers:
            answer.close()
        self._answers.clear()
        if self._replay is not None and not self._replay.closed:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._replay.fileno())
            self._replay.close(linger=0)
        self._pub.close(linger=0)
        if self._own_context is not None:
            # Without it ZMQ closes the sockets later, and a restarted engine cannot bind its ports.
            self._own_context.term()

    def _take_requests(self, replay: zmq.Socket[bytes]) -> None:
        """Read every waiting request; ZMQ's descriptor is edge-triggered, so none may be left."""
        while True:
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 3 or len(frames[2]) > 8:
                self.stats.bad_replay_requests += 1
            elif len(self._answers) >= _ANSWERS_MAX:
                self.stats.dropped_replay_requests += 1
            elif self._ledger is not None and frames[2] == REQUEST:
                self._answers.append(self._snapshot(frames[0], self._ledger))
            else:
                self._answers.append(self._answer(frames[0], int.from_bytes(frames[2], "big")))
        if self._answers and self._slice_handle is None and self._loop is not None:
            self._slice_handle = self._loop.call_soon(self._send_slice, replay)

    def _send_slice(self, replay: zmq.Socket[bytes]) -> None:
        """Send one slice of the oldest answer, then let the loop run."""
        self._slice_handle = None
        room = _SLICE_MESSAGES
        while room > 0:
            message = next(self._answers[0], _DONE)
            if message is None:
                room -= _SHARD_COST
                continue
            room -= 1
            if message is _DONE:
                self._answers.popleft()
                break
            try:
                replay.send_multipart(message, zmq.NOBLOCK)
            except zmq.ZMQError:
                # The peer is gone or its queue is full; it times out and retries.
                self._answers.popleft()
                break
        # Sending may have consumed the edge that signalled a waiting request.
        self._take_requests(replay)

    def _answer(self, peer: bytes, start_seq: int) -> Generator[list[bytes] | None, None, None]:
        """The messages of one answer, from the ring's content when the answer begins."""
        # A copy: batches published during the answer are sent live, and would otherwise extend it without
        # end.
        for seq, payload in [entry for entry in self._ring if entry[0] >= start_seq]:
            self.stats.replayed_batches += 1
            yield [peer, b"", self._topic, seq.to_bytes(8, "big"), payload]
        yield [peer, b"", b"", END_SEQ, b""]
        self.stats.replays += 1

    def _snapshot(self, peer: bytes, ledger: SnapshotLedger) -> Generator[list[bytes] | None, None, None]:
        """Yield None for each piece of work, then the message of the snapshot."""
        cut, snapshot = self._next_seq - 1, ledger.snapshot()
        head = [peer, b"", cut.to_bytes(8, "big", signed=True), self.publisher_id or b""]
        try:
            while not ledger.lost and snapshot.size_bytes <= self._snapshot_bytes_max and snapshot.step():
                yield None
            if snapshot.done and snapshot.size_bytes <= self._snapshot_bytes_max:
                self.stats.snapshots += 1
                yield [*head, *snapshot.chunks]
            else:
                self.stats.snapshots_refused += 1
                head[2] = UNAVAILABLE.to_bytes(8, "big", signed=True)
                yield head
        finally:
            snapshot.close()

    def _send_heartbeat(self) -> None:
        """Publish an empty batch after an idle second, so that readers can tell idleness from failure."""
        if self._loop is None or self._pub.closed:
            return
        self._heartbeat = self._loop.call_later(_HEARTBEAT_S, self._send_heartbeat)
        if not self._published:
            self.stats.heartbeats += 1
            self.publish([])
        self._published = False


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and return the address in use (a wildcard port resolved)."""
    socket.bind(endpoint)
    if not endpoint.startswith("tcp://"):
        return endpoint
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
