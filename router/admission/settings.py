"""Whether clients need keys, and what becomes of them; all defaults live here."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.admission.fair_queue import Priority


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of clients. Without a file none is needed, and ``Authorization`` is passed on to engines."""

    file: str | None = None
    """TOML file with tenants, their limits, and the SHA-256 of each key; `kvatlas keys add` writes it
    ([tenants.md](tenants.md)). Read again when it changes. Every request to an engine, and `/v1/models`, then
    needs a key: `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    engine_priorities: bool = False
    """Engines schedule by priority (vLLM's `--scheduling-policy priority`): requests of tenants of the class
    `low` get `priority` 1, of `high` -1, where their bodies have none. `policy.engine_priority` does so."""
    isolate: Literal["off", "tenant", "group"] = "off"
    """Isolate caches: the router sets `cache_salt` in every prompt, one for each tenant, or one for each
    `cache_group` of the key file (a tenant without one is its own group). Needs `keys.file` and
    `keys.isolate_secret_file` ([tenants.md](tenants.md#cache-isolation))."""
    isolate_secret_file: str | None = None
    """File with the secret that salts are derived from, at least 32 bytes; the same for all routers of a
    fleet. Read again when it changes: prompts are then cached under new salts."""
    client_salts: Literal["combine", "refuse"] = "combine"
    """With `keys.isolate`: a client's own `cache_salt` separates its prompts further, or is refused (400)."""
    forward: bool = False
    """Pass the client's key on to engines. By default it is taken out, and `fleet.api_key_file` is sent where
    that is set."""

    def __post_init__(self) -> None:
        if self.isolate == "off":
            return
        if self.file is None:
            raise ValueError(f"isolate = {self.isolate}: needs keys.file, which says whose request it is")
        if self.isolate_secret_file is None:
            raise ValueError(f"isolate = {self.isolate}: needs keys.isolate_secret_file")


class WaitTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Longest predicted waits, in seconds: of all in ``[queue]``, of a tenant in the key file, whose targets
    count first. Raises ``ValueError`` for 0 or less."""

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
        own = None
        if priority == Priority.HIGH:
            own = self.wait_target_high_s
        elif priority == Priority.LOW:
            own = self.wait_target_low_s
        return self.wait_target_s if own is None else own

    @property
    def has_wait_targets(self) -> bool:
        """Whether requests of any class may be refused."""
        return any(getattr(self, name) is not None for name in WaitTargets.__struct_fields__)


# When requests wait in the router, and how many for how long; all defaults live here.


class QueueSettings(WaitTargets, frozen=True, kw_only=True):
    """Requests wait in the router while every engine that could take them is saturated, and tenants share
    what comes free ([tenants.md](tenants.md#the-queue)). Off by default: every request goes to an engine at
    once."""

    saturation_s: float | None = None
    """An engine is saturated with more than this many seconds of prompts queued, by the router's account.
    Switches the queue on; 1 is a good value."""
    engine_requests_max: int | None = None
    """An engine is also saturated with this many requests, running and waiting; give the engines'
    ``--max-num-seqs``. Not set: only seconds of prompts count."""
    requests_max: int = 1000
    """Most requests that wait (for each worker). Beyond it the tenant with the most waiting loses its newest,
    of the lowest class: 429 `queue_full`."""
    wait_s_max: float = 60.0
    """Longest wait; then 503 `queue_timeout`. A client's `x-request-timeout` (seconds) may shorten it."""
    ageing: float = 0.0
    """Order within a tenant and class: by arrival plus this many times the request's own seconds of work.
    0: first come, first served; 10 lets short prompts overtake, for a lower mean and some longer waits."""
    credit_s: float = 2.0
    """A tenant that had less than its share may be ahead of the others by what all engines compute in this
    many seconds (times its weight), so that several of its requests at once do not wait behind a flood; 0: no
    tenant saves anything up."""
    sibling_share: float = 0.5
    """A prompt goes at once if it shares this part of itself with one in flight on an engine that has no more
    than four times `saturation_s` queued, and no other tenant waits; above 0 and at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sibling_share > 1:
            raise ValueError(f"sibling_share must be at most 1, got {self.sibling_share}")
