"""Time receipts: the predicted time to first token, part by part, beside the measured one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.router.http.client import HttpClient
from kvatlas.router.observe.receipts import Receipt
from kvatlas.router.tools.doctor.http import Http
from kvatlas.router.tools.top import take_snapshot
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running

SLOW: dict[str, Any] = {"prefill_s_per_token": 2e-4, "decode_s_per_token": 1e-4}


async def streamed(rig: Rig, text: str) -> str | None:
    """A streamed chat, read to its end; the predicted milliseconds that its head carries."""
    headers, _ = await rig.streamed(text)
    return headers.get("x-kvatlas-predicted-ttft-ms")  # type: ignore[no-any-return]


async def receipts(rig: Rig, count: int) -> list[Receipt]:
    await until(lambda: len(rig.router.accounts.receipts.latest) == count, "every receipt")
    return list(rig.router.accounts.receipts.latest)


def samples(page: str, name: str) -> dict[tuple[str, ...], float]:
    found = (s for family in text_string_to_metric_families(page) for s in family.samples)
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in found if s.name == name}


async def test_a_receipt_has_the_predicted_time_part_by_part_and_the_measured_one() -> None:
    async with running(SLOW) as engines, routing(configure(*engines)) as rig:
        await rig.ready()
        header = await streamed(rig, TEXT * 20)
        await rig.caught_up(*engines)
        await streamed(rig, TEXT * 20 + "And then?")
        first, second = await receipts(rig, 2)
        (engine,) = rig.router.fleet
        assert first.predicted_ttft_s is not None
        parts = first.queue_s + first.pages_s + first.load_s + first.prefill_s + first.engine_s
        assert first.predicted_ttft_s == pytest.approx(parts)
        assert first.prompt_tokens is not None
        rate = 1 / 8000  # nothing is learned from one prompt
        assert first.prefill_s == pytest.approx(rate * first.prompt_tokens)
        assert first.ttft_s is not None
        assert first.ttft_s > 0
        assert first.router_s > 0
        assert header is not None
        since_s = first.router_s + first.predicted_ttft_s
        assert int(header) <= 1000 * since_s + 1
        assert int(header) >= 1000 * first.predicted_ttft_s - 1
        assert second.predicted_tokens
        assert second.prefill_s < first.prefill_s, "cached tokens take no time"
        page = (await rig.ask("GET", "/metrics"))[1]
        buckets = samples(page, "kvatlas_time_to_first_token_error_seconds_bucket")
        assert buckets[engine.engine_id, "+Inf", MODEL] == 2
        errors = [(one.ttft_s or 0) - (one.predicted_ttft_s or 0) for one in (first, second)]
        for bound in (-0.05, 0.01, 0.05, 0.25):
            counted = buckets[engine.engine_id, str(bound), MODEL]
            assert counted == sum(error <= bound for error in errors)
        outcomes = samples(page, "kvatlas_time_to_first_token_predictions_total")
        assert sum(outcomes.values()) == 2
        shown = (await rig.ask("GET", "/kvatlas/receipts"))[1][0]
        assert shown["predicted_ttft_s"] == pytest.approx(first.predicted_ttft_s)
        (view,) = (await rig.ask("GET", "/kvatlas/engines"))[1]
        assert view["first_tokens"]["compared"] == 2
        async with HttpClient() as client:
            picture = await take_snapshot(Http(client, 3.0), rig.ops_url)
        assert picture.engines[0].ttft_compared == 2
        assert picture.engines[0].predicted_ttft_s == pytest.approx(
            (first.predicted_ttft_s + (second.predicted_ttft_s or 0)) / 2
        )


async def test_a_prompt_behind_another_one_has_its_prefill_as_queue() -> None:
    async with routed({**SLOW, "prefill_s_per_token": 1e-4}) as (rig, _):
        await rig.ready()
        (engine,) = rig.router.fleet
        ahead = asyncio.create_task(streamed(rig, "One. " + TEXT * 400))
        await until(lambda: engine.load.current(rig.router.clock()).waiting, "a prompt at the engine")
        await asyncio.gather(ahead, streamed(rig, "Two. " + TEXT))
        behind = next(one for one in await receipts(rig, 2) if (one.prompt_tokens or 0) < 100)
        assert behind.queue_s > 0
        assert behind.predicted_ttft_s == pytest.approx(
            behind.queue_s + behind.pages_s + behind.prefill_s + behind.engine_s
        )


async def test_an_answer_without_a_stream_has_a_prediction_and_no_measured_time() -> None:
    async with running(SLOW) as engines, routing(configure(*engines)) as rig:
        await rig.ready()
        raw = await rig.chat(TEXT)
        assert int(raw.headers["x-kvatlas-predicted-ttft-ms"]) >= 0
        (only,) = await receipts(rig, 1)
        assert only.predicted_ttft_s is not None
        assert only.ttft_s is None
        (engine,) = rig.router.fleet
        assert engine.first_tokens.summary().compared == 0


async def test_of_several_prompts_in_one_request_no_time_is_predicted() -> None:
    async with running(SLOW) as engines, routing(configure(*engines)) as rig:
        await rig.ready()
        raw = await rig.api.completions.with_raw_response.create(
            model=MODEL, prompt=[TEXT, TEXT + "More."], max_tokens=2
        )
        assert "x-kvatlas-engine" in raw.headers
        assert "x-kvatlas-predicted-ttft-ms" not in raw.headers
        (only,) = await receipts(rig, 1)
        assert only.predicted_ttft_s is None
