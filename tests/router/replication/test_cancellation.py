"""Tasks of the shared index end when cancelled, also if something happens at that moment."""

from __future__ import annotations

import asyncio

import pytest

from kvatlas.router.replication.mirror import MirroredIndex
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.settings import SharedSettings


async def rounds(count: int) -> None:
    """This many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(5))
async def test_a_writer_that_is_cancelled_ends_whatever_changed_just_before(turns: int) -> None:
    mirror = MirroredIndex(Client(SharedSettings(url="redis://127.0.0.1:1")), "tiny")
    writing = asyncio.ensure_future(mirror.run())
    await rounds(10)
    mirror._dirty.set()
    await rounds(turns)
    writing.cancel()
    await rounds(20)
    assert writing.cancelled()
