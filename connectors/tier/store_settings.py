"""How long the scheduler's half believes what it knows of a shared store, and how much it keeps of it."""

from __future__ import annotations

from dataclasses import dataclass


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
