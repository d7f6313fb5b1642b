"""Decisions before the cost: another name for a model, and a client that may choose."""

from __future__ import annotations

import openai
import pytest

from kvatlas.router.proxy.settings import ProxySettings
from tests.support.whole_router import MODEL, configure, routed, routing, running


async def test_an_alias_is_answered_by_the_model_behind_it_and_listed() -> None:
    async with routed({}, aliases={"gpt-4o": MODEL, "gone": {"no-such-model": 1.0}}) as (rig, engines):
        answer = await rig.chat("hi", model="gpt-4o")
        assert answer.http_response.status_code == 200
        assert answer.headers["x-kvatlas-engine"] == engines[0].base_url
        listed = {card.id: card for card in (await rig.api.models.list()).data}
        assert set(listed) == {MODEL, "gpt-4o"}
        assert listed["gpt-4o"].root == MODEL  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            await rig.chat("hi", model="gone")


async def test_a_client_may_choose_the_engine_where_that_is_allowed() -> None:
    async with running({}, {}) as engines:
        allowed = configure(*engines, proxy=ProxySettings(pin_header=True))
        async with routing(allowed) as rig:
            for engine in engines * 2:
                chosen = {"x-kvatlas-engine": engine.base_url}
                answer = await rig.chat("the same prompt", extra_headers=chosen)
                assert answer.headers["x-kvatlas-engine"] == engine.base_url
            with pytest.raises(openai.InternalServerError, match="'nobody', which was asked for"):
                await rig.chat("hi", extra_headers={"x-kvatlas-engine": "nobody"})
        async with routing(configure(*engines)) as rig:
            answer = await rig.chat("hi", extra_headers={"x-kvatlas-engine": "nobody"})
            assert answer.http_response.status_code == 200
