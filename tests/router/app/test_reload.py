"""A whole router takes another configuration while it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.publisher.simulator.settings import DEMO_TOKENIZER_DIR
from kvatlas.router.admission.key_file import KeySettings, digest_of
from kvatlas.router.config.schema import Config, ModelConfig, ServerConfig
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.prompts.reader import ModelDirError
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.reloads import apply, decide, reloads_of
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}


@asynccontextmanager
async def one_engine(**changes: Any) -> AsyncIterator[Rig]:
    async with running({}) as engines, routing(configure(*engines, **changes)) as rig:
        yield rig


async def chat(rig: Rig, **fields: Any) -> tuple[int, Any]:
    return await rig.ask("POST", "/v1/chat/completions", {**CHAT, **fields})


async def models(rig: Rig, headers: dict[str, str]) -> int:
    async with rig.session.get(f"{rig.url}/v1/models", headers=headers) as answer:
        return answer.status


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


def other(rig: Rig, **changes: Any) -> Config:
    return msgspec.structs.replace(rig.router.config, **changes)


async def test_names_and_limits_hold_for_the_next_request() -> None:
    async with one_engine() as rig:
        assert (await chat(rig, model="name"))[0] == 404
        await apply(
            rig.router,
            other(
                rig,
                aliases={"name": MODEL},
                proxy=ProxySettings(body_bytes_max=2000),
                server=ServerConfig(port=0, log_requests=True),
                listen=ListenSettings(header_bytes_max=2048),
                policy=PolicySettings(policy="round-robin"),
            ),
        )
        assert (await chat(rig, model="name"))[0] == 200
        assert rig.router.proxy.requests.log
        listed = (await rig.ask("GET", "/v1/models"))[1]["data"]
        assert {card["id"] for card in listed} == {MODEL, "name"}
        assert (await chat(rig, padding="x" * 2000))[0] == 413
        async with rig.session.post(f"{rig.url}/v1/chat/completions", json=CHAT) as answer:
            assert "x-kvatlas-engine" not in answer.headers
        assert await models(rig, {"x-long": "x" * 3000}) == 431


async def test_a_model_gets_its_tokenizer_and_its_facts() -> None:
    async with running({}) as engines, routing(configure(*engines, models={})) as rig:
        await rig.chat(TEXT)
        assert rig.router.accounts.receipts.latest[-1].read != "local"
        facts = ModelConfig(tokenizer=str(DEMO_TOKENIZER_DIR), hash_seeds=("11",))
        await apply(rig.router, other(rig, models={MODEL: facts}))
        await rig.ready()  # its feed is followed again, and its blocks are kept
        for _ in range(2):
            await rig.chat(TEXT)
        await rig.caught_up(*engines)
        receipt = rig.router.accounts.receipts.latest[-1]
        assert receipt.read == "local"
        assert receipt.outcome == "exact"
        assert receipt.predicted_tokens
        assert rig.router.scopes.scope(MODEL).facts.hash_seeds == ("11",)
        assert rig.router.scopes.check_integrity() == []


async def test_an_unusable_tokenizer_changes_nothing(tmp_path: Path) -> None:
    async with one_engine() as rig:
        before = rig.router.config
        wanted = other(rig, models={ANY_MODEL: ModelConfig(tokenizer=str(tmp_path))}, aliases={"name": MODEL})
        try:
            await apply(rig.router, wanted)
        except ModelDirError:
            pass
        else:
            raise AssertionError("it was taken")
        assert rig.router.config is before
        assert (await chat(rig, model="name"))[0] == 404


async def test_another_key_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        key = digest_of(f"key-{name}")
        (tmp_path / name).write_text(f'[tenants.t]\n[[keys]]\ntenant = "t"\nsha256 = "{key}"\n')
    async with one_engine(keys=KeySettings(file=str(tmp_path / "one"))) as rig:
        assert [await models(rig, bearer("one")), await models(rig, bearer("two"))] == [200, 401]
        await apply(rig.router, other(rig, keys=KeySettings(file=str(tmp_path / "two"))))
        assert [await models(rig, bearer("one")), await models(rig, bearer("two"))] == [401, 200]


async def test_each_outcome_is_counted() -> None:
    wanted: list[Config] = []
    async with one_engine() as rig:
        levels: list[str] = []
        reloads = reloads_of(
            rig.router,
            lambda running: decide(running, lambda: wanted[-1]),
            on_log=lambda level, _: levels.append(level),
        )

        async def counted(config: Config) -> dict[str, int]:
            wanted.append(config)
            await reloads.once()
            return dict(reloads.stats.reloads)

        same = rig.router.config
        assert await counted(same) == {"applied": 0, "unchanged": 1, "refused": 0}
        bad = other(rig, policy=PolicySettings(policy="nope"))
        assert await counted(bad) == {"applied": 0, "unchanged": 1, "refused": 1}
        assert rig.router.config is same
        good = other(rig, server=ServerConfig(port=1, log_level="warning"))
        assert await counted(good) == {"applied": 1, "unchanged": 1, "refused": 1}
        assert levels == ["warning"]
        assert reloads.stats.waiting == 1  # the port
        page = (await rig.ask("GET", "/metrics"))[1]
        assert 'kvatlas_config_reloads_total{outcome="refused"} 1.0' in page
        assert "kvatlas_config_waiting 1.0" in page
