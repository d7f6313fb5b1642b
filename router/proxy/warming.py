"""A stream that leaves an engine that ends: another one computes its tokens first, while it goes on.

So the client waits for a few tokens when the other engine takes it over. Invariants: nothing is taken from
the stream here; no tenant is charged for it; a stream is warmed once at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.openai.apis import COMPLETION
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.proxy.attempt import Answer, Attempt
from kvatlas.router.proxy.carriers import Outbound
from kvatlas.router.proxy.failures import engine_failed
from kvatlas.router.proxy.settings import ProxyStats
from kvatlas.router.proxy.turns import WAIT_S_MAX, ContinuationTurns
from kvatlas.router.proxy.usage_reports import read_usage

# An answer of one token; a longer one is none.
_ANSWER_BYTES_MAX: Final = 1 << 20
_OK: Final = 200


def as_completion(out: Outbound, body: bytes, now_s: float, **changes: Any) -> InboundRequest:
    """The request for a completion that goes on with a stream, or warms an engine for that."""
    return msgspec.structs.replace(
        out.request,
        path=COMPLETION,
        query=b"",
        body=body,
        prompt=None,
        read_s=now_s,
        retention=None,
        hides_usage=False,
        **changes,
    )


class Warmer:
    """Has engines compute prompts. ``place``: choose an engine, none of those given; ``done`` as of
    ``Carrier``."""

    def __init__(
        self,
        place: Callable[[InboundRequest, frozenset[str]], Awaitable[Attempt]],
        done: Callable[[Answer], None],
        turns: ContinuationTurns,
        stats: ProxyStats,
    ) -> None:
        self._place = place
        self._done = done
        self._turns = turns
        self._stats = stats

    async def warm(
        self, out: Outbound, tokens: int, ask: Callable[[Attempt], Awaitable[Answer | None]]
    ) -> bool:
        """Have another engine than that which has the stream compute ``out``, a prompt of this many tokens:
        in turn, as streams that go on. ``ask``: send it; None: it did not come to that. Returns whether it
        did."""
        computed: int | None = None
        first = frozenset((out.record.engine,))
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                attempt, ended = await self._turns.place(
                    tokens, lambda full: self._place(out.request, first | full)
                )
                try:
                    computed = await self._computed(attempt, ask)
                finally:
                    ended()
                    for one in (attempt, attempt.prefill):
                        if one is not None and one.open:
                            one.finished(None)
        except (ApiError, TimeoutError):
            pass
        self._stats.count_warming(computed)
        return computed is not None

    async def _computed(
        self, attempt: Attempt, ask: Callable[[Attempt], Awaitable[Answer | None]]
    ) -> int | None:
        """The prompt tokens that were computed; None: it was not."""
        answer: Answer | None = None
        try:
            answer = await ask(attempt)
            if answer is None:
                return None
            data = await _whole(answer)
            if answer.status != _OK:
                attempt.refused(answer.status, 0.0)
                return None
            attempt.answered(answer.status)
            attempt.first_byte(answer.status)
            usage = attempt.corrected(read_usage(data))
            attempt.finished(usage)
            return attempt.work.computed(usage)
        except UpstreamError as error:
            engine_failed(attempt, error, self._stats)
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        finally:
            if answer is not None:
                self._done(answer)


async def _whole(answer: Answer) -> bytes:
    data = b""
    while not answer.at_eof and len(data) < _ANSWER_BYTES_MAX:
        data += await answer.read()
    return data


class StreamLeaving:
    """Implements ``Leaving``. ``warm`` has another engine compute what the stream has; ``stop`` has its relay
    hand it over at its next event."""

    def __init__(self, warm: Callable[[], Awaitable[bool]], stop: Callable[[], None]) -> None:
        self._warm = warm
        self._stop = stop
        self._task: asyncio.Task[None] | None = None
        self.warmed = False

    @property
    def warms(self) -> bool:
        """Implement ``Leaving``."""
        return self._task is not None and not self._task.done()

    def warm(self) -> None:
        """Implement ``Leaving``."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def now(self) -> None:
        """Implement ``Leaving``."""
        self.end()
        self._stop()

    async def _run(self) -> None:
        self.warmed = await self._warm()
        if self.warmed:
            self._stop()

    def end(self) -> None:
        """Implement ``Leaving``."""
        if self._task is not None:
            self._task.cancel()
