"""Responses that the simulated engine keeps: to go on from, to be asked for again, to be cancelled.

Always true: at most ``KEPT_MAX`` are kept; one that is dropped while it is made is not made any further.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from publisher.simulator.api.answers import Json

KEPT_MAX = 1024
_UNDER_WAY = "queued"


class KeptResponse:
    """One response: its body, the messages that a next one goes on from, and a background stream's events."""

    def __init__(self, body: Json, messages: list[Json], abort: Callable[[], None], *, streams: bool) -> None:
        self.body = body
        self.messages = messages
        self.streams = streams
        self._abort = abort
        self._events: list[bytes] = []
        self._changed = asyncio.Condition()

    @property
    def under_way(self) -> bool:
        """Whether it is being made in the background."""
        return bool(self.body["status"] == _UNDER_WAY)

    def cancel(self) -> None:
        """Stop making it."""
        self.body = {**self.body, "status": "cancelled"}
        self._abort()

    async def add_event(self, event: bytes) -> None:
        """An event of its stream happened."""
        async with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    async def finish(self, body: Json, said: str) -> None:
        """It is made, or was cancelled before: then ``body`` is not taken."""
        async with self._changed:
            if self.under_way:
                self.body = body
                self.messages = [*self.messages, {"role": "assistant", "content": said}]
            self._changed.notify_all()

    async def events(self, first: int) -> AsyncIterator[bytes]:
        """Events from number ``first`` on, until it is made or cancelled."""
        while True:
            async with self._changed:
                while len(self._events) <= first and self.under_way:
                    await self._changed.wait()
                events = self._events[first:]
            if not events:
                return
            first += len(events)
            for event in events:
                yield event


class KeptResponses:
    """Responses by id, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, KeptResponse] = {}

    def get(self, response_id: str) -> KeptResponse | None:
        """The response of this id."""
        return self._kept.get(response_id)

    def put(self, response: KeptResponse) -> None:
        """Keep one more; the oldest makes room."""
        self._kept[response.body["id"]] = response
        while len(self._kept) > KEPT_MAX:
            dropped = self._kept.pop(next(iter(self._kept)))
            if dropped.under_way:
                dropped.cancel()
