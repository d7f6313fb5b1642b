"""Which engine holds which response of the Responses API, and whose it is: follow-ups, GET and cancel must go
there, and only for the tenant that made it.

Learned from answers, so that only responses made through this router are known, and asked of others who may
know (``sources``: sibling workers, a shared index). Bounded: the oldest are forgotten first; an engine that
leaves takes its responses with it. Always true: a response stays with the tenant that it was first seen of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

RESPONSES_MAX: Final = 100_000
_ID_CHARS_MAX: Final = 128


class HeldResponse(NamedTuple):
    """A response's engine, and the tenant whose key made it; "" where clients have no keys."""

    engine_id: str
    tenant: str = ""


class ResponseHolders:
    """Response id -> engine id and tenant."""

    def __init__(self, responses_max: int = RESPONSES_MAX) -> None:
        self._max = responses_max
        self._held: OrderedDict[str, HeldResponse] = OrderedDict()
        self.sources: list[Callable[[str], Awaitable[HeldResponse | None]]] = []
        """Others that are asked for what is not known here, one after the other; they end in time and raise
        nothing."""
        self.listeners: list[Callable[[str, HeldResponse], None]] = []
        """Called for each response recorded here."""

    def __len__(self) -> int:
        return len(self._held)

    def record(self, response_id: str, engine_id: str, tenant: str = "") -> None:
        """This engine answered with this response. Ids longer than any engine makes are not kept."""
        held = HeldResponse(engine_id, tenant)
        if self.learn(response_id, held):
            for listener in self.listeners:
                listener(response_id, held)

    def learn(self, response_id: str, held: HeldResponse) -> bool:
        """Another worker or replica knows of it. False: it is not kept, being another tenant's already."""
        known = self._held.get(response_id)
        if len(response_id) > _ID_CHARS_MAX or (known is not None and known.tenant != held.tenant):
            return False
        self._held[response_id] = held
        self._held.move_to_end(response_id)
        if len(self._held) > self._max:
            self._held.popitem(last=False)
        return True

    def known(self, response_id: str) -> HeldResponse | None:
        """Look a response up here alone."""
        return self._held.get(response_id)

    def holder(self, response_id: str | None) -> str | None:
        """The engine that made it, as far as is known here."""
        held = None if response_id is None else self._held.get(response_id)
        return None if held is None else held.engine_id

    async def find(self, response_id: str) -> HeldResponse | None:
        """Look a response up, here and then at ``sources``."""
        if response_id in self._held or len(response_id) > _ID_CHARS_MAX:
            return self._held.get(response_id)
        for source in self.sources:
            held = await source(response_id)
            if held is not None:
                self.learn(response_id, held)
                return self._held.get(response_id)
        return None

    def forget(self, engine_id: str) -> None:
        """The engine left: its responses are gone."""
        for response_id in [r for r, held in self._held.items() if held.engine_id == engine_id]:
            del self._held[response_id]
