"""All objects of one list, kept true by a watch's events, whatever order and how often they come. Pure.

Per object the newest version wins, also over its deletion, so an event that is late or comes twice changes
nothing. Versions are compared as numbers, as Kubernetes' own components have long done and the API promises
since 1.35; where they are none, the order of arrival counts. A list is the truth and replaces everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from router.fleet.sources.kubernetes.objects import EndpointSlice, InferencePool, Pod

T = TypeVar("T", Pod, EndpointSlice, InferencePool)
_DELETED_MAX = 4096
"""Deleted objects remembered until the next list."""


class _Known(NamedTuple, Generic[T]):
    version: str
    object: T | None
    """None: deleted."""


class ObjectStore(Generic[T]):
    """See the module."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known[T]] = {}
        self._deleted: dict[tuple[str, str], None] = {}

    def __iter__(self) -> Iterator[T]:
        return (known.object for known in self._known.values() if known.object is not None)

    def __len__(self) -> int:
        return len(self._known) - len(self._deleted)

    def replace(self, objects: Iterable[T]) -> None:
        """These, and no others, exist."""
        self._known = {_key(one): _Known(one.metadata.resource_version, one) for one in objects}
        self._deleted = {}

    def put(self, one: T) -> bool:
        """Added or modified. False if it was old news."""
        return self._note(one, _Known(one.metadata.resource_version, one))

    def delete(self, one: T) -> bool:
        """Deleted; ``one`` is its last state. False if it was old news."""
        return self._note(one, _Known(one.metadata.resource_version, None))

    def _note(self, one: T, now: _Known[T]) -> bool:
        key = _key(one)
        known = self._known.get(key)
        if known is not None and not _newer(now.version, known.version):
            return False
        self._known[key] = now
        self._deleted.pop(key, None)
        if now.object is None:
            self._deleted[key] = None
            if len(self._deleted) > _DELETED_MAX:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest], self._known[oldest]
        return True


def _key(one: Pod | EndpointSlice | InferencePool) -> tuple[str, str]:
    return one.metadata.namespace, one.metadata.name


def _newer(version: str, than: str) -> bool:
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return True
