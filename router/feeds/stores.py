"""Feeds of stores: each follows the events of one store, and keeps what it holds in its model's index.

Stores have no replay. So an event that was lost leaves no way to know what else was removed: with a gap in
the numbers, a number that goes back (another process), a batch that cannot be read, or a lost connection,
all that was known of the store is dropped, and it fills again with what is stored from then on. What it held
before the router came is unknown as well: predictions are too low, never too high.

Every router and worker follows every store itself: what stores hold is in no index that replicas share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Annotated

import msgspec
import structlog
import zmq

from kvatlas.publisher.block_hash import HashScheme
from kvatlas.publisher.events import EventDecodeError
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.sockets import MessageReader, Slice, connection_events, live_socket, monitored
from kvatlas.router.feeds.store_events import StoreDecoder
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.http.client import HttpClient
from kvatlas.router.index.base import Index
from kvatlas.router.index.stores import StoreContent
from kvatlas.router.observe.load_rate import LoadRate

_log = structlog.get_logger()
_RESTART_S = 1.0
_AGE_S = 5.0
_CHANGES_AT_ONCE = 256
KEYS_PATH = "/get_all_keys"
# Of an answer with all keys: some 150 bytes for each of 1,048,576.
KEYS_BYTES_MAX = 256 << 20
KEYS_S_MAX = 30.0
# Lists that may be missing one after the other before a store counts as disconnected.
_MISSED_MAX = 2


class StoreStats(msgspec.Struct):
    """Counters and gauges of one store's feed."""

    connected: Annotated[bool, "kvatlas_store_connected"] = False
    """1 while the router is connected to all addresses that the store publishes at."""
    chunks: Annotated[int, "kvatlas_store_chunks"] = 0
    """Chunks of the store that have all their parts, and count."""
    incomplete: Annotated[int, "kvatlas_store_incomplete_chunks"] = 0
    """Chunks of which a part is missing: they do not count."""
    load_s_per_token: Annotated[float | None, "kvatlas_store_load_seconds_per_token"] = None
    """Seconds to load one token from the store, learned from receipts; until then
    `policy.storage_load_s_per_token` counts."""
    batches: Annotated[int, "kvatlas_store_batches_total"] = 0
    """Batches received from the store, or lists of its keys."""
    events: Annotated[int, "kvatlas_store_events_total"] = 0
    """Events, or keys, of these."""
    dropped: Annotated[dict[str, int], "kvatlas_store_dropped_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Times that all that was known of the store was dropped, by reason: `gap` (a number is missing),
    `restart` (numbers went back), `disconnected`, `undecodable`."""
    unused: Annotated[dict[str, int], "kvatlas_store_unused_events_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Events that were seen and not used, by reason."""
    overflows: Annotated[int, "kvatlas_store_overflows_total"] = 0
    """Chunks beyond the bound of 1,048,576 per store, which are not kept."""


class Sequence:
    """Numbers of one publisher's batches."""

    def __init__(self) -> None:
        self._next: int | None = None

    def take(self, number: int) -> str:
        """Return why what was known cannot be kept with this batch: ``gap``, ``restart``, or "". The first
        one seen may have any number."""
        expected, self._next = self._next, number + 1
        if expected is None or number == expected:
            return ""
        return "gap" if number > expected else "restart"

    def reset(self) -> None:
        """Expect any number: the connection was lost."""
        self._next = None


class StoreFeed:
    """Follows one store."""

    def __init__(
        self, settings: StoreSettings, feeds: FeedSettings, scheme: Callable[[], HashScheme | None]
    ) -> None:
        self.settings = settings
        self.content = StoreContent(settings.name, settings.reach, settings.parts)
        self.load_rate = LoadRate()
        self._decoder = StoreDecoder(settings, scheme)
        self._feeds = feeds
        self._stats = StoreStats(unused=self._decoder.unused)
        self._connected = set[str]()
        self._attached = asyncio.Event()
        # Batches of several publishers change the content one after the other.
        self._applying = asyncio.Lock()
        self._log = _log.bind(store=settings.name)

    @property
    def stats(self) -> StoreStats:
        """Counters, with the present gauges."""
        stats, content = self._stats, self.content
        stats.connected = len(self._connected) == (len(set(self.settings.events)) or 1)
        stats.chunks, stats.incomplete = content.whole, content.chunks - content.whole
        stats.overflows, stats.load_s_per_token = content.overflows, self.load_rate.s_per_token or None
        return stats

    async def run(self, clock: Callable[[], float]) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for endpoint in dict.fromkeys(self.settings.events):
                tasks.create_task(self._follow(endpoint, clock), name=f"store {self.settings.name}")
            if self.settings.keys_url is not None:
                tasks.create_task(self._poll(self.settings.keys_url, clock), name="keys of a store")
            ttl_s, more = self.settings.expires_s, False
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0 if more else _AGE_S):
                        await self._attached.wait()
                self._attached.clear()
                more = ttl_s is not None and self.content.age(clock(), ttl_s)
                more = self.content.step() or more

    def attach(self, index: Index | None) -> None:
        """Keep what it holds in this index from now on; None: in none."""
        self.content.attach(index)
        self._attached.set()

    async def _follow(self, endpoint: str, clock: Callable[[], float]) -> None:
        while True:
            try:
                await self._read(endpoint, clock)
            except Exception:  # noqa: BLE001  # other feeds and requests must continue
                self._log.exception("feed of a store failed, restarting it", endpoint=endpoint)
            self._lose("disconnected", endpoint)
            await asyncio.sleep(_RESTART_S)

    async def _poll(self, url: str, clock: Callable[[], float]) -> None:
        """Read the list of all keys again and again; what it lacks is gone."""
        missed = 0
        async with HttpClient() as client:
            while True:
                try:
                    await self._list(client, url, clock)
                    missed = 0
                except OSError as error:
                    missed += 1
                    self._log.debug("keys of a store could not be read", error=str(error))
                    if missed == _MISSED_MAX:
                        self._lose("disconnected", url)
                except Exception:  # noqa: BLE001  # other feeds and requests must continue
                    self._log.exception("keys of a store could not be used", endpoint=url)
                    self._lose("undecodable", url)
                await asyncio.sleep(self.settings.keys_every_s)

    async def _list(self, client: HttpClient, url: str, clock: Callable[[], float]) -> None:
        async with client.exchange("GET", url.rstrip("/") + KEYS_PATH, KEYS_S_MAX) as answer:
            if answer.status != 200:
                raise OSError(f"{answer.status} from {KEYS_PATH}")
            text = await answer.body(KEYS_BYTES_MAX)
        work, found = Slice(clock), dict[int, int]()
        work.begin()
        self._stats.events += await work.all(self._listed(text, found))
        await work.all(self.content.replace(found))
        self._stats.batches += 1
        self._connected.add(url)

    def _listed(self, text: bytes, found: dict[int, int]) -> Generator[None, None, int]:
        keys = self._decoder.decode_keys(text)
        while True:
            try:
                self.content.listed(next(keys), found)
            except StopIteration as end:
                count: int = end.value
                return count
            yield

    async def _read(self, endpoint: str, clock: Callable[[], float]) -> None:
        numbers, work = Sequence(), Slice(clock)
        with contextlib.ExitStack() as stack:
            live = live_socket(zmq.Context.instance(), "", self._feeds)
            reader, monitor = monitored(live, endpoint, stack)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(endpoint, monitor, numbers))
                while True:
                    message = await work.next_of(reader)
                    # An event of the connection from before this message.
                    self._note_connection(endpoint, monitor, numbers)
                    async with self._applying:
                        await self._take(message, numbers, work)
                    await work.yield_to_loop()

    async def _watch(self, endpoint: str, monitor: MessageReader, numbers: Sequence) -> None:
        while True:
            async with self._applying:
                self._note_connection(endpoint, monitor, numbers)
            await monitor.wait()

    def _note_connection(self, endpoint: str, monitor: MessageReader, numbers: Sequence) -> None:
        for event in connection_events(monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # Messages of the connection before may have been read after its end.
                numbers.reset()
                self._forget()
                self._connected.add(endpoint)
            elif event == zmq.EVENT_DISCONNECTED:
                numbers.reset()
                self._lose("disconnected", endpoint)

    async def _take(self, message: list[bytes], numbers: Sequence, work: Slice) -> None:
        self._stats.batches += 1
        if len(message) != 3 or len(message[1]) != 8 or len(message[2]) > self._feeds.payload_bytes_max:
            self._drop("undecodable")
            return
        if why := numbers.take(int.from_bytes(message[1], "big")):
            self._drop(why)
        try:
            self._stats.events += await work.all(self._apply(message[0], message[2]))
        except EventDecodeError as error:
            self._log.warning("a batch of a store cannot be read", error=str(error))
            self._drop("undecodable")

    def _apply(self, topic: bytes, payload: bytes) -> Generator[None, None, int]:
        """Decode and apply a batch, with a yield after each piece; returns the number of its events. Raises
        ``EventDecodeError``: the store must be forgotten."""
        pieces = self._decoder.decode(topic, payload)
        while True:
            try:
                changes = next(pieces) or ()
            except StopIteration as end:
                count: int = end.value
                return count
            for start in range(0, len(changes), _CHANGES_AT_ONCE):
                for change in changes[start : start + _CHANGES_AT_ONCE]:
                    if change is None:
                        self.content.clear()
                    else:
                        self.content.apply(change)
                yield
            if not changes:
                yield

    def _lose(self, why: str, endpoint: str) -> None:
        self._connected.discard(endpoint)
        self._drop(why)

    def _drop(self, why: str) -> None:
        """Drop all that is known of the store."""
        if self.content.chunks:
            self._log.warning("what this store holds is unknown: all of it was dropped", reason=why)
        self._stats.dropped[why] = self._stats.dropped.get(why, 0) + 1
        self._forget()

    def _forget(self) -> None:
        self.content.clear()
        self._decoder.clear()


class StoreFeeds:
    """The feeds of all configured stores. ``scheme_of``: hash scheme of a model's engines."""

    def __init__(
        self,
        stores: tuple[StoreSettings, ...],
        feeds: FeedSettings,
        *,
        scheme_of: Callable[[str], HashScheme | None],
        clock: Callable[[], float],
    ) -> None:
        self._feeds = feeds
        self._scheme_of = scheme_of
        self._clock = clock
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._by_name = {one.name: self._made(one) for one in stores}

    def _made(self, settings: StoreSettings) -> StoreFeed:
        return StoreFeed(settings, self._feeds, lambda: self._scheme_of(settings.model))

    def __iter__(self) -> Iterator[StoreFeed]:
        return iter(self._by_name.values())

    @property
    def stats(self) -> dict[str, StoreStats]:
        """Counters by store."""
        return {name: feed.stats for name, feed in self._by_name.items()}

    def of_engine(self, base_url: str, model: str) -> frozenset[str]:
        """Stores that an engine of this model loads from."""
        return frozenset(
            feed.settings.name
            for feed in self
            if feed.settings.model == model
            and (not feed.settings.engines or base_url in [url.rstrip("/") for url in feed.settings.engines])
        )

    def load_rate(self, stores: frozenset[str]) -> LoadRate | None:
        """Rate of an engine that loads from these; of several it is not known from which."""
        (name, *more) = stores or ("",)
        feed = None if more else self._by_name.get(name)
        return None if feed is None else feed.load_rate

    def attach(self, model: str, index: Index) -> None:
        """Keep what the model's stores hold in this index from now on."""
        for feed in self:
            if feed.settings.model == model:
                feed.attach(index)

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the stores in ``tasks``."""
        self._tasks = tasks
        for feed in self:
            self._start(feed)

    def end(self) -> None:
        """Stop following; what is known is dropped."""
        self._tasks = None
        for name in list(self._running):
            self._stop(name)

    def take(self, stores: tuple[StoreSettings, ...], index_of: Callable[[str], Index]) -> None:
        """Use changed settings: stores whose settings are the same are followed on."""
        wanted = {one.name: one for one in stores}
        for name, feed in list(self._by_name.items()):
            if wanted.get(name) != feed.settings:
                self._stop(name)
                feed.attach(None)
                del self._by_name[name]
        for name, settings in wanted.items():
            if name not in self._by_name:
                feed = self._by_name[name] = self._made(settings)
                feed.attach(index_of(settings.model))
                self._start(feed)
        self._by_name = {name: self._by_name[name] for name in wanted}

    def _start(self, feed: StoreFeed) -> None:
        if self._tasks is not None:
            name = feed.settings.name
            self._running[name] = self._tasks.create_task(feed.run(self._clock), name=f"store {name}")

    def _stop(self, name: str) -> None:
        task = self._running.pop(name, None)
        if task is not None:
            task.cancel()
        self._by_name[name].content.clear()
