"""Tenants: what each used, here and at other processes, and whether it may send one more request.

A request is let in while the tenant has a request, a token and a place left; it is charged what the engine
has to compute, as predicted when it is placed, and as reported when it ends. So the limit on uncached tokens
holds on average: one long prompt may overdraw it, and the next ones wait.

Invariants: a request is entered once and leaves once; ``active`` is the number of those that have not left.

Other processes, workers of one router and replicas alike, send totals since their start, numbered by
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
from fnmatch import fnmatchcase
from typing import Annotated, Protocol

import msgspec

from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.openai.errors import ApiError, Headers, model_not_allowed, rate_limited
from kvatlas.router.openai.request import Usage
from kvatlas.router.openai.work import NO_WORK, Work

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


# A token bucket: so much a minute on average, and at most one minute's worth at once.
#
# Pure; the caller has the clock. Invariants: what is left never exceeds the capacity. It may be overdrawn,
# since what a request costs is known only after it was let in; the debt is paid by waiting.


_ROUNDING = 1e-6


class TokenBucket:
    """``now`` is monotonic seconds, the same clock at every call. It begins full."""

    __slots__ = ("_at", "_left", "capacity")

    def __init__(self, per_minute: float, now: float) -> None:
        self.capacity = per_minute
        self._left = per_minute
        self._at = now

    def left(self, now: float) -> float:
        """Amount that may be taken now; negative while there is debt."""
        self._left = min(self.capacity, self._left + max(0.0, now - self._at) * self.capacity / 60)
        self._at = max(self._at, now)
        return self._left

    def take(self, amount: float, now: float) -> None:
        """Take it, overdrawing if need be; a negative amount is given back."""
        self._left = self.left(now) - amount  # ``left`` has the cap

    def take_for_other(self, charged: float, refunded: float, taken: float, now: float) -> float:
        """Count charges and refunds of another process. Takes the bucket to a debt of one period at most, and
        gives back no more than has been ``taken`` for that process; returns what then is."""
        left = self.left(now)
        more = min(charged, max(0.0, left + self.capacity))
        back = min(refunded, taken + more)
        self._left = left - more + back
        return taken + more - back

    def lower(self, left: float, now: float) -> None:
        """No more than this is left now."""
        self._left = min(self.left(now), left)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` (at most the capacity) can be taken without debt; 0: now."""
        missing = min(amount, self.capacity) - self.left(now)
        return 0.0 if missing <= _ROUNDING else missing * 60 / self.capacity

    def resize(self, per_minute: float, now: float) -> None:
        """The limit changed: what was used stays used."""
        used = self.capacity - self.left(now)
        self.capacity = per_minute
        self._left = per_minute - used


class TenantStats(msgspec.Struct):
    """Counters of one tenant."""

    requests: Annotated[int, "kvatlas_tenant_requests_total"] = 0
    """Requests of the tenant that were let in."""
    active: Annotated[int, "kvatlas_tenant_active"] = 0
    """Requests of the tenant being answered."""
    uncached_tokens: Annotated[int, "kvatlas_tenant_uncached_tokens_total"] = 0
    """Prompt tokens computed for the tenant: as engines reported, else as predicted."""
    cached_tokens: Annotated[int, "kvatlas_tenant_cached_tokens_total"] = 0
    """Prompt tokens of the tenant that engines took from a cache, as they reported."""
    generated_tokens: Annotated[int, "kvatlas_tenant_generated_tokens_total"] = 0
    """Tokens generated for the tenant: as engines reported, else the events of streams."""
    refused: Annotated[dict[str, int], "kvatlas_tenant_refused_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests of the tenant refused, by the limit that was reached, or `model`."""


class _Elsewhere(msgspec.Struct):
    """Share of another process in a tenant's limits: requests ``active`` there, and what was taken of the
    buckets here for it and may come back."""

    active: int = 0
    requests: float = 0.0
    tokens: float = 0.0


class Tenant:
    """One tenant's account. ``now`` is monotonic seconds; ``changed`` is called with its name whenever it
    uses something here."""

    def __init__(
        self, name: str, rules: TenantRules, now: float, changed: Callable[[str], None] = lambda name: None
    ) -> None:
        self.name = name
        self.stats = TenantStats()
        self.rules = rules
        self._requests = _bucket(rules.requests_per_minute, now)
        self._tokens = _bucket(rules.uncached_tokens_per_minute, now)
        self._changed = changed
        self._requests_total = self._requests_refunded = self._tokens_total = self._tokens_refunded = 0
        self._elsewhere: dict[Hashable, _Elsewhere] = {}

    def use(self, now: float) -> Use | None:
        """For other processes, whose limits these are too; None where nothing was ever used."""
        requests, tokens = _used(self._requests, now), _used(self._tokens, now)
        if not (self._requests_total or requests or tokens):
            return None
        return Use(
            self._requests_total,
            self._requests_refunded,
            self._tokens_total,
            self._tokens_refunded,
            self.stats.active,
            requests,
            tokens,
        )

    def used_elsewhere(self, other: Hashable, before: Use | None, use: Use, now: float) -> bool:
        """Count the use at another process; False: refused. ``LimitKeeper``."""
        pairs = ((self._requests, use.requests_used), (self._tokens, use.tokens_used))
        if any(bucket is not None and used > bucket.capacity * (1 + _ROUNDING) for bucket, used in pairs):
            return False
        share = self._elsewhere.setdefault(other, _Elsewhere())
        share.active = use.active
        if before is None:
            for bucket, used in pairs:
                if bucket is not None:
                    bucket.lower(bucket.capacity - used, now)
            return True
        if self._requests is not None:
            share.requests = self._requests.take_for_other(
                use.requests - before.requests,
                use.requests_refunded - before.requests_refunded,
                share.requests,
                now,
            )
        if self._tokens is not None:
            share.tokens = self._tokens.take_for_other(
                use.tokens - before.tokens, use.tokens_refunded - before.tokens_refunded, share.tokens, now
            )
        return True

    def forget_other(self, other: Hashable) -> None:
        """A worker or replica ended, and its requests with it."""
        self._elsewhere.pop(other, None)

    def follow(self, rules: TenantRules, now: float) -> None:
        if rules is self.rules:
            return
        self.rules = rules
        self._requests = _resized(self._requests, rules.requests_per_minute, now)
        self._tokens = _resized(self._tokens, rules.uncached_tokens_per_minute, now)

    def enter(self, now: float) -> None:
        """One more request. Raises ``ApiError`` (429)."""
        limit = self.rules.concurrent_requests
        if limit is not None and self.stats.active + self._active_elsewhere >= limit:
            raise self._refuse("concurrent_requests", limit, 1.0, now)
        self._check(self._requests, "requests_per_minute", now)
        self.check_tokens(now)
        if self._requests is not None:
            self._requests.take(1.0, now)
        self._requests_total += 1
        self.stats.requests += 1
        self.stats.active += 1
        self._changed(self.name)

    def check_tokens(self, now: float) -> None:
        """Raises ``ApiError`` (429) if the tenant has no tokens left."""
        self._check(self._tokens, "uncached_tokens_per_minute", now)

    def _check(self, bucket: TokenBucket | None, setting: str, now: float) -> None:
        if bucket is not None and (wait_s := bucket.wait_s(1.0, now)):
            raise self._refuse(setting, int(bucket.capacity), wait_s, now)

    def leave(self) -> None:
        """One request ended."""
        self.stats.active -= 1
        self._changed(self.name)

    def refund_request(self, now: float) -> None:
        """One that was let in could be given to no engine."""
        self._requests_refunded += 1
        if self._requests is not None:
            self._requests.take(-1.0, now)
        self._changed(self.name)

    @property
    def _active_elsewhere(self) -> int:
        return sum(share.active for share in self._elsewhere.values())

    def allow(self, model: str | None) -> None:
        """Raises ``ApiError`` (403) for a model that is not for this tenant; where some are not, it must be
        named (None: it was not)."""
        if not self.may_use(model or ""):
            self.stats.refused["model"] = self.stats.refused.get("model", 0) + 1
            raise model_not_allowed(model)

    def may_use(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.rules.models)

    def charge(self, uncached_tokens: int, now: float) -> None:
        """Of prompt tokens that were computed; negative: fewer than was charged before."""
        self.stats.uncached_tokens += uncached_tokens
        if uncached_tokens > 0:
            self._tokens_total += uncached_tokens
        else:
            self._tokens_refunded -= uncached_tokens
        if self._tokens is not None:
            self._tokens.take(float(uncached_tokens), now)
        self._changed(self.name)

    def headers(self, now: float) -> Headers:
        """Return the remaining limits, in the names and units of OpenAI's answers."""
        found: list[tuple[bytes, bytes]] = []
        for bucket, unit in ((self._requests, b"requests"), (self._tokens, b"tokens")):
            if bucket is not None:
                left = bucket.left(now)
                found += [
                    (b"x-ratelimit-limit-" + unit, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + unit, b"%d" % max(0, left)),
                    (b"x-ratelimit-reset-" + unit, _duration(bucket.wait_s(bucket.capacity, now))),
                ]
        return tuple(found)

    def _refuse(self, setting: str, limit: int, wait_s: float, now: float) -> ApiError:
        self.stats.refused[setting] = self.stats.refused.get(setting, 0) + 1
        return rate_limited(self.name, setting, limit, wait_s, self.headers(now))


class TenantRequest:
    """One request of a tenant, from when it was let in until it leaves."""

    __slots__ = ("_charged", "_clock", "_open", "_work", "tenant")

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        tenant.enter(clock())
        self.tenant = tenant
        self._clock = clock
        self._charged = 0
        self._work: Work | None = None
        self._open = True

    def placed(self, work: Work) -> None:
        """An engine gets it now. Asked again after a retry, the last one counts. Raises ``ApiError`` (429) if
        other requests of the tenant have reached its limit since this one came."""
        if self._work is None:
            self.tenant.check_tokens(self._clock())
        self._work = work
        self._charge(work.uncached_tokens)

    @property
    def charged_tokens(self) -> int:
        return self._charged

    def answer_headers(self) -> Headers:
        return self.tenant.headers(self._clock())

    def leave(
        self, usage: Usage | None, *, served: bool = True, asked: bool = True, streamed: int = 0
    ) -> None:
        """It ended; ``usage`` is what the engine reported, if it did, else ``streamed`` tokens were seen. Not
        ``served``: no engine computed it, and nothing is charged; nor does it count as a request where no
        engine was even ``asked``. Idempotent."""
        if not self._open:
            return
        self._open = False
        stats = self.tenant.stats
        self.tenant.leave()
        if not served:
            self._charge(0)
            if not asked:
                self.tenant.refund_request(self._clock())
            return
        if usage is None:
            stats.generated_tokens += streamed
            return
        stats.generated_tokens += usage.completion_tokens
        work = self._work or NO_WORK
        stats.cached_tokens += work.cached(usage)
        self._charge(work.computed(usage))

    def _charge(self, uncached_tokens: int) -> None:
        more, self._charged = uncached_tokens - self._charged, uncached_tokens
        if more:
            self.tenant.charge(more, self._clock())


def _used(bucket: TokenBucket | None, now: float) -> float:
    """Tokens it lacks of being full, at most one period's worth."""
    return 0.0 if bucket is None else min(bucket.capacity, bucket.capacity - bucket.left(now))


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(float(per_minute), now)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now)
    bucket.resize(float(per_minute), now)
    return bucket


def _duration(seconds: float) -> bytes:
    """As OpenAI writes them: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return b"%dms" % round(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{int(minutes)}m{text}" if minutes else text).encode()
