"""Findings about an engine's event stream, each provoked once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvatlas.publisher.events import AllBlocksCleared, DecodedBatch, encode_batch
from kvatlas.publisher.zmq_publisher import ZmqPublisher
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.observe.findings import Severity
from kvatlas.router.tools.doctor.evidence import EngineEvidence
from kvatlas.router.tools.doctor.listener import EventListener, Observation, ReplayState
from tests.router.tools.doctor.rig import (
    Findings,
    at,
    bound,
    examined,
    http_server,
    publishing,
    server,
    stored,
)
from tests.support.waiting import run, until
from tests.support.whole_router import running

DEAD = "tcp://127.0.0.1:9"


@pytest.mark.parametrize(
    ("seen", "complete"),
    [
        ({}, True),
        ({"first_seq": 0}, True),
        ({"first_seq": 3}, False),
        ({"restarts": 1}, False),
        ({"missing": 1}, False),
        ({"replay_state": ReplayState.CUT_SHORT}, False),
    ],
)
def test_a_history_is_complete_from_the_first_batch_of_one_process(
    seen: dict[str, Any], complete: bool
) -> None:
    sockets = Observation(**{"replay_state": ReplayState.COMPLETE, **seen})
    engine: Any = SimpleNamespace(sockets=sockets)
    assert EngineEvidence.history_complete.fget(engine) == complete  # type: ignore[attr-defined]


@asynccontextmanager
async def doing(action: Callable[[], Any]) -> AsyncIterator[None]:
    """Repeats an action while the context lasts."""

    async def repeat() -> None:
        while True:
            action()
            await asyncio.sleep(0.02)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()


async def heard(prepare: Callable[[ZmqPublisher], Any], **changes: Any) -> Findings:
    """Findings about an engine with a prepared publisher, by its replay."""
    async with http_server(server()) as url:
        with publishing() as publisher:
            prepare(publisher)
            return await examined(at(url, publisher, **changes), seconds=0.1)


async def test_event_sockets_without_a_publisher() -> None:
    async with http_server(server()) as url:
        found = await examined(EngineAddress(url, events=DEAD, replay=DEAD), seconds=0.5, timeout_s=0.5)
        found.expect("events.reach", Severity.ERROR, "nothing accepts connections")
        found.expect("events.replay", Severity.ERROR, "nothing accepts connections")


@pytest.mark.long
@pytest.mark.real  # ZMQ's own greeting
async def test_http_ports_given_as_event_sockets() -> None:
    async with http_server(server()) as url:
        port = url.replace("http://", "tcp://")
        found = await examined(EngineAddress(url, events=port, replay=port), seconds=0.5, timeout_s=2.0)
        found.expect("events.reach", Severity.ERROR, "not a ZMQ publisher")
        found.expect("events.replay", Severity.ERROR, "not a replay socket")


@pytest.mark.long
@pytest.mark.real  # sockets of a kind that does not fit
async def test_events_and_replay_exchanged() -> None:
    async with http_server(server()) as url:
        with publishing() as publisher:
            engine = EngineAddress(url, events=publisher.replay_endpoint, replay=publisher.endpoint)
            found = await examined(engine, seconds=0.5, timeout_s=4.0)
            found.expect("events.reach", Severity.ERROR, "swap events= and replay=")
            found.expect("events.replay", Severity.ERROR, "swap events= and replay=")


async def test_an_invalid_address() -> None:
    async with http_server(server()) as url:
        found = await examined(
            EngineAddress(url, events="tcp://nonsense", replay="tcp://nonsense"), timeout_s=0.5
        )
        found.expect("events.reach", Severity.ERROR, "not an address")
        assert found.worst("events.replay") is Severity.ERROR


async def test_no_replay_socket() -> None:
    async with http_server(server()) as url:
        with publishing(replay=False) as publisher:
            found = await examined(at(url, publisher))
            found.expect("events.reach", Severity.OK)
            found.expect("events.replay", Severity.WARNING, "no replay socket", "replay_endpoint")


@pytest.mark.parametrize(
    ("answers", "severity", "words"),
    [(0, Severity.ERROR, "connected, but no response"), (2, Severity.WARNING, "2 batches, then silence")],
    ids=["silent", "cut short"],
)
async def test_a_replay_socket_that_breaks_off(answers: int, severity: Severity, words: str) -> None:
    async with http_server(server()) as url:
        with publishing(replay=False) as publisher, bound(zmq.ROUTER) as (router, replay):
            task = asyncio.create_task(reply(router, answers))
            found = await examined(at(url, publisher, replay=replay), timeout_s=0.5)
            task.cancel()
            found.expect("events.replay", severity, words)


async def reply(router: zmq.Socket[bytes], answers: int) -> None:
    """Answer one replay request with this many batches, and no end."""
    await until(lambda: router.poll(0), "asked")
    peer = router.recv_multipart()[0]
    for seq in range(answers):
        payload = encode_batch(1.0, [AllBlocksCleared()])
        router.send_multipart([peer, b"", b"", seq.to_bytes(8, "big"), payload])


async def test_history_that_has_left_the_buffer() -> None:
    async with http_server(server()) as url:
        with publishing(buffer_steps=3) as publisher:
            for _ in range(8):
                publisher.publish([stored()])
            found = await examined(at(url, publisher))
            found.expect("events.replay", Severity.INFO, "3 batches", "number 5", "buffer_steps")


@pytest.mark.long
async def test_events_of_another_engine() -> None:
    async with running({}) as (engine,):
        with publishing() as silent:
            found = await examined(at(engine.base_url, silent), probe=True)
            found.expect("events.flow", Severity.ERROR, "answered the probe")
            found.expect("probe.exact", Severity.WARNING, "no stored blocks seen yet")


async def test_lost_numbers_are_reported() -> None:
    async with http_server(server()) as url:
        with publishing(replay=False) as publisher:

            def skip() -> None:
                publisher.publish([stored()])
                publisher._next_seq += 3

            async with doing(skip):
                found = await examined(at(url, publisher), seconds=0.5)
            found.expect("events.flow", Severity.INFO, "missing")


async def test_a_restart_while_listening() -> None:
    async with http_server(server()) as url:
        with publishing(replay=False) as publisher:
            restarted: list[bool] = []

            def step() -> None:
                publisher.publish([stored()])
                if publisher.next_seq == 12 and not restarted:
                    restarted.append(True)
                    publisher._next_seq = 0

            async with doing(step):
                found = await examined(at(url, publisher), seconds=1.0)
            found.expect("events.flow", Severity.INFO, "restart(s)")


class Recorder:
    """A sink that records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        self.told.append(f"batch of {len(batch.events)}")

    def forget(self, engine_id: str) -> None:
        self.told.append("forget")


async def test_events_before_a_restart_are_forgotten() -> None:
    sink = Recorder()
    with publishing(replay=False) as publisher:
        tap = EventListener("e", publisher.endpoint, None, sink, replay_timeout_s=1.0)
        listening = asyncio.create_task(tap.run())
        async with doing(lambda: publisher.publish([stored()] * 2)):
            await until(lambda: len(sink.told) > 2, "batches")
            publisher._next_seq = 0
            await until(lambda: "forget" in sink.told, "the restart")
        assert sink.told.count("forget") == 1
        assert set(sink.told) == {"batch of 2", "forget"}
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_a_topic_that_does_not_fit() -> None:
    async with http_server(server()) as url:
        with publishing(topic="kv") as publisher:
            async with doing(lambda: publisher.publish([stored()])):
                wrong = await examined(at(url, publisher, topic="events"), seconds=0.5)
                right = await examined(at(url, publisher, topic="kv"), seconds=0.5)
            wrong.expect("events.topic", Severity.ERROR, "'kv'", "'events'")
            right.expect("events.topic", Severity.OK)


def test_array_encoding_and_raw_hashes_are_reported() -> None:
    old = ["BlockStored", [b"\x01" * 32], None, list(range(16)), 16, None, "GPU"]
    payload = msgspec.msgpack.encode([1.0, [old], 0])
    found = run(heard(lambda publisher: publisher.publish_payload(payload)))
    found.expect("events.encoding", Severity.OK, "array encoding, bytes hashes")
    found.expect("cache.groups", Severity.WARNING, "taken for full attention")
    found.expect("cache.groups", Severity.INFO, "name no group")


def test_events_that_cannot_be_read() -> None:
    payload = msgspec.msgpack.encode([1.0, [{"type": "Nonsense"}], 0])
    found = run(heard(lambda publisher: publisher.publish_payload(payload)))
    found.expect("events.encoding", Severity.WARNING, "could not be read", "Nonsense")


def test_messages_that_are_no_batches() -> None:
    found = run(heard(lambda publisher: publisher.publish_payload(b"\xc1")))
    found.expect("events.encoding", Severity.ERROR, "payload_undecodable")


def test_events_that_make_no_sense() -> None:
    found = run(heard(lambda publisher: publisher.publish([stored(medium="TAPE")])))
    found.expect("events.encoding", Severity.WARNING, "unknown_medium")


def test_several_ranks_at_one_address() -> None:
    def prepare(publisher: ZmqPublisher) -> None:
        for rank in range(2):
            publisher.publish_payload(encode_batch(1.0, [stored()], rank))

    found = run(heard(prepare))
    found.expect("events.ranks", Severity.ERROR, "ranks [0, 1] at one address")


def test_the_events_of_another_rank() -> None:
    found = run(heard(lambda publisher: publisher.publish([stored()]), dp_rank=3))
    found.expect("events.ranks", Severity.ERROR, "rank 0 where rank 3 was expected")


@pytest.mark.parametrize("bound_to", ["tcp://10.0.0.1:9", "tcp://0.0.0.0:9"])
async def test_an_endpoint_that_the_engine_connects_to_instead_of_listening(bound_to: str) -> None:
    sources = {"0": {"endpoint": bound_to, "enable_kv_cache_events": True}}
    async with http_server(server(sources=sources)) as url:
        found = await examined(EngineAddress(url, events=DEAD), seconds=0.5, timeout_s=0.5)
        found.expect("events.reach", Severity.ERROR, bound_to, "without *", '"endpoint":"tcp://*:9"')


@pytest.mark.parametrize("bound_to", ["tcp://*:9", "tcp://10.0.0.1:5557"])
async def test_an_endpoint_that_is_fine_or_at_another_port_is_not_blamed(bound_to: str) -> None:
    sources = {"0": {"endpoint": bound_to, "enable_kv_cache_events": True}}
    async with http_server(server(sources=sources)) as url:
        found = await examined(EngineAddress(url, events=DEAD), seconds=0.5, timeout_s=0.5)
        found.expect("events.reach", Severity.ERROR, "wrong address or port")
