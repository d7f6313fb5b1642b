"""Which engine holds a response, and whose it is, between replicas: found, and not to be forged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import openai
import pytest

from router.admission.key_file import KeyFile, KeySettings, digest_of
from router.fleet.status import HeldResponse
from router.replication.redis_client import Client
from router.replication.service import ResponseDirectory
from router.replication.settings import IndexSettings
from tests.router.replication.backend import make_settings
from tests.support.clients import openai_client
from tests.support.redis_servers import Server
from tests.support.waiting import until
from tests.support.whole_router import MODEL, QUICK, Rig, configure, routing, running

HELD = HeldResponse("http://engine:8000", "ada")
KEY = "kvatlas:response:resp_1"


def key_file(folder: Path, *tenants: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f'[tenants.{name}]\n[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(f"key-of-{name}")}"\n'
            for name in tenants
        )
    )
    return path


@asynccontextmanager
async def directory(server: Server, *secrets: bytes) -> AsyncIterator[ResponseDirectory]:
    client = Client(make_settings(server.url))
    try:
        assert await client.start(10)
        made = ResponseDirectory(client, "kvatlas", lambda: secrets, timeout_s=5.0)
        writing = asyncio.create_task(made.run())
        yield made
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    finally:
        await client.close()


@pytest.mark.parametrize("secrets", [(), (b"new", b"old")])
async def test_what_one_replica_wrote_another_finds(server: Server, secrets: tuple[bytes, ...]) -> None:
    async with directory(server, *secrets) as one, directory(server, *secrets[::-1]) as other:
        one.put("resp_1", HELD)
        await until(lambda: one.stats.written, "it is written")
        assert await other.find("resp_1") == HELD
        assert await other.find("resp_unknown") is None
        assert (other.stats.found, other.stats.missing, other.stats.refused) == (1, 1, 0)
        assert 0 < int(server.command("TTL", KEY)) <= 3600


async def test_no_entry_counts_that_no_router_wrote(server: Server) -> None:
    """Not even one that a router wrote for another response or tenant, or with the keys of another file."""

    async with directory(server, b"secret") as one, directory(server, b"other") as stranger:
        stranger.put("resp_1", HELD)
        await until(lambda: stranger.stats.written, "it is written")
        assert await one.find("resp_1") is None
        one.put("resp_2", HELD)
        await until(lambda: one.stats.written, "it is written")
        good = server.command("GET", "kvatlas:response:resp_2")
        engine, tenant, signature = msgspec.msgpack.decode(good)
        forged: list[object] = [
            [engine, tenant, signature],  # of another response
            [engine, "eve", signature],
            [engine, "eve", b""],
            [engine, tenant],
            [engine, tenant, signature, "x" * 5000],
            {"engine": engine},
            7,
        ]
        for entry in forged:
            server.command("SET", KEY, msgspec.msgpack.encode(entry))
            assert await one.find("resp_1") is None
        for raw in (b"", b"\xc1", b"\x93" * 100):
            server.command("SET", KEY, raw)
            assert await one.find("resp_1") is None
        assert one.stats.refused == 1 + len(forged) + 3
        assert await one.find("resp_2") == HELD


async def test_an_index_that_does_not_answer_costs_no_more_than_its_time(server: Server) -> None:
    async with directory(server, b"secret") as one:
        one._timeout_s = 0.01
        server.command("CLIENT", "PAUSE", "1000")
        assert await one.find("resp_1") is None
        assert one.stats.missing == 1


def test_a_secret_stays_valid_when_keys_change_and_is_the_same_for_the_same_file(tmp_path: Path) -> None:
    file = KeyFile(key_file(tmp_path, "ada", "eve"), clock=lambda: 0.0)
    (first,) = file.secrets
    key_file(tmp_path, "ada", "eve", "new")
    file.reload()
    assert len(file.secrets) == 2
    assert file.secrets[1] == first
    again = KeyFile(key_file(tmp_path, "eve", "ada"), clock=lambda: 0.0)
    assert again.secrets == (first,)


async def test_a_response_is_found_by_another_replica_for_its_tenant_alone(
    server: Server, tmp_path: Path
) -> None:
    path = key_file(tmp_path, "ada", "eve")

    def client(rig: Rig, tenant: str) -> openai.AsyncOpenAI:
        return openai_client(rig.url, key=f"key-of-{tenant}")

    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running(QUICK, QUICK))
        rigs = []
        for name in ("r0", "r1"):
            index = IndexSettings(url=server.url, replica=name, lookup_timeout_s=5.0)
            config = configure(*engines, keys=KeySettings(file=str(path)), index=index)
            rigs.append(await stack.enter_async_context(routing(config)))
        one, other = rigs
        clients = [client(one, "ada"), client(other, "ada"), client(other, "eve")]
        ada, ada_there, eve = [await stack.enter_async_context(each) for each in clients]
        made = await ada.responses.create(model=MODEL, input="x", max_output_tokens=4)
        written = one.router.peers.index.responses.stats  # type: ignore[union-attr]
        await until(lambda: written.written, "it is written")
        assert (await ada_there.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await eve.responses.retrieve(made.id)
