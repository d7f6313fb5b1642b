"""The handoff of one request: what a prefill engine holds, for which decode engine, and until when.

Invariants: the parameters are sent at most once, and never with less than the margin left of the lease. The
lease counts from the last moment at which the answer certainly had not arrived, by the router's clock, so
that blocks do not seem fresh after a pause of the router. An answer that begins after the lease's end counts
as made from other blocks: the decode engine may have paused before it fetched them.
"""

from __future__ import annotations

import math

import msgspec

from router.pd.settings import PdSettings


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
    early: bool = False
    """Sent before the blocks are computed."""
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
        early: bool = False,
        leased: bool = True,
        source_url: str = "",
        cached_tokens: int | None = None,
    ) -> Handoff:
        """Make a handoff from an answer that had not arrived before ``held_since_s``. ``leased``: the engine
        does not refuse readers after the lease."""
        lease_end_s = held_since_s + settings.lease_s
        until_s = lease_end_s - settings.lease_margin_s
        end_s = lease_end_s if leased else math.inf
        return cls(params, source, version, answered_s, until_s, end_s, early, source_url, cached_tokens)

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

    def cancel(self) -> None:
        """Forbid further use of the parameters."""
        self.until_s = -math.inf

    def take(self, now: float) -> None:
        """Mark the parameters as sent. Raises ``HandoffRefusedError`` if they must not be."""
        if not self.alive(now):
            raise HandoffRefusedError
        self.sent = True


# State machine of a request on two engines, without sockets or clock.
#
# The proxy reports the outcome of each request; the state says whether the next placement may be split, which
# engines to exclude, and which handoff may be sent. A prefill whose decode engine was asked early may end
# long after the request continued without it; that changes nothing. Invariants: a prefill's parameters are
# sent at most once (``Handoff``); at most ``prefills_max`` prefills are requested, and after that the request
# stays on one engine, so it ends.
#
#     placed --> prefill --handed over--> decode --> answer      (Mooncake: perhaps both at once)
#                  | failed: another prefill engine; none left: whole
#                  | refused by 4xx, nothing handed over: whole
#                  | either while a decode engine waits for it: that request is closed
#                decode | not reached: another decode engine, same handoff while young
#                       | too late: prefill again (its blocks are cached)
#                       | 500: the blocks could not be fetched: whole, also on the same engine
#                       | its answer began too late: whole, and caches are not read
#                       | otherwise failed: split again elsewhere


_BROKEN = 500


class DisaggState:
    """State of one request, from its first split placement to its end."""

    __slots__ = (
        *("_given", "_handoff", "_settings", "_transfer_id", "_whole", "distrusts_caches", "failed"),
        "prefills",
    )

    def __init__(self, settings: PdSettings) -> None:
        self._settings = settings
        self._handoff: Handoff | None = None
        self._whole = False
        self._transfer_id = ""
        self._given = False
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

    def prefill_sent(self, transfer_id: str) -> None:
        """Note a request to a prefill engine; ``transfer_id`` names its blocks."""
        self.prefills += 1
        self._handoff = None
        self._transfer_id, self._given = transfer_id, False

    def is_settled(self, transfer_id: str) -> bool:
        """Whether this transfer has been handed over, or is not needed any more."""
        return self._given or transfer_id != self._transfer_id

    def handed_over(self, transfer_id: str, handoff: Handoff) -> bool:
        """Note that the prefill engine holds the blocks, or will hold them if both engines are asked at once.
        Returns whether the handoff may be sent: at most once for each prefill."""
        if self.is_settled(transfer_id):
            return False
        self._handoff, self._given = handoff, True
        return True

    def prefill_failed(self, transfer_id: str, engine_id: str) -> None:
        """Note that the prefill engine is down, busy or broken."""
        self._withdraw(transfer_id)
        self.failed |= {engine_id}

    def nothing_to_fetch(self, transfer_id: str) -> None:
        """Note an answer without blocks to fetch: no prefill engine is asked again."""
        self._withdraw(transfer_id)
        self._whole = True

    def _withdraw(self, transfer_id: str) -> None:
        if transfer_id != self._transfer_id:
            return
        self._given = True  # also what is found out later
        if self._handoff is not None:
            self._handoff.cancel()
            self._handoff = None

    def set_cached_tokens(self, transfer_id: str, cached_tokens: int | None) -> None:
        """Note the cached tokens that the prefill engine reported for a transfer handed over early."""
        if transfer_id == self._transfer_id and self._handoff is not None:
            self._handoff.cached_tokens = cached_tokens

    def not_fetched(self) -> None:
        """Note an answer that began after the lease: the decode engine has stored the fetched blocks under
        the prompt's hashes (v1/core/sched/scheduler.py ``_update_waiting_for_remote_kv``, 0.32)."""
        self._handoff = None
        self._whole = self.distrusts_caches = True

    def decode_failed(self, status: int = 0) -> None:
        """Note a failed decode request: by this status, or (0) by its connection."""
        self._handoff = None
        self._whole = self._whole or status == _BROKEN


# Limit of decode engines that wait at a prefill engine for blocks not yet computed. Pure.
#
# vLLM's Mooncake sender has few tasks (twice ``num_workers``, 20), and each waiting decode engine takes one.
# If the prefill fails, the task stays taken and the decode engine keeps its reserved blocks until both
# engines time out, even after the client has left. So slots are few, and a leaked one stays taken.


# Seconds by which a decode engine's time-out exceeds the prefill engine's.
_AFTER_S = 60.0


class WaitSlots:
    """Slots of all prefill engines; times are monotonic seconds."""

    __slots__ = ("_open", "_stuck")

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._stuck: dict[str, list[float]] = {}

    def taken(self, engine_id: str, now: float) -> int:
        young = {one: [end_s for end_s in ends if end_s > now] for one, ends in self._stuck.items()}
        self._stuck = {one: ends for one, ends in young.items() if ends}
        return self._open.get(engine_id, 0) + len(self._stuck.get(engine_id, ()))

    def take(self, engine_id: str) -> None:
        self._open[engine_id] = self._open.get(engine_id, 0) + 1

    def free(self, engine_id: str) -> None:
        """Free a slot: the prefill is over, or no decode engine was asked."""
        left = self._open[engine_id] - 1
        if left:
            self._open[engine_id] = left
        else:
            del self._open[engine_id]

    def leak(self, engine_id: str, now: float, abort_s: float) -> None:
        """Leak a slot: the prefill failed; the decode engine blocks until both engines time out."""
        self.free(engine_id)
        self._stuck.setdefault(engine_id, []).append(now + abort_s + _AFTER_S)
