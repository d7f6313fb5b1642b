"""Findings about an engine's HTTP side, each provoked once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from kvatlas.publisher.events import AllBlocksCleared
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import Severity
from tests.router.tools.doctor.rig import (
    MODELS,
    Answers,
    Findings,
    at,
    examined,
    http_server,
    publishing,
    server,
)
from tests.support.waiting import run
from tests.support.whole_router import running

DOWN = "http://127.0.0.1:9"
BROKEN = (500, b"no", {})


async def look_at(answers: Answers) -> Findings:
    async with http_server(answers) as url:
        return await examined(url)


def test_an_engine_that_is_down() -> None:
    found = run(examined(DOWN))
    found.expect("http.health", Severity.ERROR, "cannot connect")
    found.expect("http.models", Severity.ERROR)
    assert found.of("http.event_sources") == [], "one cause is reported once"


@pytest.mark.parametrize(
    ("check", "severity", "answers", "words"),
    [
        ("http.health", Severity.ERROR, server(health=BROKEN), "status 500"),
        ("http.health", Severity.INFO, server(health=(404, b"", {})), "not vLLM"),
        ("http.models", Severity.ERROR, server(models=(401, b"", {})), "API key"),
        ("http.models", Severity.ERROR, server(models={"data": []}), "without models"),
        ("http.models", Severity.ERROR, server(models=[1, "x"]), "without models"),
        ("http.models", Severity.ERROR, server(models={"data": [{"id": "a", "parent": "m"}]}), "LoRA"),
        ("http.version", Severity.INFO, server(version=["?"]), "not a release number"),
        ("http.version", Severity.INFO, server(version={"version": "nightly"}), "'nightly'"),
        ("http.version", Severity.WARNING, server(version={"version": "0.19.1"}), "do not name the KV cache"),
        ("http.version", Severity.WARNING, server(version={"version": "0.21.0"}), "kind and window"),
        ("http.version", Severity.INFO, server(version={"version": "0.23.0"}), "arrays"),
        ("http.version", Severity.INFO, server(version={"version": "0.28.2"}), "PYTHONHASHSEED"),
        ("http.version", Severity.INFO, server(version={"version": "0.30.0"}), "LoRA and salt"),
        ("http.version", Severity.OK, server(version={"version": "0.99.0"}), "newer than any"),
        ("http.event_sources", Severity.WARNING, server(), "publishes no events"),
        ("http.event_sources", Severity.WARNING, server(sources={"0": None}), "publishes no events"),
        ("http.event_sources", Severity.WARNING, server(sources=[1]), "not understood"),
        (
            "http.event_sources",
            Severity.WARNING,
            server(sources=(404, b"", {})),
            "the engine does not provide it",
        ),
        (
            "http.event_sources",
            Severity.WARNING,
            server(sources=(404, b"", {}), version={"version": "0.30.0"}),
            "0.30.0 has no such endpoint",
        ),
        ("clock.skew", Severity.WARNING, server(health={}, models=MODELS), "clocks differ"),
    ],
)
def test_http_finding(check: str, severity: Severity, answers: Answers, words: str) -> None:
    if check == "clock.skew":
        late = {"Date": formatdate(time.time() - 60, usegmt=True)}
        answers = dict.fromkeys(answers, (200, b'{"data":[{"id":"m"}]}', late))
    run(look_at(answers)).expect(check, severity, words)


def test_a_patch_of_a_known_release_is_not_newer() -> None:
    found = run(look_at(server(version={"version": "0.33.1"})))
    assert found.expect("http.version", Severity.OK).seen == "vLLM 0.33.1"


def test_old_releases_lack_everything_that_came_later() -> None:
    found = run(look_at(server(version={"version": "0.12.0"})))
    assert len(found.of("http.version")) == 5


async def test_a_server_that_never_answers_is_given_up() -> None:
    held: list[asyncio.StreamWriter] = []  # a writer that nothing holds closes its connection
    async with await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with http_server(server()) as good:
            found = await examined(url, good, timeout_s=0.3)
        found.expect("http.models", Severity.OK, "serves m")
        found.expect("http.health", Severity.ERROR, "no response within 0.3 s")
        for writer in held:
            writer.close()


async def test_configured_endpoints_against_those_the_engine_names() -> None:
    async with running({}) as (engine,):
        with publishing() as other:
            found = await examined(at(engine.base_url, other))
            found.expect("http.event_sources", Severity.WARNING, "events= says port")
        events = engine.events_endpoint
        found = await examined(EngineAddress(engine.base_url, events=events))
        found.expect("http.event_sources", Severity.WARNING, "replay socket that is not used")
        found = await examined(EngineAddress(engine.base_url, events=events, replay=engine.replay_endpoint))
        found.expect("http.event_sources", Severity.OK, "as given")


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(30.0, "clocks differ"), (-30.0, "events are delayed")], ids=["ahead", "behind"]
)
async def test_events_with_another_clock(ahead_s: float, words: str) -> None:
    async with http_server(server()) as url:
        with publishing() as publisher, repeating(publisher, ahead_s):
            found = await examined(at(url, publisher), seconds=1.0)
            found.expect("clock.skew", Severity.WARNING, words)


@contextmanager
def repeating(publisher: ZmqPublisher, ahead_s: float) -> Iterator[None]:
    """Publishes while the context lasts, by a clock that is ahead."""

    async def publish() -> None:
        while True:
            publisher.publish([AllBlocksCleared()], ts=time.time() + ahead_s)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()


STRANGE = [
    (200, b"", {}),
    (200, b"null", {}),
    (200, b"[]", {}),
    (200, b'"text"', {}),
    (200, b'{"data": 5, "version": [1], "0": {"endpoint": 7}}', {}),
    (200, b'{"data": [{"id": "m"}], "0": {"endpoint": "nonsense"}, "version": "0.32.0"}', {}),
    (200, b'{"data": [{"id": "m"}], "9999999999": {"endpoint": "tcp://*:1"}}', {}),
    (200, b"\xff\xfe\x00", {}),
    (200, b"[" * 50_000, {}),
    (204, b"", {}),
    (302, b"", {"Location": "/"}),
    (503, b"<html>", {}),
]


@pytest.mark.parametrize("told", STRANGE, ids=range(len(STRANGE)))
async def test_nothing_crashes_on_a_strange_engine(told: tuple[int, bytes, dict[str, str]]) -> None:
    paths = [*server(), "/metrics", "/tokenize", "/v1/completions", "/kvatlas/engines", "/ready"]
    async with http_server(dict.fromkeys(paths, told)) as url:
        found = await examined(url, router=url, probe=True, timeout_s=0.5)
        assert found.bad()
        assert not [f for f in found if "the check itself failed" in f.seen]
