"""The metrics page of several workers, asked for by several at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from prometheus_client.core import CounterMetricFamily

from router.app import Router
from router.config.schema import Config
from router.workers.calls import SiblingCalls
from router.workers.merge import WorkerPage, family_of
from router.workers.seat import WorkerSockets
from router.workers.view import WholeView


class LateSibling:
    """Counts one request more each time it is asked; each answer comes when ``release`` has a turn for it."""

    def __init__(self) -> None:
        self.asked = 0
        self.release = asyncio.Semaphore(0)

    async def ask_all(self, path: str) -> dict[int, bytes]:
        assert path == "/worker/metrics"
        self.asked += 1
        counter = CounterMetricFamily("kvatlas_tests", "text", value=self.asked)
        answer = WorkerPage(1, 0, [family_of(counter)])
        await self.release.acquire()
        return {1: msgspec.msgpack.encode(answer)}


def test_counts_never_fall_however_scrapes_overlap_and_end() -> None:
    asyncio.run(_scrapes())


async def _scrapes() -> None:
    sockets = WorkerSockets(2, ("127.0.0.1", 0))
    router, sibling = Router(Config()), LateSibling()
    try:
        seat = sockets.seat(0, 0, lambda: None, -1)
        view = WholeView(seat, router.sources, cast("SiblingCalls", cast("Any", sibling)))
        first, second, gone = (asyncio.create_task(view.metrics()) for _ in range(3))
        while not sibling.asked:
            await asyncio.sleep(0)
        sibling.release.release()
        assert b"kvatlas_tests_total 1.0" in await first
        gone.cancel()
        sibling.release.release()
        assert b"kvatlas_tests_total 2.0" in await second
        sibling.release.release()
        assert b"kvatlas_tests_total 3.0" in await view.metrics()
    finally:
        router.proxy.close()
        router.reader.close()
        sockets.close()
