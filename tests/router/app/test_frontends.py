"""A fleet in which one engine has vLLM's Rust frontend: each is predicted by its own tokens."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from kvatlas.router.openai.apis import CHAT
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.replication.settings import IndexSettings
from tests.support.redis_servers import AnyServer
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routed, routing, running

STORY = "a long story about a small engine and its famous garden. " * 12


def _body(parts: list[str]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} for part in parts]
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


async def test_both_frontends_are_predicted_exactly() -> None:
    body = _body([STORY, *["one"] * 10, STORY])
    async with routed({}, {"frontend": "rust"}, proxy=ProxySettings(pin_header=True)) as (rig, engines):
        for engine in engines:
            for _ in range(2):
                headers = {"x-kvatlas-engine": engine.base_url}
                async with rig.session.post(rig.url + CHAT, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                await until(lambda: rig.idle, "answered")
                await rig.caught_up(*engines)
        receipts = list(rig.router.accounts.receipts.latest)
        assert [receipt.outcome for receipt in receipts] == ["exact"] * 4
        assert [bool(receipt.actual_tokens) for receipt in receipts] == [False, True, False, True]
        lengths = [receipt.prompt_tokens for receipt in receipts]
        assert lengths[0] == lengths[1] != lengths[2] == lengths[3], "the line ends between parts"
        _, shown = await rig.ask("GET", "/kvatlas/engines")
        assert [one["frontend"] for one in shown] == ["python", "rust"]


async def test_both_frontends_are_predicted_exactly_by_every_replica(plain_server: AnyServer) -> None:
    """One replica follows an engine, the other predicts it from the shared index."""
    body = _body([STORY, *["one"] * 10, STORY])
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running({}, {"frontend": "rust"}))
        rigs = []
        for name in ("r0", "r1"):
            # No lease moves to the second replica while requests are predicted: its index would be behind.
            times = {"lookup_timeout_s": 5.0, "lease_s": 360.0, "block_ttl_s": 3600.0}
            index = IndexSettings(url=plain_server.url, replica=name, **times)
            config = configure(*engines, proxy=ProxySettings(pin_header=True), index=index)
            rigs.append(await stack.enter_async_context(routing(config)))
        for engine in engines:
            headers = {"x-kvatlas-engine": engine.base_url}

            async def held(rig: Rig, url: str = engine.base_url) -> int:
                _, explained = await rig.ask("POST", "/kvatlas/explain", body)
                (found,) = [one for one in explained["engines"] if one["engine"] == url]
                return int(found["hit_tokens"]["GPU"])

            for rig in rigs:
                async with rig.session.post(rig.url + CHAT, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                for other in rigs:
                    await until(lambda other=other: held(other), "its blocks are known")  # type: ignore[misc]
        outcomes = [[receipt.outcome for receipt in rig.router.accounts.receipts.latest] for rig in rigs]
        assert outcomes == [["exact"] * 2] * 2
        first, second = rigs[1].router.accounts.receipts.latest
        assert min(first.actual_tokens or 0, second.actual_tokens or 0) > 0
        assert first.prompt_tokens != second.prompt_tokens, "the line ends between parts"


async def test_an_engine_whose_tokens_are_not_known_is_predicted_to_hold_nothing() -> None:
    body = _body([STORY])
    body["messages"].append({"role": "assistant", "content": "x", "tool_calls": [_CALL]})
    async with running({}, {"frontend": "rust"}) as engines, routing(configure(*engines)) as rig:
        for _ in range(2):
            await rig.ok("POST", CHAT, body)
            await until(lambda: rig.idle, "answered")
            await rig.caught_up(*engines)
        _, explained = await rig.ask("POST", "/kvatlas/explain", body)
        held = {one["engine"]: one["hit_tokens"]["GPU"] for one in explained["engines"]}
        assert held[engines[1].base_url] == 0
        assert rig.router.reader.stats.not_local["frontend"] == 3


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1e2}'}}
