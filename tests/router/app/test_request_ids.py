"""Every answer of the router names its request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.whole_router import MODEL, TEXT, configure, routing, running

OWN = (
    "/health /ready /version /v1/models /v1/models/none /metrics /kvatlas/engines /kvatlas/problems /nothing"
)


async def test_every_answer_has_an_id_the_clients_own_if_it_gave_one() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        asked: list[tuple[str, str, Any]] = [
            ("GET", base + path, None) for base in (rig.url, rig.ops_url) for path in OWN.split()
        ]
        chat = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}
        asked += [
            ("POST", f"{rig.url}/v1/chat/completions", body)
            for body in (
                chat,
                {**chat, "stream": True},
                {**chat, "model": "none"},
                {**chat, "messages": 1},
                {},
            )
        ]
        asked += [("PUT", f"{rig.url}/v1/chat/completions", None), ("OPTIONS", f"{rig.url}/v1/models", None)]
        for method, url, body in asked:
            for given in ("", "mine"):
                fields = {"origin": "http://page", "access-control-request-method": "GET"}
                fields |= {"x-request-id": given} if given else {}
                async with rig.session.request(method, url, json=body, headers=fields) as answer:
                    await answer.read()
                    (told,) = answer.headers.getall("x-request-id")
                assert told == given or (not given and re.fullmatch("[0-9a-f]{32}", told)), (method, url)


@pytest.mark.parametrize("length", [1, 256])
async def test_an_id_with_other_characters_is_replaced(length: int) -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        for given, kept in (("x" * length, True), ("x" * length + " y", False), ("\u00e9" * length, False)):
            async with rig.session.get(f"{rig.url}/health", headers={"x-request-id": given}) as answer:
                assert (answer.headers["x-request-id"] == given) == kept
