"""Targets for the predicted wait of requests, by class: of all in ``[queue]``, of a tenant in the key file.

Always true: a tenant's target counts before one for all; no target is 0 or less.
"""

from __future__ import annotations

import msgspec

from router.admission.fair_queue import Priority


class WaitTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Longest predicted waits, in seconds. Raises ``ValueError`` for 0 or less."""

    wait_target_s: float | None = None
    """A request is refused (429 `predicted_wait`) where every engine that could take it is predicted to let
    it wait longer than this many seconds, its own prefill not counted. Not set: none is refused
    ([tenants.md](tenants.md#admission-by-predicted-wait))."""
    wait_target_high_s: float | None = None
    """The same for requests of class `high`. Not set: `wait_target_s`."""
    wait_target_low_s: float | None = None
    """The same for requests of class `low`. Not set: `wait_target_s`."""

    def __post_init__(self) -> None:
        for name in WaitTargets.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value}: expected seconds, more than 0")

    def wait_target(self, priority: int) -> float | None:
        """Target of a class (``QueueTicketRequest.priority``)."""
        own = {Priority.HIGH: self.wait_target_high_s, Priority.LOW: self.wait_target_low_s}.get(
            Priority(priority)
        )
        return self.wait_target_s if own is None else own

    @property
    def has_wait_targets(self) -> bool:
        """Whether requests of any class may be refused."""
        return any(getattr(self, name) is not None for name in WaitTargets.__struct_fields__)
