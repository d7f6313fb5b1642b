"""A place outside the GPU where blocks are held, seen from the scheduler's half of a connector.

A block key (``messages.keys``) is in one of four states: absent, being stored, held, being loaded (held and
pinned). Only held keys are ever reported by ``held``. Whatever is begun is ended exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Keys that became, or ceased to be, loadable since the last call, in the order it happened."""

    changes: tuple[tuple[bool, bytes], ...]
    """(True: stored, False: removed; key)."""


class Tier(Protocol):
    """One writer: the scheduler's half, on the engine core's thread. No call blocks."""

    medium: str
    """As in KV events: ``CPU`` or ``STORAGE``."""

    def held(self, request_id: str, keys: Sequence[bytes]) -> frozenset[bytes] | None:
        """Which of these keys could be loaded now. None: not known yet, ask again in the next step."""

    def begin_store(self, chain: Sequence[bytes], lineage: Sequence[bytes] = ()) -> list[tuple[bytes, int]]:
        """Reserve slots for those of these keys that are neither held nor under way, as far as there is room.

        ``chain``: keys of one request in prompt order; a policy may use that they depend on one another.
        ``lineage``: the request's block hashes from its first token, one per hash block, at least up to the
        last of ``chain``; a policy finds there what each key stands on. It is read during the call only.
        """

    def end_store(self, key: bytes, *, ok: bool) -> None: ...

    def begin_load(self, keys: Sequence[bytes]) -> list[int] | None:
        """Pin these keys and give their slots; None (and nothing pinned) where one is no longer held."""

    def end_load(self, key: bytes, *, ok: bool) -> None:
        """Unpin. ``ok=False``: the value is bad; it is dropped and not held again until stored anew."""

    def forget_request(self, request_id: str) -> None:
        """The request is gone: drop what ``held`` remembers for it."""

    def take_changes(self) -> TierChanges: ...

    def reset(self) -> bool:
        """Drop everything that is not under way. True: all is gone."""

    def busy(self) -> bool:
        """Something is under way here that only further steps can finish."""


# How long the scheduler's half believes what it knows of a shared store, and how much it keeps of it.


@dataclass(frozen=True)
class StoreTierSettings:
    """Seconds and counts; which of them a user may set, ``connectors.shared_settings`` says."""

    lookup_deadline_s: float = 0.05
    """How long one question may take; what it does not answer by then counts as absent."""
    held_for_s: float = 5.0
    """How long an answer "held" is believed: another engine's eviction is seen after that."""
    absent_for_s: float = 1.0
    """How long an answer "absent" is believed: another engine's store is seen after that."""
    stored_for_s: float = 60.0
    """How long what is there is not stored again, if nobody found it gone: that would copy it for nothing."""
    away_for_s: float = 1.0
    """How long a store that could not be asked is left alone."""
    quarantine_s: float = 60.0
    """How long a key whose load failed is left alone, if nobody stores it anew."""
    answers_max: int = 200_000
    questions_max: int = 256
    stores_max: int = 4096
    """Blocks on their way to the store; beyond it, blocks are not stored."""
