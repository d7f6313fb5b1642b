"""The poller against a server that says anything at all: it goes on, and believes only what makes sense."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest
from structlog.testing import capture_logs

from kvatlas.router.fleet.engine_calls import EngineCalls
from kvatlas.router.fleet.engine_metrics import (
    METRICS_BY_NAME,
    names_read,
    read_gauges,
    read_obeys_hints,
    read_pool_blocks,
    read_sleep,
    read_started,
    read_statement,
    read_transfers,
)
from kvatlas.router.fleet.engines import DesiredFleet, EngineAddress
from kvatlas.router.fleet.salt_proof import SaltProof
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.fleet.statement import reachable
from kvatlas.router.fleet.status import ModelCard
from kvatlas.router.tools.doctor.http import Http
from tests.router.fleet.misbehaving import HANG, MODELS, QUICK, page, watching
from tests.support.waiting import until

SOURCE = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "",
}
NONSENSE = {
    "garbage": b"\x00\xff garbage\r\n\r\n",
    "closes": b"",
    "not-json": page(b"<html>"),
    "invalid-utf8": page(b'{"data":[{"id":"\xff"}]}'),
    "deep": page(b'{"data":[{"id":"a","x":' + b"[" * 20_000 + b"]" * 20_000 + b"}]}"),
    "wrong-types": page(b'{"data": [{"id": 5}]}'),
    "null": page(b'{"data": null}'),
    "no-model": page(b'{"data": []}'),
    "error": page(b"{}", 500),
    "not-found": page(b"{}", 404),
    "redirect": b"HTTP/1.1 302 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n",
    "huge": page(b'{"data": [' + b" " * 200_000 + b"]}"),
    "cut": b'HTTP/1.1 200 X\r\ncontent-length: 1000\r\n\r\n{"data":',
    "hangs": HANG,
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
async def test_an_engine_that_talks_nonsense_is_down_until_it_talks_sense(answer: object) -> None:
    async with watching(answers={"/v1/models": answer}) as watch:
        await watch.polls()
        (status,) = watch.fleet
        assert not status.up
        assert "/v1/models" in status.problem
        assert len(status.problem) <= 300
        assert watch.told == []
        watch.server.answers["/v1/models"] = MODELS
        await watch.until(lambda: status.up, "up")
        assert status.problem == ""
        assert watch.told == [("up", status.engine_id)]
        watch.server.answers["/v1/models"] = answer
        await watch.until(lambda: not status.up, "down")
        assert watch.told[-1] == ("down", status.engine_id)
        assert status.serves("m")  # what it served is remembered, for who asks for that model


async def test_one_missed_poll_does_not_take_an_engine_out() -> None:
    settings = msgspec.structs.replace(QUICK, polls_missed_max=1000)
    async with watching(settings=settings) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        watch.server.answers["/v1/models"] = page(b"", 503)
        await watch.polls(count=5)
        assert status.up
        assert watch.told == [("up", status.engine_id)]


@pytest.mark.parametrize("how", ["poll", "post", "health", "doctor"])
async def test_a_cancellation_due_with_the_time_out_is_not_lost(how: str) -> None:
    """Or stopping waits for ever."""
    timeout_s = QUICK.poll_timeout_s

    hang: dict[str, object] = dict.fromkeys(("/v1/models", "/post", "/health", "/doctor"), HANG)
    calls = EngineCalls({}, ssl.create_default_context(), health_timeout_s=timeout_s)
    async with watching(answers=hang) as watch, calls.open() as client:
        url, http = watch.server.base_url, Http(client, timeout_s)
        path = {"poll": "/v1/models"}.get(how, f"/{how}")
        tasks: dict[str, Callable[[], asyncio.Task[Any]]] = {
            "poll": lambda: watch.polling,
            "post": lambda: asyncio.create_task(calls.post(f"{url}/post", b"{}", {}, timeout_s)),
            "health": lambda: asyncio.create_task(calls.healthy(url)),
            "doctor": lambda: asyncio.create_task(http.get(f"{url}/doctor")),
        }
        await watch.polls(count=1)
        task, asked = tasks[how](), watch.server.count(path)
        await until(lambda: watch.server.count(path) > asked, "it waits for an answer")
        asyncio.get_running_loop().call_later(timeout_s, task.cancel)
        time.sleep(1.2 * timeout_s)  # both come due in one turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_refused_port_takes_an_engine_out_immediately() -> None:
    settings = msgspec.structs.replace(QUICK, polls_missed_max=10**6)
    async with watching(settings=settings) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        watch.listening.close()
        await watch.until(lambda: not status.up)
        assert status.problem == "connection refused"
        assert watch.told[-1] == ("down", status.engine_id)


@pytest.mark.parametrize("answer", [HANG, page(b"", 503)], ids=["hangs", "503"])
async def test_an_engine_whose_clients_have_answers_is_alive_whatever_its_polls_say(answer: object) -> None:
    async with watching(settings=msgspec.structs.replace(QUICK, poll_timeout_s=0.02)) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        watch.server.answers["/v1/models"] = answer

        def served() -> bool:
            status.answers += 1
            return watch.server.count("/v1/models") > polls + 4 * QUICK.polls_missed_max

        polls = watch.server.count("/v1/models")
        await watch.until(served)
        assert watch.told == [("up", status.engine_id)]
        await watch.until(lambda: not status.up, "down without answers")
        assert status.silent == (answer is HANG)


async def test_a_silent_engine_that_answers_a_client_is_up_again() -> None:
    async with watching(settings=msgspec.structs.replace(QUICK, poll_timeout_s=0.02)) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        watch.server.answers["/v1/models"] = HANG
        with capture_logs() as lines:
            await watch.until(lambda: status.silent)
        (told,) = [line for line in lines if line["event"].startswith("no engine of the model answers polls")]
        assert (told["model"], told["engines"]) == ("m", 1)
        assert watch.fleet.ready("m") == [status]
        status.answers += 1
        await watch.until(lambda: status.up, "up")
        assert not status.silent
        watch.listening.close()
        await watch.until(lambda: not status.up, "down")
        await watch.until(lambda: not status.silent, "its port is closed")
        assert not watch.fleet.ready("m")


async def test_another_start_time_in_the_metrics_is_reported_as_a_restart() -> None:
    async with watching() as watch:
        (status,) = watch.fleet
        for line in (b"process_start_time_seconds 1.7e+09", b"process_start_time_seconds nan", b""):
            watch.server.answers["/metrics"] = page(line)
            await watch.polls("/metrics")
        assert (status.started, watch.told) == (1.7e9, [("up", status.engine_id)])
        watch.server.answers["/metrics"] = page(b"process_start_time_seconds 1.70000001e+09\n")
        await watch.polls("/metrics")
        assert watch.told[1:] == [("restarted", status.engine_id)]


async def test_changed_models_are_reported() -> None:
    async with watching() as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        card = {"id": "sql", "root": "/adapters/sql", "parent": "m"}
        watch.server.answers["/v1/models"] = {"data": [*MODELS["data"], card]}  # type: ignore[misc]
        await watch.until(lambda: status.serves("sql"))
        assert watch.told == [("up", status.engine_id)] * 2
        assert status.base_model == "m"
        later: Any = [*MODELS["data"], card]
        later = [one | {"created": 1_800_000_000} for one in later]
        watch.server.answers["/v1/models"] = {"data": later}
        await watch.polls()
        assert len(watch.told) == 2  # the same is not told again, whenever vLLM says it was made


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("odd"), KeyError("odd")])
async def test_a_listener_that_fails_is_called_again(error: Exception) -> None:
    async with watching() as watch:
        watch.listener.fault = error
        (status,) = watch.fleet
        await watch.until(lambda: "odd" in status.problem)
        assert not status.up  # its listener does not know it, so nothing may be sent there
        watch.listener.fault = None
        await watch.until(lambda: status.up)
        assert watch.told == [("up", status.engine_id)]


async def sources_found(sources: object) -> list[EngineAddress]:
    """The engines of a server that says this of its event sources."""
    async with watching(answers={"/kv_event_sources": sources}) as watch:
        await watch.until(lambda: any(status.up for status in watch.fleet))
        base_url = watch.server.base_url
        return [
            msgspec.structs.replace(s.engine, base_url=s.engine.base_url.replace(base_url, ""))
            for s in watch.fleet
        ]


MUTE = [EngineAddress("")]


@pytest.mark.parametrize(
    ("sources", "engines"),
    [
        ({"0": SOURCE}, [EngineAddress("", None, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")]),
        ({"3": SOURCE}, [EngineAddress("", None, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")]),
        ({"0": {**SOURCE, "replay_endpoint": None}}, [EngineAddress("", None, "tcp://127.0.0.1:5557")]),
        (
            {
                "0": {
                    **SOURCE,
                    "topic": "kv",
                    "endpoint": "tcp://10.0.0.7:1",
                    "replay_endpoint": "tcp://0.0.0.0:2",
                }
            },
            [EngineAddress("", None, "tcp://10.0.0.7:1", "tcp://127.0.0.1:2", "kv")],
        ),
        (
            {"10": {**SOURCE, "endpoint": "tcp://*:5567"}, "2": {**SOURCE, "endpoint": "tcp://[::]:5559"}},
            [
                EngineAddress("", 2, "tcp://127.0.0.1:5559", "tcp://127.0.0.1:5558"),
                EngineAddress("", 10, "tcp://127.0.0.1:5567", "tcp://127.0.0.1:5558"),
            ],
        ),
        ({"0": SOURCE, "1": None}, [EngineAddress("", 0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")]),
        (
            {"0": {**SOURCE, "new_field": [1]}},
            [EngineAddress("", None, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")],
        ),
        ({}, MUTE),
        ({"0": None}, MUTE),
        ({"0": {**SOURCE, "enable_kv_cache_events": False}}, MUTE),
        ({"0": {**SOURCE, "endpoint": None}}, MUTE),
        ({"0": {**SOURCE, "endpoint": "nonsense"}}, MUTE),
        ({"0": {**SOURCE, "endpoint": 5557}}, MUTE),
        ({"²": SOURCE}, MUTE),
        ({"-1": SOURCE}, MUTE),
        ({"9" * 5000: SOURCE}, MUTE),
        ([], MUTE),
        (page(b'{"0": "\xff"}'), MUTE),
        (page(b"", 404), MUTE),
        (page(b"", 500), MUTE),
        (b"garbage", MUTE),
    ],
)
async def test_event_sources_of_every_shape(sources: object, engines: list[EngineAddress]) -> None:
    assert await sources_found(sources) == engines


def test_the_host_of_an_ipv6_server_stands_in_brackets() -> None:
    assert reachable("tcp://*:5557", "::1") == "tcp://[::1]:5557"
    assert reachable("tcp://[::]:5557", "h") == "tcp://h:5557"
    assert reachable("tcp://[fd00::1]:5557", "h") == "tcp://[fd00::1]:5557"
    assert reachable("ipc:///tmp/x", "h") == "ipc:///tmp/x"


async def test_configured_endpoints_are_not_asked_for() -> None:
    given = [lambda url: EngineAddress(url, 0, "tcp://h:1"), lambda url: EngineAddress(url, 1)]
    async with watching(*given, answers={"/kv_event_sources": {"0": SOURCE, "1": SOURCE}}) as watch:
        await watch.until(lambda: all(status.up for status in watch.fleet))
        await watch.polls()
        assert watch.server.count("/kv_event_sources") == 0
        assert watch.ids == ["#dp0", "#dp1"]


async def test_ranks_that_were_configured_stay_where_the_server_tells_no_sources() -> None:
    given = [lambda url: EngineAddress(url, 0), lambda url: EngineAddress(url, 1)]
    async with watching(*given, answers={"/kv_event_sources": {}}) as watch:
        await watch.until(lambda: all(status.up for status in watch.fleet))
        assert watch.ids == ["#dp0", "#dp1"]
        assert {kind for kind, _ in watch.told} == {"up"}


async def test_moved_and_vanished_endpoints_are_reported_and_a_slip_changes_nothing() -> None:
    async with watching(answers={"/kv_event_sources": {"0": SOURCE}}) as watch:
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        assert status.engine.events == "tcp://127.0.0.1:5557"
        watch.server.answers["/kv_event_sources"] = {"0": {**SOURCE, "endpoint": "tcp://*:7777"}}
        await watch.until(lambda: status.engine.events == "tcp://127.0.0.1:7777")
        assert watch.told == [("up", status.engine_id)] * 2
        for slip in (page(b"", 500), b"", page(b"[")):
            watch.server.answers["/kv_event_sources"] = slip
            await watch.polls()
            assert status.engine.events == "tcp://127.0.0.1:7777"
        assert len(watch.told) == 2


async def test_an_engine_that_stops_publishing_loses_its_endpoints() -> None:
    async with watching(answers={"/kv_event_sources": {"0": SOURCE, "1": SOURCE}}) as watch:
        await watch.until(lambda: watch.ids == ["#dp0", "#dp1"])
        base_url = watch.server.base_url
        assert ("gone", base_url) in watch.told
        watch.server.answers["/kv_event_sources"] = {}
        await watch.until(lambda: watch.ids == [""] and watch.told[-1] == ("up", base_url))
        assert watch.told[-3:] == [
            ("gone", f"{base_url}#dp0"),
            ("gone", f"{base_url}#dp1"),
            ("up", base_url),
        ]
        (status,) = watch.fleet
        assert not status.publishes_events


GAUGES = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5
vllm:num_requests_waiting{engine="0",model_name="m"} 1e1
vllm:num_requests_waiting{engine="1",model_name="m"} 0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_waiting_by_reason{engine="1"} 99
"""


@pytest.mark.parametrize(
    ("rank", "running", "waiting", "usage"), [(None, 8, 10, 0.5), (0, 3, 10, 0.25), (1, 5, 0, 0.5)]
)
def test_gauges_of_an_engine_and_of_its_ranks(
    rank: int | None, running: int, waiting: int, usage: float
) -> None:
    assert read_gauges(GAUGES, rank) == {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": usage,
    }


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "-1", "abc", "1_0x"])
def test_gauges_that_are_no_number_are_left_out(value: str) -> None:
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n".encode()
    gauges = read_gauges(text, None)
    assert gauges == {"num_requests_waiting": 2.0}
    assert all(math.isfinite(number) for number in gauges.values())


def test_names_of_gauges_count_at_the_start_of_a_line_only() -> None:
    text = b"""# HELP vllm:num_requests_running
vllm:num_requests_running{engine="0"} 3.0
# HELP vllm:num_requests_waiting 7 requests wait.
other{text="vllm:num_requests_waiting 8"} 1
 vllm:num_requests_waiting 9
vllm:num_requests_waiting\t2.0
process_start_time_seconds_more 5
# process_start_time_seconds 6
process_start_time_seconds 7.0
"""
    assert read_gauges(text, None) == {"num_requests_running": 3.0, "num_requests_waiting": 2.0}
    assert read_started(text) == 7.0
    assert read_started(b"# process_start_time_seconds 6") is None


async def test_an_engine_that_sleeps_gets_nothing_until_it_wakes() -> None:
    async with watching() as watch:
        watch.server.answers["/metrics"] = page(sleep_state())
        await until(lambda: bool(watch.fleet.ready(None)), "awake")
        watch.server.answers["/metrics"] = page(sleep_state(1))
        await until(lambda: not watch.fleet.ready(None), "asleep")
        assert watch.listener.asleep == [(watch.server.base_url, False)]
        watch.server.answers["/metrics"] = page(sleep_state())
        await until(lambda: bool(watch.fleet.ready(None)), "awake again")


@pytest.mark.parametrize(
    ("looks", "emptied"),
    [
        ([(None, 1, 0), (1, 2, 0), (1, 2, 0)], [False]),
        ([(None, 1, 0), (2, 2, 0)], [False]),
        # Level 0 pauses and keeps the caches; released memory has the same gauges.
        ([(None, 1, 0), (0, 2, 0), (None, 2, 0)], []),
        ([(None, 1, 0), (0, 1, 1)], [False]),
        ([(None, 1, 0), (0, 2, 0), (1, 3, 0)], [False]),
        ([(0, 1, 0)], [False]),  # when or why is not known
        # Slept and awake again between two looks.
        ([(None, 1, 0), (None, 2, 0), (None, 2, 1)], [True, True]),
        ([(None, 5, 0)], []),
    ],
)
async def test_sleep_empties_the_caches_by_its_level(
    looks: list[tuple[int | None, int, int]], emptied: list[bool]
) -> None:
    """``looks``: level (None: awake), and calls of ``/sleep`` and ``/release_kv_cache_memory``, as vLLM 0.32
    and 0.33 count them."""
    async with watching() as watch:
        for level, sleeps, releases in looks:
            calls = (("wake", 9), ("sleep", sleeps), ("release_kv_cache_memory", releases))
            name = "vllm:sleep_mode_operation_duration_seconds_count"
            lines = "".join(f'{name}{{operation="{call}"}} {count}.0\n' for call, count in calls)
            watch.server.answers["/metrics"] = page(lines.encode() + sleep_state(level) + b"\n" + GAUGES)
            watch.listener.loads.clear()
            await watch.until(lambda: bool(watch.listener.loads))
        assert [woke for _, woke in watch.listener.asleep] == emptied


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "x"])
def test_counts_of_calls_that_make_no_sense(value: str) -> None:
    line = f'vllm:sleep_mode_operation_duration_seconds_count{{operation="sleep"}} {value}\n'
    assert read_sleep(line.encode(), None).sleeps == 0


def sleep_state(level: int | None = None) -> bytes:
    """``vllm:engine_sleep_state`` at this level of sleep; None: awake."""
    labels = 'engine="0",model_name="m"'
    states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
    lines = (f'vllm:engine_sleep_state{{{labels},sleep_state="{s}"}} {v:d}.0' for s, v in states.items())
    return "\n".join(lines).encode()


def test_only_the_rank_that_sleeps_is_asleep() -> None:
    both = b'vllm:engine_sleep_state{engine="%d",sleep_state="awake"} %d'
    text = b"\n".join((both % (0, 1), both % (1, 0)))
    assert [read_sleep(text, rank).asleep for rank in (0, 1, None)] == [False, True, True]


async def test_bad_gauges_change_nothing_and_good_ones_are_reported() -> None:
    async with watching() as watch:
        (status,) = watch.fleet
        watch.server.answers["/metrics"] = page(GAUGES)
        await watch.until(lambda: bool(watch.listener.loads))
        assert watch.listener.loads == {status.engine_id: (8, 10)}
        assert status.kv_usage == 0.5
        watch.listener.loads.clear()
        for bad in (
            GAUGES.replace(b"3.0", b"+Inf").replace(b" 5\n", b" NaN\n"),
            b"\xff" * 1000,
            b"x" * 200_000,
        ):
            watch.server.answers["/metrics"] = page(bad)
            await watch.polls("/metrics")
            watch.listener.loads.clear()
            await watch.polls("/metrics")
            assert watch.listener.loads == {}
        assert status.up


PAGE = (
    b"# HELP vllm:num_requests_running R\nvllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\n"
    b"process_start_time_seconds 1.7e+09\nvllm:e2e_request_latency_seconds_bucket 5.0\n"
)
NAMED = PAGE.replace(b"vllm:e2e_request_latency_seconds_bucket 5.0\n", b"").replace(b" 1.0", b" 7.0")


async def test_the_whole_page_is_read_once_and_then_what_is_used_of_it() -> None:
    async with watching() as watch:
        (status,) = watch.fleet
        watch.server.answers |= {"/metrics": page(PAGE), METRICS_BY_NAME: page(NAMED)}
        await watch.polls(METRICS_BY_NAME)
        assert watch.server.count("/metrics") == 1
        assert watch.listener.loads == {status.engine_id: (7, 2)}


@pytest.mark.parametrize(
    "named",
    [
        page(b"", 404),
        page(b"", 307),
        page(b""),
        page(NAMED.replace(b"process_start_time_seconds 1.7e+09\n", b"")),
        page(b"\xff" * 1000),
    ],
    ids=["not-found", "redirect", "empty", "one-missing", "garbage"],
)
async def test_a_server_that_does_not_answer_by_name_is_asked_for_the_whole_page(named: bytes) -> None:
    async with watching() as watch:
        (status,) = watch.fleet
        watch.server.answers |= {"/metrics": page(PAGE), METRICS_BY_NAME: named}
        for _ in range(4):
            await watch.polls("/metrics")
        assert watch.server.count(METRICS_BY_NAME) == 1
        assert watch.listener.loads == {status.engine_id: (1, 2)}


EVERY_SAMPLE = b"""# HELP of every sample that is read
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 5.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="99"} 1.0
vllm:spec_decode_num_drafts_total{engine="0"} 7.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 1.0
vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 2.0
vllm:sleep_mode_operation_duration_seconds_sum{operation="sleep"} 9.0
vllm:nixl_num_failed_transfers_total{engine="0"} 1.0
vllm:nixl_num_failed_notifications_total{engine="0"} 2.0
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 3.0
vllm:nixl_num_notifications_after_expiry_total{engine="0"} 4.0
kvatlas_offload_rows{engine="0",state="hinted"} 6.0
process_start_time_seconds 1.7e+09
"""


def test_samples_asked_for_by_name_say_the_same_as_the_whole_page() -> None:
    names = tuple(value.encode() for _, value in parse_qsl(urlsplit(METRICS_BY_NAME).query))
    lines = EVERY_SAMPLE.splitlines(keepends=True)
    named = b"".join(line for line in lines if re.split(rb"[{ ]", line)[0] in (b"#", *names))
    assert len(names_read(named)) == len(names)
    for fact in (read_gauges, read_pool_blocks, read_statement, read_sleep, read_obeys_hints, read_transfers):
        assert fact(named, 0) == fact(EVERY_SAMPLE, 0)
        assert fact(named, 0) != fact(b"", 0), fact
    assert read_started(named) == read_started(EVERY_SAMPLE)


async def test_another_process_is_asked_for_its_whole_page() -> None:
    """An update may answer by name where its predecessor did not, or the reverse."""
    async with watching() as watch:
        watch.server.answers |= {"/metrics": page(PAGE), METRICS_BY_NAME: page(NAMED)}
        await watch.polls(METRICS_BY_NAME)
        later = {"/metrics": page(PAGE.replace(b"1.7e", b"1.8e"))}
        watch.server.answers |= later | {METRICS_BY_NAME: page(NAMED.replace(b"1.7e", b"1.8e"))}
        await watch.polls("/metrics", 1)
        await watch.polls(METRICS_BY_NAME)
        assert watch.server.count("/metrics") == 2
        assert [what for what, _ in watch.told] == ["up", "restarted"]


@pytest.mark.parametrize("name", ["poll_interval_s", "poll_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_times_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        FleetSettings(**{name: value})


def test_gauges_are_read_between_two_polls_unless_stated() -> None:
    assert FleetSettings(poll_interval_s=5.0).gauges_s == 2.0
    assert FleetSettings(poll_interval_s=5.0, gauge_interval_s=3.0).gauges_s == 3.0


async def test_servers_that_join_are_polled_and_those_that_leave_are_reported_and_left_alone() -> None:
    async with watching() as watch, watching() as other:
        here, there = watch.server.base_url, other.server.base_url
        await watch.until(lambda: all(s.up for s in watch.fleet), "up")
        watch.poller.assign(DesiredFleet((EngineAddress(here), EngineAddress(there))))
        await watch.until(lambda: ("up", there) in watch.told, "the new one is up")
        watch.poller.assign(DesiredFleet((EngineAddress(there),)))
        assert watch.told[-1] == ("gone", here)
        assert [s.engine_id for s in watch.fleet] == [there]
        asked = len(watch.server.asked)
        mark = other.server.count("/v1/models")
        await watch.until(lambda: other.server.count("/v1/models") >= mark + 5, "time goes by")
        assert len(watch.server.asked) <= asked + 1  # one may have been on its way
        assert watch.told.count(("up", there)) == 1


async def test_nothing_is_kept_of_a_server_that_left() -> None:
    async with watching() as watch:
        base_url = watch.server.base_url
        await watch.until(lambda: all(s.up for s in watch.fleet), "up")
        poller, proof = watch.poller, SaltProof()
        poller._proofs[base_url] = proof
        await poller._settle_salts(base_url, (ModelCard("m"),), proof)
        assert poller._proofs_due
        poller.assign(DesiredFleet())
        assert not poller._proofs_due
        # One that was under way when it left.
        await poller._settle_salts(base_url, (ModelCard("m"),), proof)
        assert not poller._proofs_due


async def test_an_answer_on_its_way_from_who_left_counts_for_nothing() -> None:
    async with watching(answers={"/v1/models": HANG}) as watch:
        base_url = watch.server.base_url
        await watch.until(lambda: watch.server.count("/v1/models") >= 1, "asked")
        watch.poller.assign(DesiredFleet())
        watch.server.answers["/v1/models"] = MODELS
        watch.poller.assign(DesiredFleet((EngineAddress(base_url),), {}, {base_url: "another"}))
        await watch.until(lambda: ("up", base_url) in watch.told, "up")
        assert watch.told == [("gone", base_url), ("up", base_url)]


async def test_new_addresses_of_an_engine_that_is_up_are_reported_immediately() -> None:
    async with watching() as watch:
        base_url = watch.server.base_url
        await watch.until(lambda: all(s.up for s in watch.fleet), "up")
        watch.poller.assign(DesiredFleet((EngineAddress(base_url, None, "tcp://h:1"),)))
        assert watch.told == [("up", base_url), ("up", base_url)]
        (status,) = watch.fleet
        assert status.engine.events == "tcp://h:1"
        watch.poller.assign(
            DesiredFleet((EngineAddress(base_url, None, "tcp://h:1"),), {base_url: "drained"})
        )
        assert (status.held, watch.told) == ("drained", [("up", base_url)] * 2)
        await watch.polls()
        assert status.up


def test_nixls_counters_of_failed_transfers() -> None:
    text = b"""# TYPE vllm:nixl_num_kv_expired_reqs counter
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 3.0
vllm:nixl_num_kv_expired_reqs_total{engine="1",model_name="m"} 4.0
vllm:nixl_num_kv_expired_reqs_created{engine="1",model_name="m"} 1.7e9
vllm:nixl_num_notifications_after_expiry_total{engine="1",model_name="m"} 1
vllm:nixl_num_failed_transfers_total{engine="0"} NaN
vllm:nixl_num_descriptors_sum{engine="0"} 9
"""
    assert read_transfers(text, None) == {"kv_expired_reqs": 7.0, "notifications_after_expiry": 1.0}
    assert read_transfers(text, 0) == {"kv_expired_reqs": 3.0}


async def test_ranks_that_are_found_have_their_servers_version_before_they_are_up() -> None:
    async with watching(lambda url: EngineAddress(url, role="decode")) as watch:
        watch.server.answers["/version"] = page(b'{"version":"0.32.0"}')
        watch.server.answers["/kv_event_sources"] = {"0": SOURCE, "1": SOURCE}
        await watch.until(lambda: len(list(watch.fleet)) == 2 and all(one.up for one in watch.fleet))
        assert [status.version for status in watch.fleet] == ["0.32.0", "0.32.0"]


@pytest.mark.parametrize("owner", ["vllm", "vllm-frontend-rs", "sglang"])
async def test_the_version_may_be_asked_for_when_an_engine_comes_up(owner: str) -> None:
    async with watching(EngineAddress) as watch:
        watch.poller.versions_once = True
        cards: Any = {"data": [{"id": "m", "owned_by": owner}]}
        watch.server.answers |= {"/version": page(b'{"version":"0.32.0"}'), "/v1/models": cards}
        (status,) = watch.fleet
        await watch.until(lambda: status.up)
        assert status.version == ("0.32.0" if owner == "vllm" else None), "known before it is up"
        assert status.says_ids is (owner == "vllm")
        watch.server.answers["/version"] = page(b'{"version":"0.9.0"}')
        await watch.polls()
        assert status.says_ids is (owner == "vllm"), "it is not asked at each poll"
        del watch.server.answers["/v1/models"]
        await watch.until(lambda: not status.up)
        watch.server.answers["/v1/models"] = cards
        await watch.until(lambda: status.up)
        assert status.version == ("0.9.0" if owner == "vllm" else None)
        assert not status.says_ids


@pytest.mark.parametrize("role", ["decode", None])
async def test_the_version_of_engines_with_a_role_is_asked_for_and_their_role_is_kept(role: Any) -> None:
    async with watching(lambda url: EngineAddress(url, role=role)) as watch:
        watch.server.answers["/version"] = page(b'{"version":"0.32.0"}')
        watch.server.answers["/kv_event_sources"] = {"0": SOURCE}
        await watch.until(lambda: all(status.publishes_events and status.up for status in watch.fleet))
        (status,) = watch.fleet
        assert status.engine.role == role
        if role is None:
            assert status.version is None
            return
        assert status.version == "0.32.0", "known before it is up"
        watch.server.answers["/version"] = page(b'{"version":"0.33.0"}')
        await watch.until(lambda: status.version == "0.33.0", "another one")
