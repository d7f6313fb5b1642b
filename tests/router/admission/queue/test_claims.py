"""Claims of a request about its turn."""

from __future__ import annotations

import pytest

from kvatlas.router.admission.claims import given_priority, read_claim
from kvatlas.router.admission.key_file import TenantRules
from kvatlas.router.openai.body import peek
from kvatlas.router.openai.errors import ApiError
from kvatlas.router.openai.request import QueueTicketRequest

HIGH, NORMAL, LOW = 0, 1, 2


@pytest.mark.parametrize(
    ("header", "in_body", "expected"),
    [
        (None, None, NORMAL),
        (b"high", None, HIGH),
        (b" Low ", -5, LOW),
        (None, -1, HIGH),
        (None, 0, NORMAL),
        (None, 7, LOW),
    ],
)
def test_the_header_comes_before_the_body(header: bytes | None, in_body: int | None, expected: int) -> None:
    fields = [] if header is None else [(b"x-kvatlas-priority", header)]
    assert read_claim(fields, in_body=in_body, arrived_s=0.0) == QueueTicketRequest(priority=expected)


@pytest.mark.parametrize(
    ("value", "in_body", "expected"),
    [
        (b"-5", None, HIGH),
        (b"0", 7, NORMAL),
        (b"9", -1, LOW),
        (b"useless", -1, HIGH),
        (b"1.5", None, NORMAL),
    ],
)
def test_the_engines_own_header_comes_before_the_body(
    value: bytes, in_body: int | None, expected: int
) -> None:
    """As in vLLM; a value that it does not read leaves the body's."""
    claim = read_claim([(b"x-vllm-priority", value)], in_body=in_body, arrived_s=0.0)
    assert claim.priority == expected
    # Its number, for engines that order by it.
    number = in_body or 0 if value in (b"useless", b"1.5") else int(value)
    assert given_priority([(b"content-length", b"5"), (b"x-vllm-priority", value)], in_body) == number


@pytest.mark.parametrize(("asked", "expected"), [(None, NORMAL), (b"high", NORMAL), (b"low", LOW)])
def test_a_tenants_request_may_step_back_but_not_forward(asked: bytes | None, expected: int) -> None:
    fields = [] if asked is None else [(b"x-kvatlas-priority", asked)]
    rules = TenantRules(weight=3.0)
    claim = read_claim(fields, in_body=None, arrived_s=0.0, tenant="acme", rules=rules)
    assert claim == QueueTicketRequest("acme", 3.0, expected)


def test_a_deadline_counts_from_the_requests_arrival() -> None:
    claim = read_claim([(b"x-request-timeout", b"2.5")], in_body=None, arrived_s=10.0)
    assert claim.until_s == 12.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-kvatlas-priority", b"urgent"),
        (b"x-kvatlas-priority", b""),
        (b"x-request-timeout", b"soon"),
        (b"x-request-timeout", b"0"),
        (b"x-request-timeout", b"-1"),
        (b"x-request-timeout", b"inf"),
        (b"x-request-timeout", b"nan"),
    ],
)
def test_invalid_claims_are_refused_by_name(name: bytes, value: bytes) -> None:
    with pytest.raises(ApiError, match=name.decode()) as refused:
        read_claim([(name, value)], in_body=None, arrived_s=0.0)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"priority": -3}', -3),
        (b'{"priority": 0, "x": NaN}', 0),
        (b'{"priority": 4, "x": NaN}', 4),
        (b"{}", None),
        (b'{"priority": null}', None),
        (b'{"priority": "1"}', None),
        (b'{"priority": 1.5}', None),
        (b'{"priority": true, "x": NaN}', None),
    ],
)
def test_the_bodys_priority_is_read_where_it_is_a_whole_number(body: bytes, expected: int | None) -> None:
    assert peek(body).priority == expected


@pytest.mark.parametrize("more", ["", ', "x": NaN'])
def test_a_priority_of_too_many_digits_is_refused(more: str) -> None:
    with pytest.raises(ApiError, match="at most 18 digits"):
        peek(f'{{"priority": {"9" * 26}{more}}}'.encode())


TARGETS = (500.0, 2000.0, None)


@pytest.mark.parametrize(
    ("fields", "rules", "due_s"),
    [
        ([], None, 12.0),
        ([(b"x-kvatlas-priority", b"high")], None, 10.5),
        ([(b"x-kvatlas-priority", b"low")], None, None),
        ([(b"x-slo-ttft-ms", b"250")], None, 10.25),
        ([(b"x-slo-ttft-ms", b"250.0")], TenantRules(slo_ttft_ms=4000), 10.25),
        ([], TenantRules(slo_ttft_ms=4000), 14.0),
        ([], TenantRules(priority="high"), 10.5),
        ([(b"x-kvatlas-priority", b"high")], TenantRules(), 12.0),
    ],
)
def test_the_target_is_the_requests_else_its_tenants_else_its_classs(
    fields: list[tuple[bytes, bytes]], rules: TenantRules | None, due_s: float | None
) -> None:
    claim = read_claim(fields, in_body=None, arrived_s=10.0, tenant="acme", rules=rules, targets=TARGETS)
    assert claim.due_s == due_s
    assert read_claim(fields, in_body=None, arrived_s=10.0, tenant="acme", rules=rules).due_s is None


@pytest.mark.parametrize("value", [b"soon", b"0", b"-5", b"nan", b"inf", b""])
def test_a_target_that_is_no_time_is_refused(value: bytes) -> None:
    with pytest.raises(ApiError, match="x-slo-ttft-ms") as refused:
        read_claim([(b"x-slo-ttft-ms", value)], in_body=None, arrived_s=0.0, targets=TARGETS)
    assert (refused.value.status, refused.value.code) == (400, "invalid_slo")
