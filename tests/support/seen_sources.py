"""A source of engines at work, and its sightings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvatlas.router.fleet.engines import DiscoveredEngine, Source
from tests.support.waiting import until


class Seeing:
    """Sightings of a source: by base URL, why each engine is held."""

    def __init__(self, source: Source) -> None:
        self.source: Any = source
        self.told: list[Any] = []
        self.latest: Sequence[DiscoveredEngine] = ()

    def shown(self, sightings: Sequence[DiscoveredEngine]) -> Any:
        return {one.engine.base_url: one.held for one in sightings}

    def tell(self, sightings: Sequence[DiscoveredEngine]) -> None:
        self.latest = sightings
        self.told.append(self.shown(sightings))

    @property
    def now(self) -> Any:
        return self.told[-1] if self.told else None

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await until(condition, lambda: f"{what}; {self.told} {self.source.stats}")

    async def sees(self, wanted: Any) -> None:
        await self.until(lambda: bool(self.told) and self.now == wanted, f"{wanted}")


S = TypeVar("S", bound=Seeing)


@asynccontextmanager
async def at_work(seen: S) -> AsyncIterator[S]:
    """Run the source meanwhile; it ends by being cancelled."""
    task = asyncio.create_task(seen.source.run(seen.tell))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
