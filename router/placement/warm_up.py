"""Warm-up: hot prefixes are computed, or pulled, by an engine before the requests that need them come.

An engine that joins gets the hottest prefixes. Those that only a drained engine holds go to the engines that
will get its traffic. The tokens are those of prompts that this router has placed. Each prefix is asked for
with the adapter and the salt of its prompt, so that only its own tenant can hit it; answers are dropped,
and no client, limit or usage record sees any of it.

Invariants: an engine computes at most ``tokens_per_s`` for this, one piece at a time, only while no prompt
waits there, at most ``tokens_max`` per occasion and for ``seconds_max``; a look-up right before each prefix
leaves out what the engine holds meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog

from router.admission.admission_queue import ENGINE_PRIORITY
from router.fleet.status import Fleet
from router.http.sockets import describe_error
from router.observe.history import FIRST_TOKENS
from router.openai.request import COMPLETION, Usage
from router.pd.transfer import source_params
from router.placement.affinity import PROMPTS_MAX, HotPrompt, PromptMemory
from router.placement.candidate import Candidate, WarmUpSettings
from router.placement.engine import Accounts, Engine, order_of
from router.placement.load import LoadSettings
from router.placement.pull import Pulls, mostly_came
from router.prompts.prompt import Prompt
from router.proxy.answers import read_usage
from router.proxy.disaggregated import new_transfer_id

_log = structlog.get_logger()
_T = TypeVar("_T")

Why = Literal["joined", "drained"]
Outcome = Literal["computed", "pulled", "held", "failed", "dropped"]
_LOOK_EVERY_S: Final = 0.5
_QUIET_EVERY_S: Final = 0.05
# Engines that come up within this time of the router's own start were there before.
_SETTLES_S: Final = 30.0
_ASK_S: Final = 120.0
# In a row, after which the other prefixes of an engine are dropped.
_FAILURES_MAX: Final = 3
# Of the pool; the rest is for its own requests.
_POOL_SHARE: Final = 0.5
_RECENT_S: Final = LoadSettings().recent_s
_LOW: Final = 2
_OK: Final = 200


class WarmUpStats(msgspec.Struct):
    """Counters of warm-ups."""

    engines: Annotated[dict[str, int], "kvatlas_warm_ups_total{why}"] = msgspec.field(default_factory=dict)
    """Occasions: an engine `joined`, or was `drained`."""
    prefixes: Annotated[dict[str, int], "kvatlas_warm_up_prefixes_total{outcome}"] = msgspec.field(
        default_factory=dict
    )
    """Prefixes: `computed`; `pulled` from another engine; already `held`; `failed`; `dropped`, because
    `warm_up.seconds_max` was over, the engine left, or it failed three times in a row."""
    tokens: Annotated[int, "kvatlas_warm_up_tokens_total"] = 0
    """Tokens that engines were asked to compute or to pull."""


class _Step(NamedTuple):
    hot: HotPrompt
    until_s: float
    source: Engine | None
    """Engine to pull from; None: the one that holds most."""


Look = Callable[[Prompt, list[Engine]], Awaitable[tuple[Sequence[Candidate], Mapping[str, int]]]]
"""Candidates for a prompt, and tokens of it that the host memories hold by themselves, by engine id."""
Ask = Callable[[str, bytes, dict[str, str], float], Awaitable[tuple[int, bytes]]]


class WarmUps:
    """Warm-ups of one router. ``leads``: whether this router, and no other one, does them;
    ``order_weight``: of the engines' own order (``policy.engine_priority``)."""

    def __init__(
        self,
        settings: WarmUpSettings,
        fleet: Fleet[Engine],
        accounts: Accounts,
        pulls: Pulls,
        memory: PromptMemory,
        *,
        look: Look,
        ask: Ask,
        leads: Callable[[], bool],
        order_weight: Callable[[], float],
    ) -> None:
        self.stats = WarmUpStats()
        self._settings = settings
        self._fleet, self._accounts, self._pulls, self._memory = fleet, accounts, pulls, memory
        self._look, self._ask, self._leads, self._order_weight = look, ask, leads, order_weight
        self._seen: dict[str, tuple[bool, float | None]] = {}
        self._steps: dict[str, deque[_Step]] = {}
        self._at_work: set[str] = set()
        self._settled_s = accounts.now() + _SETTLES_S

    async def run(self) -> None:
        """Watch the fleet until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for engine in list(self._fleet):
                    await self._guarded(self._follow(engine), engine.engine_id)
                known = {engine.engine_id for engine in self._fleet}
                self._seen = {name: was for name, was in self._seen.items() if name in known}
                for name in self._steps.keys() - self._at_work:
                    self._at_work.add(name)
                    tasks.create_task(self._work(name), name=f"warm-up {name}")
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _guarded(self, work: Coroutine[Any, Any, _T], engine_id: str) -> _T | None:
        """Return the result; None after a fault, which must not end the router."""
        result: _T | BaseException = (await asyncio.gather(work, return_exceptions=True))[0]
        if isinstance(result, BaseException):
            _log.error("warm-up failed", engine=engine_id, exc_info=result)
            return None
        return result

    async def _follow(self, engine: Engine) -> None:
        """Plan what a change of this engine asks for."""
        was, before_s = self._seen.get(engine.engine_id, (False, None))
        serving, started_s = _serves(engine), engine.started
        self._seen[engine.engine_id] = serving, started_s
        restarted = None not in (before_s, started_s) and before_s != started_s
        if self._accounts.now() < self._settled_s:
            return
        joined, drained = serving and (not was or restarted), was and not serving and bool(engine.held)
        if not (joined or drained) or not engine.engine.answers or not self._leads():
            return
        why: Why = "joined" if joined else "drained"
        tokens_max = self._fitting(engine) if joined else self._settings.tokens_max
        found = self._memory.hottest(tokens_max, self._accounts.now(), engine.serves)
        if not found:
            return
        self.stats.engines[why] = self.stats.engines.get(why, 0) + 1
        _log.info("warm-up", engine=engine.engine_id, why=why, prefixes=len(found))
        for hot in found:
            if joined:
                self._add(engine, hot, None)
            else:
                await self._hand_over(engine, hot)

    def _fitting(self, engine: Engine) -> int:
        """Return the tokens that a part of its pool has room for, at most ``tokens_max``."""
        # Its own groups are known only once it has stored blocks.
        alike = (one for one in (engine, *self._fleet) if one.base_model == engine.base_model)
        layout = next((one.layout for one in alike if one.layout is not None), None)
        if layout is None or not engine.pool_blocks:
            return self._settings.tokens_max
        per_token = sum([1 / group.block_size for group in layout.groups])
        return min(self._settings.tokens_max, int(_POOL_SHARE * engine.pool_blocks / per_token))

    def _add(self, target: Engine, hot: HotPrompt, source: Engine | None) -> None:
        steps = self._steps.setdefault(target.engine_id, deque())
        if len(steps) >= PROMPTS_MAX:
            self._count("dropped")
            return
        steps.append(_Step(hot, self._accounts.now() + self._settings.seconds_max, source))

    async def _hand_over(self, leaving: Engine, hot: HotPrompt) -> None:
        """Add a prefix that only the leaving engine holds to the engine with the least to do."""
        others = [one for one in self._fleet.ready(hot.model) if one.engine.answers and one is not leaving]
        if not others:
            return
        (own, *found), _ = await self._look(hot.prompt, [leaving, *others])
        held = min(hot.tokens, own.hit.whole_tokens)
        if held < FIRST_TOKENS or held <= max([one.hit.whole_tokens for one in found]):
            self._count("held")
            return
        planned = [len(self._steps.get(one.engine_id, ())) for one in found]
        best = min(range(len(found)), key=lambda at: (planned[at], found[at].queue_s))
        self._add(others[best], hot._replace(tokens=held), leaving)

    def _count(self, outcome: Outcome) -> None:
        self.stats.prefixes[outcome] = self.stats.prefixes.get(outcome, 0) + 1

    async def _work(self, engine_id: str) -> None:
        """Take the steps of one engine, one after the other."""
        steps, failures = self._steps[engine_id], 0
        while steps:
            step, engine = steps.popleft(), self._fleet.get(engine_id)
            outcome: Outcome = "dropped"
            if engine is not None and failures < _FAILURES_MAX:
                outcome = await self._guarded(self._warm(engine, step), engine_id) or "failed"
                failures = failures + 1 if outcome == "failed" else 0
            self._count(outcome)
        del self._steps[engine_id]
        self._at_work.discard(engine_id)

    async def _warm(self, target: Engine, step: _Step) -> Outcome:
        """Ask the engine for one prefix, piece by piece."""
        hot, sent = step.hot, 0
        while True:
            await self._quiet(target, step.until_s)
            if self._accounts.now() >= step.until_s or not _serves(target):
                return "dropped"
            if target.frontend != hot.prompt.frontend:
                return "dropped"
            sources = self._sources(target, step)
            (own, *_), held = await self._look(hot.prompt, [target, *sources])
            # The events of what was sent may still be on their way.
            hit = max(sent, min(own.hit.whole_tokens, hot.tokens))
            # Of a prompt that it holds, the engine hits a block less: it computes the last token.
            layout = target.layout
            if hot.tokens - hit <= (target.scheme.hash_block_size if layout is None else layout.alignment):
                return "computed" if sent else "held"
            source = self._pulls.source(target, sources, held, self._accounts.now())
            end = min(hot.tokens, hit + self._settings.piece_tokens)
            pulled = source is not None and min(hot.tokens, held[source.engine_id]) >= end
            if pulled and source is not None:
                end = min(hot.tokens, held[source.engine_id])
            elif own.recent_s > self._settings.busy_share_max * _RECENT_S:
                # Where engines are busy, work for requests that may not come delays those that are there
                # (benchmarks/results/tiers.md).
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            came = await self._send(target, own, hot, hit, end, source if pulled else None)
            if came is None:
                return "failed"
            self.stats.tokens += end - hit
            sent = end
            if end >= hot.tokens:
                return "pulled" if pulled and mostly_came(came, end - hit) else "computed"

    async def _quiet(self, target: Engine, until_s: float) -> None:
        """Wait until no prompt waits at the engine."""
        while self._accounts.now() < until_s and _serves(target):
            load = target.load.current(self._accounts.now())
            if not load.waiting and not load.queue_s:
                return
            await asyncio.sleep(_QUIET_EVERY_S)

    def _sources(self, target: Engine, step: _Step) -> list[Engine]:
        """Return the engines that the prefix might be pulled from."""
        if not self._pulls.enabled:
            return []
        if step.source is not None:
            return [] if step.source.closed else [step.source]
        return [one for one in self._fleet.ready(step.hot.model) if one is not target]

    async def _send(
        self, target: Engine, own: Candidate, hot: HotPrompt, hit: int, end: int, source: Engine | None
    ) -> int | None:
        """Ask for the first ``end`` tokens, of which it has ``hit``. Returns the tokens that it reports as
        cached beyond those; None: it failed. Takes as long as ``tokens_per_s`` demands."""
        accounts, pulls, now = self._accounts, self._pulls, self._accounts.now()
        prompt = hot.prompt
        # One more: under vLLM's default retention an engine keeps the windows and states at the last boundary
        # before a prompt's last token, and no others.
        tokens = prompt.token_ids[: end + 1]
        work_s = own.prefill_s_per_token * (end - hit)
        body: dict[str, object] = {"model": hot.model, "prompt": tokens.tolist(), "max_tokens": 1}
        if prompt.extras.cache_salt is not None:
            body["cache_salt"] = prompt.extras.cache_salt
        if source is not None:
            work_s = pulls.warm(target, source, end - hit, now)
            params = source_params(new_transfer_id(), *pulls.address(source))
            body["kv_transfer_params"] = msgspec.Raw(params)
        address, order = target.engine, order_of(_LOW, now, self._order_weight())
        headers = {} if address.dp_rank is None else {"x-data-parallel-rank": str(address.dp_rank)}
        if order is not None and target.takes_order:
            headers[ENGINE_PRIORITY.decode()] = str(order.priority(work_s))
        ticket = target.load.admit(
            uncached_tokens=1 if source is not None else end - hit,
            now=now,
            streams=False,
            load_s=work_s if source is not None else 0.0,
            expected_s=work_s,
            running=own.running,
            waiting=own.waiting,
            prompt_tokens=end,
            rank_s=0.0 if order is None else order.rank_s(work_s),
        )
        usage: Usage | None = None
        answered = False
        try:
            url = address.base_url + COMPLETION
            status, content = await self._ask(url, msgspec.json.encode(body), headers, _ASK_S)
            if status == _OK:
                usage, answered = read_usage(content), True
            else:
                _log.warning("warm-up refused", engine=target.engine_id, status=status)
        except (OSError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.warning("warm-up failed", engine=target.engine_id, problem=describe_error(error))
        finally:
            (target.load.finish if answered else target.load.fail)(ticket, accounts.now())
        if not answered:
            if source is not None:
                pulls.judge_pair(target.engine_id, source.engine_id, came=False, now=accounts.now())
            return None
        if target.shadow is not None:
            target.shadow.served(
                tokens, lambda scheme: prompt.hashes(scheme)[: end // scheme.hash_block_size]
            )
        cached = None if usage is None else usage.cached_tokens
        came = max(0, min(end, cached or 0) - hit)
        if source is not None and cached is not None:
            good = mostly_came(came, end - hit)
            pulls.judge_pair(target.engine_id, source.engine_id, came=good, now=accounts.now())
        rest_s = (end - hit - came) / self._settings.tokens_per_s - (accounts.now() - now)
        await asyncio.sleep(max(0.0, rest_s))
        return came


def _serves(engine: Engine) -> bool:
    """Whether it answers and gets new requests."""
    return engine.up and not engine.held and not engine.asleep and not engine.closed
