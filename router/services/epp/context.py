"""State shared by the requests of one endpoint picker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from kvatlas.router.http.asgi import Answering
from kvatlas.router.http.deadlines import Sweeper
from kvatlas.router.http.listener import Capacity
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.openai.apis import PROMPT_APIS
from kvatlas.router.proxy.settings import ProxySettings
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
