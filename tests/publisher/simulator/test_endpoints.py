"""The engine's other endpoints, clients that go away, and the engine as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.publisher.simulator.scheduler import Step
from kvatlas.publisher.simulator.server import SimulatedEngine, _tcp
from kvatlas.publisher.simulator.settings import EngineSettings
from kvatlas.router.fleet.engine_metrics import read_pool_blocks
from tests.publisher.simulator.support import LONG_TEXT, all_blocks_free, engine, request
from tests.support.paths import ROOT
from tests.support.waiting import HANG_S, until

USER = {"role": "user", "content": "Hello there"}


async def test_metrics_have_vllms_names_and_count_what_happened() -> None:
    async with engine(groups="full") as running:
        prompt = list(range(5, 105))
        for _ in range(2):
            body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "n": None}
            assert (await request(running, "POST", "/v1/completions", body))[0] == 200
        _, text = await request(running, "GET", "/metrics")
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("finished_reason", "length") == "length"
    }
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    assert values["vllm:prefix_cache_queries_total"] == 200
    assert values["vllm:prefix_cache_hits_total"] == 96
    assert values["vllm:prompt_tokens_total"] == 200
    assert values["vllm:generation_tokens_total"] == 6
    assert values["vllm:request_success_total"] == 2
    assert values["vllm:time_to_first_token_seconds_count"] == 2
    assert values["vllm:time_to_first_token_seconds_bucket"] == 2
    assert 'model_name="kvatlas-demo"' in text
    assert read_pool_blocks(text.encode(), 0) == running.settings.num_blocks
    for label in ('block_size="16"', 'prefix_caching_hash_algo="sha256"', 'retention_interval="0"'):
        assert label in text
    assert 'engine="0"' in text


async def test_all_addresses_are_bound_by_zmqs_name_for_them() -> None:
    for host, bound in (("0.0.0.0", "tcp://*:*"), ("10.0.0.1", "tcp://10.0.0.1:*")):
        assert _tcp(host, 0) == bound


async def test_samples_asked_for_by_name_are_those_of_the_whole_page() -> None:
    names = ["vllm:num_requests_waiting", "vllm:time_to_first_token_seconds_count", "vllm:nothing"]
    async with engine() as running:
        _, whole = await request(running, "GET", "/metrics")
        query = "&".join(f"name[]={name}" for name in names)
        _, page = await request(running, "GET", f"/metrics/?{query}")
    of = [[line for line in text.splitlines() if line.startswith(tuple(names))] for text in (whole, page)]
    assert of[0] == of[1]
    assert len(of[1]) == 2
    assert {line.split()[2] for line in page.splitlines() if line.startswith("#")} <= set(names)


async def test_the_engine_describes_itself() -> None:
    async with engine(model="some/model", max_model_len=2048, groups="gptoss-like") as running:
        status, models = await request(running, "GET", "/v1/models")
        assert status == 200
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("some/model", 2048)]
        assert await request(running, "GET", "/health") == (200, "")
        _, version = await request(running, "GET", "/version")
        assert version["version"].startswith("0.32.0")
        _, page = await request(running, "GET", "/metrics")
        assert ' block_size="16"' in page.replace(",", " ").replace("{", " ")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_each_software_describes_its_own_endpoints(kind: Any) -> None:
    async with engine(kind=kind, num_blocks=100, publish_events=True) as running:
        sources, _ = await request(running, "GET", "/kv_event_sources")
        status, info = await request(running, "GET", "/server_info")
        assert (sources, status) == ((200, 404) if kind == "vllm" else (404, 200))
        if status == 200:
            assert info["page_size"] == 16
            assert info["internal_states"] == [{"memory_usage": {"token_capacity": 1600}}]


async def test_an_idle_engine_makes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine() as running:
        steps = 0
        begin_step = running.stepper.scheduler.begin_step

        def counted() -> Step:
            nonlocal steps
            steps += 1
            return begin_step()

        monkeypatch.setattr(running.stepper.scheduler, "begin_step", counted)
        body = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        assert (await request(running, "POST", "/v1/completions", body))[0] == 200
        await asyncio.sleep(10)
        assert steps == 4


async def test_tokenize_detokenize_and_render_agree() -> None:
    async with engine() as running:
        _, chat = await request(running, "POST", "/tokenize", {"messages": [USER]})
        assert chat["count"] == len(chat["tokens"])
        assert chat["token_strs"] is None
        _, text = await request(running, "POST", "/detokenize", {"tokens": chat["tokens"]})
        assert text["prompt"].endswith("Hello there<|im_end|>\n<|im_start|>assistant\n")
        body = {"prompt": text["prompt"], "add_special_tokens": False, "return_token_strs": True}
        _, plain = await request(running, "POST", "/tokenize", body)
        assert plain["tokens"] == chat["tokens"]
        assert plain["token_strs"][0] == "<|bos|>"
        _, rendered = await request(running, "POST", "/v1/chat/completions/render", {"messages": [USER]})
        assert rendered["token_ids"] == chat["tokens"]
        body = {"prompt": "Hello", "max_tokens": 7, "cache_salt": "s"}
        _, listed = await request(running, "POST", "/v1/completions/render", body)
        assert [(r["sampling_params"]["max_tokens"], r["cache_salt"]) for r in listed] == [(7, "s")]


async def test_render_endpoints_can_be_off_as_vllm_has_them_by_default() -> None:
    async with engine(enable_scale_out=False) as running:
        for api in ("chat/completions", "completions", "messages", "responses"):
            body = {"messages": [USER], "prompt": "x"}
            status, body = await request(running, "POST", f"/v1/{api}/render", body)
            assert status == 403
            assert body["error"]["type"] == "PermissionDeniedError"


async def test_long_texts_are_tokenized_like_short_ones() -> None:
    async with engine() as running:
        _, once = await request(running, "POST", "/tokenize", {"prompt": LONG_TEXT})
        _, often = await request(running, "POST", "/tokenize", {"prompt": LONG_TEXT * 8})
        assert often["tokens"][: once["count"] - 1] == once["tokens"][:-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    async with engine(decode_s_per_token=0.01) as running:
        body = {"messages": [USER], "stream": stream, "ignore_eos": True, "max_tokens": 5000}
        asking = asyncio.create_task(request(running, "POST", "/v1/chat/completions", body))
        await until(lambda: running.scheduler.stats.generation_tokens > 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: all_blocks_free(running) and not running.scheduler.has_work)
        assert running.scheduler.stats.finished["abort"] == 1


async def test_a_client_that_goes_away_before_its_first_token_leaves_the_queue() -> None:
    async with engine(max_num_seqs=1, decode_s_per_token=0.01) as running:
        body = {"messages": [USER], "ignore_eos": True, "max_tokens": 5000}
        asking = [
            asyncio.create_task(request(running, "POST", "/v1/chat/completions", body)) for _ in range(2)
        ]
        await until(lambda: running.scheduler.gauges().num_waiting == 1)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: not running.scheduler.has_work)
        assert all_blocks_free(running)


async def test_stopping_ends_requests_under_way() -> None:
    async with engine(decode_s_per_token=0.01) as running:
        body = {"prompt": "Hi", "ignore_eos": True, "max_tokens": 5000}
        asking = asyncio.create_task(request(running, "POST", "/v1/completions", body))
        await until(lambda: running.scheduler.stats.generation_tokens > 1)
        await running.stop()
        status, answer = await asking
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "abort"


async def test_a_taken_port_is_reported() -> None:
    async with engine() as taken:
        with pytest.raises(OSError, match="in use"):
            await SimulatedEngine(EngineSettings(port=int(taken.base_url.rpartition(":")[2]))).start()


async def test_a_step_that_fails_is_visible_and_fails_its_requests() -> None:
    async with engine() as running:

        def broken() -> Step:
            raise RuntimeError("simulated defect")

        running.scheduler.begin_step = broken  # type: ignore[method-assign]
        status, body = await request(running, "POST", "/v1/completions", {"prompt": "Hi"})
        assert status == 500
        assert body["error"]["type"] == "EngineDeadError"
        assert (await request(running, "GET", "/health"))[0] == 503


def test_as_a_process_it_serves_and_ends_cleanly_on_sigterm() -> None:
    script = (
        "from kvatlas.publisher.simulator.server import run\n"
        "from kvatlas.publisher.simulator.settings import EngineSettings\n"
        "run(EngineSettings(num_blocks=256))"
    )

    async def check() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"import structlog; structlog.configure([structlog.processors.JSONRenderer()]); {script}",
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        async with (
            aiohttp.ClientSession() as session,
            session.get(ready["base_url"] + "/health") as answer,
        ):
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0

    asyncio.run(check())


@pytest.mark.real  # sockets of the kernel
async def test_connections_accepted_as_it_stops_are_closed_too() -> None:
    async with engine() as running:
        address = ("127.0.0.1", int(running.base_url.rsplit(":", 1)[1]))
        # More than one turn of the loop accepts: the server learns of some after it began to stop.
        clients = [socket.create_connection(address, timeout=HANG_S) for _ in range(64)]
        await asyncio.sleep(0)
        await running.stop()
        for client in clients:
            with client, contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(client.recv, 1) == b""
