"""Which engine holds which response of the Responses API: follow-ups, GET and cancel must go there.

Learned from answers, so that only responses made through this router are known. Bounded: the oldest are
forgotten first; an engine that leaves takes its responses with it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

RESPONSES_MAX: Final = 100_000
_ID_CHARS_MAX: Final = 128


class ResponseHolders:
    """Response id -> engine id."""

    def __init__(self, responses_max: int = RESPONSES_MAX) -> None:
        self._max = responses_max
        self._engines: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def record(self, response_id: str, engine_id: str) -> None:
        """This engine answered with this response. Ids longer than any engine makes are not kept."""
        if len(response_id) > _ID_CHARS_MAX:
            return
        self._engines[response_id] = engine_id
        self._engines.move_to_end(response_id)
        if len(self._engines) > self._max:
            self._engines.popitem(last=False)

    def holder(self, response_id: str | None) -> str | None:
        """The engine that made it, as far as is known."""
        return None if response_id is None else self._engines.get(response_id)

    def forget(self, engine_id: str) -> None:
        """The engine left: its responses are gone."""
        for response_id in [r for r, e in self._engines.items() if e == engine_id]:
            del self._engines[response_id]
