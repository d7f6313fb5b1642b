"""What a ``HybridMultiConnector``'s halves send each other: one part per child, in the order of the children.

Plain data, pickled between the engine core and its workers. Parts are the children's own messages and are
never looked into; what always holds is that each child gets back only what its other half sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connectors.compat import KVConnectorHandshakeMetadata, KVConnectorKVEvents, MultiKVConnectorMetadata


@dataclass
class MultiMetadata(MultiKVConnectorMetadata):
    """A step, scheduler to worker: vLLM's, and who saves what."""

    saves: dict[str, frozenset[int]] = field(default_factory=dict)
    """Requests that ended, and the children (by position) that still save their blocks."""


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """What a rank's children tell other engines about themselves."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]

    @staticmethod
    def parts_for(child: int, metadata: Mapping[Any, MultiHandshake]) -> dict[Any, Any]:
        """One child's share of what all ranks told; ranks where it told nothing are left out."""
        told = {rank: handshake.parts[child] for rank, handshake in metadata.items()}
        return {rank: part for rank, part in told.items() if part is not None}


@dataclass(frozen=True)
class _Part:
    child: int
    events: Any


class MultiKvEvents(KVConnectorKVEvents):
    """KV events that the children's workers collected, child by child.

    vLLM merges the containers of several ranks by adding one's "events" to another's; here these are the
    children's whole containers, so that each counts its own ranks.
    """

    def __init__(self, parts: Mapping[int, Any]) -> None:
        self.parts = dict(parts)
        self._ranks = 1

    def add_events(self, events: list[Any]) -> None:
        for part in events:
            mine = self.parts.get(part.child)
            if mine is None:
                self.parts[part.child] = part.events
            else:
                mine.add_events(part.events.get_all_events())
                mine.increment_workers(part.events.get_number_of_workers())

    def aggregate(self) -> MultiKvEvents:
        self.parts = {child: events.aggregate() for child, events in self.parts.items()}
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._ranks += count

    def get_all_events(self) -> list[Any]:
        return [_Part(child, events) for child, events in self.parts.items()]

    def get_number_of_workers(self) -> int:
        return self._ranks

    def clear_events(self) -> None:
        for events in self.parts.values():
            events.clear_events()


class SavesUnderWay:
    """A rank's account of which children still save the blocks of requests that ended.

    A request's blocks may be freed only when the last of them is done. The scheduler announces a request in
    the same step in which the children first hear that it ended.
    """

    def __init__(self) -> None:
        self._saving: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._saving)

    def announce(self, saves: Mapping[str, Iterable[int]]) -> None:
        for request_id, children in saves.items():
            self._saving[request_id] = set(children)

    def ended(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """Those of these requests, whose save by this child ended, that no child saves any more."""
        done: set[str] = set()
        for request_id in request_ids:
            saving = self._saving.get(request_id)
            if saving is not None:
                saving.discard(child)
                if saving:
                    continue
                del self._saving[request_id]
            done.add(request_id)
        return done
