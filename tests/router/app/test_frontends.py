"""A fleet in which one engine has vLLM's Rust frontend: each is predicted by its own tokens."""

from __future__ import annotations

from typing import Any

from router.openai.request import CHAT
from router.proxy.settings import ProxySettings
from tests.support.waiting import run, until
from tests.support.whole_router import MODEL, configure, routing, running

STORY = "a long story about a small engine and its famous garden. " * 12


def _body(parts: list[str]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} for part in parts]
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def test_both_frontends_are_predicted_exactly() -> None:
    body = _body([STORY, *["one"] * 10, STORY])

    async def main() -> None:
        async with running({}, {"frontend": "rust"}) as engines:
            config = configure(*engines, proxy=ProxySettings(pin_header=True))
            async with routing(config) as rig:
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

    run(main())


def test_an_engine_whose_tokens_are_not_known_is_predicted_to_hold_nothing() -> None:
    body = _body([STORY])
    body["messages"].append({"role": "assistant", "content": "x", "tool_calls": [_CALL]})

    async def main() -> None:
        async with running({}, {"frontend": "rust"}) as engines, routing(configure(*engines)) as rig:
            for _ in range(2):
                status, answer = await rig.ask("POST", CHAT, body)
                assert status == 200, answer
                await until(lambda: rig.idle, "answered")
                await rig.caught_up(*engines)
            _, explained = await rig.ask("POST", "/kvatlas/explain", body)
            held = {one["engine"]: one["hit_tokens"]["GPU"] for one in explained["engines"]}
            assert held[engines[1].base_url] == 0
            assert rig.router.reader.stats.not_local["frontend"] == 3

    run(main())


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1e2}'}}
