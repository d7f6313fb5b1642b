"""What the requests of one endpoint picker share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any

import msgspec
import structlog

from router.epp import messages as m
from router.epp.grpc import DESTINATION, Header, changes
from router.epp.settings import EppSettings, EppStats
from router.fleet.identity import endpoint_of
from router.http.server.capacity import Capacity
from router.http.sockets import NEVER, Sweeper
from router.observe.requests import LogThrottle
from router.openai.request import PROMPT_APIS, RESPONSES
from router.proxy.attempt import Attempt
from router.proxy.settings import ProxySettings

_log = structlog.get_logger()
_TELL_EVERY_S = 5.0
_MESSAGE_BYTES = 1024 * 1024
"""Of a message beyond a body: heads and metadata."""


class PickerContext(msgspec.Struct):
    """``app`` is the router as an ASGI application; ``tasks`` is there while the picker listens; ``passing``
    ends, each, a request whose answer passes unseen."""

    app: Any
    settings: EppSettings
    proxy: ProxySettings
    header_bytes_max: int
    capacity: Capacity
    clock: Callable[[], float]
    sweeper: Sweeper
    readiness: Callable[[], bool]
    synced: Callable[[], bool]
    """Whether every source of engines has been heard."""
    endpoints: Callable[[], list[str]] = list
    """Of every engine that is known, up or not."""
    stats: EppStats = msgspec.field(default_factory=EppStats)
    draining: bool = False
    tasks: asyncio.TaskGroup | None = None
    passing: set[Callable[[], None]] = msgspec.field(default_factory=set)
    watched_due: float = 1.0
    turn: int = 0
    """Of the conformance suite's requests."""
    seldom: LogThrottle = msgspec.field(default_factory=lambda: LogThrottle(_TELL_EVERY_S))

    @property
    def message_bytes_max(self) -> int:
        """Longest message of a gateway; a buffered body is one."""
        return self.proxy.body_bytes_max + _MESSAGE_BYTES

    def watches(self, path: str) -> bool:
        """Whether the answer to this request is to be shown here. Completions are sampled evenly; what an
        answer of the Responses API is called must be known, and others are few."""
        share = self.settings.answers_watched_share
        if share >= 1.0 or path not in PROMPT_APIS or path == RESPONSES:
            return True
        if share <= 0.0:
            return False
        self.watched_due += share
        if self.watched_due < 1.0:
            return False
        self.watched_due = min(1.0, self.watched_due) - 1.0
        return True

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A request's task. Only while the picker listens."""
        if self.tasks is None:
            work.close()
            raise RuntimeError("the endpoint picker does not listen")
        return self.tasks.create_task(work)

    def warn(self, event: str, about: str, **more: Any) -> None:
        """A warning, one in a few seconds at most for each event and ``about``."""
        unsaid = self.seldom.due(f"{event} {about}", self.clock())
        if unsaid is not None:
            _log.warning(event, **more, **({"unsaid": unsaid} if unsaid else {}))


# One task waits for the next thing that happens; whoever makes it happen rings.


class Wakeup:
    """For one waiting task at a time; used from the event loop only."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def rung(self) -> None:
        """Waits for the next ring."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def ring(self) -> None:
        """Something happened."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# How long one exchange waits for what is next: one deadline at a time, looked at by the server's sweeper.


class Timer:
    """``passed`` is called once when the time is over."""

    __slots__ = ("_clock", "_passed", "_sweeper", "deadline")

    def __init__(self, sweeper: Sweeper, clock: Callable[[], float], passed: Callable[[], None]) -> None:
        self.deadline = NEVER
        self._sweeper = sweeper
        self._clock = clock
        self._passed = passed
        sweeper.add(self)

    def wait(self, seconds: float) -> None:
        """So long from now on, in place of what was set before."""
        self.deadline = self._clock() + seconds

    def expire(self) -> None:
        """Implement ``Watched``."""
        self.deadline = NEVER
        self._passed()

    def stop(self) -> None:
        """Nothing is waited for any more; for good."""
        self.deadline = NEVER
        self._sweeper.discard(self)
        self._passed = _nothing


def _nothing() -> None:
    """What is left to do when the time is over, after ``stop``."""


# What a gateway is told of a choice: the destination, twice, and what else changes in the request's head.
#
# Pure.


_DESTINATION = DESTINATION.encode()


def destination(attempt: Attempt, fallbacks: int) -> str:
    """The endpoint chosen, and those behind it in order."""
    if not fallbacks:
        return endpoint_of(attempt.base_url)
    return ",".join(dict.fromkeys(map(endpoint_of, (attempt.base_url, *attempt.next_best(fallbacks)))))


def told(
    head: list[Header],
    wanted: Iterable[Header],
    attempt: Attempt,
    fallbacks: int,
    *,
    length: int | None = None,
    target: bytes | None = None,
) -> tuple[bytes, bytes]:
    """The header mutation and the metadata by which ``head`` becomes ``wanted`` with the engine's own fields.
    ``length`` is that of a buffered body that is changed: Envoy compares. ``target``: path and query, where
    they are not those that came."""
    to = destination(attempt, fallbacks)
    own = dict(attempt.engine_headers)
    if own:
        wanted = [*(field for field in wanted if field[0] not in own), *own.items()]
    sets, removes = changes(head, wanted)
    if length is not None:
        sets.append((b"content-length", b"%d" % length))
    if target is not None:
        sets.append((b":path", target))
    mutation, metadata = _named(to)
    return m.header_mutation(sets, removes) + mutation, metadata


@lru_cache(maxsize=4096)
def _named(to: str) -> tuple[bytes, bytes]:
    """The header and the metadata that name this destination."""
    return m.header_mutation([(_DESTINATION, to.encode())]), m.dynamic_metadata(m.LB, DESTINATION, to)
