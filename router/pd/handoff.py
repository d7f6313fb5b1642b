"""What a prefill engine holds for a request, for whom, and until when.

Always true: the parameters are given out once, and never when less than the margin is left of the lease. The
lease is counted from the last moment at which the answer surely was not there yet, by the router's clock, so
that a router that stood still does not take old blocks for fresh ones. An answer that begins after its end
counts as made of other blocks: the decode engine may have stood still before it fetched them.
"""

from __future__ import annotations

import math

import msgspec

from router.pd.settings import PdSettings


class HandoffRefusedError(Exception):
    """The parameters must not be sent any more."""


class NotFetchedError(Exception):
    """An answer that began after the end of the lease on the blocks that it was to be made of: they may have
    held another prompt's KV. Nothing has been passed on."""


class Handoff(msgspec.Struct, gc=False):
    """``params``: the JSON text that the decode engine is to get. Times are monotonic seconds."""

    params: bytes
    source: str
    """Id of the prefill engine."""
    version: str | None
    """What that engine runs."""
    answered_s: float
    """When its answer had been read."""
    until_s: float
    """Not to be sent from then on."""
    lease_end_s: float
    """An answer that begins later is not passed on; infinite where late readers are refused."""
    ahead: bool = False
    """The blocks are being computed."""
    source_url: str = ""
    cached_tokens: int | None = None
    """What the prefill engine took from its cache, once it has said it."""
    sent: bool = False

    @classmethod
    def of(
        cls,
        params: bytes,
        *,
        source: str,
        version: str | None,
        held_since_s: float,
        answered_s: float,
        settings: PdSettings,
        ahead: bool = False,
        leased: bool = True,
        source_url: str = "",
        cached_tokens: int | None = None,
    ) -> Handoff:
        """Of an answer that was not there before ``held_since_s``. ``leased``: who reads the blocks after the
        lease is not refused."""
        lease_end_s = held_since_s + settings.lease_s
        until_s = lease_end_s - settings.lease_margin_s
        end_s = lease_end_s if leased else math.inf
        return cls(params, source, version, answered_s, until_s, end_s, ahead, source_url, cached_tokens)

    def alive(self, now: float) -> bool:
        """Whether a decode engine may be told of it."""
        return not self.sent and now < self.until_s

    @property
    def leased(self) -> bool:
        """An answer may begin too late."""
        return self.lease_end_s < math.inf

    def fetched(self) -> None:
        """The blocks have been read within the lease: the answer may begin whenever it does."""
        self.lease_end_s = math.inf

    def withdraw(self) -> None:
        """Nobody else is to be told of it."""
        self.until_s = -math.inf

    def take(self, now: float) -> None:
        """It is sent now. Raises ``HandoffRefusedError`` where it may not be."""
        if not self.alive(now):
            raise HandoffRefusedError
        self.sent = True
