"""The usage record of a whole router: one line for every request, which a full disk does not touch."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvatlas.publisher.simulator.request import SimRequest
from kvatlas.publisher.simulator.scheduler import Scheduler
from kvatlas.router.admission.key_file import KeySettings, digest_of
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.traces import TraceSettings
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.simulation.fetch import fetch_usage
from kvatlas.router.simulation.usage_record import read_capture
from tests.support.pairs import busy, connected
from tests.support.sidecars import completion
from tests.support.waiting import until, until_thread
from tests.support.whole_router import MODEL, TEXT, Rig, configure, routed, routing, running

KEY = "kva-" + "k" * 43


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def written(rig: Rig, count: int) -> None:
    log = rig.router.usage
    await until_thread(lambda: log.stats.written == count, f"{count} lines written")


async def test_requests_are_written_with_what_was_predicted_and_what_came(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    story = TEXT * 60
    async with routed({}, usage=UsageSettings(path=str(path))) as (rig, engines):
        await rig.chat(story)
        await rig.caught_up(*engines)
        await rig.streamed(story, extra_body={})
        await until(lambda: rig.idle, "all requests over")
        assert 'kvatlas_usage_dropped_total{reason="queue_full"} 0.0' in await rig.page()
        await written(rig, 2)
    first, second = lines_of(path)
    assert first["hash_ids"] == second["hash_ids"]
    assert first["prompt_tokens"] == first["hashed_tokens"] == second["prompt_tokens"]
    assert len(first["hash_ids"]) == -(-first["hashed_tokens"] // 512)
    assert (first["stream"], second["stream"]) == (False, True)
    assert first["first_token_s"] is None
    assert 0 < second["asked_s"] < second["first_token_s"] <= second["duration_s"]
    assert first["cached_tokens"] == first["predicted_tokens"] == 0
    assert second["cached_tokens"] == second["predicted_tokens"] == second["device_tokens"] > 0
    assert second["computed_tokens"] == second["prompt_tokens"] - second["cached_tokens"]
    assert (first["generated_tokens"], second["generated_tokens"]) == (3, 3)
    assert first["verified"] is second["verified"] is True
    assert story[:40] not in path.read_text()
    capture = read_capture(path)
    assert [one.asked.input_tokens for one in capture] == [first["hashed_tokens"]] * 2
    assert capture[1].cached_tokens == second["cached_tokens"]


async def test_every_request_has_exactly_one_line(tmp_path: Path) -> None:
    """Served, refused before and after the key is known, over a limit, of another model, a path that is not
    proxied, a client that left, an engine that refuses, and one that dies."""
    path, keys = tmp_path / "usage.jsonl", tmp_path / "keys.toml"
    keys.write_text(
        "[tenants.acme]\nconcurrent_requests = 1\n[tenants.other]\nmodels = ['x']\n"
        f"[[keys]]\ntenant = 'acme'\nsha256 = '{digest_of(KEY)}'\n"
        f"[[keys]]\ntenant = 'other'\nsha256 = '{digest_of(KEY + 'o')}'\n"
    )
    ids = iter(range(100))

    async def sent(rig: Rig, key: str = KEY, path: str = "/v1/chat/completions", **fields: Any) -> int:
        body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": TEXT}], **fields}
        headers = {"authorization": f"Bearer {key}", "x-request-id": f"r-{next(ids)}"}
        async with rig.session.post(f"{rig.url}{path}", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async with running({"decode_s_per_token": 0.001}) as engines:
        config = configure(*engines, usage=UsageSettings(path=str(path)), keys=KeySettings(file=str(keys)))
        async with routing(config) as rig:
            statuses = [
                await sent(rig),
                await sent(rig, "unknown"),
                await sent(rig, KEY + "o"),
                await sent(rig, path="/sleep"),
                await sent(rig, path="/nowhere"),
                await sent(rig, messages="no list"),
                await sent(rig, max_tokens=0),
            ]
            long = asyncio.create_task(sent(rig, max_tokens=1500, ignore_eos=True, stream=True))
            tracker = rig.router.proxy.requests
            await until(lambda: any(one.first_s for one in tracker.live), "the stream has begun")
            statuses.append(await sent(rig))
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            await until(lambda: rig.idle, "all requests over")
            await engines[0].stop()
            statuses.append(await sent(rig))
            await written(rig, 10)
            stats = rig.router.gate.tenants()["acme"]
            charged = lines_of(path)
            assert sum(line["computed_tokens"] or 0 for line in charged) == stats.uncached_tokens
            assert sum(line["generated_tokens"] or 0 for line in charged) == stats.generated_tokens
    lines = {line["request_id"]: line for line in lines_of(path)}
    assert len(lines) == 10
    assert [line["request_id"] for line in lines_of(path)].count("r-7") == 1
    gone = lines.pop("r-7")
    assert (gone["outcome"], gone["status"], gone["tenant"]) == ("client_gone", 200, "acme")
    assert sorted(line["status"] for line in lines.values()) == sorted(statuses)
    assert Counter(statuses)[429] == 1
    key_id = digest_of(KEY)[:12]
    assert (lines["r-0"]["tenant"], lines["r-0"]["key"]) == ("acme", key_id)
    assert (lines["r-1"]["tenant"], lines["r-1"]["key"]) == ("", "")
    assert (lines["r-8"]["status"], lines["r-8"]["tenant"], lines["r-8"]["key"]) == (429, "acme", key_id)
    assert lines["r-8"]["computed_tokens"] in {None, 0}
    assert KEY not in path.read_text()


async def test_a_request_that_moves_has_one_line_of_where_it_went(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    async with routed({}, {}, usage=UsageSettings(path=str(path))) as (rig, engines):
        answer = await rig.chat(TEXT)
        first = answer.headers["x-kvatlas-engine"]
        dead = next(one for one in engines if one.base_url == first)
        await dead.stop()
        await rig.chat(TEXT)
        await written(rig, 2)
    lines = lines_of(path)
    assert lines[0]["engine"] == first
    assert lines[1]["engine"] not in {first, ""}
    assert lines[1]["status"] == 200


async def test_a_prompt_computed_on_another_engine_is_one_line(tmp_path: Path) -> None:
    path, body = tmp_path / "usage.jsonl", completion(1)
    async with connected("nixl") as (p, d, pd):
        addresses = (EngineAddress(one.base_url, role=one.settings.role) for one in (p, d))
        config = configure(*addresses, pd=pd, usage=UsageSettings(path=str(path)))
        async with routing(config) as rig:
            with busy(rig):
                assert (await rig.ask("POST", "/v1/completions", body))[0] == 200
            await written(rig, 1)
        prefill, decode = p.base_url, d.base_url
    (line,) = lines_of(path)
    assert (line["engine"], line["prefill_engine"], line["status"]) == (decode, prefill, 200)
    assert line["attempts"] == 2
    assert line["cached_tokens"] == line["predicted_tokens"] == 0, "the prefill engine's hit"
    assert (line["computed_tokens"], line["verified"]) == (len(body["prompt"]), True)


async def test_the_record_can_be_had_from_the_router(tmp_path: Path) -> None:
    path, copy = tmp_path / "usage.jsonl", tmp_path / "copy.jsonl"
    for number in (1, 2):
        (tmp_path / f"usage.jsonl.{number}").write_text(f'{{"older": {number}}}\n')
    async with routed({}, usage=UsageSettings(path=str(path))) as (rig, _):
        await rig.chat(TEXT)
        await written(rig, 1)
        await asyncio.to_thread(fetch_usage, rig.ops_url, copy)
    assert copy.read_text() == '{"older": 2}\n{"older": 1}\n' + path.read_text()


async def test_a_router_without_a_record_names_the_setting(tmp_path: Path) -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        status, page = await rig.ask("GET", "/kvatlas/usage")
        assert status == 404
        assert page["error"]["code"] == "usage_off"
        with pytest.raises(OSError, match=r"set usage\.path"):
            await asyncio.to_thread(fetch_usage, rig.ops_url, tmp_path / "copy.jsonl")


async def test_a_record_that_cannot_be_written_fails_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    async with running({}) as engines:
        config = configure(*engines, usage=UsageSettings(path=str(folder / "a.jsonl")))
        folder.rmdir()
        async with routing(config) as rig:
            await rig.chat(TEXT)
            log = rig.router.usage
            await until(lambda: log.stats.write_failures, "the disk refused")
            await rig.chat(TEXT)
            rig.check_books()
            folder.mkdir()
            await written(rig, 2)


async def test_no_record_unless_asked_for() -> None:
    async with running({}) as engines, routing(configure(*engines)) as rig:
        await rig.chat(TEXT)
        assert rig.router.usage is None
        assert "kvatlas_usage" not in await rig.page()


async def test_an_engine_that_reports_wrong_cached_tokens_is_shown_with_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, add = tmp_path / "usage.jsonl", Scheduler.add

    def add_lying(self: Scheduler, request: SimRequest) -> None:
        request.reported_hit = 16
        add(self, request)

    monkeypatch.setattr(Scheduler, "add", add_lying)
    async with routed({}, usage=UsageSettings(path=str(path))) as (rig, engines):
        for _ in range(20):
            await rig.chat(TEXT * 5)
            await rig.caught_up(*engines)
        _, (view,) = await rig.ask("GET", "/kvatlas/engines")
        _, problems = await rig.ask("GET", "/kvatlas/problems")
        _, page = await rig.ask("GET", "/metrics")
        await written(rig, 20)
    lines = {line["request_id"]: line for line in lines_of(path)}
    assert len(view["contradicting"]) == 4
    for one in view["contradicting"]:
        line = lines[one["request_id"]]
        assert (line["cached_tokens"], line["verified"]) == (one["reported_tokens"], False)
        assert line["predicted_tokens"] == one["predicted_tokens"] > 16
    assert any("contradict its own events" in str(each) for each in problems.values())
    # What it may be: its layout is named.
    assert any("cache layout (full_attention of 16)" in str(each) for each in problems.values())
    (row,) = [row for row in page.splitlines() if row.startswith("kvatlas_cache_reports_doubtful{")]
    assert row.endswith(" 1.0")


@pytest.mark.real  # threads of an exporter
@pytest.mark.parametrize("status", [200, 500])
async def test_lines_go_to_a_collector_too_where_traces_are_on(tmp_path: Path, status: int) -> None:
    path, bodies = tmp_path / "usage.jsonl", list[bytes]()

    async def takes(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path == "/v1/logs":
            bodies.append(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/{path:.*}", takes)
    collector = TestServer(app)
    await collector.start_server()
    async with collector, running({}) as engines:
        config = configure(
            *engines,
            usage=UsageSettings(path=str(path)),
            traces=TraceSettings(endpoint=str(collector.make_url("")).rstrip("/"), sample_ratio=0.0),
        )
        async with routing(config) as rig:
            await rig.chat(TEXT)
            log = rig.router.usage
            assert log is not None
            await written(rig, 1)
        stats = log.export_stats
        sent = stats.records, stats.exported, stats.failures
    assert len(lines_of(path)) == 1, "the file has it whatever the collector does"
    assert sent[0] == 1
    if status == 200:
        assert sent == (1, 1, 0)
        (body,) = bodies
        for word in (b"kvatlas.usage.generated_tokens", b"kvatlas.usage.verified", MODEL.encode()):
            assert word in body
        assert b"hash_ids" not in body


def plain(stream: bytes) -> list[Any]:
    """The events of a stream without what differs from request to request."""
    found: list[Any] = []
    for line in stream.decode().splitlines():
        if not line.startswith("data: {"):
            assert line in {"", "data: [DONE]"}
            found.append("")
            continue
        event = json.loads(line[6:])
        found.append({name: value for name, value in event.items() if name not in {"id", "created"}})
    return found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("own", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": [TEXT, TEXT[::-1]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "n": 3, "temperature": 0}),
    ],
)
async def test_a_stream_is_billed_whatever_its_client_asks_and_sees_only_that(
    tmp_path: Path, path: str, asked: dict[str, Any], own: Any, kind: str
) -> None:
    usage = UsageSettings(path=str(tmp_path / "usage.jsonl"))
    answers = asked.get("n", 1) * (2 if isinstance(asked.get("prompt"), list) else 1)
    body = {"model": MODEL, "max_tokens": 7, "stream": True, "ignore_eos": True, **asked}
    if own is not None:
        body["stream_options"] = own
    settings = {"kind": kind, "groups": "full"}
    async with routed(settings, usage=usage) as (rig, engines), rig.session as session:
        async with session.post(engines[0].base_url + path, json=body) as answer:
            if answer.status != 200:
                pytest.skip("this simulated engine refuses it")
            alone = await answer.read()
        async with session.post(rig.url + path, json=body) as answer:
            routed_stream = await answer.read()
        seen, expected = plain(routed_stream), plain(alone)
        if own == {"include_usage": True}:
            # The cached tokens of the second differ.
            assert len(seen) == len(expected)
            seen = [event for event in seen if event == "" or event.get("choices") != []]
            expected = [event for event in expected if event == "" or event.get("choices") != []]
        if answers > 1:
            # Several answers come in any order.
            seen, expected = sorted(map(str, seen)), sorted(map(str, expected))
        assert seen == expected
        await rig.over()
        await written(rig, 1)
    (line,) = lines_of(tmp_path / "usage.jsonl")
    assert line["generated_tokens"] == 7 * answers
    if answers > 1:
        assert line["verified"] is None
        assert line["computed_tokens"] is not None


async def test_a_stream_that_is_cut_is_billed_by_what_came(tmp_path: Path) -> None:
    usage = UsageSettings(path=str(tmp_path / "usage.jsonl"))
    slow = {"decode_s_per_token": 0.002}
    async with routed(slow, usage=usage) as (rig, _):
        stream = await rig.api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        taken = 0
        async for _chunk in stream:
            taken += 1
            if taken == 20:
                break
        await stream.close()
        await rig.over()
        await written(rig, 1)
    (line,) = lines_of(tmp_path / "usage.jsonl")
    assert line["outcome"] == "client_gone"
    assert line["generated_tokens"] >= 15
