"""``kvatlas index stats|dump|verify``: inspection of a shared index.

Status 0: done (verify: exact), 1: the index is unavailable or not exact, 2: bad arguments.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from publisher.events import BlockHash
from router.config.errors import ConfigError
from router.fleet.identity import EngineAddress
from router.replication.codec import ScopeKeys
from router.replication.reader import SharedReader
from router.replication.redis.client import Client
from router.replication.redis.connection import IndexUnavailable
from router.replication.redis.settings import SettingsError
from router.replication.registry import IndexRefused, Registry
from router.replication.settings import IndexSettings
from router.serve.command import configure_logging
from router.tools.index_verify import EngineDiff, ScopeSnapshot, Verifier, block_hashes, models_of, read_scope
from router.tools.ops_client import output_console

_CONNECT_S = 5.0
# Number of blocks whose memory is measured: each costs one command.
_SAMPLE = 200
_PAGE = 10_000


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


def run_dump(settings: IndexSettings, *, model: str | None, limit: int) -> int:
    """Print one JSON line per block: its hash, and the planes each engine holds it in."""

    async def show(client: Client, scopes: list[ScopeSnapshot]) -> int:
        for snapshot in scopes:
            left = limit
            async for line in _blocks(client, snapshot):
                if left == 0:
                    break
                left -= 1
                print(msgspec.json.encode(line).decode())
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
    """Return the mean size in bytes of a block's key and value on the server; None without blocks or
    permission.
    """
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


async def _blocks(client: Client, snapshot: ScopeSnapshot) -> AsyncIterator[dict[str, Any]]:
    reader, keys = SharedReader(client), ScopeKeys(client.settings.namespace, snapshot.model)
    await reader.lookup((), snapshot.model, timeout_s=_CONNECT_S)
    hashes = await block_hashes(client, keys, snapshot.view.scope)
    for start in range(0, len(hashes), _PAGE):
        page = hashes[start : start + _PAGE]
        asked = [BlockHash(value) for value in page.tolist()]
        found = await reader.lookup(asked, snapshot.model, timeout_s=_CONNECT_S)
        for row, value in enumerate(asked):
            held: dict[str, list[str]] = {}
            for (plane, word), column in sorted(found.rows.columns.items()):
                for engine_id, engine in found.engines.items():
                    if word == engine.slot.word and column[row] >> np.uint64(engine.slot.bit) & np.uint64(1):
                        held.setdefault(engine_id, []).append(f"{plane.medium}/{plane.group_idx}")
            yield {"model": snapshot.model, "block": f"{value:016x}", "engines": held}


@asynccontextmanager
async def _connected(settings: IndexSettings) -> AsyncIterator[Client]:
    client = Client(settings)
    try:
        if not await client.start(_CONNECT_S):
            raise IndexUnavailable("connection", client.last_error or "no connection in time")
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
    table = Table(title=title, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("slot", "generation"):
        table.add_column(name, justify="right")
    for name in ("holder", "lease", "feed", "mode"):
        table.add_column(name, no_wrap=True)
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
    table = Table(title="the index against the engines' feeds", pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for name in ("resident", "wrong", "missing"):
        table.add_column(name, justify="right")
    for name in ("feed", "holder"):
        table.add_column(name, no_wrap=True)
    for diff in diffs:
        counts = (f"{number:,}" for number in (diff.resident, diff.wrong, diff.missing))
        holder = "gone" if diff.gone else diff.holder + (" (stale)" if diff.stale else "")
        table.add_row(diff.engine, *counts, diff.feed, holder, style="" if diff.exact else "red")
    output_console().print(table)
