"""Log lines of requests that the router refuses, one for each, with its id: at most ten a second, since any
client can cause them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from kvatlas.router.openai.errors import ApiError

_log = structlog.get_logger()
_LINES_PER_S_MAX = 10
_TEXT_MAX = 200
# Of keys, rights and limits: operators should see these.
_WARNED = frozenset({401, 403, 429})


class RefusalLog:
    """Lines ``request refused``. ``unsaid``: how many were left out before one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = self._lines = self._unsaid = 0

    def note(self, error: ApiError, request_id: bytes, **more: str) -> None:
        """Log one, or count it for the next line. ``more``: what is known of it; empty texts are left out."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > _LINES_PER_S_MAX:
            self._unsaid += 1
            return
        fields: dict[str, Any] = {name: text[:_TEXT_MAX] for name, text in more.items() if text}
        fields |= {"unsaid": self._unsaid} if self._unsaid else {}
        self._unsaid = 0
        line = _log.warning if error.status in _WARNED else _log.info
        line(
            "request refused",
            status=error.status,
            code=error.code,
            request_id=request_id.decode("latin-1"),
            **fields,
        )
