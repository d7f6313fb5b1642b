"""Messages between the halves of a ``HybridMultiConnector``: one part per child, in the order of the
children.

Plain data, pickled between the engine core and its workers. Parts are the children's own messages and opaque
here. Invariant: each child receives only the parts that its other half sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from connectors.compat import KVConnectorHandshakeMetadata, KVConnectorKVEvents, MultiKVConnectorMetadata


@dataclass
class MultiMetadata(MultiKVConnectorMetadata):
    """A step, scheduler to worker: vLLM's metadata, and the children that save ended requests."""

    saves: dict[str, frozenset[int]] = field(default_factory=dict)
    """Requests that ended, and the children (by position) that still save their blocks."""


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """Handshake metadata of a rank's children for other engines."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]

    @staticmethod
    def parts_for(child: int, metadata: Mapping[Any, MultiHandshake]) -> dict[Any, Any]:
        """One child's parts by rank; ranks without a part are omitted."""
        parts = {rank: handshake.parts[child] for rank, handshake in metadata.items()}
        return {rank: part for rank, part in parts.items() if part is not None}


@dataclass(frozen=True)
class _Part:
    child: int
    events: Any


class MultiKvEvents(KVConnectorKVEvents):
    """KV events of the children's workers, by child.

    vLLM merges the containers of several ranks by adding one's "events" to another's. Here the events are the
    children's complete containers, so that each counts its own ranks.
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


class RunningSaves:
    """Children of a rank that still save the blocks of ended requests.

    A request's blocks may be freed only when the last save is done. The scheduler announces a request in the
    same step in which the children learn of its end.
    """

    def __init__(self) -> None:
        self._saving: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._saving)

    def announce(self, saves: Mapping[str, Iterable[int]]) -> None:
        for request_id, children in saves.items():
            self._saving[request_id] = set(children)

    def ended(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """Handle the end of a child's saves; returns the requests that no child saves any longer."""
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
