"""Messages and Responses by their own clients, through the router to two real vLLM engines.

Every predicted hit must be what the engine then reports, and a response must be found again where it is kept.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.vllm.chat_load import ChatLoad
from tests.vllm.observed_fleet import BLOCK_TOKENS, Fleet, Outcome, running
from tests.vllm.vllm_engine import two_engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = 280
NUM_GPU_BLOCKS = 220
ENGINE_ARGS = (
    "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--max-num-batched-tokens", "256",
)  # fmt: skip
TOOL_TURN = [
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look it up."},
            {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "tide", "n": 2.50}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "moon"}]},
            {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


@pytest.fixture(scope="module")
def fleet(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    options = {"extra_args": ENGINE_ARGS, "environment": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}}
    engines = two_engines(vllm_python, tiny_model, logs, num_gpu_blocks=NUM_GPU_BLOCKS, **options)
    with running(engines, tiny_model, log=logs / "router.log") as fleet:
        yield fleet


def test_every_predicted_hit_is_what_the_engine_reports(fleet: Fleet, anthropic: Any) -> None:
    rng, outcomes = random.Random(5), []
    url = fleet.router.base_url
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as messages,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as responses,
    ):
        for request in ChatLoad(seed=23).requests(REQUESTS):
            if not request.chat:
                continue
            system, *turns = request.arguments["messages"]
            same = {"model": "tiny", "stream": request.stream, "extra_body": {"ignore_eos": True}}
            if rng.random() < 0.5:
                outcome = _ask_messages(messages, rng, system["content"], turns, **same)
            else:
                outcome = _ask_responses(responses, rng, system["content"], turns, **same)
            request.answered(outcome.text)
            outcomes.append(outcome)
            fleet.settle(outcome.engine_id)

    told = [outcome for outcome in outcomes if outcome.cached_tokens is not None]
    wrong = [o for o in told if o.predicted != o.cached_tokens]
    receipts = [r for r in fleet.router.receipts() if r["predicted_tokens"] != r["actual_tokens"]]
    assert not wrong, f"{len(wrong)} of {len(told)} wrong: {wrong[:5]}, {receipts[-5:]}"
    hits = [outcome for outcome in told if outcome.predicted]
    served = Counter(outcome.engine_id for outcome in outcomes)
    print(f"{len(outcomes)} asked, {len(told)} told, {len(hits)} hits, served {served}")
    assert len(told) >= 200
    assert len(hits) >= len(told) // 4
    assert set(served) == set(fleet.taps)


def _ask_messages(client: Any, rng: random.Random, system: str, turns: list[Any], **more: Any) -> Outcome:
    if rng.random() < 0.3:
        turns = [turns[0], *TOOL_TURN, *turns[1:]]
    given: Any = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    raw = client.messages.with_raw_response.create(
        system=given if rng.random() < 0.5 else system, messages=turns, max_tokens=rng.randint(1, 24), **more
    )
    answer: Any = raw.parse()
    if more["stream"]:
        events = list(answer)
        usage = next(event.usage for event in events if event.type == "message_delta")
        text = "".join(getattr(e.delta, "text", "") or "" for e in events if e.type == "content_block_delta")
    else:
        usage, text = answer.usage, "".join(block.text for block in answer.content)
    return _outcome(raw.headers, text, usage.cache_read_input_tokens)


def _ask_responses(
    client: openai.OpenAI, rng: random.Random, system: str, turns: list[Any], **more: Any
) -> Outcome:
    raw = client.responses.with_raw_response.create(
        instructions=system, input=turns, max_output_tokens=rng.randint(1, 24), **more
    )
    answer: Any = raw.parse()
    if more["stream"]:
        answer = list(answer)[-1].response
    return _outcome(raw.headers, answer.output_text, answer.usage.input_tokens_details.cached_tokens)


def _outcome(headers: Any, text: str, cached_tokens: int | None) -> Outcome:
    predicted = int(headers["x-kvatlas-hit-tokens"])
    return Outcome(headers["x-kvatlas-engine"], predicted, text or ".", cached_tokens=cached_tokens)


def test_a_response_is_found_where_it_is_kept(fleet: Fleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.router.base_url}/v1", api_key="none", max_retries=0) as client:
        for index in range(8):
            stream = index % 2 == 1
            answer: Any = client.responses.create(
                model="tiny", input=f"number {index}", store=True, stream=stream, max_output_tokens=4
            )
            made = list(answer)[-1].response if stream else answer
            assert client.responses.retrieve(made.id).id == made.id
            more = client.responses.create(
                model="tiny", input="go on", previous_response_id=made.id, max_output_tokens=4
            )
            assert more.previous_response_id == made.id
            with pytest.raises(openai.BadRequestError):  # by the engine that knows it, and that it is done
                client.responses.cancel(made.id)
            running = client.responses.create(
                model="tiny",
                input=f"at length {index}",
                background=True,
                max_output_tokens=400,
                extra_body={"ignore_eos": True},
            )
            with suppress(openai.BadRequestError):  # the engine that has it: it is done already
                assert client.responses.cancel(running.id).status == "cancelled"
        for ask in (client.responses.retrieve, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask("resp_unknown")
