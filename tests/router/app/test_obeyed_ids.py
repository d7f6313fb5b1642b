"""An engine that ignores the id which the router chose for a response is a problem: its tenant loses it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvatlas.router.fleet.engines import EngineAddress
from tests.support.api_streams import event_of
from tests.support.proxy_rig import END, SSE_HEAD, Call, Engine, Script, answer, chunk
from tests.support.waiting import until
from tests.support.whole_router import configure, routing

_CARDS = msgspec.json.encode({"object": "list", "data": [{"id": "m"}]})


def responds(obeys: list[bool], background: bool) -> Script:
    """A script: whether it obeys is the last item."""

    async def script(engine: Engine, call: Call, writer: asyncio.StreamWriter) -> None:
        if call.head.first[1] == "/v1/models":
            writer.write(answer(200, _CARDS))
            return
        asked: dict[str, Any] = msgspec.json.decode(call.body)
        if asked["input"] == "bad":
            writer.write(answer(400, b'{"error": {"message": "no"}}', "content-type: application/json"))
            return
        held = {"id": asked["request_id"] if obeys[-1] else "resp_own", "object": "response", "output": []}
        whole = {**held, "status": "completed", "usage": {"input_tokens": 5, "output_tokens": 2}}
        if not asked.get("stream"):
            writer.write(answer(200, msgspec.json.encode(whole), "content-type: application/json"))
            return
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": {**held, "background": background}}),
            ("response.output_text.delta", {"delta": "x"}),
            ("response.completed", {"response": whole}),
        ]
        writer.write(SSE_HEAD)
        for name, data in events:
            writer.write(chunk(event_of((name, {"type": name, **data}))))
            await writer.drain()
        writer.write(END)

    return script


@pytest.mark.parametrize(
    ("stream", "background"),
    # The opening of one in the background is not held: the first token comes in a later piece, without id.
    [(False, False), (True, False), (True, True)],
)
async def test_ids_of_the_engines_own_are_shown_until_it_obeys(stream: bool, background: bool) -> None:
    obeys = [True]
    async with (
        Engine(responds(obeys, background)) as one,
        routing(configure(EngineAddress(one.url))) as rig,
    ):
        (engine,) = rig.router.fleet
        await until(lambda: engine.up, "it is up")
        for step, shown in ((True, False), (False, True), (True, False)):
            obeys.append(step)
            for text in ("good", "bad"):  # an error has no id, and says nothing
                status, _ = await rig.ask(
                    "POST", "/v1/responses", {"model": "m", "input": text, "stream": stream}
                )
                assert status == (200 if text == "good" else 400)
            problems = await rig.ok("GET", "/kvatlas/problems")
            assert ("responses.ids" in str(problems)) is shown
