"""The Protocol of a source of engines: it reports the complete set it knows, whenever that changes.

The registry works out what changed. Always true of a source: while it fails it tells nothing, so what it told
last stays; every failure is counted by its reason and the last one can be read; what it tells is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from router.fleet.identity import EngineAddress

PROBLEM_LENGTH_MAX = 300


class CannotStartError(Exception):
    """A source lacks what it needs; the message names the key or file, and the remedy."""


class DiscoveredEngine(msgspec.Struct, frozen=True):
    """One engine as a source sees it now."""

    engine: EngineAddress
    held: str = ""
    """Why it is to get no new requests; "": it may have them."""
    identity: str = ""
    """Who is at that address, e.g. a pod's uid. With another one nothing that was known holds."""


class SourceStats(msgspec.Struct):
    """What metrics, ``/kvatlas/sources`` and the doctor show of a source."""

    synced: bool = False
    """Gauge: 1 once its complete list was read."""
    engines: int = 0
    """Gauge: engines it names now."""
    updates: int = 0
    """How often its set changed."""
    failing: bool = False
    """Gauge: 1 while its list may be out of date."""
    errors: dict[str, int] = {}
    """Failures, by reason."""
    refused: int = 0
    """Entries ignored because they were invalid."""
    last_error: str = ""

    def failed(self, reason: str, text: str) -> bool:
        """Count a failure. Returns whether it is news worth a log line."""
        news = not self.failing or self.last_error != text
        self.failing = True
        self.complain(reason, text)
        return news

    def complain(self, reason: str, text: str) -> None:
        """Count a failure that leaves the rest of the set in order."""
        self.errors[reason] = self.errors.get(reason, 0) + 1
        self.last_error = text[:PROBLEM_LENGTH_MAX]

    def recovered(self) -> None:
        """It works (again); the last error stays to be read."""
        self.failing = False


Publish = Callable[[Sequence[DiscoveredEngine]], None]


class Source(Protocol):
    """Runs until cancelled. ``publish`` gets the complete set whenever it may have changed."""

    name: str
    stats: SourceStats

    async def run(self, publish: Publish) -> None: ...
