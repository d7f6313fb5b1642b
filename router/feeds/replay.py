"""Fetching missed batches from an engine's replay ROUTER: the one ``Resync`` strategy in use.

A fresh DEALER per request, so that no answer can be taken for that of another request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import zmq

from router.feeds.base import FeedSettings, FeedStats, Frame, ResyncError, WireError, replay_in_pieces
from router.feeds.recovery import Recovery, Repair, RepairKind
from router.feeds.sockets import MessageReader, Slice, receive


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
        """Request a replay from ``from_seq`` and yield its frames."""
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


# What a feed does with the answer to a replay request.
#
# A replay also asks for the batch applied last (the anchor): that it comes back unchanged shows that the
# process is the one followed. Nothing is applied before, as far as there is an anchor.


class ReplayAnswers:
    """Inputs and decisions of a feed machine about replayed batches."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._position = recovery.position

    def replayed(self, now: float, request_id: int, frame: Frame) -> None:
        """A batch of the answer."""
        repair = self._recovery.answered(request_id)
        if repair is None:
            return
        repair.saw(frame.seq)
        if self._position.is_foreign(frame):
            self._recovery.restart(now, None)
        elif repair.kind is not RepairKind.RESYNC:
            self._take(now, repair, frame)
        elif frame.seq == 0:
            self._commit_resync(now, repair, frame)

    def ended(self, now: float, request_id: int) -> None:
        """The answer is complete, as far as the publisher says."""
        recovery = self._recovery
        repair = recovery.answered(request_id)
        if repair is None:
            return
        recovery.stats.replays += 1
        if repair.kind is RepairKind.RESYNC:  # the answer had no seq 0
            recovery.trust.rolled = repair.lowest_seq is not None
            recovery.give_up(now, repair)
        else:
            self._complete(now, repair)

    def failed(self, now: float, request_id: int) -> None:
        """No answer, or it broke off."""
        recovery = self._recovery
        repair = recovery.answered(request_id)
        if repair is None:
            return
        recovery.stats.replay_failures += 1
        if repair.kind is RepairKind.RESYNC:
            recovery.give_up(now, repair)
        else:
            recovery.ask_again(now, repair)

    def _take(self, now: float, repair: Repair, frame: Frame) -> None:
        position, recovery = self._position, self._recovery
        if not repair.anchored and position.is_same(frame):
            self._anchored(now, repair)
        if frame.seq < position.next_seq:
            known = position.recent.digest(frame.seq)
            if known is not None and known != frame.digest:
                recovery.restart(now, None)
            elif known is not None and not repair.anchored:
                self._anchored(now, repair)
            return
        repair.deadline = now + recovery.settings.hold_s_max
        # What finds no room stands behind a hole, which vLLM leaves where its socket takes no more, and is
        # asked for again; or the answer begins too late.
        hole = repair.anchored and repair.lowest_seq == repair.from_seq
        if not self._keep(repair, frame) and not hole:
            self._roll_past(now, repair)

    def _keep(self, repair: Repair, frame: Frame) -> bool:
        """Apply it if it is its turn, else hold it; False if there is no room."""
        position = self._position
        if frame.seq == position.next_seq and repair.anchored:
            position.apply(frame)
            position.drain()
            return True
        return position.hold(frame)

    def _anchored(self, now: float, repair: Repair) -> None:
        repair.anchored = True
        repair.deadline = now + self._recovery.settings.hold_s_max
        self._recovery.unverified = False
        if repair.kind is RepairKind.CHECK:
            repair.kind = RepairKind.GAP
        self._position.drain()

    def _complete(self, now: float, repair: Repair) -> None:
        position, recovery = self._position, self._recovery
        if not repair.anchored and repair.kind is RepairKind.CHECK:
            # The engine's oldest batch is newer than our last, or its newest older: not shown to be the
            # process that we followed. Start again with everything it still has.
            recovery.restart(now, None)
            return
        if repair.lowest_seq is not None and repair.lowest_seq > repair.from_seq:
            self._roll_past(now, repair)
        position.drain()
        if position.is_whole:
            recovery.done(now)
        else:
            recovery.ask_again(now, repair)

    def _roll_past(self, now: float, repair: Repair) -> None:
        """The publisher's buffer begins after what we need: go on from the first batch there is."""
        position, recovery = self._position, self._recovery
        if repair.kind is RepairKind.CHECK:
            recovery.restart(now, None)
            return
        repair.anchored = True
        lowest = position.held.lowest()
        if lowest is not None and lowest > position.next_seq:
            recovery.trust.rolled = True
            position.skip_to(lowest, "history_rolled")
            repair.from_seq = (
                lowest  # there is no more before it: what finds no room from here on is asked again
            )
        position.drain()

    def _commit_resync(self, now: float, repair: Repair, frame: Frame) -> None:
        """Replay reaches seq 0: drop the known state and rebuild it from there."""
        recovery = self._recovery
        recovery.forget()
        recovery.stats.resyncs += 1
        self._position.next_seq = 0
        repair.kind, repair.anchored, repair.lowest_seq = RepairKind.HISTORY, True, 0
        self._take(now, repair, frame)
