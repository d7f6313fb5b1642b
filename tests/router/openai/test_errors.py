"""Errors of the router's own: status, code, and when a client may come back."""

from __future__ import annotations

import pytest

from kvatlas.router.openai.errors import (
    ends_engines,
    engine_died,
    engine_refused,
    engine_timeout,
    engine_unreachable,
    no_ready_engine,
    predicted_wait,
    rate_limited,
    retry_after_s,
    stream_broken,
    unauthorized,
    worker_unavailable,
)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (no_ready_engine("none"), 503, "no_ready_engine", b"1"),
        (no_ready_engine("none", retry_after_s=7), 503, "no_ready_engine", b"7"),
        (worker_unavailable(), 503, "worker_unavailable", b"1"),
        (engine_died(9), 503, "engine_died", b"9"),
        (ends_engines(29.2), 503, "request_ends_engines", b"30"),
        (ends_engines(0.0), 503, "request_ends_engines", b"1"),
        (engine_unreachable(), 502, "engine_unreachable", None),
        (engine_timeout(), 504, "engine_timeout", None),
        (stream_broken("no"), 502, "engine_stream_broken", None),
        (rate_limited("ada", "requests_per_minute", 9, 1.2, ()), 429, "rate_limit_exceeded", b"2"),
        (rate_limited("ada", "requests_per_minute", 9, 0.0, ()), 429, "rate_limit_exceeded", b"1"),
        (unauthorized("admin", "admin.token_file"), 401, "admin_unauthorized", None),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_status_code_and_the_time_to_come_back(
    error: object, status: int, code: str, retry_after: bytes | None
) -> None:
    assert (error.status, error.code) == (status, code)  # type: ignore[attr-defined]
    assert dict(error.headers).get(b"retry-after") == retry_after  # type: ignore[attr-defined]


def test_how_long_an_answer_asks_to_be_left_alone() -> None:
    values = [None, b"2.5", b"9", b"-1", b"Sun, 06 Nov 1994 08:49:37 GMT"]
    assert [retry_after_s(value, 5.0) for value in values] == [0.0, 2.5, 5.0, 0.0, 1.0]


def test_a_predicted_wait_asks_to_come_back_when_it_is_over() -> None:
    waits = [dict(predicted_wait(wait_s, 1.0).headers)[b"retry-after"] for wait_s in (5.5, 1.0, 9999.0)]
    assert waits == [b"5", b"1", b"600"]


def test_a_limit_says_when_there_is_room_again() -> None:
    messages = [rate_limited("ada", "tokens_per_minute", 9, wait_s, ()).message for wait_s in (1.25, 0.0)]
    assert [message.partition("Try")[2] for message in messages] == [
        " again in 1.250 s.",
        " again in 0.001 s.",
    ]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error":{"message":"too long"}}', (400, "too long")),
        (500, b'{"message":"broken"}', (500, "broken")),
        (200, b'{"error":{"message":"aborted"}}', (502, "aborted")),
        (399, b"<html>", (502, "The engine answered with status 399.")),
        (422, b'{"error":{"message":7}}', (422, "The engine answered with status 422.")),
        (400, b'["no"]', (400, "The engine answered with status 400.")),
        (400, b'{"error":{"message":"%b"}}' % (b"x" * 2000), (400, "x" * 1000)),
    ],
)
def test_a_refusal_of_the_engine_that_was_to_go_on_has_its_words(
    status: int, body: bytes, expected: tuple[int, str]
) -> None:
    error = engine_refused(status, body)
    assert (error.status, error.message) == expected
