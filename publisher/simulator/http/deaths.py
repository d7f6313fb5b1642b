"""A simulated engine that dies in the middle of an answer: a switch for tests and demonstrations.

``Deaths`` stands between the application and the server, counts the pieces of an answer to a request that
generates, and ends the engine at the chosen point. Dead is dead: no answer, no event, no port.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from publisher.simulator.http.call import ClientGoneError, Send
from publisher.simulator.settings import DeathPoint


class Deaths:
    """``at``: where the next answer ends the engine; None: nowhere."""

    def __init__(self, at: DeathPoint | None, die: Callable[[], None]) -> None:
        self.at = at
        self._die = die

    def watch(self, send: Send) -> Send:
        """``send`` of one answer, up to the engine's death."""

        async def watched(message: MutableMapping[str, Any]) -> None:
            begins = message["type"] == "http.response.start"
            if begins and self.at == "before_answer":
                self._end()
            ends = not begins and not message.get("more_body", False)
            if not begins and self.at == "after_first_byte":
                body = message["body"]
                await send({**message, "body": body[: max(1, len(body) // 2)], "more_body": True})
                self._end()
            await send(message)
            if ends and self.at == "after_answer":
                self._end()

        return watched

    def _end(self) -> None:
        self._die()
        raise ClientGoneError
