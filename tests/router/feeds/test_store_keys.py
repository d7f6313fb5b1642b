"""A Mooncake master without events: its list of keys is read again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.router.feeds import stores as store_feeds
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.feeds.stores import StoreFeed
from kvatlas.router.index.memory import MemoryIndex
from tests.router.fleet.misbehaving import page
from tests.support.store_publishers import mooncake_key
from tests.support.waiting import until

BLOCKS = [bytes([number]) * 32 for number in range(1, 7)]


class Master:
    """Answers ``GET /get_all_keys`` as the released one does: a key in each line."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.whole: bytes | None = None
        self.asked: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        writer.write(
            page("".join(f"{key}\n" for key in self.keys).encode()) if self.whole is None else self.whole
        )
        await writer.drain()
        writer.close()


class Followed:
    def __init__(self, feed: StoreFeed, master: Master, index: MemoryIndex) -> None:
        self.feed, self.master, self.index = feed, master, index

    @property
    def chunks(self) -> int:
        return self.index.stats().residencies

    async def lists(self, count: int = 2) -> None:
        """``count`` further answers."""
        wanted = len(self.master.asked) + count
        await until(lambda: len(self.master.asked) >= wanted, "lists read")


@asynccontextmanager
async def followed(**more: Any) -> AsyncIterator[Followed]:
    master, index = Master(), MemoryIndex()
    server = await asyncio.start_server(master.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    fields = {"name": "pool", "kind": "mooncake", "keys_url": url, "model": "org/kvatlas-demo", **more}
    feed = StoreFeed(msgspec.convert(fields, StoreSettings), FeedSettings(), HashScheme)
    feed.attach(index)
    async with server:
        running = asyncio.create_task(feed.run(asyncio.get_running_loop().time))
        yield Followed(feed, master, index)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def keys(*numbers: int, **ranks: int) -> list[str]:
    return [mooncake_key(BLOCKS[number], **ranks) for number in numbers]


async def test_chunks_that_a_list_lacks_are_gone() -> None:
    async with followed() as store:
        store.master.keys = [*keys(0, 1, 2), "another's", *keys(3)[:1], "é" * 3000]
        await until(lambda: store.chunks == 4, "listed")
        assert store.master.asked[0] == b"GET /get_all_keys HTTP/1.1"
        assert store.feed.stats.connected
        assert store.feed.stats.unused.keys() == {"keys of another form than vLLM's"}
        store.master.keys = keys(3, 4)
        await until(lambda: store.chunks == 2, "listed")
        assert store.feed.stats.chunks == 2
        store.master.keys = []
        await until(lambda: store.chunks == 0, "emptied")
        assert store.feed.stats.dropped == {}


async def test_a_chunk_counts_with_all_its_parts() -> None:
    async with followed(tensor_parallel=2) as store:
        store.master.keys = [*keys(0, 1), *keys(0, tp=1)]
        await until(lambda: store.chunks == 1, "one is whole")
        assert store.feed.stats.incomplete == 1
        store.master.keys = [*keys(0, 1), *keys(1, tp=1)]
        await store.lists()
        assert (store.chunks, store.feed.stats.incomplete) == (1, 1), "a part that is gone is gone"


@pytest.mark.parametrize("answer", [page(b"no", 503), b"", b"HTTP/1.1 200 X\r\ncontent-length: 99\r\n\r\nx"])
async def test_two_failures_drop_what_was_known(answer: bytes) -> None:
    async with followed() as store:
        store.master.keys = keys(0, 1)
        await until(lambda: store.chunks == 2, "listed")
        store.master.whole = answer
        await until(lambda: store.chunks == 0, "dropped")
        assert store.feed.stats.dropped == {"disconnected": 1}
        assert not store.feed.stats.connected
        store.master.whole = None
        await until(lambda: store.chunks == 2, "listed again")
        assert store.feed.stats.connected


async def test_lists_and_what_is_kept_of_them_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.router.index.stores.CHUNKS_MAX", 3)
    async with followed() as store:
        store.master.keys = keys(0, 1, 2, 3, 4)
        await until(lambda: store.chunks == 3, "listed")
        assert store.feed.stats.overflows >= 2
        monkeypatch.setattr(store_feeds, "KEYS_BYTES_MAX", 100)
        await until(lambda: store.chunks == 0, "too long a list")


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"events": ["tcp://h:1"]}, "events"),
        ({"keys_url": None}, "events"),
        ({"kind": "lmcache"}, "keys_url"),
        ({"keys_url": "mooncake:9003"}, "keys_url"),
        ({"keys_url": "http://h:1?x=1"}, "keys_url"),
        ({"keys_every_s": 0.1}, "keys_every_s"),
    ],
)
def test_settings_that_do_not_fit(wrong: dict[str, Any], key: str) -> None:
    fields = {"name": "pool", "kind": "mooncake", "keys_url": "http://h:1", "model": "m", **wrong}
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert(fields, StoreSettings)
