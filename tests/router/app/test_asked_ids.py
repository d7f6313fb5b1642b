"""Of streams that may go on elsewhere, only engines that are known to say the ids of tokens are asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.proxy.settings import ProxySettings
from tests.support.front import fronting
from tests.support.whole_router import MODEL, configure, routing, running

ON = ProxySettings(continue_streams=True)
PROMPTS: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}
SGLANG: dict[str, Any] = {"kind": "sglang", "groups": "full", "max_model_len": 4096}


@pytest.mark.parametrize(
    ("engine", "version", "asks"),
    [
        ({}, (200, {"version": "0.32.0"}), True),
        ({}, (200, {"version": "0.10.2"}), True),
        ({}, (200, {"version": "0.11.0rc2.dev9+g1234567"}), True),
        ({}, (200, {"version": "0.10.1.1"}), False),
        ({}, (200, {"version": "0.9.2"}), False),
        ({}, (200, {"version": "dev"}), False),
        ({}, (404, {"detail": "Not Found"}), False),
        ({"frontend": "rust", "version": "0.33.0"}, (200, {"version": "0.33.0"}), False),
        (SGLANG, (200, {"version": "0.32.0"}), False),
    ],
)
async def test_only_engines_known_to_say_ids_are_asked(
    engine: dict[str, Any], version: tuple[int, Any], asks: bool
) -> None:
    async with running(engine) as (one,), fronting(one) as front:
        front.overrides["/version"] = lambda: version
        async with routing(configure(EngineAddress(front.base_url), proxy=ON)) as rig:
            for path, prompt in PROMPTS.items():
                body = json.dumps({"model": MODEL, "stream": True, "max_tokens": 2, **prompt}).encode()
                status, answer = await rig.ask("POST", path, body)
                assert status == 200
                assert answer.endswith("data: [DONE]\n\n")
                assert '"token_ids":[' not in answer
                sent = dict(front.bodies)[path]
                assert sent == (b'{"return_token_ids":true,' + body[1:] if asks else body)
