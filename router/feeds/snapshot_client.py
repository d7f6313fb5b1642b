"""Fetches everything that an engine holds, with the snapshot protocol of its publisher, which is recognised
by its response.

All of them understand one request, ``[b"", b"snapshot"]`` from a new DEALER, and it is harmless to others:
a publisher that only replays reads the eight bytes as a seq beyond its last and answers with its end
marker. Addresses are tried in the order given (the engine's snapshot socket, then its replay socket), each
with ``replay_timeout_s`` of silence allowed; the one that answered is tried first the next time. Responses:

- ``[b"", seq, publisher_id, chunk, ...]``, one message: vLLM #57789 and our publisher. ``seq`` is signed,
  -1 an empty history, below that "none now";
- ``[b"", topic, resume_seq, payload]`` until the end marker, ``resume_seq`` the next live seq: vLLM #50134;
- the end marker alone: no snapshots here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator

import msgspec
import zmq

from kvatlas.publisher.event_decoder import decode_in_pieces
from kvatlas.publisher.events import AllBlocksCleared, DecodedBatch, EventDecodeError
from kvatlas.publisher.snapshot import REQUEST
from kvatlas.router.feeds.base import Cut, FeedSettings, ResyncError, SnapshotUnsupportedError
from kvatlas.router.feeds.sockets import MessageReader, Slice, receive

_END_SEQ = b"\xff" * 8
# Batches of up to 1024 blocks each: about a millisecond of the sink's time.
_EVENTS_PER_PIECE = 4
SNAPSHOT_BYTES_MAX = 256 << 20
"""A larger snapshot is abandoned and a replay is requested: it is about 5 million blocks."""


class SnapshotClient:
    """Fetches snapshots; implements ``kvatlas.router.feeds.base.SnapshotSource``."""

    def __init__(
        self,
        endpoints: list[str],
        context: zmq.Context[zmq.Socket[bytes]],
        settings: FeedSettings,
        clock: Callable[[], float],
    ) -> None:
        self._endpoints = endpoints
        self._context = context
        self._settings = settings
        self._clock = clock

    async def fetch(self) -> AsyncGenerator[DecodedBatch | Cut, None]:
        """Request a snapshot and yield its batches, then its cut."""
        failure: ResyncError | None = None
        for endpoint in list(self._endpoints):
            with MessageReader(self._context.socket(zmq.DEALER)) as reader:
                try:
                    first = await self._ask(endpoint, reader)
                except SnapshotUnsupportedError:
                    continue
                except ResyncError as error:
                    failure = error
                    continue
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                work = Slice(self._clock)
                work.begin()
                pieces = _whole(first) if _is_one_message(first) else None
                if pieces is not None:
                    for piece in pieces:
                        if piece is not None:
                            yield piece
                        await work.yield_to_loop()
                    return
                async for part in self._stream(endpoint, reader, first, work):
                    yield part
                    await work.yield_to_loop()
                return
        raise failure or SnapshotUnsupportedError("no snapshots here")

    async def _ask(self, endpoint: str, reader: MessageReader) -> list[bytes]:
        """Return the first message of the response, without its empty frame."""
        reader.socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
        reader.socket.set(zmq.MAXMSGSIZE, SNAPSHOT_BYTES_MAX)  # limit of one frame
        try:
            reader.socket.connect(endpoint)
            reader.socket.send_multipart([b"", REQUEST], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ResyncError(f"{endpoint}: {error}") from error
        first = await self._next(endpoint, reader)
        if len(first) >= 2 and _END_SEQ in first[:2] and not first[-1]:
            raise SnapshotUnsupportedError(endpoint)
        return first

    async def _next(self, endpoint: str, reader: MessageReader) -> list[bytes]:
        message = await receive(reader, endpoint, self._settings.replay_timeout_s)
        return message[1:] if message and message[0] == b"" else message

    async def _stream(
        self, endpoint: str, reader: MessageReader, first: list[bytes], work: Slice
    ) -> AsyncGenerator[DecodedBatch | Cut, None]:
        """Read vLLM #50134's form: numbered messages that all carry the seq to continue from."""
        resume, offload, size = first[1] if len(first) == 3 else b"", False, 0
        message = first
        while True:
            if len(message) != 3 or len(message[1]) != 8:
                raise ResyncError(f"{endpoint}: no snapshot message: {len(message)} frames")
            if message[1] == _END_SEQ:
                break
            if message[1] != resume:
                raise ResyncError(f"{endpoint}: the snapshot changed during transfer")
            size += len(message[2])
            batch = await work.all(_decode(message[2]))
            if message is first and not (batch.events and isinstance(batch.events[0], AllBlocksCleared)):
                raise ResyncError(f"{endpoint}: a replay instead of the requested snapshot")
            if size > SNAPSHOT_BYTES_MAX:
                raise ResyncError(f"{endpoint}: snapshot over {SNAPSHOT_BYTES_MAX} bytes")
            offload = offload or _shows_offload(batch)
            for piece in _split(batch):
                yield piece
            message = await self._next(endpoint, reader)
        yield Cut(int.from_bytes(resume, "big") - 1, None, offload)


def _is_one_message(frames: list[bytes]) -> bool:
    """Whether it is vLLM #57789's form: an 8-byte cut, then a 16-byte id."""
    return len(frames) >= 2 and len(frames[0]) == 8 and len(frames[1]) == 16


def _whole(frames: list[bytes]) -> Iterator[DecodedBatch | Cut | None]:
    """Yield the pieces of a response in one message; None where the event loop may run."""
    seq = int.from_bytes(frames[0], "big", signed=True)
    if seq < -1:
        raise ResyncError(f"the publisher has no snapshot now ({seq})")
    if sum(map(len, frames)) > SNAPSHOT_BYTES_MAX:
        raise ResyncError(f"snapshot over {SNAPSHOT_BYTES_MAX} bytes")
    offload = False
    for chunk in frames[2:]:
        batch = yield from _decode(chunk)
        offload = offload or _shows_offload(batch)
        yield from _split(batch)
    yield Cut(seq, frames[1], offload)


def _decode(payload: bytes) -> Generator[None, None, DecodedBatch]:
    try:
        batch = yield from decode_in_pieces(payload)
    except EventDecodeError as error:
        raise ResyncError(f"snapshot: {error}") from None
    if batch.rejected:
        raise ResyncError(f"snapshot: {batch.rejected[0]}")
    return batch


def _split(batch: DecodedBatch) -> Iterator[DecodedBatch]:
    for start in range(0, len(batch.events), _EVENTS_PER_PIECE):
        yield msgspec.structs.replace(batch, events=batch.events[start : start + _EVENTS_PER_PIECE])


def _shows_offload(batch: DecodedBatch) -> bool:
    return any(
        not isinstance(event, AllBlocksCleared) and event.medium not in {None, "GPU"}
        for event in batch.events
    )
