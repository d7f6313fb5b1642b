"""This version on what a release left: configuration, keys, usage record, index, a running replica; and
what this version writes, as that release reads it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.replication.gossip import GossipStats
from kvatlas.router.replication.keys import ScopeKeys, schema_key
from kvatlas.router.replication.members import MemberRecord
from kvatlas.router.replication.messages import PeerMessages
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.registry import EngineFacts
from kvatlas.router.replication.settings import SharedSettings
from kvatlas.router.simulation.usage_record import read_capture
from tests.support.paths import ROOT
from tests.support.redis_servers import VirtualServer
from tests.support.waiting import WAIT_S, until
from tests.support.whole_router import MODEL, Rig, routing
from tests.upgrade.setup import HERE, MESSAGES, chat, configuration, dump, engines, names, prompt, restore

RELEASES = sorted(path for path in HERE.iterdir() if path.name[0].isdigit())
KEYS = ScopeKeys("kva", MODEL)
BEATS = {KEYS.replicas: 1, KEYS.load: 1}
"""Messages that a replica repeats -> where their beat is."""


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def server() -> Iterator[VirtualServer]:
    made = VirtualServer()
    yield made
    made.close()


def read(kept: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kept / name).read_text("utf-8"))
    return found


def continues(before: Any, after: Any) -> bool:
    """Whether a reader of ``before`` finds all of it in ``after``: more elements at ends, more keys."""
    if isinstance(before, list) and isinstance(after, list):
        return len(after) >= len(before) and all(map(continues, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and continues(value, after[key]) for key, value in before.items())
    return bool(before == after)


def both_ways(raw: bytes, kind: Any) -> bool:
    """Read by this version without loss, and what this version writes of it read as before."""
    written = msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=kind))
    return continues(msgspec.msgpack.decode(raw), msgspec.msgpack.decode(written))


def test_a_message_goes_on_at_its_end_only() -> None:
    assert continues([1, {"a": [2]}], [1, {"a": [2, 3], "b": 4}, 5])
    assert not any(continues([1, [2]], other) for other in ([1], [1, []], [2, [2]], [[2], 1], {}))
    assert not continues({"a": 1}, {"b": 1})


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_between_two_versions_are_read_by_both(kept: Path, name: str) -> None:
    stats, raw = GossipStats(), bytes.fromhex(read(kept, "messages.json")[name])
    assert PeerMessages(type(MESSAGES[name]), stats).read(raw) is not None
    assert both_ways(raw, type(MESSAGES[name]))
    assert (stats.malformed, stats.other_version) == (0, 0)


def test_the_registry_of_an_index_is_read_by_both(kept: Path) -> None:
    content = read(kept, "redis.json")
    assert bytes.fromhex(content[schema_key("kva").hex()]) == b"1", "another needs a namespace of its own"
    members = content[KEYS.replicas.hex()].values()
    facts = [value for name, value in content[KEYS.scope.hex()].items() if bytes.fromhex(name)[:2] == b"e:"]
    assert all(both_ways(bytes.fromhex(raw), MemberRecord) for raw in members)
    assert [both_ways(bytes.fromhex(raw), EngineFacts) for raw in facts] == [True, True]


def missing(kept: dict[str, list[str]], now: dict[str, list[str]], announced: set[str]) -> list[str]:
    """Names that a release had and that are gone, unannounced."""
    return [
        f"{kind}: {name}"
        for kind, had in kept.items()
        for name in had
        if name not in {*now[kind], *announced}
    ]


def test_no_name_of_a_release_is_gone_unannounced(kept: Path) -> None:
    """From the day of the release on: its section of the changelog promises the names."""
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    promised = read(kept, "names.json") if f"## [{kept.name}]" in changes else {}
    announced = set(re.findall(r"Removed: `([^`]+)`", changes))
    assert missing(promised, names(), announced) == []
    had = {"settings": ["a.b", "a.c"], "flags": ["--x"]}
    assert missing(had, {"settings": ["a.c"], "flags": []}, {"--x"}) == ["settings: a.b"]


async def warm(kept: Path) -> None:
    """The engines hold what they held: they have served the requests of the usage record."""
    lines = [json.loads(line) for line in (kept / "usage.jsonl").read_text("utf-8").splitlines()]
    for number, line in zip((0, 1, 2, 0, 1, 2), lines, strict=True):
        await prompt(line["engine"], number)


@asynccontextmanager
async def last_release(server: VirtualServer, kept: Path) -> AsyncIterator[None]:
    """A replica of it that serves: its leases and messages, renewed as it renews them, byte for byte."""
    client = Client(SharedSettings(url=server.url, connect_timeout_s=WAIT_S))
    assert await client.start(WAIT_S)
    content = read(kept, "redis.json")
    restore(server, content, client.identity)
    await client.close()
    leases = {bytes.fromhex(name): bytes.fromhex(v) for name, v in content[KEYS.leases.hex()].items()}

    async def renew() -> None:
        for beat in range(1, 1 << 20):
            for key, position in BEATS.items():
                fields = msgspec.msgpack.decode(bytes.fromhex(content[key.hex()][b"old".hex()]))
                fields[position] += beat
                server.command("HSET", key, b"old", msgspec.msgpack.encode(fields))
            now_s, _ = server.command("TIME")
            for engine, lease in leases.items():
                token, _, holder = lease.split(b"|")
                server.command(
                    "HSET", KEYS.leases, engine, b"%b|%d|%b" % (token, 1000 * int(now_s) + 3000, holder)
                )
            await asyncio.sleep(0.5)

    serving = asyncio.create_task(renew())
    try:
        yield
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def holders(server: VirtualServer) -> set[bytes]:
    fields = server.command("HGETALL", KEYS.leases)
    return {lease.rpartition(b"|")[2] for lease in fields[1::2]}


async def exact(rig: Rig) -> None:
    """Each conversation goes on where its blocks are, and is predicted exactly."""
    before = len(rig.router.accounts.receipts.latest)
    for number in range(3):
        await chat(rig, number)
    receipts = list(rig.router.accounts.receipts.latest)[before:]
    assert [receipt.outcome for receipt in receipts] == ["exact"] * 3
    assert all(receipt.actual_tokens for receipt in receipts)


async def test_both_versions_serve_at_once_and_the_new_one_alone(
    kept: Path, server: VirtualServer, tmp_path: Path
) -> None:
    for name in ("keys.toml", "usage.jsonl"):
        shutil.copy(kept / name, tmp_path / name)
    async with engines():
        await warm(kept)
        async with (
            last_release(server, kept),
            routing(configuration(kept, tmp_path, server.url, "new")) as rig,
        ):
            await exact(rig)
            assert holders(server) == {b"old"}, "its leases are respected"
            page = await rig.page()
            for kind in ("peer_inflight_malformed", "peer_inflight_other_version", "limits_malformed"):
                assert f"kvatlas_{kind}_total 0.0" in page
            assert "kvatlas_lease_replicas 2.0" in page
        async with routing(configuration(kept, tmp_path, server.url, "new")) as rig:
            await until(lambda: holders(server) == {b"new"}, "it follows both engines")
            await rig.ready()
            await exact(rig)
            written = dump(server)
    assert len(read_capture(tmp_path / "usage.jsonl")) == 6 + 3 + 3
    assert same_form(read(kept, "redis.json"), written)


def same_form(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the last release, when it comes back, finds its schema, fields and keys."""
    scope, schema = KEYS.scope.hex(), schema_key("kva").hex()
    fields = [{bytes.fromhex(name)[:2] for name in content[scope]} for content in (before, after)]
    blocks = [
        {len(key) for key, value in content.items() if isinstance(value, str)} for content in (before, after)
    ]
    return after[schema] == before[schema] and fields[0] <= fields[1] and blocks[0] == blocks[1]
