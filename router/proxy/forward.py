"""One request to one engine after another, until an answer can be given: attempts and retries.

The answer's head is held until its first body bytes are there, so that an engine that dies during its prefill
can still be replaced without the client noticing. Where a stream's comments had to be passed on meanwhile,
another engine goes on in the same response; from the first token given to the client on there is no retry. A
placement ends exactly once, with ``finished`` or ``failed``, also when this is cancelled.

A placement on two engines has the first one asked (``split/``) while the second one's place is held;
what the second one may be told, and what comes after a failure, is for the request's ``DisaggState``.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec
import structlog

from kvatlas.router.http.request_cycle import answer_whole
from kvatlas.router.http.upstream import UpstreamError
from kvatlas.router.http.upstream_pool import REPEATABLE, UpstreamClient
from kvatlas.router.observe.requests import RequestRecord
from kvatlas.router.openai.apis import COMPLETION, PROMPT_APIS, RESPONSES
from kvatlas.router.openai.error_bodies import error_event
from kvatlas.router.openai.errors import (
    ApiError,
    engine_redirects,
    engine_refused,
    engine_timeout,
    engine_unreachable,
    no_ready_engine,
    retry_after_s,
    stream_broken,
)
from kvatlas.router.openai.members import run_cooperatively, with_first, with_value
from kvatlas.router.openai.request import InboundRequest
from kvatlas.router.pd.bodies import hint_params
from kvatlas.router.pd.handoff import DisaggState, NotFetchedError
from kvatlas.router.pd.settings import PdSettings, PdStats
from kvatlas.router.pd.transfer import connector_of
from kvatlas.router.proxy.answers import SseRelay
from kvatlas.router.proxy.attempt import Answer, Attempt, Had
from kvatlas.router.proxy.carriers import Carrier, Outbound, OwnConnections
from kvatlas.router.proxy.comments import Comments
from kvatlas.router.proxy.continuation import (
    ContinuedStream,
    completion_of,
    held_back,
    text_so_far,
    warming_of,
    whole_tokens,
)
from kvatlas.router.proxy.continuation_plan import ContinuationPlan
from kvatlas.router.proxy.deaths import HELD_BACK, Deaths
from kvatlas.router.proxy.disaggregated import AgainError, DisaggForwarder, Harm, broke, new_transfer_id
from kvatlas.router.proxy.engine_page import EnginePage
from kvatlas.router.proxy.failures import (
    BROKEN,
    BROKEN_STATUSES,
    REFUSALS,
    EventRefusedError,
    abandoned,
    ended_with_process,
    engine_failed,
)
from kvatlas.router.proxy.headers import REDIRECTS, AnswerHead, as_json, read_answer_headers
from kvatlas.router.proxy.kept_stream import KeptStream
from kvatlas.router.proxy.media_names import has_media
from kvatlas.router.proxy.parsed_stream import ABSENT, ParsedStream
from kvatlas.router.proxy.relay import AnswerRelay
from kvatlas.router.proxy.settings import ProxySettings, ProxyStats
from kvatlas.router.proxy.turns import ContinuationTurns
from kvatlas.router.proxy.warming import StreamLeaving, Warmer, as_completion

_log = structlog.get_logger()
_OK = 200
_BAD_REQUEST = 400
# Of an engine that reads the ids of a chat, which it does in less than a second.
_READ_TIMEOUT_S: Final = 30.0
# Of a refusal, until its reason is known.
_TOLD_BYTES: Final = 4096
# How vLLM and SGLang say that a prompt is too long.
_TOO_LONG: Final = re.compile(rb"context length|maximum model length|max_model_len|context window")
_NOT_PASSED_ON = REFUSALS | REDIRECTS
# Of an answer that is searched for its `usage`; longer ones give receipts without reported tokens.
USAGE_BYTES_MAX = 4 << 20
# A request that breaks an engine (500, or the connection ends before the first byte) is given to one other
# engine and then to none: some requests break every engine they meet.
_BREAKS_MAX = 2
# Largest error answer of an engine that is kept, to be passed on if no other engine answers.
_KEPT_ANSWER_BYTES_MAX = 256 * 1024
# Times that a request is taken from an engine that is to end, beside its attempts.
_MOVES_MAX = 16
# Log lines per second on broken engines: one that dies breaks with all its requests.
_BREAK_LINES_MAX = 10


class Refusal(msgspec.Struct, gc=False):
    """An engine's error answer, kept whole: passed on if no other engine answers."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes


class Placer(Protocol):
    """Chooses the engine for a request."""

    async def place(
        self, request: InboundRequest, *, exclude: frozenset[str], disagg: DisaggState | None = None
    ) -> Attempt:
        """Raises ``ApiError`` (model_not_found, no_ready_engine) when there is no engine to ask. A request
        may be placed several times (a retry before the first byte), never on an engine in ``exclude``;
        ``disagg``: it has been placed on two engines, and what may come now."""

    def decode(self, model: str, ids: Sequence[int], *, skips_special: bool) -> str | None:
        """Return the text of token ids of a model; None: it is not known here."""


class Forwarder:
    """Places and sends requests. One per proxy; holds no state of a request."""

    def __init__(
        self,
        planner: Placer,
        client: UpstreamClient,
        *,
        settings: ProxySettings,
        stats: ProxyStats,
        clock: Callable[[], float],
        pd: PdSettings,
        pd_stats: PdStats,
        deaths: Deaths | None = None,
    ) -> None:
        self._planner = planner
        self.silence_s = 0.0
        """A client of a stream gets a comment before it has had nothing for this long; 0: none."""
        self._deaths = deaths
        self._own = OwnConnections(client)
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._bootstrap = EnginePage(client, b"/query")
        self._legs = DisaggForwarder(
            self._own,
            connector_of(pd, self._bootstrap),
            pd=pd,
            proxy=settings,
            stats=pd_stats,
            proxy_stats=stats,
            clock=clock,
            metrics=EnginePage(client, b"/metrics"),
        )
        self._turns = ContinuationTurns()
        self._warmer = Warmer(
            lambda request, exclude: planner.place(request, exclude=exclude),
            self._own.done,
            self._turns,
            stats,
        )
        self._lines = 0
        self._lines_second = 0

    def configure(self, settings: ProxySettings, pd: PdSettings) -> None:
        """Set the settings of new requests."""
        self._settings = self._legs.proxy = settings
        self._legs.pd, self._legs.connector = pd, connector_of(pd, self._bootstrap)

    async def forward(self, out: Outbound) -> None:
        """Answer the request. Raises ``ApiError`` if nothing has been sent.

        Returning without having completed the answer means that the connection must be cut.
        """
        try:
            await self._forward(out)
            while (kept := out.broke) is not None:
                out.broke = None
                await self._go_on(out, kept)
        except ApiError as error:
            if out.had is Had.NOTHING:
                raise
            await self._end_stream(error, out)
        if out.record.broken and isinstance(out.plan, str) and out.plan:
            self._stats.count_continuation("", refused=out.plan)
        deaths = self._deaths
        if deaths is not None and (out.lost or self._stats.suspects_current):
            if out.lost and self._deaths_of(out) is not None:
                # No task waits for the look: an answer that broke off is cut by returning from here.
                deaths.failed(out.digest(), out.lost, out.asked_s)
            elif not out.record.broken and 200 <= out.record.status < 300:
                deaths.cleared(out.digest())

    async def _end_stream(self, error: ApiError, out: Outbound) -> None:
        """The client has had comments, and no engine goes on: tell it so in the stream."""
        self._stats.streams_broken += 1
        out.record.broken = True
        self._stats.count_error(error.status, error.code)
        out.record.tracker.warn(
            "answer broke off", out.record, error.code, engine=out.record.engine, problem=error.code
        )
        data = SseRelay(out.request.path).broken(*error_event(error, out.request.path, b""))
        out.record.bytes_out += len(data)
        if (waits := out.client.write(data, more=False)) is not None:
            await waits

    async def _go_on(self, out: Outbound, kept: KeptStream) -> None:
        """Have another engine go on with a stream that broke. Raises ``ApiError``."""
        if self._was_poison(out, out.record.engine):
            self._stats.count_continuation("", refused="engines_died")
            raise _broke_off()
        if out.lost and (deaths := self._deaths_of(out)) is not None:
            deaths.failed(out.digest(), out.lost, out.asked_s)
        out.lost = ""
        found = await self._continuation(out, kept)
        if isinstance(found, str):
            self._stats.count_continuation("", refused=found)
            raise _broke_off()
        await self._go_on_with(out, *found)

    async def _go_on_with(self, out: Outbound, goes_on: ContinuedStream, body: bytes | None) -> None:
        """Have another engine asked for this completion, None if only the end is missing, and the stream go
        on with it. Raises ``ApiError``."""
        record, first, outcome = out.record, out.record.engine, "failed"

        def comment() -> Awaitable[None] | None:
            record.bytes_out += len(_COMMENT)
            return out.client.write(_COMMENT, more=True)

        comments = Comments(_COMMENT_EVERY_S, record, comment)
        goes_on.on_begin = comments.cancel
        moved_from, record.continued_from = record.continued_from, first
        try:
            if body is None:
                await self._write_end(out, goes_on)
            else:
                # Where its engine has computed the rest there is nothing to wait for.
                parses = isinstance(goes_on, ParsedStream)
                request = as_completion(
                    out, body, self._clock(), continues=True, at_once=goes_on.warmed, parses=parses
                )
                again = _as_again(out, request, goes_on)
                try:
                    await self._forward(again, frozenset((first,)))
                except ApiError as error:
                    # To the client it is the first engine's failure, whatever keeps others from going on.
                    raise _broke_off(f" No other engine went on: {error.message}") from error
                finally:
                    out.lost, out.asked_s = again.lost, again.asked_s
                    out.had, out.broke = max(again.had, Had.ANSWER), again.broke
            outcome = "broke" if out.broke is not None else "failed" if record.broken else "completed"
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        finally:
            comments.cancel()
            if goes_on.begun or not goes_on.moves:
                self._stats.count_continuation(outcome)
            else:
                record.engine, record.continued_from = first, moved_from

    def _leave(
        self, placement: Attempt, out: Outbound, connection: Answer, relay: AnswerRelay
    ) -> StreamLeaving:
        """How this stream leaves its engine: made once it is to, since few ever do."""

        def stop() -> None:
            if relay.stream is not None:
                relay.stream.hand_over = partial(self._hand_over, placement, out, connection, relay, made)

        made = StreamLeaving(lambda: self._warm(out, relay), stop)
        return made

    async def _warm(self, out: Outbound, relay: AnswerRelay) -> bool:
        """Have another engine compute what the stream has until now. Returns whether it did."""
        kept = None if relay.stream is None else relay.stream.state
        if kept is None or not kept.movable or _brings_media(out):
            return False
        tokens = len(kept.ids)
        request = as_completion(out, warming_of(kept, tokens), self._clock(), stream=False, continues=True)
        again, disagg = _as_again(out, request), self._legs.disagg()
        tokens += kept.prompt_tokens
        warmed = await self._warmer.warm(
            again, tokens, lambda attempt: self._ask_warm(attempt, again, disagg)
        )
        if disagg.distrusts_caches:
            kept.unable = "fetched"
        return warmed

    async def _ask_warm(self, placement: Attempt, out: Outbound, disagg: DisaggState) -> Answer | None:
        """Have an engine compute a prompt, or fetch what another one computes of it. None: it was not asked,
        or could not fetch that. Raises ``UpstreamError``."""
        if placement.body is None:
            return await self._ask(placement, out, self._own, None)
        answer: Answer | None = None
        try:
            if placement.prefill is not None:
                await self._legs.prefill(placement.prefill, placement.body, out, disagg, new_transfer_id())
                self._legs.check_decode(placement, out)
            placement.asked()
            answer = await self._ask(placement, out, self._own, disagg)
            if answer is not None and answer.status in REFUSALS:
                self._legs.failed(placement, out, disagg, answer.status)
            placement.check_fetched()
        except UpstreamError:
            self._legs.failed(placement, out, disagg)
            raise
        except (AgainError, NotFetchedError) as error:
            if isinstance(error, NotFetchedError):
                self._legs.not_fetched(placement, out, disagg)
            if answer is not None:
                self._own.done(answer)
            return None
        return answer

    async def _hand_over(
        self,
        placement: Attempt,
        out: Outbound,
        connection: Answer,
        relay: AnswerRelay,
        leaving: StreamLeaving,
    ) -> bool:
        """Have another engine take over a stream that its own still has, until its end. Returns whether one
        did; else the stream goes on as before. Raises ``ApiError``."""
        kept = None if relay.stream is None else relay.stream.state
        found = "" if kept is None or not kept.movable else await self._continuation(out, kept)
        if isinstance(found, str) or found[1] is None:
            return False
        goes_on, body = found
        goes_on.moves, goes_on.warmed = True, leaving.warmed

        def taken() -> None:
            self._stats.count_move("warmed" if goes_on.warmed else "cold")
            placement.moved = True
            placement.finished(None)
            # Which ends the engine's work.
            self._own.done(connection)

        goes_on.on_taken = taken
        try:
            await self._go_on_with(out, goes_on, body)
        except ApiError:
            if placement.moved:
                raise
        if not placement.moved:
            self._stats.count_move("stayed")
        return placement.moved

    def _was_poison(self, out: Outbound, engine_id: str) -> bool:
        """Whether the request was on another engine when that died."""
        deaths = self._deaths_of(out)
        if deaths is None:
            return False
        known = deaths.suspects.find(out.digest(), self._clock(), self._settings.suspect_s)
        return known is not None and (known.engine_id != engine_id or known.deaths >= _BREAKS_MAX)

    async def _continuation(
        self, out: Outbound, kept: KeptStream
    ) -> tuple[ContinuedStream, bytes | None] | str:
        """The stream to go on with and what its engine is asked, None if no token is left; a text: why it
        cannot go on (a label)."""
        model, skips = out.request.model or "", kept.plan.skips_special
        if self._planner.decode(model, kept.ids[:1], skips_special=skips) is None:
            return "tokenizer"

        def decode(ids: Sequence[int]) -> str:
            return self._planner.decode(model, ids, skips_special=skips) or ""

        parsed = kept.parsed
        tokens = len(kept.ids) if parsed else whole_tokens(kept.ids, decode)
        if tokens is None:
            return "characters"
        if not parsed and held_back(kept, tokens, decode):
            return "parser"
        stopping = None
        if kept.plan.stop.stops:
            stopping = await run_cooperatively(text_so_far(kept, tokens, decode))
            if stopping is None:
                return "characters"
        if _brings_media(out):
            return "media"
        context = out.request.context_tokens
        body = completion_of(kept, tokens, int(context) if 0 < context < math.inf else None)
        if isinstance(body, str):
            return body
        if parsed:
            return "parser" if body is None else (ParsedStream(kept, told=out.tells), body)
        return ContinuedStream(kept, tokens, stopping, told=out.tells), body

    async def _write_end(self, out: Outbound, goes_on: ContinuedStream) -> None:
        out.record.usage = goes_on.usage
        data = goes_on.over()
        out.record.bytes_out += len(data)
        if (waits := out.client.write(data, more=False)) is not None:
            await waits

    async def _place_continued(
        self, out: Outbound, goes_on: ContinuedStream, exclude: frozenset[str]
    ) -> Attempt:
        """In turn, and on an engine with room for it."""
        request, stop_comments = out.request, goes_on.on_begin
        if goes_on.warmed:
            return await self._planner.place(request, exclude=exclude)
        placement, ended = await self._turns.place(
            goes_on.usage.prompt_tokens + goes_on.usage.completion_tokens,
            lambda full: self._planner.place(request, exclude=exclude | full),
        )

        def begun() -> None:
            stop_comments()
            ended()

        goes_on.on_begin = begun
        return placement

    async def _forward(self, out: Outbound, exclude: frozenset[str] = frozenset()) -> None:
        retry_end = self._clock() + self._settings.retry_time_s_max
        # Engines that went down, or gave no connection in time, without failing this request: better than no
        # engine at all.
        left: frozenset[str] = frozenset()
        outcome: Refusal | UpstreamError | None = None
        breaks = attempt = moves = 0
        disagg: DisaggState | None = None
        carrier = out.carrier or self._own
        while attempt < self._settings.attempts_max:
            # An abandoned attempt was moved away from its engine by us, possibly after minutes: it has a
            # right to another one.
            if attempt and self._clock() >= retry_end and not _abandoned(outcome):
                break
            try:
                placement = await (
                    self._place_continued(out, out.goes_on, exclude | left)
                    if out.goes_on is not None
                    else self._place_again(out, exclude, left, disagg)
                    if disagg is not None or left or self._stats.suspects_current
                    else self._planner.place(out.request, exclude=exclude)
                )
            except ApiError as error:
                # An engine that was not asked has not answered, and one with a longer context may come back.
                # What may have ended engines is held back whatever the last one answered.
                if outcome is None or _unasked(outcome) or error.code in HELD_BACK:
                    raise
                break
            if attempt:
                self._note_retry(out.record, outcome, placement.engine_id)
            if disagg is None and placement.body is not None:
                disagg = self._legs.disagg()
            try:
                outcome = await self._attempt(placement, out, carrier, disagg)
            except AgainError as again:
                # At most once per prefill that the disagg allows, plus one.
                # Not an attempt of its own: the failure was the prefill's, and the decode engine may be used
                # again.
                await self._note_harm(out, again)
                breaks += again.harm is Harm.BROKE
                if breaks < _BREAKS_MAX and out.had is not Had.END:
                    continue
                outcome = self._not_again(out, outcome)
                break
            if outcome is None:
                return
            # Engines that are replaced one after another.
            moves += placement.drained
            attempt += not placement.drained or moves > _MOVES_MAX
            tried = frozenset((placement.engine_id,))
            spared = _abandoned(outcome) or _not_reached(outcome)
            left, exclude = (left | tried, exclude) if spared else (left, exclude | tried)
            # The engine may have acted on it: a second execution could do it twice.
            if _unrepeatable(out.request, outcome):
                break
            breaks = await self._note_break(out, placement, outcome, breaks)
            # A gateway that carries the request decides itself whether it can be sent again.
            if breaks >= _BREAKS_MAX or not carrier.may_retry:
                break
        await self._give_up(outcome, out)

    def _not_again(
        self, out: Outbound, outcome: Refusal | UpstreamError | None
    ) -> Refusal | UpstreamError | None:
        """End a request that is not placed again: the client has its error, or it broke engines."""
        if out.had is Had.END:
            return None
        self._stats.requests_quarantined += 1
        return outcome or UpstreamError("reset")

    async def _place_again(
        self, out: Outbound, exclude: frozenset[str], left: frozenset[str], disagg: DisaggState | None
    ) -> Attempt:
        """Not on an engine in ``exclude``, and on one in ``left`` only where there is no other. What may have
        ended an engine is held back before it takes a place: to ask that engine takes seconds."""
        if self._deaths is not None and self._stats.suspects_current:
            await self._deaths.check(out.digest(), self._settings.suspect_s)
        if disagg is not None:
            exclude |= disagg.failed
        try:
            return await self._planner.place(out.request, exclude=exclude | left, disagg=disagg)
        except ApiError:
            if not left:
                raise
            return await self._planner.place(out.request, exclude=exclude, disagg=disagg)

    async def _attempt(
        self, placement: Attempt, out: Outbound, carrier: Carrier, disagg: DisaggState | None
    ) -> Refusal | UpstreamError | None:
        """Have the request answered as placed. None: it has been (or the answer broke off); else why not.
        Raises ``AgainError``, and ``ApiError`` for a request that its tenant may not make."""
        prefill, body = placement.prefill, placement.body
        try:
            if self._stats.suspects_current:
                self._check_suspect(placement, out)
            # One that takes over a prompt that has been computed costs what that did.
            if out.entry is not None and (body is None or prefill is not None):
                out.entry.placed(placement.work)
            if disagg is not None and prefill is not None and body is not None:
                self._note_placed(prefill, out)
                await self._legs.prefill(prefill, body, out, disagg, new_transfer_id())
                self._legs.check_decode(placement, out)
            return await self._exchange(placement, out, carrier, disagg)
        finally:
            if out.goes_on is not None:
                out.goes_on.on_begin()
            if placement.open:
                placement.finished(None)
            if prefill is not None:
                prefill.finished(None)

    def _check_suspect(self, placement: Attempt, out: Outbound) -> None:
        """Raise ``AgainError`` for a request that may have ended an engine while it waited for its place."""
        deaths = None if out.goes_on is not None else self._deaths
        if deaths is not None and deaths.holds(out.digest(), self._settings.suspect_s):
            raise AgainError("suspected", placement.engine_id)

    def _note_placed(self, placement: Attempt, out: Outbound) -> None:
        """An engine is asked now."""
        out.asked_s = self._clock()
        record = out.record
        record.placed(
            placement.engine_id, completion=out.request.path in PROMPT_APIS, waited_s=placement.waited_s
        )
        record.why = placement.facts
        out.tells = bool(placement.client_headers)
        if out.goes_on is None:
            record.placement_facts = placement.usage_facts
        if record.trace is not None:
            placement.engine_headers += record.trace.asks(placement.engine_id, placement.facts())

    def _note_retry(
        self, record: RequestRecord, outcome: Refusal | UpstreamError | None, engine_id: str
    ) -> None:
        """Before ``record`` gets the next engine."""
        self._stats.retries += 1
        if outcome is not None and not _broke(outcome):  # that is reported elsewhere
            record.tracker.warn(
                "request retried",
                record,
                record.engine,
                engine=record.engine,
                next=engine_id,
                problem=_why(outcome),
            )

    async def _note_break(
        self, out: Outbound, placement: Attempt, outcome: Refusal | UpstreamError, breaks: int
    ) -> int:
        """How many engines it has broken now. Raises ``ApiError`` if this one died."""
        engine_id = placement.engine_id
        if not _broke(outcome):
            if isinstance(outcome, UpstreamError) and ended_with_process(placement, outcome):
                self._note_death(out, engine_id)
            return breaks
        out.record.explained = True
        self._log_break(out.request, engine_id, outcome, last=breaks + 1 >= _BREAKS_MAX)
        await self._hold_if_dead(out, engine_id)
        return breaks + 1

    def _note_death(self, out: Outbound, engine_id: str) -> None:
        """The process that had the request is gone, and perhaps of it: another engine may get it now, and a
        second death counts."""
        if (deaths := self._deaths_of(out)) is not None:
            deaths.restarted(out.digest(), engine_id, out.asked_s)

    def _deaths_of(self, out: Outbound) -> Deaths | None:
        """Return the account of engines that this request may have ended; None: it is in none."""
        return self._deaths if out.carrier is None and self._settings.suspect_s else None

    async def _note_harm(self, out: Outbound, again: AgainError) -> None:
        """Raise ``ApiError`` if an engine died of the request, and no other one may be asked now."""
        if again.harm is Harm.RESTARTED:
            self._note_death(out, again.engine_id)
        elif again.harm is not Harm.NONE:
            await self._hold_if_dead(out, again.engine_id)

    async def _hold_if_dead(self, out: Outbound, engine_id: str) -> None:
        """Before another engine is asked: raise ``ApiError`` if the one that had the request died of it, or
        may have."""
        deaths = self._deaths_of(out)
        if deaths is not None and await deaths.ended(out.digest(), engine_id, out.asked_s):
            out.record.tracker.warn("engine died", out.record, engine_id, engine=engine_id)
            raise deaths.held_back()

    def _log_break(
        self, request: InboundRequest, engine_id: str, outcome: Refusal | UpstreamError, *, last: bool
    ) -> None:
        """Count and log a request that broke an engine; ``last``: it is not given to another one."""
        self._stats.engines_broken += 1
        self._stats.requests_quarantined += last
        second = int(self._clock())
        # An engine that dies breaks with all its requests: a line for each would flood the log.
        if second != self._lines_second:
            self._lines_second, self._lines = second, 0
        self._lines += 1
        if self._lines > _BREAK_LINES_MAX:
            return
        _log.warning(
            "request broke two engines; it is not sent to another" if last else "request broke an engine",
            request_id=request.request_id.decode("latin-1"),
            engine=engine_id,
            path=request.path,
            model=request.model,
            problem=_why(outcome),
        )

    async def _give_up(self, outcome: Refusal | UpstreamError | None, out: Outbound) -> None:
        record = out.record
        if out.had is Had.END:
            return
        if isinstance(outcome, Refusal):
            if out.had is not Had.NOTHING:
                raise engine_refused(outcome.status, outcome.body)
            record.status, record.bytes_out = outcome.status, len(outcome.body)
            await answer_whole(out.client, outcome.status, outcome.fields, outcome.body)
            return
        # No outcome: every attempt ended before a connection, because the pool was full.
        reason = outcome.reason if outcome is not None else "overflow"
        if reason == "timeout":
            raise engine_timeout()
        if reason == "overflow":
            raise no_ready_engine("All connections to the engines are in use; retry shortly.")
        raise engine_unreachable()

    async def _exchange(
        self, placement: Attempt, out: Outbound, carrier: Carrier, disagg: DisaggState | None
    ) -> Refusal | UpstreamError | None:
        """Ask the engine of the client's answer, and pass that on."""
        connection: Answer | None = None
        task = out.client.task
        if task is not None and carrier.may_retry:
            # It is cancelled where the engine goes down before the first byte: another one is asked then.
            placement.awaited(task.cancel)
        try:
            if placement.body is not None:
                placement.asked()
            self._note_placed(placement, out)
            connection = await self._ask_first(placement, out, carrier, disagg)
            status = 0 if connection is None else connection.status
            if status == _BAD_REQUEST and carrier is self._own and placement.drop_order():
                refused, connection = connection, None
                self._own.done(refused)
                connection = await self._ask_without_order(placement, out, disagg)
            if connection is None:
                out.record.unseen = True
                return None
            own = placement.client_headers if placement.body is None else placement.answer_headers
            own = own if out.entry is None else (*own, *out.entry.answer_headers())
            head = read_answer_headers(connection.headers, out.head.request_id, own)
            if connection.status in _NOT_PASSED_ON:
                return await self._refuse(placement, out, connection, head, disagg)
            placement.answered(connection.status)
            await self._pass_on(placement, out, connection, head)
        except UpstreamError as error:
            self._legs.failed(placement, out, disagg, _status_of(error, out.request))
            engine_failed(placement, error, self._stats)
            return error
        except EventRefusedError as error:
            self._legs.failed(placement, out, disagg, error.status)
            return self._refused(placement, 0.0, Refusal(error.status, as_json(error.fields), error.body))
        except NotFetchedError:
            raise self._legs.not_fetched(placement, out, disagg) from None
        except asyncio.CancelledError:
            return self._moved(placement, out, disagg)
        else:
            return None
        finally:
            if connection is not None and not placement.moved:
                carrier.done(connection)

    def _ask_first(
        self, placement: Attempt, out: Outbound, carrier: Carrier, disagg: DisaggState | None
    ) -> Awaitable[Answer | None]:
        """Send the engine its body, once it has shown that it may go on with a stream for a parser."""
        if isinstance(out.goes_on, ParsedStream):
            return self._ask_compared(placement, out, carrier, disagg, out.goes_on)
        return self._ask(placement, out, carrier, disagg)

    async def _ask_compared(
        self,
        placement: Attempt,
        out: Outbound,
        carrier: Carrier,
        disagg: DisaggState | None,
        stream: ParsedStream,
    ) -> Answer | None:
        """Raises ``ApiError`` where the engine does not read the answer so far as the client has had it, and
        where it cannot be asked ``EventRefusedError`` and ``UpstreamError``."""

        async def ask(path: str, body: bytes) -> bytes:
            status, data = await self._own.whole(placement, out, path, body, _READ_TIMEOUT_S)
            if status in ABSENT:
                placement.parses_not()
            if status != _OK:
                raise EventRefusedError(status, [], data[:_TOLD_BYTES])
            return data

        if why := await stream.differs(ask):
            self._stats.count_continuation("", refused=why)
            raise _broke_off()
        placement.check_eligible()
        return await self._ask(placement, out, carrier, disagg)

    async def _pass_on(self, placement: Attempt, out: Outbound, connection: Answer, head: AnswerHead) -> None:
        """Give the client this answer, behind what it has had."""
        if out.had is not Had.NOTHING and not (head.sse and 200 <= connection.status < 300):
            raise await self._not_a_stream(placement, connection)
        relay = AnswerRelay(
            connection,
            placement,
            out.record,
            head,
            out.client,
            self._stats,
            USAGE_BYTES_MAX,
            out.carrier is None,
            out.had,
            _silence_s=self.silence_s if out.carrier is None else 0.0,
            _plan=out.plan if isinstance(out.plan, ContinuationPlan) and placement.says_ids else None,
            _goes_on=out.goes_on,
        )
        if isinstance(out.plan, ContinuationPlan) or out.goes_on is not None:
            placement.leave = partial(self._leave, placement, out, connection, relay)
        try:
            first = None
            if connection.status == _BAD_REQUEST and out.carrier is None:
                first = await self._not_too_long(placement, connection, head)
            if (rest := relay.run(first)) is not None:
                await rest
        finally:
            placement.leave = None
            if placement.leaving is not None:
                placement.leaving.end()
            if relay.stream is not None and not placement.moved:
                out.had = relay.stream.had
                out.broke = relay.stream.state if relay.stream.broke else None
            if out.record.broken and not placement.says_ids and isinstance(out.plan, ContinuationPlan):
                out.plan = "ids"
            if (out.record.broken or out.broke is not None) and placement.failed not in ("", "aborted"):
                out.lost = placement.engine_id
                if placement.died:
                    self._note_death(out, out.lost)
                    out.lost = ""

    async def _not_too_long(self, placement: Attempt, connection: Answer, head: AnswerHead) -> bytes:
        """The beginning of a refusal, to be passed on. Raises ``EventRefusedError`` for a prompt that is too
        long for this engine while another one of its model has a longer context: the tokens of a text are not
        always known here, and an engine may have restarted with another length."""
        first = await connection.read()
        while not connection.at_eof and len(first) < _TOLD_BYTES:
            first += await connection.read()
        if placement.body is None and _TOO_LONG.search(first) is not None and placement.needs_longer():
            body = first + await self._read_refusal(connection)
            raise EventRefusedError(_BAD_REQUEST, head.fields, body)
        return first

    async def _not_a_stream(self, placement: Attempt, connection: Answer) -> ApiError:
        """The error for an answer that cannot go on in the stream that has begun."""
        body = await self._read_refusal(connection)
        placement.first_byte(connection.status)
        placement.finished(None)
        return engine_refused(connection.status, body)

    async def _refuse(
        self,
        placement: Attempt,
        out: Outbound,
        connection: Answer,
        head: AnswerHead,
        disagg: DisaggState | None,
    ) -> Refusal:
        """End an attempt whose answer is not passed on: an error of the engine, or a redirect, for which
        ``ApiError`` is raised."""
        if connection.status in REDIRECTS:
            placement.answered(connection.status)
            raise engine_redirects(out.request.path, connection.status)
        self._legs.failed(placement, out, disagg, connection.status)
        body = await self._read_refusal(connection)
        wait_s = retry_after_s(head.retry_after, self._settings.retry_after_s_max)
        return self._refused(placement, wait_s, Refusal(connection.status, head.fields, body))

    def _moved(self, placement: Attempt, out: Outbound, disagg: DisaggState | None) -> UpstreamError:
        """Its engine went down; raises the ``CancelledError`` that is being handled where the client left."""
        if (error := abandoned(placement, self._stats)) is None:
            self._stats.clients_left_unanswered += placement.left_unanswered()
            raise  # noqa: PLE0704  # called while it is handled
        self._legs.failed(placement, out, disagg)
        engine_failed(placement, error, self._stats)
        return error

    def _refused(self, placement: Attempt, wait_s: float, refusal: Refusal) -> Refusal:
        if placement.refused(refusal.status, wait_s):
            self._stats.count_failure("status")
        return refusal

    def _ask(
        self, placement: Attempt, out: Outbound, carrier: Carrier, disagg: DisaggState | None
    ) -> Awaitable[Answer | None]:
        """Send the engine its body: the client's, or another one instead."""
        settings = self._settings
        timeout_s = settings.stream_head_timeout_s if out.request.stream else settings.first_byte_timeout_s
        if disagg is not None and placement.body is not None:
            return self._legs.fetch(placement, placement.body, out, disagg, timeout_s)
        if placement.kv_source is not None:
            # The engine from which a part of the prompt is fetched. A name of its own per attempt: engines
            # forget a request's transfer by name when it ends
            # (vllm/v1/kv_offload/tiering/p2p/manager.py ``on_request_finished``, 0.32).
            steps = placement.kv_source.asked_with(new_transfer_id(), placement.retention)
        elif disagg is not None and disagg.distrusts_caches:
            # A salt that no other request has.
            steps = with_value(out.request.body, b"cache_salt", new_transfer_id(), adds=True)
        elif placement.retention and placement.sent_body is None:
            # A retention hint alone: the engine transfers nothing.
            steps = with_first(out.request.body, b"kv_transfer_params", hint_params(placement.retention))
        else:
            return carrier.ask(placement, out, timeout_s)
        return self._ask_changed(placement, out, carrier, timeout_s, steps)

    async def _ask_changed(
        self,
        placement: Attempt,
        out: Outbound,
        carrier: Carrier,
        timeout_s: float,
        steps: Generator[None, None, bytes],
    ) -> Answer | None:
        """With the body that the steps make of the client's."""
        placement.sent_body = await run_cooperatively(steps)
        placement.check_eligible()
        return await carrier.ask(placement, out, timeout_s)

    async def _ask_without_order(
        self, placement: Attempt, out: Outbound, disagg: DisaggState | None
    ) -> Answer | None:
        """Ask an engine that refused the request without the priority that it was given here: vLLM before V1
        takes none but 0 unless it schedules by priority (vllm/engine/llm_engine.py, 0.8)."""
        answer = await self._ask(placement, out, self._own, disagg)
        if answer is not None and answer.status != _BAD_REQUEST:
            placement.order_refused()
            self._stats.priorities_refused += 1
        return answer

    async def _read_refusal(self, connection: Answer) -> bytes:
        """The body of an error answer. One that is too long to keep counts as no answer."""
        body = b""
        while data := await connection.read():
            body += data
            if len(body) > _KEPT_ANSWER_BYTES_MAX:
                raise UpstreamError("reset")
        return body


# Between comments to the client of a stream that waits for another engine.
_COMMENT_EVERY_S = 10.0
_COMMENT = b": waiting\n\n"


def _as_again(out: Outbound, request: InboundRequest, goes_on: ContinuedStream | None = None) -> Outbound:
    """The request to another engine, for a stream of which the client has had a part."""
    return msgspec.structs.replace(
        out,
        request=request,
        target=COMPLETION.encode(),
        entry=None,
        had=Had.COMMENTS,
        plan="",
        broke=None,
        goes_on=goes_on,
        _digest=out.digest(),
    )


def _brings_media(out: Outbound) -> bool:
    """Whether there is more in its prompt than tokens."""
    facts = out.record.placement_facts()
    if facts is not None and facts.tokens is not None:
        return bool(facts.extras.multimodal)
    return has_media(out.request.body)


def _broke_off(why: str = "") -> ApiError:
    return stream_broken(f"The engine broke off before its answer was complete.{why}")


def _abandoned(outcome: Refusal | UpstreamError | None) -> bool:
    return isinstance(outcome, UpstreamError) and outcome.abandoned


def _unasked(outcome: Refusal | UpstreamError) -> bool:
    """Whether the engine was given up before the request was sent, or is not the one that it needs."""
    if isinstance(outcome, Refusal):
        return outcome.status == _BAD_REQUEST
    return _abandoned(outcome) and not outcome.sent


def _not_reached(outcome: Refusal | UpstreamError) -> bool:
    """Whether no connection came about in time: the engine's queue of connections is full, or this process
    was late. Linux sends the next SYN after 1 s, then 2 s: a new connection asks sooner."""
    return isinstance(outcome, UpstreamError) and outcome.reason == "timeout" and not outcome.sent


def _why(outcome: Refusal | UpstreamError) -> str:
    if _abandoned(outcome):
        return "the engine went down"
    return outcome.reason if isinstance(outcome, UpstreamError) else f"status {outcome.status}"


def _status_of(error: UpstreamError, request: InboundRequest) -> int:
    """The status that an engine means by breaking off, 0 for none: vLLM fails to write the error of a
    Responses stream, and cuts the connection (entrypoints/openai/responses/serving.py, 0.32)."""
    cut = error.reason == "broken_stream" and request.stream and request.path == RESPONSES
    return BROKEN if cut else 0


def _unrepeatable(request: InboundRequest, outcome: Refusal | UpstreamError) -> bool:
    """Whether the engine may have taken it, and it must not be sent twice."""
    sent = not isinstance(outcome, UpstreamError) or outcome.sent
    return sent and request.method not in REPEATABLE


def _broke(outcome: Refusal | UpstreamError) -> bool:
    """Whether the request may have broken the engine: it was there, and no answer came of it."""
    if isinstance(outcome, Refusal):
        return outcome.status in BROKEN_STATUSES
    return broke(outcome)
