"""Tenants: what each used, and whether it may send one more request.

A request is let in while the tenant has a request, a token and a place left; it is charged what the engine
has to compute, as predicted when it is placed, and as reported when it ends. So the limit on uncached tokens
holds on average: one long prompt may overdraw it, and the next ones wait.

Invariants: a request is entered once and leaves once; ``active`` is the number of those that have not left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.admission.others_use import Use
from kvatlas.router.admission.token_bucket import ROUNDING, TokenBucket
from kvatlas.router.openai.errors import ApiError, Headers, model_not_allowed, rate_limited
from kvatlas.router.openai.request import Usage
from kvatlas.router.openai.work import NO_WORK, Work


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
        if any(bucket is not None and used > bucket.capacity * (1 + ROUNDING) for bucket, used in pairs):
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
