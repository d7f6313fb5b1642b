"""One request on one engine, from the choice until its end: what the engine's breaker and its accounts are
told.

The proxy reports what happens; the placement extends this with accounts of its own (``_begun``,
``_ended``). Invariants: it ends exactly once, whatever is reported and how often, and what is reported after
the end changes nothing but the breaker."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, Final, Protocol

import xxhash

from kvatlas.router.admission.claims import ENGINE_PRIORITY
from kvatlas.router.observe.usage import PlacementFacts
from kvatlas.router.openai.request import InboundRequest, Usage
from kvatlas.router.openai.work import NO_WORK, Work
from kvatlas.router.pd.bodies import SplitBody
from kvatlas.router.pd.handoff import Handoff, NotFetchedError
from kvatlas.router.pd.transfer import KvSource
from kvatlas.router.proxy.breaker import Breaker
from kvatlas.router.proxy.kept_stream import KeptStream

# Refusals that say nothing against an engine: it has enough to do, or too short a context.
_NO_FAULTS: Final = frozenset({400, 429})
Fields = tuple[tuple[bytes, bytes], ...]


class Attempt:
    """``engine_headers`` are added to the forwarded request, ``client_headers`` to the answer.
    ``expected_s``: seconds that the engine should need until its first token. ``now``: monotonic seconds."""

    # What few attempts have is the class's until it is set: each request makes one.
    open = True
    """It has not ended."""
    failed = ""
    """Why it ended, if it failed: one of ``kvatlas.router.openai.request.FAILURES``."""
    body: SplitBody | None = None
    """Of a request that this engine takes over after another one has computed its prompt."""
    retention = b""
    """Retention hint for the engine's connector, as JSON; empty: none."""
    sent_body: bytes | None = None
    """Body for this engine instead of the client's."""
    handoff: Handoff | None = None
    """Request that the engine has received."""
    kv_source: KvSource | None = None
    """Engine from which this one is to fetch a part of the prompt."""
    prefill: Attempt | None = None
    """That other engine, which is to be asked first; None: it has been."""
    version: str | None = None
    """Version of an engine that computes prompts for others."""
    abandoned = False
    """Its engine went down before the first byte, and another one can be asked."""
    drained = False
    """It was taken from an engine that was to end, which says nothing of either."""
    blameless = False
    """Its end says nothing of the engine: another process runs there now, or it was not asked."""
    died = False
    """The process that had it ended, or answers no polls any more."""
    kept: KeptStream | None = None
    """The state of its stream, with which another engine may go on."""
    tokens_before = 0
    """Tokens of its answer that other engines generated."""
    leave: Callable[[], Leaving] | None = None
    """Makes ``leaving``; None: its stream does not leave an engine that ends."""
    leaving: Leaving | None = None
    """How it leaves; None: it was not to, until now."""
    moved = False
    """It has left, and its connection is given back."""
    watched = False
    """Its answer must be seen, since more than this rests on it."""
    _heard = _works = False

    def __init__(
        self,
        engine_id: str,
        base_url: str,
        breaker: Breaker,
        request: InboundRequest,
        *,
        now: Callable[[], float],
        expected_s: float = 0.0,
        work: Work = NO_WORK,
        engine_headers: Fields = (),
        client_headers: Fields = (),
        waited_s: float = 0.0,
        later: bool = False,
    ) -> None:
        self.engine_id = engine_id
        self.base_url = base_url
        """``http://host:port`` without a trailing slash."""
        self.request = request
        self.engine_headers = engine_headers
        self.client_headers = client_headers
        self.expected_s = expected_s
        self.work = work
        """Work that the engine should have with it."""
        self.waited_s = waited_s
        """Seconds that it waited in the router for an engine with room."""
        self.now = now
        self._breaker = breaker
        self.asked_s = now()
        if not later and (request.stream or breaker.free_until != math.inf):
            self.asked()

    @property
    def says_ids(self) -> bool:
        """Whether its engine is known to say the ids of the tokens of a stream, if it is asked."""
        return False

    def asked(self) -> None:
        """Note that the engine is asked now; for an attempt made to be asked ``later``."""
        self.asked_s = self.now()
        request, breaker = self.request, self._breaker
        # Otherwise there is nothing to be probed.
        if request.stream or breaker.free_until != math.inf:
            breaker.begin(
                self.asked_s, streams=request.stream, expected_s=self.expected_s, client=request.client
            )

    @property
    def answer_headers(self) -> Fields:
        """Fields to add to the answer, once its head has come."""
        return self.client_headers

    def drop_order(self) -> bool:
        """Ask without the priority that the engine was given. Returns whether it was given one."""
        fields = tuple(field for field in self.engine_headers if field[0] != ENGINE_PRIORITY)
        dropped = len(fields) < len(self.engine_headers)
        self.engine_headers = fields
        return dropped

    def order_refused(self) -> None:
        """The engine refuses any priority: it takes without one what it refused with it."""

    def parses_not(self) -> None:
        """The engine does not read the ids of chats."""

    def facts(self) -> dict[str, Any]:
        """Why this engine, for a trace: attribute -> value."""
        return {}

    def usage_facts(self) -> PlacementFacts:
        """Facts known when it was placed, for its usage record."""
        return PlacementFacts(prefill_engine="" if self.handoff is None else self.handoff.source)

    def next_best(self, count: int) -> tuple[str, ...]:
        """Base URLs of up to ``count`` engines that would have been chosen after this one, in order."""
        return ()

    def unseen(self, ended: Callable[[], None]) -> float:
        """The answer will not be seen. Returns after how many seconds it should be over; ``ended`` is called
        where that is known sooner."""
        self._breaker.unseen(self.asked_s)
        return 0.0

    def needs_longer(self) -> bool:
        """The engine refused the request as too long. Returns whether another one has a longer context; it is
        then placed on one of these."""
        return False

    def check_eligible(self) -> None:
        """Raises ``UpstreamError`` if its engine may not get the request any more; to be called after each
        wait on the way to it."""

    def awaited(self, cancel: Callable[[], object]) -> None:
        """The first byte is waited for; ``cancel`` ends that, where the engine goes down or restarts
        meanwhile."""

    def arrived(self, answer: Answer | None = None) -> None:
        """The first bytes are there, or nothing more is waited for. ``answer``: it comes, and ends where the
        engine turns out to have been restarted meanwhile."""

    def answered(self, status: int) -> None:
        """The engine gave a head that is no error of its own. One of success is no answer yet: an engine that
        breaks every answer behind it works for no client."""
        if 200 <= status < 300:
            self._breaker.taken(self.now())
        else:
            self._succeeded(self.now())

    def named(self, *, obeyed: bool) -> None:
        """The answer is a response; ``obeyed``: it has the id that the router chose for it."""

    def first_byte(self, status: int) -> None:
        """The first byte of its body came, of a stream the first event: the engine works."""
        if not self._heard:
            now = self.now()
            self._heard = True
            self._breaker.answered_at(now)
            if self.request.stream and 200 <= status < 300:
                self._succeeded(now)
            if self.open and 200 <= status < 300:
                self._begun(now)

    def streamed(self, events: int) -> None:
        """Note events of the answer that came: about one for each token."""

    def rest_s(self) -> float:
        """Return the predicted seconds until the end of its answer, which has begun."""
        return math.inf

    def left_unanswered(self) -> bool:
        """The client left. Returns whether that counts against the engine, which has given no answers."""
        if self._heard or not self.open:
            return False
        return self._breaker.left_unanswered(
            self.asked_s, self.now(), expected_s=self.expected_s, streams=self.request.stream
        )

    def refused(self, status: int, wait_s: float) -> bool:
        """The engine answered with an error of its own; it asked to be left alone for ``wait_s``. Returns
        whether that ended the attempt."""
        now = self.now()
        self._breaker.record(status in _NO_FAULTS, now, connection=False)
        if wait_s > 0:
            request = self.request
            self._breaker.refused(xxhash.xxh3_64_intdigest(request.body), wait_s, now, request.client)
        return self._end("status")

    def fetch_failed(self) -> bool:
        """The engine could not fetch what another one had computed, which says little of it."""
        return self._end("status")

    def check_fetched(self) -> None:
        """The answer begins. Raises ``NotFetchedError`` where the lease on what it is made of has ended."""
        held = self.handoff
        if held is not None and self.now() >= held.lease_end_s:
            raise NotFetchedError

    def corrected(self, usage: Usage | None) -> Usage | None:
        """Return the usage that the answer reports, with the hit of the engine that computed the prompt:
        connectors count what they fetch as cached."""
        held = self.handoff
        if usage is not None and held is not None and held.cached_tokens is not None:
            usage.cached_tokens = held.cached_tokens
        return usage

    def handed_over(self, gap_s: float) -> None:
        """Note that the engine learns of blocks that another one has held for it for this long."""

    def nothing_held(self) -> None:
        """The engine was to keep a prompt for another one, and has no connector for that."""

    def broke(self, reason: str) -> bool:
        """The connection failed, for one of ``kvatlas.router.openai.request.FAILURES``, or could not be had
        within our own limit (``overflow``). Returns whether that ended the attempt."""
        if reason == "overflow":
            return self._end("refused")
        if self.blameless:
            return self._end(reason)
        self._breaker.record(False, self.now())
        return self._end(reason)

    def finished(self, usage: Usage | None) -> None:
        """The answer ended (also when the client went away: ``usage`` is None then)."""
        if self.open:
            if self._heard:
                self._succeeded(self.now())
            self.open = False
            self._ended(usage, "")

    def _succeeded(self, now: float) -> None:
        """Its first token came, or its end: once."""
        if not self._works:
            self._works = True
            self._breaker.record(True, now)

    def _end(self, failed: str) -> bool:
        was_open, self.open = self.open, False
        if was_open:
            self.failed = failed
            self._ended(None, failed)
        return was_open

    def _begun(self, now: float) -> None:
        """The first byte of an answer of success came: of a stream, the prefill is over."""

    def _ended(self, usage: Usage | None, failed: str) -> None:
        """The end, once; ``failed`` is one of ``kvatlas.router.openai.request.FAILURES``, or "" where it did
        not fail."""


class Leaving(Protocol):
    """How a stream leaves an engine that ends: another one computes what it has, and takes over then."""

    @property
    def warms(self) -> bool:
        """That is being computed."""

    def warm(self) -> None:
        """Have it computed, and leave then."""

    def now(self) -> None:
        """Leave at the next event."""

    def end(self) -> None:
        """The stream ended, or leaves."""


class Had(IntEnum):
    """The part of its answer that the client has had."""

    NOTHING = 0
    COMMENTS = 1
    """The head of an event stream, and comments: any engine may go on."""
    ANSWER = 2
    """A part of one engine's answer."""
    END = 3
    """The end of it, which is an error."""


class Answer(Protocol):
    """An engine's answer while it comes: status and header fields first, then ``read`` until ``at_eof``."""

    status: int
    headers: list[tuple[bytes, bytes]]
    complete: bool
    """All of it has come."""
    heard_s: float
    """When something of it came last (monotonic seconds)."""

    @property
    def at_eof(self) -> bool:
        """Everything has been read."""

    def read_nowait(self) -> bytes | None:
        """All that has come; None: nothing yet."""

    def next_event(self, step: Callable[[bytes], bool] | None = None) -> Awaitable[None]:
        """Return an awaitable of the next event, for use when ``read_nowait`` returned None.

        ``step`` may get the data that comes instead, until it returns False or raises.
        """

    async def read(self) -> bytes:
        """At least one byte of the body; ``b""`` at its end. Raises ``UpstreamError``."""

    def lose(self, since_s: float) -> bool:
        """Fail it as a lost connection does, if nothing came of it since then; returns whether it did."""

    def kept_alive(self) -> None:
        """Note that the last piece was no part of an answer: the time-out of the wait for one goes on."""
