"""The doctor tries salts as the router does: by what the engine states of its cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.tools.doctor.examine import ExamineSettings, _Examination
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
    """The requests to an engine that states this."""
    http = Http()
    server = SimpleNamespace(
        models=[ModelCard("m", max_model_len=65_536)], server_info=stated, metrics_answer=HttpAnswer(200)
    )
    engine = SimpleNamespace(
        engine=SimpleNamespace(dp_rank=None, base_url="http://e:1"), kind="vllm", server=server
    )
    myself = SimpleNamespace(_http=http, _settings=ExamineSettings())
    await _Examination._try_salts(myself, engine, "m")  # type: ignore[arg-type]
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
