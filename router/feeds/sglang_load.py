"""Load that SGLang's schedulers publish: ``[topic, sequence number, LoadStat]``, at once when it changes and
once a second otherwise (managers/scheduler_components/load_publisher.py, 0.5.23). Messages wait in a short
queue and only the latest one counts; a socket that is silent for three heartbeats counts no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import msgspec
import structlog
import zmq

from kvatlas.router.feeds.sockets import MessageReader, subscribed

_log = structlog.get_logger()
LOAD_FRESH_S = 3.0
_LOADS_MAX: Final = 16
_LOAD_BYTES_MAX: Final = 4096
# At most twenty readings a second and engine.
_LOAD_PAUSE_S: Final = 0.05
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class LoadReading(msgspec.Struct, array_like=True, tag="LoadStat", gc=False):
    """The first fields of SGLang's ``LoadStat``; it appends others."""

    running: _Count
    waiting: _Count
    used_tokens: _Count
    """Tokens in the KV cache that are in use, not only cached."""
    max_tokens: _Count
    """Size of the KV cache; 0: unknown."""


_READING: Final = msgspec.msgpack.Decoder(LoadReading)


class _Followed(NamedTuple):
    source: tuple[str, str]
    task: asyncio.Task[None]


class LoadSockets:
    """Follows the load sockets of engines. ``report`` gets each engine's latest reading, None for a message
    that is no ``LoadStat``. ``clock`` is monotonic."""

    def __init__(
        self, report: Callable[[str, LoadReading | None], None], *, clock: Callable[[], float]
    ) -> None:
        self._report = report
        self._clock = clock
        self._followed: dict[str, _Followed] = {}
        self._heard_s: dict[str, float] = {}

    def follow(self, engine_id: str, source: tuple[str, str] | None, tasks: asyncio.TaskGroup | None) -> None:
        """Follow the socket at this address and topic from now on; None: none."""
        known = self._followed.get(engine_id)
        if source == (None if known is None else known.source):
            return
        self.stop(engine_id)
        if source is not None and tasks is not None:
            task = tasks.create_task(self._read(engine_id, *source))
            self._followed[engine_id] = _Followed(source, task)

    def stop(self, engine_id: str) -> None:
        self._heard_s.pop(engine_id, None)
        if (known := self._followed.pop(engine_id, None)) is not None:
            known.task.cancel()

    def stop_all(self) -> None:
        """Stop following every engine."""
        for engine_id in list(self._followed):
            self.stop(engine_id)

    def is_fresh(self, engine_id: str) -> bool:
        """Whether the engine's latest reading counts."""
        heard_s = self._heard_s.get(engine_id)
        return heard_s is not None and self._clock() - heard_s <= LOAD_FRESH_S

    async def _read(self, engine_id: str, endpoint: str, topic: str) -> None:
        socket = subscribed(zmq.Context.instance(), topic, _LOADS_MAX, _LOAD_BYTES_MAX)
        with MessageReader(socket) as reader:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                problem = str(error)
                _log.warning("load not followed", engine=engine_id, endpoint=endpoint, problem=problem)
                return
            while True:
                messages = reader.take_many(_LOADS_MAX)
                if not messages:
                    await reader.wait()
                    continue
                reading = _reading(messages[-1])
                if reading is not None:
                    self._heard_s[engine_id] = self._clock()
                self._report(engine_id, reading)
                await reader.rest(_LOAD_PAUSE_S)


def _reading(message: list[bytes]) -> LoadReading | None:
    try:
        return _READING.decode(message[2]) if len(message) == 3 else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
