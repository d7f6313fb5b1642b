"""An independent count of mixed requests, by their clients and engines, against the usage record."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.router.observe.usage import UsageLine, UsageSettings
from tests.support.waiting import until, until_thread
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running, tenants

SLOW = {"decode_s_per_token": 0.005}
RULES = {"acme": "", "other": "", "limited": 'models = ["x"]'}
AT_ONCE = 12
# Before its number, at the end of each prompt: engines have names of their own for requests of some APIs.
MARK = "number "


class Asked(msgspec.Struct):
    """One request, and what its client saw."""

    name: str
    tenant: str
    path: str
    body: dict[str, Any]
    leaves_after: int = -1
    """Events with text after which its client leaves; -1: never."""
    status: int = 0
    seen: int = 0
    whole: bool = False
    works: list[SimRequest] = []

    @property
    def answers(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def computed(self) -> int:
        """Tokens that engines generated for it, for any client."""
        return sum(len(work.output) for work in self.works)


def draw(rng: random.Random, number: int) -> Asked:
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
    limit, text = rng.randint(1, 30), TEXT[rng.randint(0, 20) :] * rng.randint(1, 3) + f" {MARK}{number}."
    body: dict[str, Any] = {"model": MODEL, "stream": rng.random() < 0.6}
    if path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": limit, "store": False}
    elif path == "/v1/completions":
        body |= {"prompt": text, "max_tokens": limit, "ignore_eos": True}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
    if path.endswith("completions"):
        body |= {"n": 3} if rng.random() < 0.2 else {}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] and rng.random() < 0.4 else {}
    tenant, wrong = rng.choice(["acme", "acme", "other"]), rng.random()
    if wrong < 0.04:
        body["model"] = "nowhere"
    elif wrong < 0.08:
        body["messages" if "messages" in body else "prompt"] = 7
    elif wrong < 0.12:
        tenant = "limited"
    elif wrong < 0.16:
        tenant = "stranger"
    leaves = rng.randint(1, limit) if body["stream"] and rng.random() < 0.25 else -1
    return Asked(f"r{number}", tenant, path, body, leaves)


def has_text(event: bytes) -> bool:
    """Read without the router's code: whether a token's text, or the empty last one of a choice, is in it."""
    data = next((line[6:] for line in event.split(b"\n") if line.startswith(b"data: {")), b"")
    said = json.loads(data) if data else {}
    if "choices" in said:
        return any(one.get("text") or (one.get("delta") or {}).get("content") for one in said["choices"])
    return said.get("type") in {"content_block_delta", "response.output_text.delta"}


async def ask(rig: Rig, one: Asked) -> None:
    headers = {"authorization": f"Bearer key-of-{one.tenant}", "x-request-id": one.name}
    try:
        async with rig.session.post(rig.url + one.path, json=one.body, headers=headers) as answer:
            one.status, left = answer.status, b""
            async for piece in answer.content.iter_any():
                *events, left = (left + piece).split(b"\n\n")
                one.seen += sum(map(has_text, events)) if one.body["stream"] and one.status == 200 else 0
                if 0 <= one.leaves_after <= one.seen:
                    answer.close()
                    return
            one.whole = one.status == 200 and b'"error"' not in left
    except (aiohttp.ClientError, ConnectionError):
        pass


def watch(engine: SimulatedEngine, asked: dict[str, Asked]) -> None:
    """Note what the engine is given, by the number in its prompt."""
    submit = engine.stepper.submit

    def noted(request: SimRequest) -> Any:
        text = engine.model._tokenizer.decode(request.prompt)
        found = re.search(rf"{MARK}(\d+)\.", text)
        if found is not None:  # none in the router's own questions
            asked[f"r{found[1]}"].works.append(request)
        return submit(request)

    engine.stepper.submit = noted  # type: ignore[method-assign]


async def streaming(rig: Rig, engine: str) -> None:
    live = rig.router.proxy.requests.live
    await until(lambda: any(one.first_s and one.engine == engine for one in live), "it streams")


def check_continued(one: Asked, last: SimRequest, line: UsageLine) -> None:
    """Another engine went on, with what its client had of the answer behind the prompt."""
    about, first = (one, line), one.works[0]
    had = len(last.prompt) - len(first.prompt)
    assert last.prompt == first.prompt + first.output[:had], about
    assert line.generated_tokens == had + len(last.output), about
    assert line.prompt_tokens == len(first.prompt), about
    assert line.recomputed_tokens == len(last.prompt) - (last.cached_tokens or 0), about
    assert line.computed_is == "estimated", about
    assert 0 <= (line.computed_tokens or 0) <= len(first.prompt), about


def check(one: Asked, line: UsageLine) -> None:
    """A line against what client and engines saw."""
    about = (one, line)
    assert line.tenant == ("" if one.tenant == "stranger" else one.tenant), about
    if not one.works:
        # Refused: nothing was computed, and nothing costs.
        assert not line.computed_tokens, about
        assert not line.generated_tokens, about
        assert (line.computed_is, line.generated_is) == (None, None), about
        return
    # An engine that ends by SIGTERM may report what it gave up (Responses).
    ended = [work for work in one.works if work.finish_reason in {"length", "stop"}] or one.works
    if line.generated_is == "measured":
        latest = ended[-one.answers :]
        assert len(latest) == one.answers, about
        if line.continued_from:
            check_continued(one, latest[0], line)
            return
        assert line.generated_tokens == sum(len(work.output) for work in latest), about
        assert line.prompt_tokens == len(latest[0].prompt), about
        if one.answers == 1:
            assert line.computed_is == "measured", about
            assert line.computed_tokens == len(latest[0].prompt) - (latest[0].cached_tokens or 0), about
        else:
            assert line.computed_is == "estimated", about
            assert 0 <= (line.computed_tokens or 0) <= one.answers * len(latest[0].prompt), about
        return
    # Cut by either side: what passed, and nothing that the engines did not generate.
    assert not one.whole or line.outcome != "200", about
    assert one.seen <= (line.generated_tokens or 0) <= one.computed, about
    assert line.generated_is in {"counted", None}, about
    assert line.computed_is in {"estimated", None}, about
    if line.outcome == "client_gone":
        assert line.computed_is == "estimated" or line.computed_tokens == 0, about


@pytest.mark.parametrize(
    ("count", "seed"), [(24, 1), *(pytest.param(300, seed, marks=pytest.mark.long) for seed in (2, 3, 4))]
)
async def test_the_record_differs_from_an_independent_count_in_what_was_cut_only(
    tmp_path: Path, count: int, seed: int
) -> None:
    rng, path = random.Random(seed), tmp_path / "usage.jsonl"
    asked = {one.name: one for one in (draw(rng, number) for number in range(count))}
    waiting = iter(asked.values())
    async with running(SLOW, SLOW) as engines:
        for engine in engines:
            watch(engine, asked)
        config = configure(*engines, usage=UsageSettings(path=str(path)), keys=tenants(tmp_path, RULES))
        async with routing(config) as rig:

            async def client(number: int) -> None:
                for place, one in enumerate(waiting):
                    if number == 0 and place == 1:
                        await streaming(rig, engines[0].base_url)
                        await engines[0].stop()  # as a process that ends
                    await ask(rig, one)

            await asyncio.gather(*map(client, range(AT_ONCE)))
            await until(lambda: rig.idle, "all requests over")
            log, gate = rig.router.usage, rig.router.gate
            assert log is not None
            assert gate is not None
            await until_thread(lambda: log.stats.written == count, "every request has a line")
            stats = gate.tenants()
    lines = [msgspec.json.decode(text, type=UsageLine) for text in path.read_bytes().splitlines()]
    assert sorted(line.request_id for line in lines) == sorted(asked)
    for line in lines:
        check(asked[line.request_id], line)
    for tenant, told in stats.items():
        own = [line for line in lines if line.tenant == tenant]
        assert sum(line.computed_tokens or 0 for line in own) == told.uncached_tokens
        assert sum(line.generated_tokens or 0 for line in own) == told.generated_tokens
    if count >= 300:
        outcomes = {line.outcome for line in lines}
        assert {"200", "400", "401", "403", "404", "client_gone"} <= outcomes
        assert {line.generated_is for line in lines} == {"measured", "counted", None}
        assert {line.computed_is for line in lines} == {"measured", "estimated", None}
