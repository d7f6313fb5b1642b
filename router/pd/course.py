"""What may happen next to one request that goes to two engines: a state machine without sockets or clock.

The proxy tells what came of each request it sent; the course says whether the next placement may be split,
which engines it leaves out, and which handoff a decode engine may be told of. A prefill of which a decode
engine was told early may end long after the request went on without it; that changes nothing any more. Always
true: a prefill's parameters are sent at most once (``Handoff``), no more than ``prefills_max`` prefills are
asked for, and after that the request is whole, so that it ends.

    placed --> prefill --handed over--> decode --> answer      (Mooncake: perhaps both at once)
                 | failed: another prefill engine; none left: whole
                 | refused by 4xx, nothing handed over: whole
                 | either while a decode engine waits for it: that one's request is closed
               decode | not reached: another decode engine, same handoff while young
                      | too late: prefill again (its blocks are cached)
                      | 500: the blocks could not be fetched: whole, also on the same engine
                      | its answer began too late: whole, and nothing is taken from caches
                      | otherwise failed: split anew elsewhere
"""

from __future__ import annotations

from router.pd.handoff import Handoff
from router.pd.settings import PdSettings

_BROKEN = 500


class Course:
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
