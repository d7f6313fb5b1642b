"""``kvatlas index stats|verify``: inspect a shared index, and compare it with the engines' feeds.

Status 0: done (verify: exact), 1: the index is unavailable or not exact, 2: bad arguments.

``verify`` follows every engine of a scope itself (all events from the first one, by replay), builds residency
from them, and compares block by block. The index lags the feeds by one write, so a difference counts only if
it persists: the comparison is repeated until it is gone or the time is up.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
import numpy as np
from redis.exceptions import RedisError

from kvatlas.publisher.events import BlockHash
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.feeds.base import FeedState
from kvatlas.router.feeds.subscriber import Feed
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.index.base import Plane, Words
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.index.memory import MemoryIndex
from kvatlas.router.index.model import FleetResidency
from kvatlas.router.replication.codec import ScopeKeys
from kvatlas.router.replication.leases import Lease, Leases, MemberRecord, decode_members
from kvatlas.router.replication.reader import SharedEngine, SharedReader
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable, unavailable
from kvatlas.router.replication.registry import IndexRefused, Registry, Scope, ScopeView
from kvatlas.router.replication.settings import IndexSettings, SettingsError, parse_url
from kvatlas.router.serve import configure_logging
from kvatlas.router.tools.ops_client import make_table, output_console

# Reads a shared index from outside the router: its scopes, lease holders, and every block key. For tools and
# tests only: it walks all keys (SCAN), which the router never does.


_SCAN_COUNT = 5000
_GLOB = re.compile(rb"([\\*?\[\]])")
_TIMEOUT_S = 10.0


class ScopeSnapshot(NamedTuple):
    """One model's registry, leases and replicas, read one after the other."""

    model: str
    view: ScopeView
    leases: dict[str, Lease]
    replicas: dict[str, MemberRecord]

    @property
    def addresses(self) -> dict[str, EngineAddress]:
        """Addresses of the engines, as reported by the replicas."""
        return {e.engine_id: e for record in self.replicas.values() for e in record.wants}


async def models_of(client: Client) -> list[str]:
    """Return the models that have a scope in the client's namespace."""
    namespace = client.settings.namespace.encode()
    pattern = re.compile(re.escape(namespace) + rb":\{(.*)\}:scope")
    found = set()
    async for keys in scan(client, namespace + b":{", b"}:scope"):
        found |= {unquote(match[1].decode()) for key in keys if (match := pattern.fullmatch(key))}
    return sorted(found)


async def read_scope(client: Client, model: str) -> ScopeSnapshot | None:
    """Read everything but the blocks; None if there is no such scope."""
    view = await Registry(client, model).fetch()
    if view is None:
        return None
    leases = await Leases(client, model, "").holders()
    records = decode_members(
        await client.command("HGETALL", ScopeKeys(client.settings.namespace, model).replicas)
    )
    return ScopeSnapshot(model, view, leases, {name: s for name, s in records.items() if s is not None})


async def scan(client: Client, head: bytes, tail: bytes = b"") -> AsyncIterator[list[bytes]]:
    """Yield all keys that start with ``head`` and end in ``tail``, page by page.

    A key may be returned twice. Raises ``IndexUnavailable``.
    """
    glob = _GLOB.sub(rb"\\\1", head) + b"*" + _GLOB.sub(rb"\\\1", tail)
    for master in client.masters():
        cursor = 0
        while True:
            query = ("SCAN", cursor, "MATCH", glob, "COUNT", _SCAN_COUNT)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    cursor, keys = await master.execute_command(*query)
            except (RedisError, OSError) as error:
                raise unavailable(error) from error
            yield keys
            if not cursor:
                break


async def block_hashes(client: Client, keys: ScopeKeys, scope: Scope) -> Words:
    """Return the hash of every block that has a key in this scope, unordered."""
    found: list[bytes] = []
    for partition in range(scope.partitions):
        prefix = keys.prefix(scope.epoch, partition, scope.partitions)
        async for page in scan(client, prefix):
            found += [key[-8:] for key in page if len(key) == len(prefix) + 8]
    return np.unique(np.frombuffer(b"".join(found), "<u8").astype(np.uint64))


_LOOKUP_S = 10.0
_PAGE = 20_000
_AGAIN_S = 0.1
Pairs = set[tuple[Plane, int]]
# (Wrong, missing) pairs of one engine.
_Difference = tuple[Pairs, Pairs]
_KNOWN = frozenset({FeedState.READY, FeedState.DEGRADED})


class EngineDiff(msgspec.Struct):
    """Comparison of one engine, in (plane, block) pairs."""

    engine: str
    feed: str
    """State of this tool's own feed; differences are meaningful only if it is ``ready``."""
    holder: str = ""
    stale: bool = True
    resident: int = 0
    """Pairs the engine holds according to its feed."""
    wrong: int = 0
    """Pairs in the index that the engine does not hold: predicted hits are too long."""
    missing: int = 0
    """Pairs the engine holds that are not in the index: predicted hits are too short."""

    gone: bool = False
    """No replica follows or writes it: its remaining blocks are not used and expire."""

    @property
    def exact(self) -> bool:
        return self.gone or (
            self.feed == FeedState.READY and not self.stale and not (self.wrong or self.missing)
        )


class Verifier:
    """Follows the engines of one scope while its context is open."""

    def __init__(
        self, client: Client, snapshot: ScopeSnapshot, addresses: Mapping[str, EngineAddress]
    ) -> None:
        self._unknown = sorted(set(snapshot.view.slots) - set(addresses))
        self._leases = snapshot.leases
        self._client = client
        self._model = snapshot.model
        self._memory = MemoryIndex()
        self._residency = FleetResidency(ModelFacts(), self._memory)
        self._reader = SharedReader(client)
        self._feeds = [
            Feed(e.engine_id, e.events, e.replay, e.topic, self._residency)
            for e in addresses.values()
            if e.events is not None
        ]
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Verifier:
        self._running = [asyncio.create_task(feed.run()) for feed in self._feeds]
        return self

    async def __aexit__(self, *_: object) -> None:
        for feed in self._feeds:
            feed.close()
        await asyncio.gather(*self._running, return_exceptions=True)

    def others(self) -> list[EngineDiff]:
        """Return the engines in the index with unknown event addresses."""
        held = {engine_id for engine_id, lease in self._leases.items() if lease.held}
        return [EngineDiff(e, "unknown", gone=e not in held) for e in self._unknown]

    async def compare(self, settle_s: float) -> list[EngineDiff]:
        """Return the persistent differences: as soon as there are none, otherwise after ``settle_s``."""
        end = time.monotonic() + settle_s
        found: list[EngineDiff] = []
        before: dict[str, _Difference] = {}
        while True:
            if all(feed.state in _KNOWN for feed in self._feeds):
                found, before = await self._compare_once(before)
            if (found and all(diff.exact for diff in found)) or time.monotonic() > end:
                return found or [EngineDiff(feed.engine_id, str(feed.state)) for feed in self._feeds]
            await asyncio.sleep(_AGAIN_S)

    async def _compare_once(
        self, before: Mapping[str, _Difference]
    ) -> tuple[list[EngineDiff], dict[str, _Difference]]:
        """Return the differences also found before, and all current ones."""
        await self._reader.lookup((), self._model, timeout_s=_LOOKUP_S)
        engines = self._reader.engines(self._model)
        shown = await shown_pairs(self._client, self._reader, self._model)
        diffs, now = [], {}
        for feed in self._feeds:
            engine_id = feed.engine_id
            held = self._held(engine_id)
            seen = shown.get(engine_id, set())
            wrong, missing = seen - held, held - seen
            now[engine_id] = wrong, missing
            old_wrong, old_missing = before.get(engine_id, (wrong, missing))
            known: SharedEngine | None = engines.get(engine_id)
            diffs.append(
                EngineDiff(
                    engine_id,
                    str(feed.state),
                    "" if known is None else known.holder,
                    known is None or known.stale,
                    len(held),
                    len(wrong & old_wrong),
                    len(missing & old_missing),
                )
            )
        return diffs, now

    def _held(self, engine_id: str) -> Pairs:
        """Return the pairs the engine holds according to its feed."""
        planes = self._memory.planes(engine_id)
        blocks = self._memory.blocks_of(engine_id)
        bits = self._memory.held_in(engine_id, planes, [BlockHash(value) for value in blocks.tolist()])
        pairs: Pairs = set()
        for number, plane in enumerate(planes):
            there = (bits >> np.uint64(number)) & np.uint64(1) != 0
            pairs.update((plane, value) for value in blocks[there].tolist())
        return pairs


async def shown_pairs(client: Client, reader: SharedReader, model: str) -> dict[str, Pairs]:
    """Return the (plane, block) pairs of each engine in a scope. Raises ``IndexUnavailable``."""
    view = await Registry(client, model).fetch()
    if view is None:
        return {}
    keys = ScopeKeys(client.settings.namespace, model)
    hashes = await block_hashes(client, keys, view.scope)
    shown: dict[str, Pairs] = {}
    for start in range(0, len(hashes), _PAGE):
        page: Words = hashes[start : start + _PAGE]
        asked = [BlockHash(value) for value in page.tolist()]
        found = await reader.lookup(asked, model, timeout_s=_LOOKUP_S)
        for engine_id, engine in found.engines.items():
            pairs = shown.setdefault(engine_id, set())
            for (plane, word), column in found.rows.columns.items():
                if word == engine.slot.word:
                    there = (column >> np.uint64(engine.slot.bit)) & np.uint64(1) != 0
                    pairs.update((plane, value) for value in page[there].tolist())
    return shown


_CONNECT_S = 5.0
# Number of blocks whose memory is measured: each costs one command.
_SAMPLE = 200


class EngineLine(msgspec.Struct):
    """One engine in ``stats``."""

    engine: str
    slot: int
    generation: int
    holder: str
    lease_s: float
    """Seconds until its lease expires; not positive: no writer."""
    token: int
    feed: str
    missing_batches: int
    mode: str


class ScopeLine(msgspec.Struct):
    """One scope (model) in ``stats``. Bytes as counted by the server: keys and values with overhead."""

    model: str
    blocks: int
    bytes_per_block: float | None
    epoch: str
    partitions: int
    code_bytes: int
    retired_slots: int
    engines: list[EngineLine]
    replicas: dict[str, int]
    """Replicas alive recently, and the number of engines each follows."""


def run_stats(settings: IndexSettings, *, model: str | None, as_json: bool) -> int:
    """Print sizes, engines and their generations, lease holders, feed states."""

    async def show(client: Client, scopes: list[ScopeSnapshot]) -> int:
        lines = [await scope_line(client, snapshot) for snapshot in scopes]
        if as_json:
            print(msgspec.json.encode(lines).decode())
        else:
            for line in lines:
                _print_scope(line)
        return 0

    return _run(settings, model, show)


def run_index_verify(
    settings: IndexSettings,
    *,
    model: str | None,
    engines: tuple[EngineAddress, ...],
    settle_s: float,
    as_json: bool,
) -> int:
    """Returns 0 if the index agrees with every engine's feed.

    ``engines`` add to the addresses stored in the index or override them; fields they leave out are kept.
    """
    if not 0 <= settle_s <= 3600:
        raise ConfigError(f"--settle: {settle_s} is not in 0..3600")
    given: dict[str, EngineAddress] = {engine.engine_id: engine for engine in engines}

    async def show(client: Client, scopes: list[ScopeSnapshot]) -> int:
        diffs: list[EngineDiff] = []
        for snapshot in scopes:
            diffs += await verify_scope(client, snapshot, given, settle_s)
        if as_json:
            print(msgspec.json.encode(diffs).decode())
        else:
            _print_diffs(diffs)
        return 0 if diffs and all(diff.exact for diff in diffs) else 1

    return _run(settings, model, show)


async def verify_scope(
    client: Client, snapshot: ScopeSnapshot, given: Mapping[str, EngineAddress], settle_s: float
) -> list[EngineDiff]:
    """Compare every engine of a scope; those with unknown addresses get the feed state ``unknown``."""
    known = {
        engine_id: addressed(snapshot.addresses.get(engine_id), given.get(engine_id))
        for engine_id in (snapshot.addresses | dict(given))
        if engine_id in snapshot.view.slots
    }
    async with Verifier(client, snapshot, known) as verifier:
        found = await verifier.compare(settle_s) if known else []
        return found + verifier.others()


def addressed(known: EngineAddress | None, given: EngineAddress | None) -> EngineAddress:
    """Merge the address given on the command line with the one stored in the index; the former wins."""
    if known is None or given is None:
        found = given or known
        if found is None:
            raise AssertionError("one of them names the engine")
        return found
    overrides = {
        name: getattr(given, name) for name in ("events", "replay") if getattr(given, name) is not None
    }
    if given.topic:
        overrides["topic"] = given.topic
    return msgspec.structs.replace(known, **overrides)


async def scope_line(client: Client, snapshot: ScopeSnapshot) -> ScopeLine:
    """Compute the figures of one scope."""
    view, keys = snapshot.view, ScopeKeys(client.settings.namespace, snapshot.model)
    hashes = await block_hashes(client, keys, view.scope)
    sample = hashes[:: max(1, len(hashes) // _SAMPLE)][:_SAMPLE]
    engines = []
    for engine_id, slot in sorted(view.slots.items()):
        lease, facts = snapshot.leases.get(engine_id), view.facts.get(engine_id)
        engines.append(
            EngineLine(
                engine_id,
                slot.number,
                slot.generation,
                lease.holder if lease is not None and lease.held else "",
                0.0 if lease is None else round(lease.expires_in_s, 3),
                0 if lease is None else lease.token,
                "unknown" if facts is None else facts.feed_state,
                0 if facts is None else facts.missing_batches,
                "unknown" if facts is None else facts.mode,
            )
        )
    return ScopeLine(
        snapshot.model,
        len(hashes),
        await _bytes_per_block(client, keys, snapshot, sample.tolist()),
        view.scope.epoch.hex(),
        view.scope.partitions,
        view.scope.code_bytes,
        view.retired_slots,
        engines,
        {name: record.held for name, record in sorted(snapshot.replicas.items())},
    )


async def _bytes_per_block(
    client: Client, keys: ScopeKeys, snapshot: ScopeSnapshot, sample: list[int]
) -> float | None:
    """Return the mean bytes of a block's key and value on the server; None without blocks or permission."""
    sizes = []
    scope = snapshot.view.scope
    for value in sample:
        partition = value & (scope.partitions - 1)
        key = keys.prefix(scope.epoch, partition, scope.partitions) + value.to_bytes(8, "little")
        try:
            size = await client.command("MEMORY", "USAGE", key, key=key)
        except IndexUnavailable:
            return None
        if size is not None:
            sizes.append(int(size))
    return round(sum(sizes) / len(sizes), 1) if sizes else None


async def connect(client: Client) -> None:
    """Raises ``IndexUnavailable``, which names the servers."""
    if not await client.start(_CONNECT_S):
        where = f"no Redis or Valkey answers at {parse_url(client.settings.url).where} (index.url)"
        raise IndexUnavailable(where, client.last_error or "no connection in time")


@asynccontextmanager
async def _connected(settings: IndexSettings) -> AsyncIterator[Client]:
    client = Client(settings)
    try:
        await connect(client)
        await Registry(client, "").check()
        yield client
    finally:
        await client.close()


def _run(
    settings: IndexSettings, model: str | None, show: Callable[[Client, list[ScopeSnapshot]], Awaitable[int]]
) -> int:
    if not settings.is_shared:
        raise ConfigError("no index: give --index URL, --index-file PATH or KVATLAS_INDEX_URL")
    configure_logging("error", "console")

    async def main() -> int:
        async with _connected(settings) as client:
            models = await models_of(client) if model is None else [model]
            snapshot = [await read_scope(client, name) for name in models]
            scopes = [found for found in snapshot if found is not None]
            if not scopes:
                where = f"namespace {settings.namespace!r}" + ("" if model is None else f", model {model!r}")
                print(f"kvatlas index: {where} is empty", file=sys.stderr)
                return 1
            return await show(client, scopes)

    try:
        return asyncio.run(main())
    except SettingsError as error:
        raise ConfigError(f"index: {error}") from None
    except (IndexUnavailable, IndexRefused) as error:
        print(f"kvatlas index: {error}", file=sys.stderr)
        return 1


def _print_scope(line: ScopeLine) -> None:
    size = "-" if line.bytes_per_block is None else f"{line.bytes_per_block:.0f}"
    title = f"{line.model}: {line.blocks:,} blocks, {size} bytes per block"
    table = make_table("<engine", ">slot", ">generation", "<holder", "<lease", "<feed", "<mode", title=title)
    for engine in line.engines:
        lease = f"{engine.lease_s:.1f} s" if engine.holder else "free"
        feed = engine.feed + (f" (-{engine.missing_batches})" if engine.missing_batches else "")
        table.add_row(
            engine.engine, str(engine.slot), str(engine.generation), engine.holder, lease, feed, engine.mode
        )
    console = output_console()
    console.print(table)
    console.print("replicas: " + ", ".join(f"{name} ({held})" for name, held in line.replicas.items()))


def _print_diffs(diffs: list[EngineDiff]) -> None:
    columns = ("<engine", ">resident", ">wrong", ">missing", "<feed", "<holder")
    table = make_table(*columns, title="the index against the engines' feeds")
    for diff in diffs:
        counts = (f"{number:,}" for number in (diff.resident, diff.wrong, diff.missing))
        holder = "gone" if diff.gone else diff.holder + (" (stale)" if diff.stale else "")
        table.add_row(diff.engine, *counts, diff.feed, holder, style="" if diff.exact else "red")
    output_console().print(table)
