"""Fetching missed batches from an engine's replay ROUTER: the one ``Resync`` strategy in use.

A fresh DEALER per request, so that no answer can be taken for that of another request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import zmq

from router.feeds.base import FeedSettings, FeedStats, ResyncError
from router.feeds.sockets import MessageReader, Slice, receive
from router.feeds.wire import Frame, WireError, replay_in_pieces


class ReplayResync:
    """Asks ``endpoint`` for batches. Malformed messages are counted in ``stats`` and left out."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        stats: FeedStats,
        settings: FeedSettings,
        clock: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._context = context
        self._stats = stats
        self._settings = settings
        self._clock = clock

    async def fetch(self, from_seq: int) -> AsyncGenerator[Frame, None]:
        """See ``Resync.fetch``."""
        socket = self._context.socket(zmq.DEALER)
        with MessageReader(socket) as reader:
            socket.set(zmq.RCVHWM, self._settings.receive_queue_max)
            socket.set(zmq.MAXMSGSIZE, 4 * self._settings.payload_bytes_max)
            try:
                socket.connect(self._endpoint)
                socket.send_multipart([b"", from_seq.to_bytes(8, "big")], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ResyncError(f"{self._endpoint}: {error}") from error
            work = Slice(self._clock, self._settings.slice_s)
            while True:
                message = await receive(reader, self._endpoint, self._settings.replay_timeout_s)
                try:
                    steps = replay_in_pieces(message, payload_bytes_max=self._settings.payload_bytes_max)
                    frame = await work.all(steps)
                except WireError as error:
                    self._stats.malformed(error.reason)
                    await work.yield_to_loop()
                    continue
                if frame is None:
                    return
                if frame.fault:
                    self._stats.malformed(frame.fault)
                yield frame
                await work.yield_to_loop()
