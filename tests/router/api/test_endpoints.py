"""The router's own endpoints, asked over HTTP and by the ``openai`` client."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas import __version__
from kvatlas.publisher.simulator.server import SimulatedEngine
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.config.schema import Config, ServerConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.observe.findings import Finding, Severity
from kvatlas.router.placement.candidate import PolicySettings
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.replication.settings import IndexSettings
from tests.support.ports import free_port
from tests.support.waiting import until
from tests.support.whole_router import LOCAL, MODEL, QUICK, TEXT, configure, routing, running

CHAT = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": TEXT * 20}]}


def check_error(answer: Any, code: str) -> None:
    """OpenAI's error shape with this code."""
    assert set(answer) == {"error"}, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code
    assert answer["error"]["message"]


async def test_ready_shows_errors_before_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    severities = (Severity.WARNING, Severity.ERROR, Severity.OK, Severity.WARNING, Severity.ERROR)

    def found(_: object) -> Generator[None, None, list[Finding]]:
        yield
        return [Finding(f"check.{number}", one, "router", "") for number, one in enumerate(severities)]

    monkeypatch.setattr("kvatlas.router.api.app.current_findings", found)
    async with routing(configure(), wait=False) as rig:
        _, body = await rig.ask("GET", "/ready")
    assert [one["check"] for one in body["problems"]] == ["check.1", "check.4", "check.0", "check.3"]


async def test_ready_says_no_until_an_engine_answers_and_is_known() -> None:
    port = free_port()
    config = configure(EngineAddress(f"http://127.0.0.1:{port}"))
    async with routing(config, wait=False) as rig:
        assert await rig.ask("GET", "/health") == (200, {"status": "ok"})
        status, body = await rig.ask("GET", "/ready")
        assert (status, body["ready"]) == (503, False)
        assert "engine" in body["reason"]
        assert body["engines"][f"http://127.0.0.1:{port}"]["up"] is False
        engine = SimulatedEngine(EngineSettings(port=port, **QUICK))
        await engine.start()
        try:
            await rig.ready()
            status, body = await rig.ask("GET", "/ready")
            assert (status, body["ready"], body["reason"]) == (200, True, "")
            assert body["engines"][engine.base_url] == {
                "up": True,
                "problem": "",
                "on_hold": "",
                "feed": "ready",
            }
        finally:
            await engine.stop()


@pytest.mark.parametrize(
    ("share", "waits"),
    [(None, True), ("load", True), ("blocks", False)],
    ids=["alone", "without-Redis", "without-an-index"],
)
async def test_ready_waits_for_a_cold_feed_but_not_for_ever(share: Any, *, waits: bool) -> None:
    silent, nowhere = f"tcp://127.0.0.1:{free_port()}", f"redis://127.0.0.1:{free_port()}"
    index = IndexSettings() if share is None else IndexSettings(url=nowhere, share=share)
    async with running({"publish_events": False}) as (engine,):
        known = EngineAddress(engine.base_url, events=silent)
        slow = FleetSettings(poll_interval_s=0.1, warm_up_s_max=1000.0)
        patient = configure(known, fleet=slow, index=index)
        async with routing(patient, wait=False) as rig:
            await until(lambda: rig.router.fleet.ready(None), "an engine")
            await until(lambda: share is None or rig.router.peers.problem, "Redis is missed")
            status, body = await rig.ask("GET", "/ready")
            assert status == (503 if waits else 200)
            assert (engine.base_url in body["reason"]) == waits
            assert ("without the shared index" in body["reason"]) == (share is not None)
        hasty = configure(known, fleet=FleetSettings(poll_interval_s=0.1, warm_up_s_max=0.01))
        async with routing(hasty, wait=False) as rig:
            await until(lambda: rig.router.readiness().ready, "ready")
            status, body = await rig.ask("GET", "/ready")
            assert status == 200
            assert engine.base_url in body["reason"]


async def test_an_engine_that_joins_cold_does_not_make_the_router_unready() -> None:
    port = free_port()
    late = EngineAddress(f"http://127.0.0.1:{port}", events=f"tcp://127.0.0.1:{free_port()}")
    fleet = FleetSettings(poll_interval_s=0.1, poll_down_interval_s=0.05, warm_up_s_max=1000.0)
    async with running({}) as (first,), routing(configure(first, late, fleet=fleet), wait=False) as rig:
        await until(lambda: rig.router.readiness().ready, "ready with one of two")
        engine = SimulatedEngine(EngineSettings(port=port, **QUICK))
        await engine.start()
        try:
            await until(lambda: len(rig.router.fleet.ready(None)) == 2, "the second is up")
            status, body = await rig.ask("GET", "/ready")
            assert status == 200
            assert late.engine_id in body["reason"]
        finally:
            await engine.stop()


async def test_ready_says_no_while_draining() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        rig.router.draining = lambda: True
        status, body = await rig.ask("GET", "/ready")
        assert (status, body["reason"]) == (503, "draining")
        assert (await rig.ask("GET", "/health"))[0] == 200


async def test_the_server_tells_the_router_that_it_drains() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        assert rig.router.readiness().ready
        rig.server.drain()
        assert rig.router.readiness().reason == "draining"


async def test_probes_may_use_head() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        for path in ("/health", "/ready", "/metrics", "/version", "/v1/models"):
            assert await rig.ask("HEAD", path) == (200, "")


async def test_version() -> None:
    async with routing(configure(), wait=False) as rig:
        assert await rig.ask("GET", "/version") == (200, {"version": __version__})


async def test_models_are_the_union_of_the_engines_models() -> None:
    settings = [{"model": "a"}, {"model": "b", "max_model_len": 900}, {"model": "b", "max_model_len": 700}]
    async with running(*settings) as engines, routing(configure(*engines)) as rig:
        listed = (await rig.api.models.list()).data
        assert sorted(card.id for card in listed) == ["a", "b"]
        assert all(card.object == "model" and card.owned_by for card in listed)
        _, card = await rig.ask("GET", "/v1/models/b")
        assert card["max_model_len"] == 700  # what fits every engine
        assert (await rig.api.models.retrieve("a")).id == "a"
        with pytest.raises(openai.NotFoundError) as missing:
            await rig.api.models.retrieve("c")
        assert missing.value.code == "model_not_found"


async def test_model_names_may_contain_slashes() -> None:
    async with running({"model": "org/name"}) as engines, routing(configure(*engines)) as rig:
        status, card = await rig.ask("GET", "/v1/models/org/name")
        assert (status, card["id"]) == (200, "org/name")


async def test_an_unknown_model_is_not_found() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        with pytest.raises(openai.NotFoundError) as missing:
            await rig.chat("hello", model="nobody")
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        assert missing.value.response.headers["x-should-retry"] == "false"
        rig.check_books()


async def test_two_models_go_to_the_engines_that_serve_them() -> None:
    async with running({"model": "a"}, {"model": "b"}) as (a, b), routing(configure(a, b)) as rig:
        for model, engine in (("a", a), ("b", b), ("a", a), ("b", b)):
            raw = await rig.chat(TEXT * 9, model=model)
            assert raw.headers["x-kvatlas-engine"] == engine.base_url
            reported = raw.parse().usage.prompt_tokens_details.cached_tokens
            assert int(raw.headers["x-kvatlas-hit-tokens"]) == reported
            await rig.caught_up(a, b)
        assert sorted(rig.router.scopes.models()) == ["a", "b"]


async def test_metrics_parse_and_count() -> None:
    async with running({}, {}) as engines, routing(configure(*engines)) as rig:
        first = _samples((await rig.ask("GET", "/metrics"))[1])
        for _ in range(3):
            await rig.chat(TEXT * 20, stream=True, stream_options={"include_usage": True})
            await rig.caught_up(*engines)  # the first events show half of what there is to know
            await rig.chat(TEXT * 20)
            await rig.caught_up(*engines)
        page = (await rig.ask("GET", "/metrics"))[1]
        families = {family.name: family for family in text_string_to_metric_families(page)}
        assert {name.partition("_")[0] for name in families} == {"kvatlas", "gen", "process"}
        samples = _samples(page)
        exact = [s.value for s in families["kvatlas_receipts"].samples if s.labels["outcome"] == "exact"]
        assert sum(exact) == 6
        assert sum(s.value for s in families["kvatlas_engine_up"].samples) == 2
        assert samples["kvatlas_proxy_requests_total"] == 6
        counters = [f.name for f in families.values() if f.type == "counter"]
        for key, value in first.items():
            if key.partition("{")[0].removesuffix("_total") in counters:
                assert samples[key] >= value, key  # counters never fall


def _samples(page: str) -> dict[str, float]:
    return {
        f"{s.name}{{{sorted(s.labels.items())}}}" if s.labels else s.name: s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


async def test_numbers_that_fall_are_gauges() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        page = (await rig.ask("GET", "/metrics"))[1]
        types = {family.name: family.type for family in text_string_to_metric_families(page)}
        for name in (
            "proxy_requests_active",
            "inflight_prompts",
            "inflight_blocks",
            "prompts_prefix_bytes",
            "feed_missing_batches",
            "index_blocks",
        ):
            assert types[f"kvatlas_{name}"] == "gauge", name
        assert types["kvatlas_shadow_prompts"] == "counter"


def engine_counts(engine: SimulatedEngine) -> bytes:
    """Everything an engine counts of its requests."""
    return msgspec.json.encode(
        {
            name: getattr(engine.scheduler.stats, name)
            for name in ("prompt_tokens", "generation_tokens", "finished")
        }
    )


@pytest.mark.parametrize("policy", ["kvatlas", "round-robin", "least-load"])
async def test_explain_tells_the_decision_that_the_next_request_gets(policy: str) -> None:
    chosen = {"policy": PolicySettings(policy=policy)}
    async with running({}, {}, {}) as engines, routing(configure(*engines, **chosen)) as rig:
        for turn in range(6):
            text = TEXT * (10 + turn % 3)
            body = {**CHAT, "messages": [{"role": "user", "content": text}]}
            before = [engine_counts(engine) for engine in engines]
            status, told = await rig.ask("POST", "/kvatlas/explain", body)
            assert status == 200
            again = (await rig.ask("POST", "/kvatlas/explain", body))[1]
            assert again["choice"] == told["choice"]  # explaining changes no state
            assert [engine_counts(engine) for engine in engines] == before  # nothing was forwarded
            assert rig.router.proxy.stats.requests == turn
            raw = await rig.chat(text)
            assert raw.headers["x-kvatlas-engine"] == told["choice"]["engine"]
            assert int(raw.headers["x-kvatlas-hit-tokens"]) == told["choice"]["hit_tokens"]
            await rig.caught_up(*engines)
        rig.check_books()


async def test_explain_shows_every_engine_class_by_class() -> None:
    settings = {"groups": "gptoss-like"}
    async with running(settings, settings) as engines, routing(configure(*engines)) as rig:
        raw = await rig.chat(CHAT["messages"][0]["content"])  # type: ignore[index]
        await rig.caught_up(*engines)
        _, told = await rig.ask("POST", "/kvatlas/explain", CHAT)
        assert told["prompt"] == {
            "api": "chat",
            "tokens": raw.parse().usage.prompt_tokens,
            "read": "local",
            "by": rig.router.reader.tokenized_by(MODEL),
            "skips_cache": False,
        }
        assert told["choice"]["engine"] == raw.headers["x-kvatlas-engine"]
        shown = {entry["engine"]: entry for entry in told["engines"]}
        assert set(shown) == {engine.base_url for engine in engines}
        warm = shown.pop(raw.headers["x-kvatlas-engine"])
        (cold,) = shown.values()
        assert warm["mode"] == "native"
        assert warm["feed"] == cold["feed"] == "ready"
        hit = warm["hit_tokens"]["GPU"]
        assert hit > 100
        assert cold["hit_tokens"] == {"GPU": 0, "CPU": 0, "STORAGE": 0, "offloaded": 0}
        assert [c["spec_class"].split()[0] for c in warm["by_class"]] != []
        assert len(warm["by_class"]) == 2  # full attention, and the window
        assert all(c["hit_tokens"] >= hit for c in warm["by_class"])
        assert warm["ended_by"]["at_token"] == hit
        assert warm["cost"]["total_s"] < cold["cost"]["total_s"]
        assert {"queue_s", "running", "waiting", "kv_usage"} == set(warm["load"])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"model": "kvatlas-demo"}', 400, "missing_prompt"),
        (b'{"model": "nobody", "prompt": "x"}', 404, "model_not_found"),
        (b'{"prompt": "' + b"x" * 2000 + b'"}', 413, "body_too_large"),
        (b"", 400, "invalid_json"),
    ],
)
async def test_explain_refuses_what_it_cannot_read(body: bytes, status: int, code: str) -> None:
    small = {"proxy": ProxySettings(body_bytes_max=1500)}
    async with running({}) as engines, routing(configure(*engines, **small)) as rig:
        answered, told = await rig.ask("POST", "/kvatlas/explain", body)
        assert answered == status
        check_error(told, code)
        assert (await rig.ask("GET", "/health"))[0] == 200


async def test_explain_works_for_text_that_goes_by_affinity() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        body = {**CHAT, "chat_template": "{{ messages }}"}
        _, told = await rig.ask("POST", "/kvatlas/explain", body)
        assert told["prompt"]["read"] == "affinity"
        assert told["prompt"]["why"]
        assert told["choice"]["engine"] == engines[0].base_url


async def test_engines_and_receipts_show_what_happened() -> None:
    async with running({}, {"publish_events": False}) as (a, b), routing(configure(a, b)) as rig:
        _, fresh = await rig.ask("GET", "/kvatlas/engines")
        assert [entry["engine"] for entry in fresh] == [a.base_url, b.base_url]
        assert (await rig.ask("GET", "/kvatlas/receipts"))[1] == []
        for _ in range(4):
            await rig.chat(TEXT * 20, extra_headers={"x-request-id": "me"})
            await rig.caught_up(a)
        entries = {e["engine"]: e for e in (await rig.ask("GET", "/kvatlas/engines"))[1]}
        assert entries[a.base_url]["feed_state"] == "ready"
        assert entries[b.base_url]["feed_state"] == "none"
        assert (entries[a.base_url]["mode"], entries[b.base_url]["mode"]) in {
            ("native", "shadow"),
            ("waiting", "shadow"),  # it got none of the four
        }
        _, receipts = await rig.ask("GET", "/kvatlas/receipts")
        assert len(receipts) == 4
        assert {r["outcome"] for r in receipts} == {"exact"}
        assert all("me" in r["request_id"] for r in receipts)
        assert all(r["predicted_tokens"] == r["actual_tokens"] for r in receipts)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/kvatlas/nothing", 404, "path_not_found"),
        ("GET", "/kvatlas/engines/", 404, "path_not_found"),
        ("GET", "/kvatlas", 404, "path_not_found"),
        ("GET", "/nothing", 404, "path_not_found"),
        ("GET", "/kvatlas/explain", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PATCH", "/kvatlas/engines", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_are_refused_in_the_same_shape(
    method: str, path: str, status: int, code: str
) -> None:
    async with routing(configure(), wait=False) as rig:
        answered, told = await rig.ask(method, path)
        assert answered == status
        check_error(told, code)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version"])
async def test_own_endpoints_answer_with_a_slash_at_the_end_too(path: str) -> None:
    async with routing(configure(), wait=False) as rig:
        for spelled in (f"{path}/", f"{path}%2F"):
            assert await rig.ask("GET", spelled) == await rig.ask("GET", path)


async def test_a_fault_of_the_router_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routing(configure(), wait=False) as rig:
        monkeypatch.setattr(rig.router.fleet, "model_cards", lambda: 1 / 0)
        status, told = await rig.ask("GET", "/v1/models")
        assert status == 500
        check_error(told, "internal_error")
        assert (await rig.ask("GET", "/health"))[0] == 200


async def test_decisions_are_exposed_only_where_configured() -> None:
    async with running({}) as engines:
        quiet = Config(
            server=ServerConfig(port=0), engines=configure(*engines).engines, models={ANY_MODEL: LOCAL}
        )
        async with routing(quiet) as rig:
            raw = await rig.chat("hello")
            assert not [name for name in raw.headers if name.startswith("x-kvatlas")]


async def test_without_engines_requests_are_refused_and_may_be_retried() -> None:
    async with routing(configure(), wait=False) as rig:
        with pytest.raises(openai.InternalServerError) as refused:
            await rig.chat("hello")
        assert refused.value.status_code == 503
        assert refused.value.code == "no_ready_engine"
        assert refused.value.response.headers["retry-after"] == "1"
        rig.check_books()


@pytest.mark.parametrize("path", ["/ready", "/health", "/v1/models", "/v1/models/none", "/nowhere"])
async def test_answers_and_errors_end_with_a_newline(path: str) -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        async with rig.session.get(rig.url + path) as answer:
            assert (await answer.read()).endswith(b"}\n")
        bad = rig.session.post(
            f"{rig.url}/v1/messages", data=b"{", headers={"content-type": "application/json"}
        )
        async with bad as answer:
            assert (await answer.read()).endswith(b"}\n")
