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


# What may happen next to one request that goes to two engines: a state machine without sockets or clock.
#
# The proxy tells what came of each request it sent; the course says whether the next placement may be
# split, which engines it leaves out, and which handoff a decode engine may be told of. A prefill of which a
# decode engine was told early may end long after the request went on without it; that changes nothing any
# more. Always true: a prefill's parameters are sent at most once (``Handoff``), no more than
# ``prefills_max`` prefills are asked for, and after that the request is whole, so that it ends.
#
#     placed --> prefill --handed over--> decode --> answer      (Mooncake: perhaps both at once)
#                  | failed: another prefill engine; none left: whole
#                  | refused by 4xx, nothing handed over: whole
#                  | either while a decode engine waits for it: that one's request is closed
#                decode | not reached: another decode engine, same handoff while young
#                       | too late: prefill again (its blocks are cached)
#                       | 500: the blocks could not be fetched: whole, also on the same engine
#                       | its answer began too late: whole, and nothing is taken from caches
#                       | otherwise failed: split anew elsewhere


_BROKEN = 500


class DisaggState:
    """Of one request, from its first split placement until its end."""

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
    def splits(self) -> bool:
        """Whether the next placement may be on two engines."""
        return not self._whole and self.prefills < self._settings.prefills_max

    def handoff(self, now: float) -> Handoff | None:
        """What a decode engine may be told of now."""
        held = self._handoff
        return held if held is not None and held.alive(now) else None

    @property
    def told(self) -> bool:
        """A decode engine has been told of what is held, and nobody else is to be."""
        return self._handoff is not None and self._handoff.sent

    def asked(self, transfer_id: str) -> None:
        """A prefill engine is asked; this names what it computes."""
        self.prefills += 1
        self._handoff = None
        self._transfer_id, self._given = transfer_id, False

    def given(self, transfer_id: str) -> bool:
        """This transfer has been handed over, or is not wanted any more."""
        return self._given or transfer_id != self._transfer_id

    def handed_over(self, transfer_id: str, handoff: Handoff) -> bool:
        """The prefill engine holds the blocks, or will: where both engines are asked at once. Returns whether
        a decode engine may be told: at most once for each prefill."""
        if self.given(transfer_id):
            return False
        self._handoff, self._given = handoff, True
        return True

    def prefill_failed(self, transfer_id: str, engine_id: str) -> None:
        """The prefill engine is down, busy or broken."""
        self._withdraw(transfer_id)
        self.failed |= {engine_id}

    def nothing_held(self, transfer_id: str) -> None:
        """It answered, but holds nothing for anybody: no engine need be asked again."""
        self._withdraw(transfer_id)
        self._whole = True

    def _withdraw(self, transfer_id: str) -> None:
        if transfer_id != self._transfer_id:
            return
        self._given = True  # also what is found out later
        if self._handoff is not None:
            self._handoff.withdraw()
            self._handoff = None

    def learned(self, transfer_id: str, cached_tokens: int | None) -> None:
        """The prefill engine says what it took from its cache, of a transfer that was handed over early."""
        if transfer_id == self._transfer_id and self._handoff is not None:
            self._handoff.cached_tokens = cached_tokens

    def not_fetched(self) -> None:
        """The decode engine was told, and its answer began after the lease: what it fetched it has stored
        under the prompt's hashes (v1/core/sched/scheduler.py ``_update_waiting_for_remote_kv``, 0.32)."""
        self._handoff = None
        self._whole = self.distrusts_caches = True

    def decode_failed(self, status: int = 0) -> None:
        """The decode engine was told and failed, by this status or (0) by its connection."""
        self._handoff = None
        self._whole = self._whole or status == _BROKEN


# How many decode engines may wait at a prefill engine for blocks that are not there yet. Pure.
#
# vLLM's Mooncake sender has few tasks (twice ``num_workers``, 20), and each decode engine that waits takes
# one. If the prefill comes to nothing, nobody wakes it until both engines' time is over, though its client
# has left: the task is taken, and the decode engine keeps the blocks that it had reserved, all that time.
# So places are few, and one that is stuck stays taken.


_AFTER_S = 60.0
"""By which a decode engine's own time-out exceeds the prefill engine's."""


class WaitSlots:
    """Of all prefill engines; times are monotonic seconds."""

    __slots__ = ("_open", "_stuck")

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._stuck: dict[str, list[float]] = {}

    def taken(self, engine_id: str, now: float) -> int:
        """Places taken at this engine."""
        young = {one: [end_s for end_s in ends if end_s > now] for one, ends in self._stuck.items()}
        self._stuck = {one: ends for one, ends in young.items() if ends}
        return self._open.get(engine_id, 0) + len(self._stuck.get(engine_id, ()))

    def take(self, engine_id: str) -> None:
        """One more."""
        self._open[engine_id] = self._open.get(engine_id, 0) + 1

    def free(self, engine_id: str) -> None:
        """One less: the prefill is over, or no decode engine was told."""
        left = self._open[engine_id] - 1
        if left:
            self._open[engine_id] = left
        else:
            del self._open[engine_id]

    def stick(self, engine_id: str, now: float, abort_s: float) -> None:
        """The prefill came to nothing, and a decode engine waits for it until the engines' time is over."""
        self.free(engine_id)
        self._stuck.setdefault(engine_id, []).append(now + abort_s + _AFTER_S)
