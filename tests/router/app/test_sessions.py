"""Sessions on the ops port: the turns of each, where they ran, and the tokens that engines hold for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.openai.apis import CHAT, MESSAGES, RESPONSES
from tests.support.waiting import until
from tests.support.whole_router import MODEL, Rig, configure, routed, routing, running, tenants

TEXT = "a long story about a small engine and its famous garden. " * 20
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    RESPONSES: {"input": TEXT, "max_output_tokens": 2},
}


async def ask(
    rig: Rig, engines: list[SimulatedEngine], path: str = CHAT, key: str = "none", **fields: Any
) -> None:
    headers = {"authorization": f"Bearer {key}", **fields.pop("headers", {})}
    body = {"model": MODEL, **BODIES[path], **fields}
    async with rig.session.post(rig.url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    await until(lambda: rig.idle, "request over")
    await rig.caught_up(*engines)


async def sessions(rig: Rig, query: str = "") -> list[dict[str, Any]]:
    status, found = await rig.ask("GET", f"/kvatlas/sessions{query}")
    assert status == 200
    shown: list[dict[str, Any]] = found
    return shown


@pytest.mark.parametrize("path", BODIES)
async def test_turns_of_a_session_and_the_tokens_held_for_it(path: str) -> None:
    async with running({}, {}) as engines, routing(configure(*engines)) as rig:
        claude = {"x-claude-code-session-id": "of claude"}
        await ask(rig, engines, path, headers=claude)
        await ask(rig, engines, path, headers={**claude, "x-claude-code-agent-id": "helper"})
        await ask(rig, engines, path, headers={"x-session-id": "own"})
        await ask(rig, engines, path)
        own, of_claude = await sessions(rig)
        assert [own["session"], of_claude["session"]] == ["own", "of claude"], "the latest first"
        first, second = of_claude["latest"]
        assert (of_claude["turns"], first["agent"], second["agent"]) == (2, "", "helper")
        assert first["engine"] == second["engine"], "its prefix is there"
        assert of_claude["prompt_tokens"] == first["prompt_tokens"] + second["prompt_tokens"]
        assert of_claude["cached_tokens"] == first["cached_tokens"] + second["cached_tokens"] > 0
        # The first request stored the whole prompt; the others only used it.
        whole_blocks = first["prompt_tokens"] // 16 * 16
        assert of_claude["held_tokens"] == {first["engine"]: whole_blocks}
        assert own["held_tokens"] == {}
        assert [one["session"] for one in await sessions(rig, "?session=of")] == ["of claude"]
        assert await sessions(rig, "?session=claude") == []
        # What the engine drops is held no more.
        ran = next(engine for engine in engines if engine.base_url == first["engine"])
        async with rig.session.post(f"{ran.base_url}/reset_prefix_cache") as answer:
            assert answer.status == 200
        other = {"model": MODEL, "prompt": "another text " * 20, "max_tokens": 1}
        async with rig.session.post(f"{ran.base_url}/v1/completions", json=other) as answer:
            assert answer.status == 200  # announces the reset, too
        await rig.caught_up(*engines)
        assert (await sessions(rig, "?session=of"))[0]["held_tokens"] == {first["engine"]: 0}
        _, page = await rig.ask("GET", "/metrics")
        assert "kvatlas_sessions_dropped_total 0.0" in page
        assert "kvatlas_session_blocks_dropped_total 0.0" in page


async def test_tenants_with_one_session_name_stay_apart_and_see_nothing(tmp_path: Path) -> None:
    token = "a-token-of-operators"
    (tmp_path / "tokens").write_text(f"ops:{token}\n")
    server = ServerConfig(port=0, ops_host="0.0.0.0", ops_token_file=str(tmp_path / "tokens"))
    keys = tenants(tmp_path, {"ada": "", "eve": ""})
    async with routed({}, server=server, keys=keys) as (rig, engines):
        ops = {"authorization": f"Bearer {token}"}

        async def shown() -> list[tuple[str, str, int, bool]]:
            status, found = await rig.ask("GET", "/kvatlas/sessions", fields=ops)
            assert status == 200
            return [(s["tenant"], s["session"], s["turns"], s["held_tokens"] is None) for s in found]

        await ask(rig, engines, key="key-of-ada", headers={"x-session-id": "same"})
        assert await shown() == [("ada", "same", 1, False)]
        await ask(rig, engines, key="key-of-eve", headers={"x-session-id": "same"})
        # Events do not tell whose session of that name a block is.
        assert await shown() == [("eve", "same", 1, True), ("ada", "same", 1, True)]
        for key in ("key-of-ada", token):
            fields = {"authorization": f"Bearer {key}"}
            async with rig.session.get(f"{rig.url}/kvatlas/sessions", headers=fields) as answer:
                assert answer.status == 404
                body = await answer.read()
                assert msgspec.json.decode(body)["error"]["code"] == "ops_port"
                assert b"same" not in body
        fields = {"authorization": "Bearer key-of-ada"}
        for wrong in (fields, {}):
            assert (await rig.ask("GET", "/kvatlas/sessions", fields=wrong))[0] == 401
