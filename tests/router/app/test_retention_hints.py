"""A whole router that sends retention hints: who gets them, what they say, and that no client writes one."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.connectors.scheduler.plans import HINT, retention_hint
from kvatlas.publisher.pool.retention_order import RetentionHint
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.checks import check_config
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engines import EngineAddress, Role
from kvatlas.router.openai.apis import BATCH, CHAT, MESSAGES
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from kvatlas.router.proxy.settings import ProxySettings
from tests.router.app.test_cache_isolation import RULES
from tests.router.app.test_prefill_decode import SPLITS
from tests.support.front import Front, fronting
from tests.support.pairs import busy
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running, tenants

HINTS = PolicySettings(retention_hints=True)
JSON = {"content-type": "application/json"}
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


async def test_the_turns_of_a_session_have_hints_and_every_other_byte_stays() -> None:
    async with hinting() as (rig, front):
        for _ in range(2):
            assert await ask(rig, chat(), x_session_id="s") == 200
        assert await ask(rig, chat("no session")) == 200
        first, second, other = received(front)
        assert other == chat("no session")
        for body in (first, second):
            hint = read(body)
            assert 0.5 <= hint.value < 1
            assert hint.owner == ""
            text = json.dumps(json.loads(body)["kv_transfer_params"], separators=(",", ":")).encode()
            assert body == chat().replace(b"{", b'{"kv_transfer_params":%b,' % text, 1)
        assert rig.router.accounts.retention.stats.sent["session"] == 2
        rig.check_books()


@pytest.mark.parametrize(
    ("metrics", "policy"), [(IGNORES, HINTS), (OBEYS, PolicySettings())], ids=["connector", "setting"]
)
async def test_no_hint_is_sent_where_it_is_not_obeyed_or_not_wanted(
    metrics: bytes, policy: PolicySettings
) -> None:
    async with hinting(metrics, policy=policy) as (rig, front):
        assert await ask(rig, chat(), x_session_id="s") == 200
        assert received(front) == [chat()]
        assert sum(rig.router.accounts.retention.stats.sent.values()) == 0


CLAIM = {HINT: {"ttl_s": 86_400, "value": 1, "owner": "me"}}


@pytest.mark.parametrize(
    "fields",
    [{"kv_transfer_params": CLAIM}, {"vllm_xargs": {"kv_transfer_params": CLAIM}}],
    ids=["parameters", "xargs"],
)
@pytest.mark.parametrize("session", ["", "s"], ids=["alone", "session"])
async def test_a_client_cannot_write_a_hint(fields: dict[str, Any], session: str) -> None:
    async with hinting() as (rig, front):
        assert await ask(rig, chat(**fields), x_session_id=session) == 200
        (body,) = received(front)
        assert b'"me"' not in body
        hint = read(body)
        assert (hint is not None) == bool(session)
        assert hint is None or hint.ttl_s < 1000


@pytest.mark.parametrize(
    ("control", "ttl_s"),
    [({"type": "ephemeral"}, 300.0), ({"type": "ephemeral", "ttl": "1h"}, 3600.0), (None, None)],
)
async def test_cache_control_of_messages_is_a_time_to_live(control: Any, ttl_s: float | None) -> None:
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

    async with hinting() as (rig, front):
        assert await ask(rig, body, MESSAGES) == 200
        hint = read(received(front, MESSAGES)[0])
        assert (None if hint is None else hint.ttl_s) == ttl_s


async def test_a_prefix_of_many_prompts_has_a_hint_of_its_own_length() -> None:
    async with hinting() as (rig, front):
        for number in range(20):
            assert await ask(rig, chat(TEXT * 30 + f"question {number}")) == 200
        bodies = received(front)
        assert read(bodies[0]) is None
        hint = read(bodies[-1])
        assert hint.tokens == 512


async def test_each_tenant_owns_its_hints_and_no_engine_learns_its_name(tmp_path: Path) -> None:
    async with hinting(keys=tenants(tmp_path, RULES)) as (rig, front):
        for tenant in ("ada", "bob", "ada"):
            await ask(rig, chat(), x_session_id="s", authorization=f"Bearer key-of-{tenant}")
        owners = [hint.owner for body in received(front) if (hint := read(body)) is not None]
        assert len(owners) == 3
        assert owners[0] == owners[2] != owners[1]
        assert not any(name in body for body in received(front) for name in (b"ada", b"bob"))


async def test_another_engine_gets_the_hint_only_if_it_obeys_it() -> None:
    async with running({}, {}) as engines, fronting(engines[0]) as obeys, fronting(engines[1]) as ignores:
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


@pytest.mark.parametrize(
    ("path", "many"),
    [
        (BATCH, {"messages": [[{"role": "user", "content": TEXT * 30 + str(n)}] for n in range(2)]}),
        ("/v1/completions", {"prompt": [TEXT * 30 + str(n) for n in range(2)]}),
    ],
)
async def test_all_prompts_of_one_request_have_the_hint_of_its_session(
    path: str, many: dict[str, Any]
) -> None:
    body = json.dumps({"model": MODEL, "max_tokens": 1, **many}).encode()
    async with hinting() as (rig, front):
        front.overrides[path] = lambda: (200, {"choices": []})
        for _ in range(20):  # their prefix is hot
            assert await ask(rig, body, path) == 200
        assert await ask(rig, body, path, x_session_id="s") == 200
        *others, last = [read(each) for each in received(front, path)]
        # One length for all prompts would cover what is only of the first one.
        assert set(others) == {None}
        assert last.tokens is None


@asynccontextmanager
async def two(
    engines: tuple[dict[str, Any], ...],
    listed: Callable[[Front, SimulatedEngine], EngineAddress],
    **changes: Any,
) -> AsyncIterator[tuple[Rig, list[Front], list[SimulatedEngine]]]:
    """A router before fronts of two engines; the first one's metrics say that it obeys hints."""
    async with running(*engines) as started, AsyncExitStack() as stack:
        fronts = [await stack.enter_async_context(fronting(engine)) for engine in started]
        fronts[0].overrides["/metrics"] = lambda: (200, OBEYS)
        config = configure(*map(listed, fronts, started), policy=HINTS, **changes)
        async with routing(config) as rig:
            await until(lambda: any(engine.obeys_hints for engine in rig.router.fleet), "metrics read")
            yield rig, fronts, list(started)
            await rig.over()


@pytest.mark.parametrize("obeying", ["prefill", "decode"])
async def test_both_requests_of_a_split_one_have_the_hint_if_their_engine_obeys_it(obeying: str) -> None:
    roles: tuple[Role, Role] = ("prefill", "decode") if obeying == "prefill" else ("decode", "prefill")

    def listed(front: Front, engine: SimulatedEngine) -> EngineAddress:
        return EngineAddress(front.base_url, role=engine.settings.role)

    async with two(tuple({"role": role} for role in roles), listed, pd=SPLITS) as (rig, fronts, _):
        with busy(rig):
            assert await ask(rig, chat(TEXT * 30, kv_transfer_params=CLAIM), x_session_id="s") == 200
        assert rig.router.proxy.pd_stats.handoffs == 1
        for front, role in zip(fronts, roles, strict=True):
            (body,) = received(front)
            params = json.loads(body)["kv_transfer_params"]
            assert params["do_remote_decode" if role == "prefill" else "do_remote_prefill"] is True
            hint = read(body)
            assert (hint is not None) == (role == obeying)
            assert hint is None or hint.value == 0.5
        assert rig.router.accounts.retention.stats.sent["session"] == 1


def feed_is_at(rig: Rig, front: Front, engine: SimulatedEngine) -> bool:
    feed = rig.router.lifecycle.feeds.stats.get(front.base_url)
    return feed is not None and feed.last_seq == engine.publisher.next_seq - 1


async def test_a_request_that_pulls_has_its_hint_too() -> None:
    def listed(front: Front, engine: SimulatedEngine) -> EngineAddress:
        host, port = engine.connector.address
        return EngineAddress(front.base_url, kv_source=f"{host}:{port}")

    tier = {"kv_connector": "offloading", "host_blocks": 8000}
    async with two((tier, tier), listed, pull=PullSettings(enabled=True)) as (rig, fronts, engines):
        await until(lambda: all(one.version for one in rig.router.fleet), "versions are known")
        for number, engine in enumerate(engines):  # the second one holds the prompt
            warm = json.dumps({"model": MODEL, "prompt": [5 + number] * 700, "max_tokens": 1}).encode()
            bodies = [warm, chat(TEXT * 60)] if number else [warm]
            for path, body in zip(("/v1/completions", CHAT), bodies, strict=False):
                async with rig.session.post(engine.base_url + path, data=body, headers=JSON) as answer:
                    assert answer.status == 200
        for front, engine in zip(fronts, engines, strict=True):
            await until(lambda f=front, e=engine: feed_is_at(rig, f, e), "every batch applied")  # type: ignore[misc]
        holder = rig.router.fleet.get(fronts[1].base_url)
        load = holder.load
        ticket = load.admit(uncached_tokens=80_000, now=time.monotonic(), streams=True)
        assert await ask(rig, chat(TEXT * 60), x_session_id="s") == 200
        load.finish(ticket, time.monotonic())
        (body,) = received(fronts[0])
        assert json.loads(body)["kv_transfer_params"].keys() == {"remote_kv_source", HINT}
        assert read(body) is not None


def test_clients_with_transfer_parameters_of_their_own_and_hints_exclude_each_other() -> None:
    proxy = ProxySettings(trust_client_kv_transfer_params=True)
    with pytest.raises(ConfigError, match=r"policy\.retention_hints: with proxy.trust_client"):
        check_config(configure(EngineAddress("http://h:1"), proxy=proxy, policy=HINTS))
