"""Requests on the metrics page and in the log of a whole router."""

from __future__ import annotations

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.router.config.schema import ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from tests.support.front import fronting
from tests.support.waiting import until
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routing, running

TIMES = {
    "kvatlas_time_to_first_token_seconds",
    "kvatlas_inter_token_seconds",
    "kvatlas_request_duration_seconds",
    "kvatlas_router_overhead_seconds",
}


async def samples(rig: Rig) -> dict[tuple[str, ...], float]:
    page = (await rig.ask("GET", "/metrics"))[1]
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_counts_and_times_by_model() -> None:
    async with running({"decode_s_per_token": 0.05}) as (engine,), routing(configure(engine)) as rig:
        await rig.streamed(TEXT, max_tokens=5)
        await rig.chat(TEXT)
        assert (await rig.ask("GET", "/v1/models/nonsense"))[0] == 404
        assert (await rig.ask("GET", "/models"))[0] == 404
        bad = {"model": "nonsense", "messages": [{"role": "user", "content": "x"}]}
        assert (await rig.ask("POST", "/v1/chat/completions", bad))[0] == 404
        await until(lambda: rig.idle, "answered")
        found = await samples(rig)
        assert found["kvatlas_requests_total", engine.base_url, MODEL, "200"] == 2
        assert found["kvatlas_requests_total", "", "", "404"] == 2  # no model of a client's invention
        counts = {name: found[f"{name}_count", MODEL] for name in TIMES}
        assert counts.pop("kvatlas_inter_token_seconds") >= 1
        assert counts.pop("kvatlas_time_to_first_token_seconds") == 1
        assert set(counts.values()) == {2}
        assert all(found[f"{name}_sum", MODEL] > 0 for name in TIMES)
        assert not any(name == "kvatlas_proxy_errors_total" for name, *_ in found)
        assert found["kvatlas_proxy_not_found_total", "path_not_found"] == 1
        assert any(name == "kvatlas_build_info" for name, *_ in found)
        assert found[("process_resident_memory_bytes",)] > 1e6


async def test_one_line_per_request() -> None:
    server = ServerConfig(port=0, log_requests=True)
    async with running({}) as (engine,), routing(configure(engine, server=server)) as rig:
        with structlog.testing.capture_logs() as logs:
            await rig.streamed(TEXT, max_tokens=5)
            await until(lambda: rig.idle, "answered")
        (line,) = [line for line in logs if line["event"] == "request"]
        assert (line["method"], line["path"], line["model"]) == ("POST", "/v1/chat/completions", MODEL)
        assert (line["engine"], line["status"], line["attempts"]) == (engine.base_url, 200, 1)
        assert line["completion_tokens"] == 5
        assert 0 < line["first_token_s"] <= line["duration_s"]
        assert line["request_bytes"] > 0 < line["answer_bytes"]
        assert line["request_id"]
        assert TEXT[:20] not in repr(line)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "401 from /v1/models: the engine wants an API key (--api-key); set fleet.api_key_file"),
        (404, "404 from /v1/models"),
    ],
)
async def test_an_engine_that_never_answers_is_reported_with_the_likely_cause(
    status: int, problem: str
) -> None:
    async with running({}) as (engine,), fronting(engine) as front:
        front.overrides["/v1/models"] = lambda: (status, {})
        with structlog.testing.capture_logs() as logs:
            async with routing(configure(EngineAddress(front.base_url)), wait=False) as rig:
                await until(lambda: front.asked("/v1/models") >= 4, "asked again and again")
                (seen,) = rig.router.fleet
                assert seen.problem == problem
        lines = [line for line in logs if line["event"] == "engine does not answer"]
        assert len(lines) == 1  # it is asked often, and said seldom
        assert (lines[0]["engine"], lines[0]["problem"]) == (front.base_url, problem)
