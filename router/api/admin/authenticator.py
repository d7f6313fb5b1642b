"""Authenticates requests to the admin API and the ops port, and limits their rate.

Always true: nothing of a request's body is read before the sender is authenticated. Once failed logins have
used up their allowance, tokens from one address are compared one after the other, ``TURN_S`` apart: that
slows guessing, and costs a client with a valid token a fraction of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import Request

from router.api.admin.rate_limit import RateLimit, Turns
from router.api.admin.tokens import TokenFile
from router.openai.errors import ApiError, too_often, unauthorized

PEER = "kvatlas.peer"
"""Where the listener puts the common name of a client certificate into the ASGI scope."""
_FAILED = ""


class Authenticator:
    """``mutual``: connections come with a checked certificate. ``per_minute`` is for each name and for
    failed logins together; with ``unlimited`` for failed logins only. ``realm`` and ``key`` appear in error
    messages: the name of the API, and the setting that names the tokens.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        mutual: bool,
        per_minute: float,
        clock: Callable[[], float],
        realm: str = "admin",
        key: str = "admin.token_file",
        unlimited: bool = False,
    ) -> None:
        self._tokens = tokens
        self._mutual = mutual
        self._limit = RateLimit(per_minute)
        self._turns = Turns()
        self._clock = clock
        self._realm = realm
        self._key = key
        self._unlimited = unlimited

    async def admit(self, request: Request) -> str:
        """The name of the authenticated client. Raises ``ApiError``."""
        now = self._clock()
        if self._limit.used_up(_FAILED, now):
            wait_s = self._turns.take(_address(request), now)
            if wait_s is None:
                raise self._too_often(1)
            await asyncio.sleep(wait_s)
        who = self._who(request)
        if who is not None and self._unlimited:
            return who
        wait = self._limit.take(_FAILED if who is None else f"={who}", self._clock())
        if wait:
            raise self._too_often(wait)
        if who is None:
            raise unauthorized(self._realm, self._key)
        return who

    def now(self) -> float:
        """The clock that rates go by, in seconds."""
        return self._clock()

    def _too_often(self, wait_s: int) -> ApiError:
        what = "requests without a valid token" if self._unlimited else "requests"
        return too_often(self._realm, what, wait_s)

    def _who(self, request: Request) -> str | None:
        peer: str | None = request.scope.get(PEER) if self._mutual else None
        if self._tokens is None:
            return peer
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        who = self._tokens.who(token.strip().encode("utf-8", "replace"))
        if scheme.lower() != "bearer" or (self._mutual and peer is None):
            return None
        return who


def _address(request: Request) -> str:
    """The client's address; of IPv6 the part that one customer is given (64 bits)."""
    host = request.client.host if request.client is not None else ""
    return ":".join(host.split(":")[:4]) if host.count(":") > 1 and "." not in host else host
