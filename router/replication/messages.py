"""Messages between routers, workers and replicas alike: msgpack arrays that begin with their version.

While a fleet is updated, routers of two versions share an index. A router ignores messages of another
version, and counts them apart from those that cannot be read: the first are expected then, the second a
fault. ``VERSION`` is raised with each change that a router of the version before could not read, or would
read as something else. A field added at the end, with a default, is no such change: older routers skip it.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

import msgspec

T = TypeVar("T")
# Tag of each message struct, so that it is its first element.
VERSION: Final = 1
_HEAD = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Unread(Protocol):
    """Counters of messages that were not used."""

    malformed: int
    other_version: int


class PeerMessages(Generic[T]):
    """Reads messages of one kind; ``stats`` counts the others."""

    def __init__(self, kind: type[T], stats: Unread) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._stats = stats

    def read(self, message: bytes) -> T | None:
        """Return the content; None, and counted, for a message of another version or a malformed one."""
        try:
            return self._decode(message)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            if _is_other_version(message):
                self._stats.other_version += 1
            else:
                self._stats.malformed += 1
            return None


def _is_other_version(message: bytes) -> bool:
    try:
        found = msgspec.msgpack.decode(_HEAD.decode(message)[0], type=int)
    except (msgspec.MsgspecError, ValueError, RecursionError, IndexError):
        return False
    return found != VERSION
