"""A circuit breaker per engine: pure, on a clock of its caller, with quick recovery.

An engine is left out for one of three reasons, each with its own end:

- **Failures.** Open after ``failures_max`` connection-level failures in a row, or when at least ``share_max``
  of no fewer than ``window_min`` recent outcomes failed. One probe at a time; the first success closes.
- **Retry-After.** Applied once ``refusals_min`` different requests were refused and none has succeeded
  lately; for one client if all were its own. Ends with its time or with the first success.
- **Silence.** Clients gave up waiting for a first byte, or a streamed request has waited for
  ``silent_s_max`` beyond twice the expected time, while the engine gave no answers. One probe each
  ``silent_probe_s``; ends with the first byte of any answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec


class BreakerSettings(msgspec.Struct, frozen=True):
    """Numbers of the rules above."""

    failures_max: int = 3
    open_s_first: float = 0.5
    open_s_max: float = 10.0
    probe_s: float = 1.0
    """A probe without outcome for this long (a long generation) allows the next one."""
    share_max: float = 0.5
    window_s: float = 10.0
    window_min: int = 20
    refusals_min: int = 2
    pause_success_s: float = 2.0
    """A success this recent overrules Retry-After."""
    pause_clients_max: int = 256
    """Refused clients that are remembered; beyond it all count as refused."""
    pause_probe_s: float = 1.0
    """From Retry-After to the first probe; each refused probe doubles it up to ``open_s_max``."""
    give_up_s: float = 0.5
    """A client that leaves sooner, beyond twice the expected time, has not waited long enough to count."""
    give_ups_min: int = 2
    """A streamed request counts for as many: its first byte comes with the first token."""
    silent_s_max: float = 15.0
    """A streamed request that waits longer, beyond twice the expected time, shows a silent engine."""
    silent_probe_s: float = 10.0
    overdue_s: float = 1.0
    """A streamed request that waits longer, beyond twice the expected time, has the engine polled."""


_DEFAULTS = BreakerSettings()


class RetryAfterPause:
    """The pause that an engine asked for (Retry-After), and to whom it applies. Clients are any numbers that
    tell them apart."""

    __slots__ = ("_clients", "_probe_at", "_probe_s", "_refused", "_settings", "_success_at", "until")

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        # Different requests since the last success.
        self._refused: set[int] = set()
        self._clients: set[int] = set()  # and whose they were
        self._success_at = -math.inf
        self._probe_at = 0.0
        self._probe_s = settings.pause_probe_s
        self.until = 0.0

    def allows(self, now: float, client: int) -> bool:
        if now >= self.until or not self._applies_to(client):
            return True
        # A client that sends one refused request after the other must not use up the probes of all others.
        waits_s = (
            self._settings.pause_probe_s if self._was_refused(client) and len(self._clients) > 1 else 0.0
        )
        return now >= self._probe_at + waits_s

    def _applies_to(self, client: int) -> bool:
        # Refusals of one client alone (its rate limit at the engine, say) must not lock the engine for all
        # others.
        return len(self._clients) > 1 or client in self._clients

    def _was_refused(self, client: int) -> bool:
        return client in self._clients or len(self._clients) >= self._settings.pause_clients_max

    def begin(self, now: float, client: int) -> None:
        if now < self.until and self._applies_to(client):
            self._probe_at = now + self._probe_s
            # Probes thin out while they are refused: the engine asked for a pause.
            self._probe_s = min(2 * self._probe_s, self._settings.open_s_max)

    def refused(self, request: int, until: float, now: float, client: int) -> None:
        settings = self._settings
        if len(self._refused) < settings.refusals_min:
            self._refused.add(request)
        if len(self._clients) < settings.pause_clients_max:
            self._clients.add(client)
        # One request may be refused for reasons of its own, and an engine that answers others is not
        # overloaded.
        if len(self._refused) < settings.refusals_min or now - self._success_at < settings.pause_success_s:
            return
        if now >= self.until:
            self._probe_s = settings.pause_probe_s
            self._probe_at = now + self._probe_s
        self.until = max(self.until, until)

    def succeeded(self, now: float) -> None:
        self._success_at = now
        self.until = 0.0
        if self._refused:
            self._refused.clear()
            self._clients.clear()


class Silence:
    """Whether an engine gives no answers although it gets requests."""

    __slots__ = ("_asked_at", "_given_up_at", "_heard_at", "_probe_at", "_settings", "due_at", "give_ups")

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        # The first streamed request since an answer.
        self._asked_at = math.inf
        self.due_at = math.inf
        """When one of the streamed requests since an answer has waited too long."""
        self._heard_at = -math.inf
        self.give_ups = 0
        self._given_up_at = math.inf  # there were enough of them
        self._probe_at = 0.0

    def holds(self, now: float) -> bool:
        """The engine counts as silent."""
        settings = self._settings
        return self.give_ups >= settings.give_ups_min or now >= self.due_at

    def began_at(self, now: float) -> float:
        """Since when it holds; infinite: it does not."""
        return min(self._given_up_at, self.due_at) if self.holds(now) else math.inf

    def allows(self, now: float) -> bool:
        return now >= self._probe_at or not self.holds(now)

    def begin(self, now: float, *, streams: bool, expected_s: float) -> None:
        if self.holds(now):
            self._probe_at = now + self._settings.silent_probe_s
        if streams:
            self._asked_at = min(self._asked_at, now)
            self.due_at = min(self.due_at, now + self._settings.silent_s_max + 2 * expected_s)

    def unseen(self, asked_at: float) -> None:
        """Forget the request that was sent then: no result of it will be reported."""
        # Only the oldest request sets ``due_at``: with it gone, the next streamed request starts the time
        # again.
        if self._asked_at == asked_at:
            self._asked_at = self.due_at = math.inf

    def left_unanswered(self, asked_at: float, now: float, *, expected_s: float, streams: bool) -> bool:
        """A client left without a byte. Returns whether that is evidence."""
        waited_s = now - asked_at
        # The engine answered somebody meanwhile, or the client left too early to prove anything.
        if self._heard_at >= asked_at or waited_s < self._settings.give_up_s + 2 * expected_s:
            return False
        # A stream shows its first token at once; another answer shows nothing before its end, so one give-up
        # proves less.
        self.give_ups += self._settings.give_ups_min if streams else 1
        if self.give_ups >= self._settings.give_ups_min:
            self._given_up_at = min(self._given_up_at, now)
        self._probe_at = now + self._settings.silent_probe_s
        return True

    def answered_at(self, now: float) -> None:
        self._heard_at = now
        self._asked_at = self.due_at = self._given_up_at = math.inf
        self.give_ups = 0


class Breaker:
    """State of one engine. Times are seconds on one monotonic clock and must not decrease."""

    def __init__(self, settings: BreakerSettings = _DEFAULTS) -> None:
        self._settings = settings
        self._in_a_row = 0
        self._open_s = 0.0  # 0: closed
        self._opened_at = math.inf  # when it was closed last
        self._open_until = 0.0
        self._probing = False
        self._window_end = 0.0
        # ok, failed in this half of the window.
        self._recent = [0, 0]
        self._before = [0, 0]  # and in the half before it
        self._pause = RetryAfterPause(settings)
        self._silence = Silence(settings)
        self.free_until = math.inf
        """Before this time ``allows`` is true unless an event is reported: every decision asks for
        every engine. Infinite: nothing at all speaks against the engine."""
        self.on_change: Callable[[float], None] = lambda free_until: None
        """Called with each new ``free_until``."""

    def _update(self) -> None:
        paused, silence = self._pause.until > 0.0, self._silence
        # Computed on events, so that the check per engine and decision is one comparison.
        if self._open_s or paused or silence.give_ups:
            self.free_until = -math.inf
        else:
            self.free_until = silence.due_at
        self.on_change(self.free_until)

    @property
    def closed(self) -> bool:
        """No failure keeps the engine out (Retry-After or silence still may)."""
        return self._open_s == 0.0

    def allows(self, now: float, client: int = 0) -> bool:
        """May this engine be chosen now, for this client? No side effect."""
        if self._open_s and now < self._open_until:
            return False
        if now < self._pause.until and not self._pause.allows(now, client):
            return False
        silence = self._silence
        return (not silence.give_ups and silence.due_at == math.inf) or silence.allows(now)

    def overdue(self, now: float) -> bool:
        """Whether a streamed request waits longer than expected while the engine gives no answers."""
        settings = self._settings
        return now >= self._silence.due_at - settings.silent_s_max + settings.overdue_s

    def lost(self, asked_at: float, now: float, *, expected_s: float) -> bool:
        """Whether a request sent then, whose first byte should take ``expected_s``, is lost: since
        before the engine was left out, or, as a probe, for as long as shows a silent engine."""
        # A request sent before the engine was excluded is stuck with it. A later one is a probe, which gets
        # the full time.
        out_since = min(self._opened_at, self._silence.began_at(now))
        if out_since == math.inf:
            return False
        return asked_at <= out_since or now >= asked_at + self._settings.silent_s_max + 2 * expected_s

    def waits_s(self, now: float, client: int = 0) -> float:
        """Seconds for which the engine itself asked (``refused``) to be left alone by this client."""
        return 0.0 if self._pause.allows(now, client) else self._pause.until - now

    def begin(self, now: float, *, streams: bool = False, expected_s: float = 0.0, client: int = 0) -> None:
        """A request goes there, whose first byte should take ``expected_s``: in the half-open state it is the
        only probe for ``probe_s``."""
        if self._open_s:
            self._probing = True
            self._open_until = max(self._open_until, now + self._settings.probe_s)
        self._pause.begin(now, client)
        self._silence.begin(now, streams=streams, expected_s=expected_s)
        if streams:
            self._update()

    def unseen(self, asked_at: float) -> None:
        """The answer to the request that went there then will not be seen: no evidence of anything."""
        self._silence.unseen(asked_at)
        self._update()

    def record(self, ok: bool, now: float, *, connection: bool = True) -> None:
        """An outcome. ``connection``: a failure of the connection, not an error status."""
        if now >= self._window_end:
            self._roll(now)
        self._recent[0 if ok else 1] += 1
        if ok:
            self._in_a_row = 0
            if self._open_s:
                self._close()
            return
        # Error statuses count for the share only: one poisonous request that every engine answers with 500
        # must not exclude the fleet.
        if connection:
            self._in_a_row += 1
        if not self.closed:
            # Requests from before it opened may all fail together and say nothing new; a probe does.
            if self._probing:
                self._open(now, min(self._open_s * 2, self._settings.open_s_max))
        elif self._in_a_row >= self._settings.failures_max or self._share_too_high():
            self._open(now, self._settings.open_s_first)

    def taken(self, now: float) -> None:
        """A request was not refused: the head of its answer says success, which proves nothing more."""
        self._pause.succeeded(now)
        if self.free_until != math.inf:
            self._update()

    def refused(self, request: int, wait_s: float, now: float, client: int = 0) -> None:
        """The engine refused this client's request (any numbers that tell them apart) and asked to be left
        alone for ``wait_s``."""
        self._pause.refused(request, now + wait_s, now, client)
        self._update()

    def answered_at(self, now: float) -> None:
        """The first byte of an answer came."""
        self._silence.answered_at(now)
        if self.free_until != math.inf:
            self._update()

    def left_unanswered(self, asked_at: float, now: float, *, expected_s: float, streams: bool) -> bool:
        """The client of a request begun at ``asked_at`` left without a byte, where the first one should have
        taken ``expected_s``. Returns whether that counts against the engine."""
        counts = self._silence.left_unanswered(asked_at, now, expected_s=expected_s, streams=streams)
        self._update()
        return counts

    def _open(self, now: float, seconds: float) -> None:
        # Kept over failed probes: requests sent between them wait without a chance as well.
        self._opened_at = min(self._opened_at, now)
        self._probing = False
        self._open_s = seconds
        self._open_until = now + seconds
        self._update()

    def _close(self) -> None:
        self._probing = False
        self._open_s = 0.0
        self._opened_at = math.inf
        self._recent = [0, 0]
        self._before = [0, 0]
        self._update()

    def _roll(self, now: float) -> None:
        # Two halves instead of a list of outcomes: constant memory, and the window is exact to a half.
        half = self._settings.window_s / 2
        self._before = self._recent if now < self._window_end + half else [0, 0]
        self._recent = [0, 0]
        self._window_end = now + half

    def _share_too_high(self) -> bool:
        failed = self._recent[1] + self._before[1]
        total = failed + self._recent[0] + self._before[0]
        return total >= self._settings.window_min and failed >= self._settings.share_max * total
