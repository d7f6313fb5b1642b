"""A whole router that sends retention hints: who gets them, what they say, and that no client writes one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.scheduler.plans import HINT, retention_hint
from publisher.pool.host_tier import RetentionHint
from router.admission.settings import KeySettings
from router.config.checks import check_config
from router.config.errors import ConfigError
from router.fleet.identity import EngineAddress
from router.openai.request import CHAT, MESSAGES
from router.placement.candidate import PolicySettings
from router.proxy.settings import ProxySettings
from tests.router.app.test_cache_isolation import RULES
from tests.support.front import Front, fronting
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

HINTS = PolicySettings(retention_hints=True)
OBEYS = b'kvatlas_offload_rows{engine="0",model_name="m",state="hinted"} 0.0\n'
IGNORES = b'kvatlas_offload_rows{engine="0",model_name="m",state="used"} 0.0\n'


@asynccontextmanager
async def hinting(metrics: bytes = OBEYS, **changes: Any) -> AsyncIterator[tuple[Rig, Front]]:
    async with running({}) as engines, fronting(*engines) as front:
        front.overrides["/metrics"] = lambda: (200, metrics)
        config = configure(EngineAddress(front.base_url), **{"policy": HINTS, **changes})
        async with routing(config) as rig:
            (engine,) = rig.router.fleet
            await until(lambda: engine.obeys_hints == (metrics is OBEYS), "metrics read")
            yield rig, front


async def ask(rig: Rig, body: bytes, path: str = CHAT, **fields: str) -> int:
    headers = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in fields.items()}}
    async with rig.session.post(rig.url + path, data=body, headers=headers) as answer:
        await answer.read()
    await until(lambda: rig.idle, "answered")
    return answer.status


def chat(text: str = TEXT, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def received(front: Front, path: str = CHAT) -> list[bytes]:
    return [body for seen, body in front.bodies if seen == path]


def read(body: bytes) -> RetentionHint | None:
    """As a connector reads it."""
    params = json.loads(body).get("kv_transfer_params")
    return retention_hint(SimpleNamespace(kv_transfer_params=params))  # type: ignore[arg-type]


def test_the_turns_of_a_session_have_hints_and_every_other_byte_stays() -> None:
    async def main() -> None:
        async with hinting() as (rig, front):
            for _ in range(2):
                assert await ask(rig, chat(), x_session_id="s") == 200
            assert await ask(rig, chat("no session")) == 200
            first, second, other = received(front)
            assert other == chat("no session")
            for body in (first, second):
                hint = read(body)
                assert hint is not None
                assert 0.5 <= hint.value < 1
                assert hint.owner == ""
                text = json.dumps(json.loads(body)["kv_transfer_params"], separators=(",", ":")).encode()
                assert body == chat().replace(b"{", b'{"kv_transfer_params":%b,' % text, 1)
            assert rig.router.accounts.retention.stats.sent["session"] == 2
            rig.check_books()

    run(main())


@pytest.mark.parametrize(
    ("metrics", "policy"), [(IGNORES, HINTS), (OBEYS, PolicySettings())], ids=["connector", "setting"]
)
def test_no_hint_is_sent_where_it_is_not_obeyed_or_not_wanted(metrics: bytes, policy: PolicySettings) -> None:
    async def main() -> None:
        async with hinting(metrics, policy=policy) as (rig, front):
            assert await ask(rig, chat(), x_session_id="s") == 200
            assert received(front) == [chat()]
            assert sum(rig.router.accounts.retention.stats.sent.values()) == 0

    run(main())


CLAIM = {HINT: {"ttl_s": 86_400, "value": 1, "owner": "me"}}


@pytest.mark.parametrize(
    "fields",
    [{"kv_transfer_params": CLAIM}, {"vllm_xargs": {"kv_transfer_params": CLAIM}}],
    ids=["parameters", "xargs"],
)
@pytest.mark.parametrize("session", ["", "s"], ids=["alone", "session"])
def test_a_client_cannot_write_a_hint(fields: dict[str, Any], session: str) -> None:
    async def main() -> None:
        async with hinting() as (rig, front):
            assert await ask(rig, chat(**fields), x_session_id=session) == 200
            (body,) = received(front)
            assert b'"me"' not in body
            hint = read(body)
            assert (hint is not None) == bool(session)
            assert hint is None or hint.ttl_s < 1000

    run(main())


@pytest.mark.parametrize(
    ("control", "ttl_s"),
    [({"type": "ephemeral"}, 300.0), ({"type": "ephemeral", "ttl": "1h"}, 3600.0), (None, None)],
)
def test_cache_control_of_messages_is_a_time_to_live(control: Any, ttl_s: float | None) -> None:
    system = {"type": "text", "text": TEXT, **({} if control is None else {"cache_control": control})}
    quoted = '{"cache_control": {"type": "ephemeral", "ttl": "1h"}}'
    body = json.dumps(
        {
            "model": MODEL,
            "system": [system],
            "messages": [{"role": "user", "content": quoted}],
            "max_tokens": 1,
        }
    ).encode()

    async def main() -> None:
        async with hinting() as (rig, front):
            assert await ask(rig, body, MESSAGES) == 200
            hint = read(received(front, MESSAGES)[0])
            assert (None if hint is None else hint.ttl_s) == ttl_s

    run(main())


def test_a_prefix_of_many_prompts_has_a_hint_of_its_own_length() -> None:
    async def main() -> None:
        async with hinting() as (rig, front):
            for number in range(20):
                assert await ask(rig, chat(TEXT * 30 + f"question {number}")) == 200
            bodies = received(front)
            assert read(bodies[0]) is None
            hint = read(bodies[-1])
            assert hint is not None
            assert hint.tokens == 512

    run(main())


def test_each_tenant_owns_its_hints_and_no_engine_learns_its_name(tmp_path: Path) -> None:
    rules = tmp_path / "keys.toml"
    rules.write_text(RULES)

    async def main() -> None:
        async with hinting(keys=KeySettings(file=str(rules))) as (rig, front):
            for tenant in ("ada", "bob", "ada"):
                await ask(rig, chat(), x_session_id="s", authorization=f"Bearer key-of-{tenant}")
            owners = [hint.owner for body in received(front) if (hint := read(body)) is not None]
            assert len(owners) == 3
            assert owners[0] == owners[2] != owners[1]
            assert not any(name in body for body in received(front) for name in (b"ada", b"bob"))

    run(main())


def test_another_engine_gets_the_hint_only_if_it_obeys_it() -> None:
    async def main() -> None:
        async with (
            running({}, {}) as engines,
            fronting(engines[0]) as obeys,
            fronting(engines[1]) as ignores,
        ):
            obeys.overrides["/metrics"] = lambda: (200, OBEYS)
            obeys.overrides[CHAT] = lambda: (503, {})
            config = configure(*map(EngineAddress, (obeys.base_url, ignores.base_url)), policy=HINTS)
            async with routing(config) as rig:
                await until(lambda: any(engine.obeys_hints for engine in rig.router.fleet), "metrics read")
                texts = [f"{number} {TEXT}" for number in range(12)]  # a cold prompt goes to either engine
                for text in texts:
                    assert await ask(rig, chat(text), x_session_id="s") == 200
                assert received(ignores) == [chat(text) for text in texts]
                assert received(obeys)
                assert all(read(body) for body in received(obeys))

    run(main())


def test_clients_with_transfer_parameters_of_their_own_and_hints_exclude_each_other() -> None:
    proxy = ProxySettings(trust_client_kv_transfer_params=True)
    with pytest.raises(ConfigError, match=r"policy\.retention_hints"):
        check_config(configure(EngineAddress("http://h:1"), policy=HINTS, proxy=proxy))
