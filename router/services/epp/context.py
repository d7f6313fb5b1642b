"""State shared by the requests of one endpoint picker, and the small parts they wait with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any

import msgspec
import structlog

from kvatlas.router.fleet.engines import endpoint_of
from kvatlas.router.http.asgi import Answering
from kvatlas.router.http.client_head import Header
from kvatlas.router.http.deadlines import NEVER, Sweeper
from kvatlas.router.http.listener import Capacity
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.proxy.attempt import Attempt
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.services.epp import messages as m
from kvatlas.router.services.epp.header_fields import DESTINATION, changes
from kvatlas.router.services.epp.settings import EppSettings, EppStats

_log = structlog.get_logger()
_TELL_EVERY_S = 5.0
# Message size in addition to a body: heads and metadata.
_MESSAGE_BYTES = 1024 * 1024


class PickerContext(msgspec.Struct):
    """Shared state. ``answer`` is the router's; ``tasks`` exists while the picker listens; each of
    ``passing`` ends a request whose answer is not observed."""

    answer: Answering
    settings: EppSettings
    proxy: ProxySettings
    header_bytes_max: int
    capacity: Capacity
    clock: Callable[[], float]
    sweeper: Sweeper
    readiness: Callable[[], bool]
    synced: Callable[[], bool]
    """Whether every source of engines has answered at least once."""
    stats: EppStats = msgspec.field(default_factory=EppStats)
    draining: bool = False
    tasks: asyncio.TaskGroup | None = None
    passing: dict[Callable[[], None], None] = msgspec.field(default_factory=dict)
    watched_due: float = 1.0
    seldom: LogThrottle = msgspec.field(default_factory=lambda: LogThrottle(_TELL_EVERY_S))

    @property
    def message_bytes_max(self) -> int:
        """Size limit of a gateway's message; a buffered body is one message."""
        return self.proxy.body_bytes_max + _MESSAGE_BYTES

    def watches(self, path: str) -> bool:
        """Whether the answer to this request is observed. Completions are sampled evenly."""
        # Other paths are rare.
        share = self.settings.answers_watched_share
        if share >= 1.0 or path not in PROMPT_APIS:
            return True
        if share <= 0.0:
            return False
        self.watched_due += share
        if self.watched_due < 1.0:
            return False
        self.watched_due = min(1.0, self.watched_due) - 1.0
        return True

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a request's task. Only while the picker listens."""
        if self.tasks is None:
            work.close()
            raise RuntimeError("the endpoint picker does not listen")
        return self.tasks.create_task(work)

    def warn(self, event: str, about: str, **more: Any) -> None:
        """Log a warning, rate-limited for each event and ``about``."""
        unsaid = self.seldom.due(f"{event} {about}", self.clock())
        if unsaid is not None:
            _log.warning(event, **more, **({"unsaid": unsaid} if unsaid else {}))


# Single-waiter, auto-reset event.


class Wakeup:
    """Wakes one waiting task at a time; used from the event loop only."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until ``set`` is called."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def set(self) -> None:
        """Wake the waiting task."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# Deadline of an exchange, checked by the server's sweeper; one at a time.


class Timer:
    """Calls ``passed`` once when the deadline has passed."""

    __slots__ = ("_clock", "_passed", "_sweeper", "deadline")

    def __init__(self, sweeper: Sweeper, clock: Callable[[], float], passed: Callable[[], None]) -> None:
        self.deadline = NEVER
        self._sweeper = sweeper
        self._clock = clock
        self._passed = passed
        sweeper.add(self)

    def wait(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now, replacing the previous one."""
        self.deadline = self._clock() + seconds

    def expire(self) -> None:
        self.deadline = NEVER
        self._passed()

    def stop(self) -> None:
        self.deadline = NEVER
        self._sweeper.discard(self)
        self._passed = lambda: None


# Parts of the message with which the gateway learns the choice: the destination as header and as metadata,
# and changes to the request's head.
#
# Pure.


_DESTINATION = DESTINATION.encode()


def destination(attempt: Attempt, fallbacks: int) -> str:
    """Return the chosen endpoint and its fallbacks, in order."""
    if not fallbacks:
        return endpoint_of(attempt.base_url)
    return ",".join(dict.fromkeys(map(endpoint_of, (attempt.base_url, *attempt.next_best(fallbacks)))))


def request_changes(
    head: list[Header],
    wanted: Iterable[Header],
    attempt: Attempt,
    fallbacks: int,
    *,
    length: int | None = None,
    target: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Return the header mutation and the metadata that turn ``head`` into ``wanted`` with the engine's own
    fields. ``length``: that of a changed buffered body, which Envoy compares. ``target``: path and query, if
    changed."""
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
    """Return the header and the metadata that name this destination."""
    return m.header_mutation([(_DESTINATION, to.encode())]), m.dynamic_metadata(m.LB, DESTINATION, to)
