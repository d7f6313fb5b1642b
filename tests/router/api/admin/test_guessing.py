"""Guessing tokens: slowed, not a way to keep an administrator out, and quiet in the log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fastapi import Request

from router.api import admin_auth as limit
from router.api.admin_auth import Authenticator, TokenFile
from router.openai.errors import ApiError
from tests.router.api.admin.admin_rig import OTHER, administered, audited, token_file
from tests.support.whole_router import running


class Counting(TokenFile):
    compared = 0

    def who(self, token: bytes) -> str | None:
        self.compared += 1
        return super().who(token)


def asking(token: str, address: str = "192.0.2.1") -> Request:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    return Request({"type": "http", "headers": headers, "client": (address, 1)})


async def outcome(door: Authenticator, request: Request) -> int:
    try:
        await door.admit(request)
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
    await asyncio.gather(*many)  # whoever has 64 bits of addresses is one
    assert tokens.compared <= before + limit.WAITING_MAX


async def test_refused_calls_of_nobody_known_are_a_line_a_second_in_the_log(
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
