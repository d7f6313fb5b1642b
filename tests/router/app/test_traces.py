"""Traces as a collector gets them: a span per phase, tied to the client's and the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe import traces as traces_module
from kvatlas.router.observe.traces import Traces, TraceSettings
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.proxy.app import ProxyApp
from kvatlas.router.startup_check import check
from tests.support.proxy_rig import Engine, ask, request, says
from tests.support.proxy_rig import routing as proxying
from tests.support.waiting import until
from tests.support.whole_router import TEXT, configure, routed, routing, running

pytestmark = pytest.mark.real  # threads of an exporter

http_exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-2] + "00"


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans it gets."""
    spans: list[Any] = []

    async def take(asked: web.Request) -> web.Response:
        message = collector.ExportTraceServiceRequest.FromString(await asked.read())
        spans.extend(s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans)
        return web.Response(body=collector.ExportTraceServiceResponse().SerializeToString())

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", spans
    finally:
        await runner.cleanup()


def facts(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_spans_of_a_request_with_prediction_and_receipt() -> None:
    async with collecting() as (endpoint, spans), running({}) as engines:
        settings = TraceSettings(endpoint=endpoint, sample_ratio=0.0)
        async with routing(configure(*engines, traces=settings)) as rig:
            await rig.chat(TEXT * 20)
            await until(lambda: rig.idle, "request over")
            await rig.caught_up(*engines)
            await rig.chat(TEXT * 20, extra_headers={"traceparent": PARENT})
            await rig.chat("hi", extra_headers={"traceparent": NOT_SAMPLED})
            await until(lambda: rig.idle, "requests over")
            assert "kvatlas_traces_requests_total 1.0" in await rig.page()
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == ["POST /v1/chat/completions", "decide", "read body", "read prompt", "upstream"]
    root = by_name.pop("POST /v1/chat/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (PARENT[3:35], PARENT[36:52])
    assert {span.parent_span_id for span in by_name.values()} == {root.span_id}
    order = ["read body", "read prompt", "decide", "upstream"]
    starts = [by_name[name].start_time_unix_nano for name in order]
    assert starts == sorted(starts)
    asked, ended = facts(by_name["upstream"]), facts(root)
    assert asked["kvatlas.predicted_hit_tokens"] == ended["kvatlas.hit_tokens"] > 100
    assert asked["kvatlas.mode"] == "native"
    assert asked["kvatlas.reason"] == "only"
    assert ended["http.response.status_code"] == 200
    assert ended["gen_ai.usage.output_tokens"] == 3
    assert ended["gen_ai.operation.name"] == "chat"
    assert ended["gen_ai.usage.cache_read.input_tokens"] == ended["kvatlas.hit_tokens"]


async def test_each_leg_is_a_span_with_its_engine_and_the_second_one_has_the_gap() -> None:
    async with (
        collecting() as (endpoint, spans),
        running({"role": "prefill"}, {"role": "decode"}) as (p, d),
    ):
        settings = TraceSettings(endpoint=endpoint, sample_ratio=1.0)
        addresses = EngineAddress(p.base_url, role="prefill"), EngineAddress(d.base_url, role="decode")
        pd = PdSettings(min_remote_tokens=0, leg_overhead_s=0.0, transfer_s_per_token=0.0)
        async with routing(configure(*addresses, traces=settings, pd=pd)) as rig:
            load = next(engine.load for engine in rig.router.fleet if engine.engine.decodes)
            held = load.reserve(time.monotonic())  # a sequence that a prefill would hold up
            await rig.chat(TEXT * 20)
            load.finish(held, time.monotonic())
            await until(lambda: rig.idle, "requests over")
        engines = [p.base_url, d.base_url]
    root = next(span for span in spans if not span.parent_span_id)
    legs = sorted(
        (span for span in spans if span.name == "upstream"), key=lambda span: int(span.start_time_unix_nano)
    )
    assert {span.parent_span_id for span in legs} == {root.span_id}
    first, second = map(facts, legs)
    assert [one["kvatlas.engine"] for one in (first, second)] == engines
    assert [one["kvatlas.leg"] for one in (first, second)] == ["prefill", "decode"]
    assert "kvatlas.gap_s" not in first
    assert 0 <= second["kvatlas.gap_s"] * 1e9 <= legs[1].end_time_unix_nano - legs[0].start_time_unix_nano
    assert second["kvatlas.transfer_tokens"] == first["kvatlas.prompt_tokens"] > 100
    assert legs[0].end_time_unix_nano <= legs[1].start_time_unix_nano


async def test_the_wait_in_the_queue_is_a_span() -> None:
    slow = {"decode_s_per_token": 0.05}
    async with collecting() as (endpoint, spans), running(slow) as engines:
        settings = TraceSettings(endpoint=endpoint, sample_ratio=0.0)
        queue = QueueSettings(saturation_s=60.0, engine_requests_max=1)
        async with routing(configure(*engines, traces=settings, queue=queue)) as rig:
            room = rig.router.accounts.room
            first = asyncio.ensure_future(rig.chat("hi", max_tokens=2000))
            await until(lambda: rig.router.accounts.load_stats.admitted == 1, "the engine is busy")
            waiting = asyncio.ensure_future(rig.chat(TEXT, extra_headers={"traceparent": PARENT}))
            await until(lambda: room.stats.waiting == 1, "it waits")
            first.cancel()
            await waiting
            await until(lambda: rig.idle, "requests over")
        spans.sort(key=lambda span: int(span.start_time_unix_nano))
    root = next(span for span in spans if span.name == "POST /v1/chat/completions")
    names = [span.name for span in spans if span is not root]
    assert names == ["read body", "read prompt", "decide", "queue", "decide", "upstream"]
    wait = next(span for span in spans if span.name == "queue")
    assert wait.parent_span_id == root.span_id
    asked = facts(next(span for span in spans if span.name == "upstream"))
    waited_ns = wait.end_time_unix_nano - wait.start_time_unix_nano
    assert asked["kvatlas.waited_s"] > 0 < waited_ns


def _traced(traces: Traces) -> Any:
    def wrap(app: ProxyApp) -> ProxyApp:
        app.requests.traces = traces
        return app

    return wrap


class Collected:
    """An exporter of the SDK's kind that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415  # an extra

        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to close."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


@pytest.mark.parametrize("parent", [PARENT, NOT_SAMPLED, "", "garbage"])
async def test_the_engine_gets_a_child_of_ours_or_what_the_client_sent(parent: str) -> None:
    kept = Collected()
    traces = Traces(TraceSettings(), exporter=kept, chance=lambda: 1.0)  # type: ignore[arg-type]
    fields = (f"traceparent: {parent}", "tracestate: vendor=1") if parent else ()
    async with Engine(says(200, b"{}")) as engine, proxying(engine.url, wrap=_traced(traces)) as rig:
        await ask(rig, request(b"{}", *fields))
        head = engine.calls[0].head
    traces.close()
    if parent != PARENT:
        assert (head["traceparent"], kept.spans) == (parent, [])
        return
    upstream = next(span for span in kept.spans if span.name == "upstream")
    made = upstream.get_span_context()
    assert head["traceparent"] == f"00-{PARENT[3:35]}-{made.span_id:016x}-01"
    assert head["tracestate"] == "vendor=1"
    assert traces.stats.spans == traces.stats.spans_exported == len(kept.spans)


async def test_a_collector_that_does_not_answer_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # What waits for it is the end of the process alone.
    impatient = partial(http_exporter.OTLPSpanExporter, "http://127.0.0.1:9/v1/traces", timeout=0.1)
    monkeypatch.setattr(traces_module, "_exporter", lambda settings: impatient())
    settings = TraceSettings(endpoint="http://127.0.0.1:9", sample_ratio=1.0)
    async with routed({}, traces=settings) as (rig, _):
        for _ in range(5):
            assert (await rig.chat("hi")).http_response.status_code == 200
        traces = rig.router.traces
        assert traces is not None
        await until(lambda: rig.idle, "requests over")
    assert traces.stats.spans == 25


def test_without_the_sdk_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    config = configure(traces=TraceSettings(endpoint="http://collector:4318"))
    with pytest.raises(ConfigError, match=r"'\.\[otel\]'"):
        check(config)


@pytest.mark.parametrize("settings", [{"endpoint": "collector:4317"}, {"sample_ratio": 1.5}])
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        TraceSettings(**settings)
