"""The doctor tries salts as the router does: by what the engine states of its cache."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvatlas.router.config.schema import ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.salt_proof import SaltProof
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.tools.doctor.engine_gauges import EngineGauges
from kvatlas.router.tools.doctor.evidence import EngineEvidence, ServerEvidence
from kvatlas.router.tools.doctor.examine import salt_prover
from kvatlas.router.tools.doctor.http import HttpAnswer


class Http:
    """Refuses everything, and remembers it."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []

    async def get(self, url: str) -> HttpAnswer:
        return HttpAnswer(404)

    async def post(self, url: str, body: bytes, **_: Any) -> HttpAnswer:
        self.posted.append(msgspec.json.decode(body))
        return HttpAnswer(404)


async def tried(stated: EngineStatement | None) -> list[dict[str, Any]]:
    """The salted requests to an engine that states this."""
    http = Http()
    none = HttpAnswer(404)
    server = ServerEvidence(none, none, none, none, none, (ModelCard("m", max_model_len=65_536),))
    server.server_info = stated
    engine = EngineEvidence(EngineAddress("http://e:1"), server, ModelConfig(), {}, EngineGauges())
    await salt_prover(http, engine, "m", 1.0).prove(SaltProof())  # type: ignore[arg-type]
    return http.posted


async def test_an_engine_without_a_prefix_cache_keeps_everything_apart() -> None:
    assert await tried(EngineStatement(source="server_info", caches_prefixes=False)) == []


@pytest.mark.parametrize(("block", "words_min"), [(None, 16), (16, 32), (784, 1568)])
async def test_a_prompt_that_is_tried_fills_a_block(block: int | None, words_min: int) -> None:
    posted = await tried(EngineStatement(source="server_info", attention_block_size=block))
    words = [len(str(one.get("prompt", one.get("messages", one.get("input")))).split()) for one in posted]
    assert max(words) >= words_min
    if block is None:
        assert await tried(None)
        assert max(words) < 784
