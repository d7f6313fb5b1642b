"""What the requests of one endpoint picker share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from router.epp.settings import EppSettings, EppStats
from router.http.deadlines import Sweeper
from router.http.server.capacity import Capacity
from router.observe.log_throttle import LogThrottle
from router.openai.apis import PROMPT_APIS, RESPONSES
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
