"""ZMQ in memory loses, repeats and reconnects where libzmq does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tests.world.loop import VirtualLoop
from tests.world.seams import run_with

A, B = "10.0.0.1", "10.0.0.2"
EVENTS = f"tcp://{B}:5557"


def made(loop: VirtualLoop, machine: str, kind: int, **options: int) -> Any:
    with loop.machine(machine, process=True):
        socket = zmq.Context.instance().socket(kind)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    return socket


def publisher(loop: VirtualLoop, **options: int) -> Any:
    socket = made(loop, B, zmq.PUB, **options)
    with loop.machine(B):
        socket.bind("tcp://*:5557")
    return socket


def subscriber(loop: VirtualLoop, topic: bytes = b"", **options: int) -> Any:
    socket = made(loop, A, zmq.SUB, **options)
    socket.set(zmq.SUBSCRIBE, topic)
    socket.connect(EVENTS)
    return socket


def taken(socket: Any) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            return found


def test_messages_of_a_topic_arrive_in_order_once_it_is_subscribed() -> None:
    async def main(loop: VirtualLoop) -> None:
        sender, receiver = publisher(loop), subscriber(loop, b"kv")
        sender.send_multipart([b"kv", b"too early"])
        await asyncio.sleep(1)
        for number in range(20):
            sender.send_multipart([b"kv@x" if number % 2 else b"other", b"%d" % number])
        await asyncio.sleep(1)
        assert taken(receiver) == [b"%d" % number for number in range(1, 20, 2)]

    run_with(main)


def test_a_cut_off_subscriber_loses_what_is_beyond_both_queues() -> None:
    async def main(loop: VirtualLoop) -> None:
        sender, receiver = publisher(loop, SNDHWM=10), subscriber(loop, RCVHWM=5)
        await asyncio.sleep(1)
        loop.net.cut(A, B)
        for number in range(30):
            sender.send_multipart([b"", b"%d" % number])
        assert loop.zmq.dropped == 20
        loop.net.cut(A, B, up=True)
        await asyncio.sleep(1)
        first = taken(receiver)
        await asyncio.sleep(1)
        assert first + taken(receiver) == [b"%d" % number for number in range(10)]

    run_with(main)


@pytest.mark.parametrize("silent", [True, False])
def test_a_restarted_publisher_is_found_again_and_the_monitor_tells(*, silent: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        sender = publisher(loop)
        keepalive = {"TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 30, "TCP_KEEPALIVE_INTVL": 10}
        receiver = subscriber(loop, **keepalive, TCP_KEEPALIVE_CNT=3)
        monitor = receiver.get_monitor_socket()
        await asyncio.sleep(100)
        loop.kill(sender.process, silent=silent)
        await asyncio.sleep(0.05)
        events = [parse_monitor_message([b, b""])["event"] for b in heads(monitor)]
        ends = [] if silent else [zmq.EVENT_DISCONNECTED]
        assert events == [zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, *ends]
        again = publisher(loop)
        await asyncio.sleep(61)
        again.send_multipart([b"", b"new"])
        await asyncio.sleep(1)
        assert taken(receiver) == [b"new"]

    def heads(monitor: Any) -> list[bytes]:
        found = []
        while monitor.get(zmq.EVENTS) & zmq.POLLIN:
            found.append(monitor.recv_multipart()[0])
        return found

    run_with(main)


def test_a_dealer_has_its_answer_and_keeps_its_request_until_there_is_somebody() -> None:
    async def main(loop: VirtualLoop) -> None:
        dealer = made(loop, A, zmq.DEALER)
        dealer.connect(EVENTS)
        dealer.send_multipart([b"", b"early"], zmq.NOBLOCK)
        await asyncio.sleep(5)
        router = made(loop, B, zmq.ROUTER)
        with loop.machine(B):
            router.bind("tcp://*:5557")
        await asyncio.sleep(5)
        name, _, text = router.recv_multipart(zmq.NOBLOCK)
        router.send_multipart([name, b"", text + b" bird"])
        router.send_multipart([b"nobody", b"", b"lost"])
        await asyncio.sleep(1)
        assert taken(dealer) == [b"early bird"]

    run_with(main)


def test_too_large_a_message_ends_the_connection() -> None:
    async def main(loop: VirtualLoop) -> None:
        sender, receiver = publisher(loop), subscriber(loop, MAXMSGSIZE=10)
        await asyncio.sleep(1)
        sender.send_multipart([b"", b"x" * 11])
        sender.send_multipart([b"", b"lost with it"])
        await asyncio.sleep(1)
        sender.send_multipart([b"", b"fine"])
        await asyncio.sleep(1)
        assert taken(receiver) == [b"fine"]

    run_with(main)


def test_a_world_may_lose_any_message() -> None:
    async def main(loop: VirtualLoop) -> None:
        sender, receiver = publisher(loop), subscriber(loop)
        await asyncio.sleep(1)
        loop.zmq.loses = lambda source, to, message: message[-1] == b"2"
        for number in range(4):
            sender.send_multipart([b"", b"%d" % number])
        await asyncio.sleep(1)
        assert taken(receiver) == [b"0", b"1", b"3"]
        assert loop.zmq.lost == 1

    run_with(main)


def test_a_descriptor_is_readable_when_something_has_come_before_it_was_watched() -> None:
    async def main(loop: VirtualLoop) -> None:
        sender, receiver = publisher(loop), subscriber(loop)
        await asyncio.sleep(1)
        sender.send_multipart([b"", b"x"])
        await asyncio.sleep(1)
        readable = asyncio.Event()
        loop.add_reader(receiver.fileno(), readable.set)
        await readable.wait()
        assert taken(receiver) == [b"x"]
        loop.remove_reader(receiver.fileno())

    run_with(main)
