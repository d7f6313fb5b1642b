"""Where a request goes that reached the sidecar: always to the engine beside it, and before that to one that
computes its prompt, if the request names one that may.

What is always true of both requests (``router.proxy.split``) is so here: it is the same code. What came of a
first request is told to the picker in the answer's head (``router.pd.sidecar``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.openai.apis import PROMPT_APIS
from router.openai.errors import no_ready_engine
from router.openai.members import TooManyStepsError, at_leisure
from router.openai.request import InboundRequest, Usage
from router.pd.bodies import SplitBody, split_body
from router.pd.course import Course
from router.pd.sidecar import PREFILLERS, Prefilled, read_prefillers, tell
from router.pd.stats import PdStats
from router.proxy.attempt import Attempt, Fields
from router.proxy.breaker import Breaker
from router.sidecar.allowed import Allowed

_PREFILLERS_MAX = 1024
_FORGETS = 0.9


class SidecarPlacer:
    """Implements ``Placer``. ``engine``: base URL of the engine beside it; ``scheme``: of prefill engines."""

    def __init__(
        self, engine: str, allowed: Allowed, *, scheme: str, stats: PdStats, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._allowed = allowed
        self._scheme = scheme
        self._stats = stats
        self._clock = clock
        self._breaker = Breaker()
        self._prefillers: OrderedDict[str, _Prefiller] = OrderedDict()
        """The one asked last at the end."""

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], course: Course | None = None
    ) -> Attempt:
        """See ``Placer``."""
        if self._engine in exclude:
            raise no_ready_engine("The engine beside this sidecar did not answer; retry shortly.")
        named = read_prefillers(request.headers)
        found, why = self._find(request, named, exclude, course)
        body = None
        if found is not None:
            body, why = await self._read(request)
        if body is None or found is None:
            if why:
                self._stats.count(self._stats.whole, why)
            return self._alone(request)
        helper = _Helper(found, f"{self._scheme}://{found}", self._known(found), request, now=self._clock)
        return _Answerer(self._engine, self._breaker, request, self._clock, body, helper, named.index(found))

    def _alone(self, request: InboundRequest) -> Attempt:
        attempt = Attempt(self._engine, self._engine, self._breaker, request, now=self._clock)
        if any(name == PREFILLERS for name, _ in request.headers):
            attempt.client_headers = (tell(Prefilled(None, None)),)
        return attempt

    def _find(
        self, request: InboundRequest, named: list[str], exclude: frozenset[str], course: Course | None
    ) -> tuple[str | None, str]:
        """The engine that computes the prompt, or why there is none; "": it has no prompt."""
        if request.method != "POST" or request.path not in PROMPT_APIS:
            return None, ""
        if course is not None and not course.splits:
            return None, "retried"
        if not named:
            return None, "local"
        may = [endpoint for endpoint in named if endpoint in self._allowed]
        if not may:
            self._stats.prefillers_refused += 1
            return None, "not_allowed"
        now = self._clock()
        able = (e for e in may if e not in exclude and self._known(e).breaker.allows(now, request.client))
        return next(able, None), "no_prefill_engine"

    async def _read(self, request: InboundRequest) -> tuple[SplitBody | None, str]:
        try:
            body = await at_leisure(split_body(request.path, request.body))
        except TooManyStepsError:
            return None, "body"
        return (None, body.whole) if body.whole else (body, "")

    def _known(self, endpoint: str) -> _Prefiller:
        known = self._prefillers.pop(endpoint, None) or _Prefiller()
        self._prefillers[endpoint] = known
        if len(self._prefillers) > _PREFILLERS_MAX:
            self._prefillers.popitem(last=False)
        return known


class _Prefiller:
    """What is known of one prefill engine."""

    __slots__ = ("breaker", "s_per_byte")

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.s_per_byte = 0.0
        """Seconds from a request to its answer per byte of its body: of the slowest lately."""

    def answered(self, seconds: float, body_bytes: int) -> None:
        self.s_per_byte = max(seconds / max(1, body_bytes), _FORGETS * self.s_per_byte)


class _Helper(Attempt):
    """The prompt's computation. ``cached_tokens`` is None until the engine has said it."""

    __slots__ = ("_prefiller", "cached_tokens")

    def __init__(
        self,
        engine: str,
        base_url: str,
        prefiller: _Prefiller,
        request: InboundRequest,
        *,
        now: Callable[[], float],
    ) -> None:
        self.cached_tokens: int | None = None
        self._prefiller = prefiller
        expected_s = prefiller.s_per_byte * len(request.body)
        super().__init__(engine, base_url, prefiller.breaker, request, now=now, expected_s=expected_s)

    def _begun(self, now: float) -> None:
        self._prefiller.answered(now - self.asked_s, len(self.request.body))

    def _ended(self, usage: Usage | None, failed: str) -> None:
        self.cached_tokens = None if usage is None else usage.cached_tokens


class _Answerer(Attempt):
    """The answer, by an engine that is told what the helper holds."""

    __slots__ = ("_helper", "_place")

    def __init__(
        self,
        engine: str,
        breaker: Breaker,
        request: InboundRequest,
        clock: Callable[[], float],
        body: SplitBody,
        helper: _Helper,
        place: int,
    ) -> None:
        super().__init__(engine, engine, breaker, request, now=clock, later=True)
        self.body = body
        self.prefill = self._helper = helper
        self._place = place

    @property
    def answer_headers(self) -> Fields:
        """See ``Attempt``. The prompt has been computed by then, or (both were asked at once) perhaps not."""
        return (tell(Prefilled(self._place, self._helper.cached_tokens)),)
