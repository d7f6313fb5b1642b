"""All objects of one list, updated by a watch's events, in whatever order and however often they come. Pure.

The newest version of an object wins, also over its deletion, so late and repeated events change nothing.
Versions are compared as numbers, as Kubernetes' own components do and as the API guarantees since 1.35; if
they are not numbers, the order of arrival counts. A list replaces everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kvatlas.router.services.kubernetes.objects import EndpointSlice, InferencePool, Pod

T = TypeVar("T", Pod, EndpointSlice, InferencePool)
# Deleted objects remembered until the next list.
_DELETED_MAX = 4096


class _Known(NamedTuple, Generic[T]):
    version: str
    object: T | None
    """None: deleted."""


class ObjectStore(Generic[T]):
    """The objects of one list."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known[T]] = {}
        self._deleted: dict[tuple[str, str], None] = {}

    def __iter__(self) -> Iterator[T]:
        return (known.object for known in self._known.values() if known.object is not None)

    def __len__(self) -> int:
        return len(self._known) - len(self._deleted)

    def replace(self, objects: Iterable[T]) -> None:
        self._known = {_key(one): _Known(one.metadata.resource_version, one) for one in objects}
        self._deleted = {}

    def put(self, one: T) -> bool:
        """Add or update an object. False if the event was outdated."""
        return self._note(one, _Known(one.metadata.resource_version, one))

    def delete(self, one: T) -> bool:
        """Delete an object; ``one`` is its last state. False if the event was outdated."""
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
