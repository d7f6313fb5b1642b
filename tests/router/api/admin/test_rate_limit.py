"""The rate limit, and guessed tokens: slowed, no way to keep an administrator out, quiet in the log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.api import rate_limit as limit
from kvatlas.router.api.admin_auth import Authenticator
from kvatlas.router.api.admin_tokens import TokenFile
from kvatlas.router.api.rate_limit import TURN_S, WAITING_MAX, RateLimit, Turns
from kvatlas.router.observe.log_throttle import LogThrottle
from kvatlas.router.openai.errors import ApiError
from tests.router.api.admin.admin_rig import OTHER, administered, audited, token_file
from tests.support.whole_router import running


@given(
    st.floats(1, 600), st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), min_size=1, max_size=60)
)
def test_never_more_than_the_burst_and_the_rate(per_minute: float, steps: list[tuple[str, float]]) -> None:
    limit = RateLimit(per_minute)
    now, taken = 0.0, {"a": 0, "b": 0}
    for name, pause in steps:
        now += pause
        wait = limit.take(name, now)
        taken[name] += not wait
        assert taken[name] <= max(1.0, per_minute / 4) + now * per_minute / 60 + 1e-6
        if wait:
            assert limit.take(name, now + wait) == 0
            taken[name] += 1
            now += wait


def test_after_a_burst_there_is_one_at_each_interval() -> None:
    limit = RateLimit(7.5)
    told = [(0.0, 0), (0.0, 1), (0.5, 1), (1.0, 0), (1.0, 8), (3.0, 6), (8.75, 1), (9.0, 0), (9.0, 8)]
    assert [(now, limit.take("a", 50.0 + now)) for now, _ in told] == told
    assert limit.take("b", 50.0) == 0


def test_the_number_of_remembered_names_is_bounded() -> None:
    limit = RateLimit(60)
    for number in range(1000):
        limit.take(str(number), 0.0)
        limit.take("0", 0.0)
    assert list(limit._buckets) == [*(str(number) for number in range(745, 1000)), "0"], "those used last"


def test_turns_come_one_after_the_other_and_few_may_wait() -> None:
    turns = Turns()
    waits = [turns.take("a", 100.0) for _ in range(WAITING_MAX)]
    assert waits == [number * TURN_S for number in range(WAITING_MAX)]
    assert turns.take("a", 100.0) is None
    assert turns.take("b", 100.0) == 0.0
    assert turns.take("a", 100.0 + TURN_S) == (WAITING_MAX - 1) * TURN_S
    assert turns.take("a", 200.0) == 0.0


def test_the_turns_of_those_that_came_last_are_kept() -> None:
    turns = Turns()
    turns.take("a", 100.0)
    for number in range(limit._NAMES_MAX - 1):
        turns.take(str(number), 100.0)
    assert turns.take("a", 100.0) == TURN_S
    turns.take("one too many", 100.0)
    assert turns.take("a", 100.0) == 2 * TURN_S
    assert turns.take("0", 100.0) == 0.0, "it came first, and was forgotten"


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Basic", ""])
async def test_a_token_of_another_scheme_is_none(tmp_path: Path, scheme: str) -> None:
    door = Authenticator(
        TokenFile(Path(token_file(tmp_path))), mutual=False, per_minute=40.0, clock=lambda: 0.0
    )
    headers = [(b"authorization", f"{scheme} {OTHER}".encode())]
    expected = 200 if scheme.lower() == "bearer" else 401
    assert await outcome(door, {**asking(OTHER), "headers": headers}) == expected


def test_messages_that_clients_cause_are_logged_once_an_interval_with_the_number_left_out() -> None:
    seldom = LogThrottle(1.0)
    assert [seldom.due("x", now) for now in (5.0, 5.1, 5.9, 6.0, 6.5, 9.0)] == [0, None, None, 2, None, 1]
    assert seldom.due("y", 9.0) == 0


class Counting(TokenFile):
    compared = 0

    def who(self, token: bytes) -> str | None:
        self.compared += 1
        return super().who(token)


def asking(token: str, address: str = "192.0.2.1") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    return {"type": "http", "headers": headers, "client": (address, 1)}


async def outcome(door: Authenticator, scope: dict[str, Any]) -> int:
    try:
        await door.admit(scope)
    except ApiError as error:
        return error.status
    return 200


async def test_beyond_their_allowance_guesses_are_compared_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "TURN_S", 0.01)
    tokens = Counting(Path(token_file(tmp_path)))
    door = Authenticator(tokens, mutual=False, per_minute=40.0, clock=lambda: 100.0)

    guesses = [outcome(door, asking(f"guess-{n}-0123456789")) for n in range(200)]
    answers = await asyncio.gather(*guesses)
    assert sorted(set(answers)) == [401, 429]
    assert tokens.compared <= 10 + limit.WAITING_MAX  # a quarter of 40, and those who wait their turn
    # a true token is not looked at either while too many guess from there, but is from elsewhere
    assert await outcome(door, asking(OTHER)) == 429
    assert await outcome(door, asking(OTHER, "192.0.2.2")) == 200
    many = [outcome(door, asking(f"guess-{n}-0123456789", f"2001:db8:0:7:{n:x}::1")) for n in range(200)]
    before = tokens.compared
    await asyncio.gather(*many)  # one client may have all addresses of a 64-bit prefix
    assert tokens.compared <= before + limit.WAITING_MAX


async def test_refused_calls_without_a_name_are_a_line_a_second_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "TURN_S", 0.001)
    async with running({}) as (one,), administered(tmp_path, one) as admin:
        with audited() as lines:
            started = time.monotonic()
            for _ in range(60):
                await admin.ask("POST", "/drain", {"engine": one.base_url}, token="wrong")
            took_s = time.monotonic() - started
            assert (await admin.ask("POST", "/undrain", {"engine": "http://x:1"}))[0] == 404
        unknown = [line for line in lines if line["who"] == "unknown"]
        assert 1 <= len(unknown) <= 1 + took_s
        assert all(line["unsaid"] for line in unknown[1:])
        assert [line["who"] for line in lines][-1] == "ann"  # what somebody known does is always said
        stats = admin.rig.router.admin.stats  # type: ignore[union-attr]
        assert sum(stats.refused.values()) == 61
