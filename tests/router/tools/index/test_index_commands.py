"""``kvatlas verify --index`` and ``kvatlas index``: as commands, on a real server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.replication.keys import SCHEMA, ScopeKeys, schema_key
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.tools.index import connect, scope_line, verify_scope
from kvatlas.router.tools.index_reader import block_hashes, models_of, read_scope
from tests.support.paths import ROOT
from tests.support.process_fleet import fleet
from tests.support.redis_servers import Server, any_program
from tests.support.waiting import run_real, until
from tests.support.whole_router import MODEL, TEXT, configure, routing, running
from tests.world.redis_server import RedisServer

TRACES = ROOT / "tests" / "data" / "traces"


def kvatlas(*args: str, index: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KVATLAS_INDEX_URL": index}
    command = [sys.executable, "-m", "kvatlas", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT, check=False)


async def _beside(*args: str, index: str) -> subprocess.CompletedProcess[str]:
    """The same without holding the loop."""
    return await asyncio.to_thread(kvatlas, *args, index=index)


@pytest.mark.process
def test_recorded_truth_is_exact_through_the_index() -> None:
    with Server(any_program()) as server:
        done = kvatlas("verify", str(TRACES), "--json", "--index", server.url, index="")
        assert done.returncode == 0, done.stderr
        total = msgspec.json.decode(done.stdout.splitlines()[-1])["total"]
        assert total["traces"] == len(list(TRACES.glob("*.jsonl.gz")))
        assert total["probes"] == total["exact"] > 1000
        assert total["states"] == total["states_exact"] > 100


def test_a_trace_that_cannot_be_read_is_named(
    tmp_path: Path, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"header": {"groups": []}}\nnonsense\n')
    with Server(any_program()) as server:
        done = kvatlas("verify", str(broken), "--index", server.url)
        assert done.returncode == 2
        assert "broken.jsonl:2" in done.stderr


async def test_the_index_is_compared_with_what_engines_hold() -> None:
    """On the store of the worlds: exact while all is well, and a block that was lost is seen."""
    store = RedisServer(("10.9.0.1", 6379))
    await store.start()
    settings = IndexSettings(url=store.url, replica="r0", lookup_timeout_s=5.0)
    async with running({}, {}) as engines, routing(configure(*engines, index=settings)) as rig:
        await rig.ready()
        for number in range(4):
            await rig.chat(f"{number} {TEXT * 8}")
        client = Client(settings)
        await connect(client)
        assert await models_of(client) == [MODEL]

        async def compared() -> list[tuple[str, str, int, int, int]]:
            scope = await read_scope(client, MODEL)
            assert scope is not None
            found = await verify_scope(client, scope, {}, 1.0)
            assert [one.exact for one in found] == [not (one.wrong or one.missing) for one in found]
            return sorted((one.engine, one.holder, one.resident, one.wrong, one.missing) for one in found)

        held = {engine.base_url: len(engine.pool.resident(0)) for engine in engines}
        right = sorted((engine, "r0", count, 0, 0) for engine, count in held.items())
        assert sum(held.values()) > 10

        async def agrees() -> bool:
            return await compared() == right

        await until(agrees, "the index has what the engines hold")
        scope = await read_scope(client, MODEL)
        assert scope is not None
        line = await scope_line(client, scope)
        assert (line.model, line.retired_slots, [*line.replicas]) == (MODEL, 0, ["r0"])
        assert line.blocks == len({block for engine in engines for block in engine.pool.resident(0)})
        assert [(one.engine, one.holder, one.feed, one.mode) for one in line.engines] == [
            (engine, "r0", "ready", "native") for engine in sorted(held)
        ]
        assert all(one.lease_s > 0 and one.generation > 0 for one in line.engines)
        keys, stored = ScopeKeys(settings.namespace, MODEL), scope.view.scope
        lost = int((await block_hashes(client, keys, stored))[0])
        prefix = keys.prefix(stored.epoch, lost & (stored.partitions - 1), stored.partitions)
        store.client().delete(prefix + lost.to_bytes(8, "little"))
        holders = sum(lost in map(int, engine.pool.resident(0)) for engine in engines)
        assert sum(missing for *_, missing in await compared()) == holders > 0
        await client.close()


@pytest.mark.process
@pytest.mark.timeout(300)
def test_stats_and_verify_of_a_fleet_at_work() -> None:
    async def main(server: Server) -> None:
        async with fleet(server.url, engines=2) as made:
            scope: dict[str, Any] = {}

            async def all_ready() -> bool:
                stats = await _beside("index", "stats", "--json", index=server.url)
                (found,) = msgspec.json.decode(stats.stdout)
                scope.update(found)
                return {one["feed"] for one in found["engines"]} == {"ready"}

            # The routers may still divide the engines among themselves.
            await until(all_ready, lambda: f"every feed is ready: {scope}")
            assert scope["model"] == "kvatlas-demo"
            assert scope["blocks"] > 10
            assert 50 < scope["bytes_per_block"] < 150
            assert {e["engine"] for e in scope["engines"]} == set(made.engines)
            assert {e["holder"] for e in scope["engines"]} <= {"r0", "r1"}
            assert all(e["generation"] > 0 and e["lease_s"] > 0 for e in scope["engines"])
            verified = await _beside("index", "verify", "--json", index=server.url)
            assert verified.returncode == 0, verified.stdout
            assert "wrong" in (await _beside("index", "verify", index=server.url)).stdout
            assert "generation" in (await _beside("index", "stats", index=server.url)).stdout

    with Server(any_program()) as server:
        run_real(main(server), 280)  # four commands, two routers and two engines, one after the other


@pytest.mark.process
def test_an_empty_namespace_and_an_unreachable_server_are_reported() -> None:
    with Server(any_program()) as server:
        empty = kvatlas("index", "stats", "--namespace", "other", index=server.url)
        assert (empty.returncode, "namespace 'other'" in empty.stderr) == (1, True)
    away = kvatlas("index", "stats", index=server.url)
    assert away.returncode == 1
    where = server.url.removeprefix("redis://").partition("/")[0]
    assert away.stderr.startswith(f"kvatlas index: no Redis or Valkey answers at {where} (index.url): ")


@pytest.mark.process
def test_a_namespace_of_another_version_is_refused_at_start() -> None:
    with Server(any_program()) as server:
        server.command("SET", schema_key("kva").decode(), str(SCHEMA + 1))
        refused = kvatlas("serve", "--engine", "http://127.0.0.1:1", "--port", "0", index=server.url)
        assert refused.returncode == 2
        assert f"schema {SCHEMA + 1}" in refused.stderr
        assert f"schema {SCHEMA}" in refused.stderr.replace(f"schema {SCHEMA + 1}", "")
