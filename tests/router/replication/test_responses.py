"""Which engine holds a response, and whose it is, between replicas: the id says it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest

from kvatlas.router.admission.key_file import KeyFile, KeySettings, digest_of
from kvatlas.router.replication.settings import IndexSettings
from tests.support.clients import openai_client
from tests.support.redis_servers import AnyServer
from tests.support.whole_router import MODEL, QUICK, Rig, configure, routing, running


def key_file(folder: Path, *tenants: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f'[tenants.{name}]\n[[keys]]\ntenant = "{name}"\nsha256 = "{digest_of(f"key-of-{name}")}"\n'
            for name in tenants
        )
    )
    return path


def test_secrets_of_a_tenant_are_those_of_its_own_keys(tmp_path: Path) -> None:
    file = KeyFile(key_file(tmp_path, "ada", "eve"), clock=lambda: 0.0)
    (first,) = file.secrets("ada")
    assert file.secrets("eve") != (first,)
    assert file.secrets("stranger") == ()
    key_file(tmp_path, "new", "eve", "ada")
    file.reload()
    assert file.secrets("ada") == (first,)
    text = file.path.read_text()
    file.path.write_text(text.replace(digest_of("key-of-ada"), digest_of("another")))
    file.reload()
    assert len(file.secrets("ada")) == 2
    assert file.secrets("ada")[1] == first
    again = KeyFile(file.path, clock=lambda: 0.0)
    assert again.secrets("ada") == file.secrets("ada")[:1]
    file.path.write_text(text.replace("ada", "bob"))
    file.reload()
    assert file.secrets("ada") == ()


async def test_a_response_is_found_by_another_replica_for_its_tenant_alone(
    server: AnyServer, tmp_path: Path
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
        assert (await ada_there.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await eve.responses.retrieve(made.id)
