"""Whole routers on one index: what one proves of an engine's salts, the others have without a request."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.fleet.engine_client import Shown
from kvatlas.router.fleet.salt_proof import SaltProof, SaltProver
from kvatlas.router.fleet.shared_proofs import LEADER_S_MAX, TOLD_S_MAX
from kvatlas.router.openai.apis import CHAT, MESSAGES
from kvatlas.router.replication.redis_client import Client
from kvatlas.router.replication.stored_proofs import StoredProofs
from tests.router.replication.backend import make_settings
from tests.router.replication.test_recent_work import Share, index_of
from tests.support.redis_servers import AnyServer
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routing, running, tenants

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
}


def proven(rig: Rig) -> bool:
    return all(one.salt_proof is not None and one.salt_proof.tries for one in rig.router.fleet)


@pytest.mark.parametrize(("share", "late"), [("blocks", False), ("load", True)])
async def test_one_router_tries_an_engine_for_all(
    server: AnyServer, share: Share, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, prove = [], SaltProver.prove

    async def counted(self: SaltProver, proof: SaltProof) -> None:
        tried.append(self)
        await prove(self, proof)

    monkeypatch.setattr(SaltProver, "prove", counted)
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    keys = tenants(tmp_path, {"ada": ""}, isolate="tenant", isolate_secret_file=str(secret))
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({"drops_salt": MESSAGES}, {}))
        rigs = []
        for name in ("r0", "r1"):
            config = configure(*engines, index=index_of(server, name, share), keys=keys)
            rigs.append(await stack.enter_async_context(routing(config, wait=False)))
            if late:
                await until(lambda: proven(rigs[0]), "the first one has tried the engines")
        await until(lambda: all(proven(rig) for rig in rigs), "both know of both engines")
        assert len(tried) == len(engines)
        for rig in rigs:
            drops, obeys = (one.salt_proof for one in rig.router.fleet)
            assert drops is not None
            assert obeys is not None
            assert (drops.apis[MESSAGES].verdict, drops.apis[CHAT].verdict) == ("refuted", "proven")
            assert obeys.apis[MESSAGES].verdict == "proven"
            await rig.ready()
            status, _ = await rig.ask("POST", MESSAGES, BODY, {"authorization": "Bearer key-of-ada"})
            assert status == 200
            (receipt,) = list(rig.router.accounts.receipts.latest)
            assert receipt.engine_id == engines[1].base_url


@pytest.mark.parametrize(
    ("why", "waits_s"),
    [
        ("nothing is known", 0.0),
        ("another process", 0.0),
        ("unreadable", 0.0),
        ("its replica died", TOLD_S_MAX),
        ("no Redis", LEADER_S_MAX),
    ],
)
async def test_without_an_answer_a_router_tries_it_in_time(
    server: AnyServer, why: str, waits_s: float
) -> None:
    settings = make_settings(server.url if why != "no Redis" else "redis://127.0.0.1:1/0")
    mine = SaltProof(started=5.0)
    clients = [Client(settings), Client(settings)]
    one, other = (
        StoredProofs(client, settings.namespace, name) for client, name in zip(clients, "ab", strict=True)
    )
    engine = "http://e:1"
    if why == "another process":
        await clients[0].start(1.0)
        await one.tell(engine, SaltProof({CHAT: Shown("proven")}, tries=1, started=4.0))
    elif why == "unreadable":
        await clients[0].start(1.0)
        await clients[0].command("SET", one._key(engine, mine), b"salts \xff")
    elif why == "its replica died":
        await one.ask(engine, SaltProof(started=5.0))
    began = asyncio.get_running_loop().time()
    await other.ask(engine, mine)
    waited_s = asyncio.get_running_loop().time() - began
    assert waits_s <= waited_s < waits_s + 0.5
    assert mine == SaltProof(started=5.0)
    for client in clients:
        await client.close()
