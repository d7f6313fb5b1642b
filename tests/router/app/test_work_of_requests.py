"""A request of many prompts or answers is charged, queued and loaded whole before an engine is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.tenants import TenantRequest
from kvatlas.router.openai.apis import BATCH, CHAT, COMPLETION, GENERATE
from kvatlas.router.openai.work import Work
from tests.router.app.test_prefill_decode import SPLITS, D, P, apart, busy, completion, prompt
from tests.support.whole_router import MODEL, routed, tenants

RULES = {"small": "uncached_tokens_per_minute = 1000", "free": ""}
TEXT = "a word that is new in this fleet " * 12
CHAT_OF = [{"role": "user", "content": TEXT}]
FLOODS: list[tuple[str, dict[str, Any], int, int]] = [
    (COMPLETION, {"prompt": [f"{at} {TEXT}" for at in range(64)]}, 64, 4000),
    (COMPLETION, {"prompt": [prompt(at, 200) for at in range(64)]}, 64, 12_800),
    (COMPLETION, {"prompt": prompt(1, 200), "n": 100, "temperature": 1.0}, 100, 900),
    (BATCH, {"messages": [[{"role": "user", "content": f"{at} {TEXT}"}] for at in range(64)]}, 64, 4000),
    (CHAT, {"messages": CHAT_OF, "n": 100, "temperature": 1.0}, 100, 250),
    (GENERATE, {"token_ids": prompt(1, 200), "sampling_params": {"n": 100, "temperature": 1.0}}, 100, 900),
]
"""Path, body, sequences of the engine, and tokens that they are charged with at least."""


@pytest.mark.parametrize("read", ["here", "nowhere"])
@pytest.mark.parametrize(("path", "body", "sequences", "tokens"), FLOODS)
async def test_all_prompts_and_answers_count(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    sequences: int,
    tokens: int,
    read: str,
) -> None:
    changes: dict[str, Any] = {} if read == "here" else {"models": {}}
    queue = QueueSettings(saturation_s=1e6)
    async with routed({}, keys=tenants(tmp_path, RULES), queue=queue, **changes) as (rig, _):
        (engine,) = rig.router.fleet
        seen: list[tuple[int, int]] = []
        placed = TenantRequest.placed

        def note(entry: TenantRequest, work: Work) -> None:
            placed(entry, work)
            load = engine.load.current(rig.router.accounts.now())
            seen.append((load.running + load.waiting, load.awaited_tokens))
            assert (load.running + load.waiting, load.awaited_tokens) == (
                work.sequences,
                entry.charged_tokens,
            )

        monkeypatch.setattr(TenantRequest, "placed", note)
        fields = {"authorization": "Bearer key-of-small"}
        asked = {"model": MODEL, "max_tokens": 1, **body}
        status, _ = await rig.ask("POST", path, asked, fields)
        await rig.over()
        ((requests, charged),) = seen
        assert requests > 1
        # How many there are of what is not read is not always known.
        assert requests == sequences or read != "here"
        assert charged >= (tokens if read == "here" else 100)
        left = rig.router.proxy.requests.ended[-1].charged_tokens or 0
        assert left >= tokens or status != 200 or read != "here", "the report corrects, it does not forget"
        if left > 1000:
            assert (await rig.ask("POST", path, asked, fields))[0] == 429


@pytest.mark.parametrize("stream", [False, True])
async def test_a_split_request_is_charged_once(stream: bool) -> None:
    """Its share beside other tenants: the prompt when it is placed, and what was generated in the end."""
    queue = QueueSettings(saturation_s=60.0)
    async with apart(P, D, pd=SPLITS, queue=queue) as (rig, _):
        room = rig.router.accounts.room
        assert room is not None
        charged: list[float] = []
        charge = room.charge

        def note(claim: Any, pool: str, tokens: float) -> Any:
            charged.append(tokens)
            return charge(claim, pool, tokens)

        room.charge = note  # type: ignore[method-assign]
        with busy(rig):
            status, _ = await rig.ask("POST", COMPLETION, completion(3, stream=stream))
        assert status == 200
        await rig.over()
        assert rig.router.proxy.pd_stats.split == 1
        assert charged[0] == 700
        assert sum(charged) <= 700 + 2 * 6, "the prefill is not charged beside the answer"


async def test_tokenizing_costs_and_waits_like_the_rest(tmp_path: Path) -> None:
    queue = QueueSettings(saturation_s=1.0, engine_requests_max=1)
    async with routed({}, keys=tenants(tmp_path, RULES), queue=queue) as (rig, _):
        fields = {"authorization": "Bearer key-of-small"}
        body = {"model": MODEL, "prompt": "a word " * 10_000}
        assert (await rig.ask("POST", "/tokenize", body, fields))[0] == 200
        await rig.over()
        assert (await rig.ask("POST", "/tokenize", body, fields))[0] == 429
        (engine,) = rig.router.fleet
        ticket = engine.load.admit(uncached_tokens=100_000, now=rig.router.accounts.now())
        room = rig.router.accounts.room
        assert room is not None
        fields = {"authorization": "Bearer key-of-free", "x-request-timeout": "0.05"}
        status, answer = await rig.ask("POST", "/tokenize", body, fields)
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        engine.load.fail(ticket, rig.router.accounts.now())
