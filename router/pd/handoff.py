"""The handoff of one request: what a prefill engine holds, for which decode engine, and until when.

Invariants: the parameters are sent at most once, and never with less than the margin left of the lease. The
lease counts from the last moment at which the answer certainly had not arrived, by the router's clock, so
that blocks do not seem fresh after a pause of the router. An answer that begins after the lease's end counts
as made from other blocks: the decode engine may have paused before it fetched them.
"""

from __future__ import annotations

import math

import msgspec

from kvatlas.router.pd.settings import PdSettings


class HandoffRefusedError(Exception):
    """The parameters must not be sent any more."""


class NotFetchedError(Exception):
    """An answer began after the end of the lease on its blocks, which may have held another prompt's KV by
    then. Nothing of it has been forwarded."""


class Handoff(msgspec.Struct, gc=False):
    """``params``: JSON text for the decode engine. Times are monotonic seconds."""

    params: bytes
    source: str
    """Id of the prefill engine."""
    version: str | None
    """Version of the prefill engine."""
    answered_s: float
    """When the prefill engine's answer had been read."""
    until_s: float
    """The parameters must not be sent from then on."""
    lease_end_s: float
    """An answer that begins later is not forwarded; infinite if the prefill engine refuses late readers."""
    source_url: str = ""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill engine took from its cache; None until it has reported them."""
    sent: bool = False

    @classmethod
    def from_answer(
        cls,
        params: bytes,
        *,
        source: str,
        version: str | None,
        held_since_s: float,
        answered_s: float,
        settings: PdSettings,
        leased: bool = True,
        source_url: str = "",
        cached_tokens: int | None = None,
    ) -> Handoff:
        """Make a handoff from an answer that had not arrived before ``held_since_s``. ``leased``: the engine
        does not refuse readers after the lease."""
        lease_end_s = held_since_s + settings.lease_s
        until_s = lease_end_s - settings.margin_s
        end_s = lease_end_s if leased else math.inf
        return cls(params, source, version, answered_s, until_s, end_s, source_url, cached_tokens)

    def alive(self, now: float) -> bool:
        """Whether the parameters may be sent now."""
        return not self.sent and now < self.until_s

    @property
    def leased(self) -> bool:
        """Whether an answer may begin too late."""
        return self.lease_end_s < math.inf

    def fetched(self) -> None:
        """Mark the blocks as read within the lease: the answer may begin at any time."""
        self.lease_end_s = math.inf

    def take(self, now: float) -> None:
        """Mark the parameters as sent. Raises ``HandoffRefusedError`` if they must not be."""
        if not self.alive(now):
            raise HandoffRefusedError
        self.sent = True


_BROKEN = 500


class DisaggState:
    """State of one request on two engines, from its first split placement to its end. No sockets, no clock.

    The proxy reports the outcome of each request; the state says whether the next placement may be split,
    which engines to exclude, and which handoff may be sent. Invariants: a prefill's parameters are sent at
    most once (``Handoff``); at most ``prefills_max`` prefills are requested, and after that the request stays
    on one engine, so it ends.

        placed --> prefill --handed over--> decode --> answer
                     | failed: another prefill engine; none left: whole
                     | refused by 4xx, nothing handed over: whole
                   decode | not reached: another decode engine, same handoff while young
                          | too late: prefill again (its blocks are cached)
                          | 500: the blocks could not be fetched: whole, also on the same engine
                          | its answer began too late: whole, and caches are not read
                          | otherwise failed: split again elsewhere
    """

    __slots__ = ("_handoff", "_settings", "_whole", "distrusts_caches", "failed", "prefills")

    def __init__(self, settings: PdSettings) -> None:
        self._settings = settings
        self._handoff: Handoff | None = None
        self._whole = False
        self.prefills = 0
        """Prefill engines asked so far."""
        self.failed: frozenset[str] = frozenset()
        """Prefill engines that are not asked again."""
        self.distrusts_caches = False
        """An engine may have stored other blocks under this prompt's hashes."""

    @property
    def may_split(self) -> bool:
        """Whether the next placement may be split."""
        return not self._whole and self.prefills < self._settings.prefills_max

    def handoff(self, now: float) -> Handoff | None:
        """Return the handoff that may be sent to a decode engine now."""
        held = self._handoff
        return held if held is not None and held.alive(now) else None

    @property
    def is_sent(self) -> bool:
        """Whether the handoff was sent to a decode engine."""
        return self._handoff is not None and self._handoff.sent

    def prefill_sent(self) -> None:
        """Note a request to a prefill engine."""
        self.prefills += 1
        self._handoff = None

    def handed_over(self, handoff: Handoff) -> None:
        """Note that the prefill engine holds the blocks."""
        self._handoff = handoff

    def prefill_failed(self, engine_id: str) -> None:
        """Note that the prefill engine is down, busy or broken."""
        self.failed |= {engine_id}

    def nothing_to_fetch(self) -> None:
        """Note an answer without blocks to fetch: no prefill engine is asked again."""
        self._whole = True

    def not_fetched(self) -> None:
        """Note an answer that began after the lease: the decode engine has stored the fetched blocks under
        the prompt's hashes (v1/core/sched/scheduler.py ``_update_waiting_for_remote_kv``, 0.32)."""
        self._handoff = None
        self._whole = self.distrusts_caches = True

    def decode_failed(self, status: int = 0) -> None:
        """Note a failed decode request: by this status, or (0) by its connection."""
        self._handoff = None
        self._whole = self._whole or status == _BROKEN
