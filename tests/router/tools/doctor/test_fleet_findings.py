"""Findings across engines and about a router, each provoked once."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import Finding, Severity
from kvatlas.router.tools.doctor import findings
from kvatlas.router.tools.doctor.evidence import Evidence
from kvatlas.router.tools.doctor.findings import CheckResult, exit_status, info, run_checks
from tests.router.tools.doctor.rig import Answers, at, examined, http_server, publishing, server, stored
from tests.support.examples import some
from tests.support.whole_router import configure, routing, running

ENGINE = "http://127.0.0.1:9"
UP: dict[str, Any] = {
    "engine": ENGINE,
    "up": True,
    "problem": "",
    "available": True,
    "feed": {"reason": ""},
    "feed_state": "ready",
    "mode": "native",
    "receipts": {"exact": 30},
    "drifting": False,
}


async def test_one_engine_under_two_names() -> None:
    async with running({}) as (engine,):
        await examined(engine.base_url, probe=True)
        other = engine.base_url.replace("127.0.0.1", "localhost")
        addresses = {"events": engine.events_endpoint, "replay": engine.replay_endpoint}
        found = await examined(engine.base_url, EngineAddress(other, **addresses))
        found.expect("fleet.duplicates", Severity.ERROR, "the same", "two names")


async def test_seeds_that_differ() -> None:
    async with running({"hash_seed": "1"}, {"hash_seed": "2"}) as engines:
        found = await examined(*(e.base_url for e in engines), probe=True)
        found.expect("fleet.hash_seeds", Severity.WARNING, "PYTHONHASHSEED differs", "'1'", "'2'")
        assert {f.severity for f in found.of("probe.exact")} == {Severity.OK}


async def test_algorithms_and_layouts_that_differ() -> None:
    other = {"hash_algo": "sha256_cbor", "groups": "full"}
    async with running({"groups": "gptoss-like"}, other) as engines:
        found = await examined(*(e.base_url for e in engines), probe=True)
        found.expect("fleet.hash_seeds", Severity.WARNING, "prefix_caching_hash_algo")
        found.expect("fleet.layouts", Severity.WARNING, "sliding_window/16")


DRAFTS: Answers = {"metrics": (200, b'vllm:spec_decode_num_drafts_total{engine="0"} 7.0', {})}


@pytest.mark.parametrize("ahead", some([[[16]], None], 2))
async def test_hashes_that_look_ahead_in_some_engines_only(ahead: list[list[int]] | None) -> None:
    async with http_server(server(**DRAFTS)) as first, http_server(server(**DRAFTS)) as second:
        with publishing() as plain, publishing() as other:
            plain.publish([stored()])
            other.publish([stored(tokens=32, lookahead_token_ids=ahead)])
            found = await examined(at(first, plain), at(second, other))
            if ahead is None:
                assert found.of("fleet.lookahead") == []
            else:
                found.expect("fleet.lookahead", Severity.WARNING, "KV connector", first, second)


async def test_releases_that_differ() -> None:
    async with http_server(server()) as new, http_server(server(version={"version": "0.30.1"})) as old:
        found = await examined(new, old)
        found.expect("fleet.versions", Severity.INFO, "0.30.1, 0.32.0")


async def test_no_engine_at_all() -> None:
    async with http_server({"/kvatlas/engines": [], "/ready": {"ready": True}}) as url:
        found = await examined(router=url)
        found.expect("fleet.engines", Severity.ERROR, "no engine to examine")


async def test_without_a_router_there_is_no_finding_about_engines() -> None:
    async with http_server({}) as url:
        found = await examined(router=url)
        found.expect("router.reach", Severity.ERROR, "404")
        assert found.of("fleet.engines") == []


def router(**changes: Any) -> Answers:
    answers = {"/kvatlas/engines": [{**UP, **changes}], "/ready": {"ready": True, "reason": ""}}
    return {**answers, "/metrics": {}, "/version": {"version": "0.1.0"}}


DOWN = {
    "check": "engine.down",
    "severity": "error",
    "subject": ENGINE,
    "seen": "down: refused",
    "since_s": 5.0,
}
TOKENIZER = {"check": "tokens.tokenizer", "severity": "warning", "subject": "m", "seen": "m: by engines"}


async def test_the_routers_own_problems_are_repeated_under_their_ids() -> None:
    told = {ENGINE: [DOWN], "m": [TOKENIZER]}
    async with http_server(router(up=False) | {"/kvatlas/problems": told}) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        down = found.expect("engine.down", Severity.ERROR, "down: refused")
        assert (down.subject, down.since_s) == (ENGINE, 5.0)
        assert found.expect("tokens.tokenizer", Severity.WARNING, "m: by engines").subject == url
        assert found.of("router.engines") == []


@pytest.mark.parametrize(
    ("receipts", "told"), [({"exact": 3, "over": 1}, "75% of 4"), ({"under": 3, "unpredicted": 5}, "0% of 3")]
)
async def test_the_routers_view_of_an_engine(receipts: dict[str, int], told: str) -> None:
    async with http_server(router(receipts=receipts)) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        assert found.expect("router.predictions", Severity.OK, told).subject == ENGINE


@pytest.mark.parametrize(
    ("source", "severity", "words"),
    [
        ({"synced": True, "engines": 3}, Severity.OK, ("engines from kubernetes: 3",)),
        ({"synced": True, "engines": 0}, Severity.OK, ("engines from kubernetes: 0",)),
        (
            {"synced": False, "last_error": "status 403"},
            Severity.ERROR,
            ("not synced yet: status 403", "check RBAC"),
        ),
        (
            {"synced": True, "engines": 2, "failing": True, "last_error": "refused"},
            Severity.WARNING,
            ("2, as last known", "refused", "check RBAC"),
        ),
        ({"synced": True, "refused": 4, "last_error": "pod a"}, Severity.INFO, ("4 entries", "pod a")),
    ],
)
async def test_where_the_routers_engines_come_from(
    source: dict[str, Any], severity: Severity, words: tuple[str, ...]
) -> None:
    told = {"static": {"synced": True, "engines": 0}, "kubernetes": source}
    async with http_server({**router(), "/kvatlas/sources": told}) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        assert found.expect("router.sources", severity, *words).subject == url
        assert len(found.of("router.sources")) == 1


async def test_a_router_that_sees_another_engine_than_the_doctor() -> None:
    async with running({}) as (engine,):
        view = {"engine": engine.base_url, "scheme": None, "layout": {"groups": []}}
        async with http_server(router(**view, mode="learned")) as url:
            found = await examined(engine.base_url, router=url, probe=True)
            found.expect("router.engines", Severity.WARNING, "the router learns hashes")
            found.expect("router.engines", Severity.WARNING, "0 group(s) in a layout different")
        async with http_server(router(**view)) as url:
            found = await examined(engine.base_url, router=url)
            found.expect("router.engines", Severity.ERROR, "another hash scheme")
        async with http_server(router(engine=engine.base_url, feed_state="none")) as url:
            found = await examined(engine.base_url, router=url)
            found.expect("router.engines", Severity.WARNING, "no feed for this engine")


async def test_a_router_that_is_not_there_or_not_ready() -> None:
    async with http_server(server()) as engine:
        found = await examined(engine, router="http://127.0.0.1:9")
        found.expect("router.reach", Severity.ERROR, "cannot connect")
        found = await examined(engine, router=engine)
        found.expect("router.reach", Severity.ERROR, "status 404")
        answers = router() | {"/ready": (503, b'{"ready": false, "reason": "draining"}', {})}
        async with http_server(answers) as url:
            found = await examined(engine, router=url)
            found.expect("router.reach", Severity.ERROR, "draining")
            found.expect("router.engines", Severity.WARNING, "does not know this engine")
            found.expect("router.engines", Severity.INFO, "not examined")


async def test_findings_by_the_routers_metrics() -> None:
    page = (
        b"kvatlas_prompts_template_mismatches_total 1.0\n"
        b'kvatlas_index_unknown_removals_total{model="m"} 2.0\n'
        b"kvatlas_proxy_errors_total 0.0\nnonsense\n"
        b'kvatlas_prompts_reads_total{api="chat",how="local"} 40.0\n'
        b'kvatlas_prompts_reads_total{api="messages",how="local"} 1.0\n'
        b'kvatlas_prompts_reads_total{api="messages",how="affinity"} 3.0\n'
        b'kvatlas_prompts_reads_total{api="responses",how="renderer"} 1.0\n'
        b'kvatlas_prompts_reads_total{api="responses",how="engine"} 1.0\n'
        b'kvatlas_prompts_not_local_total{reason="no_tokenizer"} 3.0\n'
    )

    async with http_server(router() | {"/metrics": (200, page, {})}) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        found.expect("router.predictions", Severity.INFO, "jinja2")
        found.expect("router.predictions", Severity.INFO, "2 removals")
        by_text = found.expect("router.prompts", Severity.INFO, "75% placed by text")
        assert "tokenizer" in by_text.remedy
        found.expect("router.prompts", Severity.INFO, "50% by render servers, 50% by engines")


async def test_render_servers_that_give_no_answer() -> None:
    def page(failures: int) -> bytes:
        return (
            b'kvatlas_prompts_reads_total{api="chat",how="affinity"} 8.0\n'
            b'kvatlas_prompts_not_local_total{reason="multimodal"} 8.0\n'
            b"kvatlas_prompts_renderer_total 0.0\n"
            b"kvatlas_prompts_renderer_calls_total 4.0\n"
            b"kvatlas_prompts_renderer_failures_total %d.0\n"
            b"kvatlas_prompts_renderer_skipped_total 1.0\n" % failures
        )

    async with http_server(router() | {"/metrics": (200, page(4), {})}) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        found.expect("router.prompts", Severity.WARNING, "no usable result for 5 prompt(s)")
        assert "start them" in found.expect("router.prompts", Severity.INFO, "placed by text").remedy
    async with http_server(router() | {"/metrics": (200, page(0), {})}) as url:
        found = await examined(ENGINE, router=url, timeout_s=0.5)
        assert found.worst("router.prompts") is Severity.INFO
        assert "one request for each set" in found.expect("router.prompts", Severity.INFO).remedy


async def test_the_router_and_the_doctor_agree_on_the_layout_of_a_real_engine() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        await rig.chat("tell " * 60)
        await rig.caught_up(engine)
        found = await examined(engine.base_url, router=rig.ops_url)
        assert [f.severity for f in found.of("router.engines")] == [Severity.OK]


def test_a_check_that_stumbles_is_a_finding_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbling(_seen: Evidence) -> Any:
        yield info("said before")
        raise KeyError("surprise")

    def after(_seen: Evidence) -> Any:
        yield CheckResult(Severity.OK, "said after")

    checks = {"fleet.stumbling": stumbling, "router.after": after}
    monkeypatch.setattr(findings, "_CHECKS", checks)
    found = run_checks(Evidence(Config(), []))
    assert [f.seen for f in found][::2] == ["said before", "said after"]
    assert "KeyError" in found[1].seen
    assert found[1].severity is Severity.ERROR


def test_a_problem_has_a_cause_and_a_remedy() -> None:
    for report in (findings.warning, findings.error):
        assert report("seen", "cause", "remedy").remedy == "remedy"
        with pytest.raises(ValueError, match="seen: a problem needs"):
            report("seen", "cause")


def test_status_is_that_of_the_worst_finding() -> None:
    def of(severity: Severity) -> Finding:
        return Finding("a.b", severity, "x", "y")

    assert exit_status([of(Severity.OK), of(Severity.INFO)]) == 0
    assert exit_status([of(Severity.OK), of(Severity.WARNING)]) == 1
    assert exit_status([of(Severity.ERROR)]) == 1
    assert exit_status([]) == 0


async def test_an_events_batch_that_breaks_the_index_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("kvatlas.router.index.model_indexes.ModelIndexes.apply", broken)

    async with http_server(server()) as url:
        with publishing() as publisher:
            publisher.publish([stored()])
            found = await examined(at(url, publisher), model=ModelConfig())
            found.expect("events.encoding", Severity.ERROR, "ZeroDivisionError: boom")


async def test_a_router_given_as_an_engine_is_recognised() -> None:
    async with running({}) as (engine,), routing(configure(engine)) as rig:
        for url in (rig.url, rig.ops_url):
            found = await examined(url)
            assert [(one.check, one.severity) for one in found if one.subject == url] == [
                ("http.version", Severity.ERROR)
            ]
            told = found.expect("http.version", Severity.ERROR, "this is a kvatlas router", "--router")
            assert "upgrade" not in told.remedy


async def test_events_in_an_unknown_medium_are_reported() -> None:
    async with http_server(server()) as url:
        with publishing() as publisher:
            publisher.publish([stored(), stored(medium="SHARED_STORAGE"), stored(medium="CPU")])
            found = await examined(at(url, publisher))
            told = found.expect("events.encoding", Severity.WARNING, "not used")
            assert told.seen.endswith("SHARED_STORAGE 1")
