"""``kvatlas index stats|verify``: inspect a shared index, and compare it with the engines' feeds.

Status 0: done (verify: exact), 1: the index is unavailable or not exact, 2: bad arguments.

``verify`` follows every engine of a scope itself (all events from the first one, by replay), builds residency
from them, and compares block by block. The index lags the feeds by one write, so a difference counts only if
it persists: the comparison is repeated until it is gone or the time is up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.log_lines import configure_logging
from kvatlas.router.replication.index_url import SettingsError, parse_url
from kvatlas.router.replication.keys import ScopeKeys
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.redis_connection import IndexUnavailable
from kvatlas.router.replication.registry import IndexRefused, Registry
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.tools.index_reader import ScopeSnapshot, block_hashes, models_of, read_scope
from kvatlas.router.tools.index_verifier import EngineDiff, Verifier
from kvatlas.router.tools.ops_client import make_table, output_console

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
        raise ConfigError(f"--settle: {settle_s} is not 0 to 3600")
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
                why = "no replica writes blocks there; with index.share = 'load' none does"
                print(f"kvatlas index: {where} is empty: {why}", file=sys.stderr)
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
