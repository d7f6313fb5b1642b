"""HTTP client of the doctor: returns a response or the reason why there is none, within time and size
limits.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec

from kvatlas.router.http.client import HttpClient
from kvatlas.router.http.error_texts import NotConnectedError, describe_error
from kvatlas.router.tools.ops_client import reason

ANSWER_BYTES_MAX = 8 << 20
_PROBLEM_LENGTH_MAX = 200
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_T = TypeVar("_T")


class HttpAnswer(msgspec.Struct, frozen=True):
    """HTTP response.

    ``status`` 0: no response, ``problem`` is the reason. ``date_skew_s``: the server's clock by its Date
    header (whole seconds) minus the local clock; None without that header.
    """

    status: int
    body: bytes = b""
    problem: str = ""
    date_skew_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def description(self) -> str:
        """Description of the response for findings."""
        if not self.status:
            return self.problem
        message = reason(self.body) if not self.ok else ""
        return f"status {self.status}: {message}" if message else f"status {self.status}"

    def json(self, kind: type[_T]) -> _T | None:
        """Decode the body as ``kind``; None if it does not match."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except _BAD_JSON:
            return None


class Http:
    """HTTP requests of one client; ``timeout_s`` applies to each."""

    def __init__(self, client: HttpClient, timeout_s: float) -> None:
        self._client = client
        self.timeout_s = timeout_s

    async def get(self, url: str, headers: dict[str, str] | None = None) -> HttpAnswer:
        return await self._ask("GET", url, None, headers or {}, self.timeout_s)

    async def post(
        self, url: str, body: Any, *, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> HttpAnswer:
        """Send ``body`` as JSON; bytes are sent unchanged."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        sent = {"content-type": "application/json", **(headers or {})}
        return await self._ask("POST", url, data, sent, timeout_s or self.timeout_s)

    async def _ask(
        self, method: str, url: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> HttpAnswer:
        try:
            async with self._client.exchange(method, url, timeout_s, data, headers) as answer:
                now = time.time()
                body = await answer.body(ANSWER_BYTES_MAX)
                return HttpAnswer(answer.status, body, date_skew_s=_date_skew_s(answer.header(b"date"), now))
        except TimeoutError:
            return HttpAnswer(0, problem=f"no response within {timeout_s:g} s")
        except NotConnectedError as problem:
            return HttpAnswer(0, problem=f"cannot connect: {describe_error(problem)}"[:_PROBLEM_LENGTH_MAX])
        except (OSError, ValueError) as problem:
            return HttpAnswer(0, problem=describe_error(problem)[:_PROBLEM_LENGTH_MAX])


def _date_skew_s(date: str, now: float) -> float | None:
    """Return how many seconds the server's clock is ahead, assuming the middle of the header's second."""
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp() + 0.5 - now
    except (ValueError, TypeError, OverflowError):
        return None
