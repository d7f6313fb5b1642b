"""A tenant's account: what is let in, what is charged, and that it is right at every end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.key_file import KeyFile, TenantRules
from kvatlas.router.admission.tenants import Tenant, TenantRequest
from kvatlas.router.admission.token_bucket import TokenBucket
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import Usage
from kvatlas.router.openai.work import Work
from tests.support.whole_router import tenants


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def account(**rules: int) -> tuple[Tenant, Clock]:
    clock = Clock()
    return Tenant("acme", TenantRules(**rules), clock.now), clock


def refusal(tenant: Tenant, clock: Clock) -> ApiError:
    with pytest.raises(ApiError) as caught:
        TenantRequest(tenant, clock)
    return caught.value


def test_requests_a_minute_then_429_with_the_time_until_the_next() -> None:
    tenant, clock = account(requests_per_minute=2)
    for _ in range(2):
        TenantRequest(tenant, clock).leave(None)
    error = refusal(tenant, clock)
    assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "requests")
    fields = dict(error.headers)
    assert fields[b"retry-after"] == b"30"
    assert fields[b"x-ratelimit-limit-requests"] == b"2"
    assert fields[b"x-ratelimit-remaining-requests"] == b"0"
    assert fields[b"x-ratelimit-reset-requests"] == b"1m0s"
    clock.now += 30
    TenantRequest(tenant, clock)
    assert tenant.stats.refused == {"requests_per_minute": 1}


def test_other_processes_get_every_change() -> None:
    clock = Clock()
    told: list[str] = []
    tenant = Tenant("acme", TenantRules(requests_per_minute=10), clock.now, told.append)
    first, second = TenantRequest(tenant, clock), TenantRequest(tenant, clock)
    assert told == ["acme"] * 2
    first.leave(None)
    second.leave(None, served=False, asked=False)
    assert told == ["acme"] * 5, "two ends, and one request that is given back"


def test_an_unknown_key_is_counted(tmp_path: Path) -> None:
    path = Path(tenants(tmp_path, {"free": ""}).file or "")
    gate = KeyGate(KeyFile(path, clock=lambda: 0.0), clock=lambda: 0.0)
    assert gate.tenant_of([(b"authorization", b"Bearer key-of-free")]).name == "free"
    for fields in ([], [(b"authorization", b"Bearer of-nobody")]):
        with pytest.raises(ApiError) as refused:
            gate.tenant_of(fields)
        assert refused.value.status == 401
    assert gate.stats.unknown == 2
    assert gate.knows("free")
    assert not gate.knows("nobody")


def test_concurrent_requests() -> None:
    tenant, clock = account(concurrent_requests=1)
    first = TenantRequest(tenant, clock)
    assert "concurrent_requests = 1" in refusal(tenant, clock).message
    first.leave(None)
    first.leave(None)
    TenantRequest(tenant, clock)
    assert tenant.stats.active == 1


def test_only_uncached_tokens_are_charged() -> None:
    """Predicted when placed, corrected by what the engine reports: who has cached prefixes pays little."""
    tenant, clock = account(uncached_tokens_per_minute=600)
    entry = TenantRequest(tenant, clock)
    entry.placed(Work(500, 2000))
    assert dict(entry.answer_headers())[b"x-ratelimit-remaining-tokens"] == b"100"
    entry.leave(Usage(prompt_tokens=10_000, completion_tokens=7, cached_tokens=9_900))
    assert dict(entry.answer_headers())[b"x-ratelimit-remaining-tokens"] == b"500"
    stats = tenant.stats
    assert (stats.uncached_tokens, stats.cached_tokens, stats.generated_tokens) == (100, 9_900, 7)


def test_one_long_prompt_is_let_in_and_paid_for() -> None:
    tenant, clock = account(uncached_tokens_per_minute=600)
    entry = TenantRequest(tenant, clock)
    entry.placed(Work(1200, 2000))
    entry.leave(None)
    error = refusal(tenant, clock)
    assert (error.kind, dict(error.headers)[b"retry-after"]) == ("tokens", b"61")
    clock.now += 61
    TenantRequest(tenant, clock)


def test_of_several_attempts_the_last_counts() -> None:
    tenant, clock = account()
    entry = TenantRequest(tenant, clock)
    entry.placed(Work(500, 2000))
    entry.placed(Work(800, 2000))
    assert tenant.stats.uncached_tokens == 800


def test_models() -> None:
    tenant = Tenant("acme", TenantRules(models=("gpt-oss-*", "tiny")), 0.0)
    tenant.allow("gpt-oss-20b")
    tenant.allow("tiny")
    for model in ("llama", None):
        with pytest.raises(ApiError) as caught:
            tenant.allow(model)
        assert caught.value.status == 403
    Tenant("free", TenantRules(), 0.0).allow(None)


def test_a_lower_limit_counts_what_was_used_already() -> None:
    tenant, clock = account(requests_per_minute=10)
    for _ in range(5):
        TenantRequest(tenant, clock)
    tenant.follow(TenantRules(requests_per_minute=5), clock.now)
    assert refusal(tenant, clock).status == 429
    tenant.follow(TenantRules(), clock.now)
    TenantRequest(tenant, clock)


amounts = st.lists(st.tuples(st.floats(0, 120), st.floats(0.5, 500)), max_size=30)


@given(per_minute=st.floats(1, 10_000), steps=amounts)
def test_a_bucket_gives_no_more_than_its_rate(per_minute: float, steps: list[tuple[float, float]]) -> None:
    """In any order of requests, grants without debt are at most the first fill and the rate since."""
    now, given_out = 0.0, 0.0
    bucket = TokenBucket(per_minute, now)
    for pause_s, amount in steps:
        now += pause_s
        if not bucket.wait_s(amount, now):
            taken = min(amount, per_minute)
            bucket.take(taken, now)
            given_out += taken
        assert given_out <= per_minute * (1 + now / 60) * (1 + 1e-9) + 1e-4
        assert bucket.left(now) <= per_minute


@given(per_minute=st.floats(1, 10_000), used=st.floats(0, 30_000), amount=st.floats(0.5, 100))
def test_the_time_told_is_the_time_it_takes(per_minute: float, used: float, amount: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(used, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s > 1:
        assert bucket.wait_s(amount, wait_s * 0.9) > 0.0
    assert bucket.wait_s(amount, wait_s + 1e-3) == 0.0


@given(per_minute=st.floats(1, 10_000), used=st.floats(0, 20_000), back=st.floats(0, 40_000))
def test_giving_back_fills_a_bucket_and_no_more(per_minute: float, used: float, back: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(used, 0.0)
    bucket.take(-back, 0.0)
    assert bucket.left(0.0) == pytest.approx(min(per_minute, per_minute - used + back))
    assert bucket.left(0.0) <= per_minute
    bucket.take(per_minute, 0.0)
    assert bucket.wait_s(1.0, 0.0) > 0


def tokens_left(tenant: Tenant, clock: Clock) -> int:
    return int(dict(tenant.headers(clock.now))[b"x-ratelimit-remaining-tokens"])


def test_unanswered_requests_are_refunded() -> None:
    tenant, clock = account(uncached_tokens_per_minute=600, requests_per_minute=5)
    for _ in range(10):
        entry = TenantRequest(tenant, clock)
        entry.placed(Work(500, 2000))
        entry.leave(None, served=False)
        assert tokens_left(tenant, clock) == 600
        assert tenant.stats.uncached_tokens == 0
        TenantRequest(tenant, clock).leave(None, served=False, asked=False)
        clock.now += 12  # a request's worth: the one that an engine was asked for counts
    assert dict(tenant.headers(clock.now))[b"x-ratelimit-remaining-requests"] == b"5"
    assert tenant.stats.active == 0


@pytest.mark.parametrize(
    ("known", "usage", "charged"),
    [
        (False, Usage(3000), 3000),
        (False, Usage(3000, 0, 1000), 2000),
        (False, None, 100),
        (True, Usage(3000), 100),
        (True, Usage(3000, 0, 0), 3000),
    ],
)
def test_an_engines_report_replaces_an_estimate_by_size(
    known: bool, usage: Usage | None, charged: int
) -> None:
    """Where the prompt's tokens are known and no cached ones are reported, the prediction knows more."""
    tenant, clock = account()
    entry = TenantRequest(tenant, clock)
    entry.placed(Work(100, 3000, known=known))
    entry.leave(usage)
    assert tenant.stats.uncached_tokens == charged
