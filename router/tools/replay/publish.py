"""Publishes a capture again, as the engines did that it was recorded from: PUB sockets and replay ROUTERs.

Seqs, topics and payloads are the recorded ones; an engine that restarted in the capture restarts here. The
pace is that of the recorder's clock times ``speed`` (0: no waiting).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import msgspec
import zmq

from publisher.zmq_publisher import ZmqPublisher
from router.tools.capture.file import CapturedFrame

_BREATHE_FRAMES = 64


class PublishEndpoint(msgspec.Struct, frozen=True):
    """Where one engine of a capture is published."""

    events: str
    replay: str | None = None


def parse_endpoint(text: str) -> PublishEndpoint:
    """``tcp://..[,replay=tcp://..]``. Raises ``ValueError``."""
    events, *options = text.split(",")
    replay = None
    for option in options:
        name, separator, replay = option.partition("=")
        if name != "replay" or not separator:
            raise ValueError(f"--publish {text!r}: {option!r} is not replay=tcp://..")
    for address in (events, replay):
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ValueError(f"--publish {text!r}: {address!r} is not a tcp:// or ipc:// address")
    return PublishEndpoint(events, replay)


@contextlib.contextmanager
def publishers(
    endpoints: Mapping[str, PublishEndpoint],
    topics: Mapping[str, str],
    *,
    buffer_steps: int,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
) -> Iterator[dict[str, ZmqPublisher]]:
    """One publisher per engine, inside a running loop. Raises ``zmq.ZMQError`` for a taken address."""
    opened: dict[str, ZmqPublisher] = {}
    try:
        for source, endpoint in endpoints.items():
            opened[source] = ZmqPublisher(
                endpoint.events,
                replay_endpoint=endpoint.replay,
                topic=topics[source],
                buffer_steps=max(1, buffer_steps),
                context=context,
            )
            opened[source].start()
        yield opened
    finally:
        for publisher in opened.values():
            publisher.close()


async def paced(frames: Iterator[CapturedFrame], speed: float) -> AsyncIterator[CapturedFrame]:
    """Frames at the times they were received at, ``speed`` times as fast; 0 gives them all at once."""
    loop = asyncio.get_running_loop()
    began: float | None = None
    first_ts = 0.0
    for number, frame in enumerate(frames):
        if began is None:
            began, first_ts = loop.time(), frame.recv_ts
        wait_s = (frame.recv_ts - first_ts) / speed - (loop.time() - began) if speed else 0.0
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        elif number % _BREATHE_FRAMES == 0:
            await asyncio.sleep(0)
        yield frame


def publish_frame(publisher: ZmqPublisher, frame: CapturedFrame) -> None:
    """Send one frame under its recorded seq."""
    publisher.renumber(frame.seq)
    publisher.publish_payload(frame.payload)


def topics_of(frames: Iterable[CapturedFrame]) -> dict[str, str]:
    """The topic of each engine's first frame."""
    topics: dict[str, str] = {}
    for frame in frames:
        topics.setdefault(frame.source, frame.topic)
    return topics
