"""Use of tenants at other processes: workers of one router and replicas alike.

Each sends totals since their start, numbered by
``beat``; the increase counts here, so a later message replaces a lost one, and one that comes twice or late
changes nothing. ``active`` is that of the newest message. A process seen for the first time, or again after a
silence, is not charged at once: then a tenant has no more left here than there. Messages are untrusted. A
total that falls or is out of bounds is refused and counted; a charge takes a bucket no deeper into debt than
one period, a refund gives back no more than was taken.

Invariant: for each process the state is that of the newest message since its start; one that ended, is silent
for ``SILENCE_S`` or was replaced has no active requests. Pure; ``now`` is monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Annotated, Protocol

import msgspec

SILENCE_S = 5.0
REMEMBERED_S = 300.0
"""How long the last message of a silent process is known by its number; a field in Redis goes sooner."""
TENANTS_MAX = 4096
"""In one message."""
PROCESSES_MAX = 1024
_TOTAL_MAX = 2**53
_ACTIVE_MAX = 2**20

_Total = Annotated[int, msgspec.Meta(ge=0, le=_TOTAL_MAX)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=_TOTAL_MAX)]


class Use(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tenant at one process: totals since the start, requests ``active`` now, and what its buckets lack
    of being full, at most one period's worth."""

    requests: _Total = 0
    requests_refunded: _Total = 0
    tokens: _Total = 0
    tokens_refunded: _Total = 0
    active: Annotated[int, msgspec.Meta(ge=0, le=_ACTIVE_MAX)] = 0
    requests_used: _Share = 0.0
    tokens_used: _Share = 0.0

    @property
    def plausible(self) -> bool:
        """No more is refunded than was charged, and all is finite."""
        whole = math.isfinite(self.requests_used) and math.isfinite(self.tokens_used)
        return whole and self.requests_refunded <= self.requests and self.tokens_refunded <= self.tokens

    def fell(self, before: Use) -> bool:
        """Whether a total is lower than it was."""
        totals = ("requests", "requests_refunded", "tokens", "tokens_refunded")
        return any(getattr(self, name) < getattr(before, name) for name in totals)


NO_USE = Use()


class Uses(msgspec.Struct, array_like=True, frozen=True):
    """Message of one process. ``life`` grows with each start, ``beat`` with each message; ``whole``: every
    tenant that has used anything is in it."""

    life: Annotated[int, msgspec.Meta(ge=0)]
    beat: _Total
    whole: bool
    tenants: Annotated[dict[str, Use], msgspec.Meta(max_length=TENANTS_MAX)] = {}


class LimitKeeper(Protocol):
    """Where tenants' limits are kept."""

    def used_elsewhere(self, other: Hashable, tenant: str, before: Use | None, use: Use) -> bool:
        """Count how far ``use`` is beyond ``before``; None: be no better off than there. False: refused."""

    def forget_other(self, other: Hashable) -> None:
        """A process has no active requests any more, for any tenant."""

    def knows(self, tenant: str) -> bool:
        """Whether there is such a tenant."""


class _Known(msgspec.Struct):
    """One process, as heard."""

    life: int
    at_s: float
    beat: int = -1
    whole_beat: int | None = None
    """The first message that had every tenant: who is missing there had used nothing."""
    uses: dict[str, tuple[int, Use]] = {}
    """By tenant: the beat and what it uses."""
    silent: bool = False
    late_beat: int = _TOTAL_MAX
    """Of a message that came in the silence, and may have been written before it."""


class OthersUse:
    """All other processes of one kind. ``refused`` is called for each value that is refused."""

    def __init__(self, ledger: LimitKeeper, refused: Callable[[], None]) -> None:
        self._ledger = ledger
        self._refused = refused
        self._known: dict[Hashable, _Known] = {}

    def receive(self, other: Hashable, uses: Uses, now: float) -> None:
        """A message, in whatever order it comes."""
        known = self._life_of(other, uses, now)
        if known is None:
            return
        if uses.beat > known.beat:
            known.beat, known.at_s = uses.beat, now
        for tenant, use in uses.tenants.items():
            if self._ledger.knows(tenant):
                self._take(other, known, uses.beat, tenant, use)
        if uses.whole:
            known.whole_beat = uses.beat if known.whole_beat is None else min(uses.beat, known.whole_beat)

    def age(self, now: float) -> None:
        """Time has passed without a message, perhaps."""
        for other, known in list(self._known.items()):
            if now - known.at_s > REMEMBERED_S:
                self.forget(other)
            elif now - known.at_s > SILENCE_S and not known.silent:
                known.silent, known.whole_beat = True, None
                known.uses.clear()
                self._ledger.forget_other(other)

    def keep(self, others: Collection[Hashable]) -> None:
        """There are no others than these. Use at the missing ones is remembered for as long as that of silent
        ones: their place of exchange may have lost everything."""
        for other in self._known.keys() - others:
            self._ledger.forget_other(other)

    def forget(self, other: Hashable) -> None:
        """It ended, or nothing is known of it any more."""
        if self._known.pop(other, None) is not None:
            self._ledger.forget_other(other)

    def totals(self) -> Mapping[Hashable, Mapping[str, Use]]:
        """The totals that count now, by process and tenant."""
        return {
            other: {tenant: use for tenant, (_, use) in known.uses.items()}
            for other, known in self._known.items()
        }

    def _life_of(self, other: Hashable, uses: Uses, now: float) -> _Known | None:
        """The process as known so far; None for a message from before what is known."""
        self.age(now)
        known, replaced = self._known.get(other), False
        if known is not None:
            if uses.life == known.life:
                if not known.silent or uses.beat > known.beat:
                    known.silent = False
                    return known
                late, known.late_beat = known.late_beat, uses.beat
                if uses.beat <= late:
                    return None  # what it left behind; if it speaks, the next one will differ
            elif uses.life < known.life and not known.silent:
                return None
            else:
                replaced = not known.silent
            self.forget(other)
        elif len(self._known) >= PROCESSES_MAX:
            self._refused()
            return None
        known = self._known[other] = _Known(uses.life, now)
        if replaced:  # all that the new one has used came since the old one was heard
            known.whole_beat = -1
        return known

    def _take(self, other: Hashable, known: _Known, beat: int, tenant: str, use: Use) -> None:
        last = known.uses.get(tenant)
        if last is not None and beat <= last[0]:
            return
        if not use.plausible:
            self._refused()
            return
        before: Use | None = None
        if last is not None:
            before = last[1]
        elif known.whole_beat is not None and known.whole_beat < beat:
            before = NO_USE
        if before is not None and use.fell(before):
            self._refused()
            before = use  # one of the two was made up: go on from here, charging nothing
        if self._ledger.used_elsewhere(other, tenant, before, use):
            known.uses[tenant] = beat, use
        else:
            self._refused()
