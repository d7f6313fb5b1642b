"""What was observed at one engine's sockets: how far each connection came, and what arrived."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import msgspec


class Connectivity(StrEnum):
    """How far a socket got."""

    NONE = "none"
    """No address, or one that is none."""
    REFUSED = "refused"
    """Nothing accepts connections there."""
    NO_HANDSHAKE = "no_handshake"
    """Something accepts connections but is not the socket it should be."""
    UP = "up"


class ReplayState(StrEnum):
    """How the one request to the replay socket went."""

    NOT_ASKED = "not_asked"
    WAITING = "waiting"
    COMPLETE = "complete"
    CUT_SHORT = "cut_short"
    """It began to answer and stopped."""
    SILENT = "silent"


class Observation(msgspec.Struct):
    """What was heard from one engine."""

    events_link: Connectivity = Connectivity.NONE
    events_problem: str = ""
    replay_link: Connectivity = Connectivity.NONE
    replay_state: ReplayState = ReplayState.NOT_ASKED
    replay_problem: str = ""
    disconnects: int = 0
    live_batches: int = 0
    replayed_batches: int = 0
    first_seq: int | None = None
    """Lowest number that replay still had."""
    last_seq: int | None = None
    missing: int = 0
    """Numbers skipped among those heard."""
    restarts: int = 0
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    topics: set[str] = msgspec.field(default_factory=set)
    sink_problem: str = ""
    """Why a batch could not be applied to the index."""
    lags_s: list[float] = msgspec.field(default_factory=list)
    """Our clock minus the time stamp of live batches."""


class ReplayComparison(msgspec.Struct, frozen=True):
    """Batches heard live, asked for again from the replay socket; sequence numbers."""

    state: ReplayState
    heard: int = 0
    missing: int = 0
    """Heard live and not in the answer, although older ones are."""
    different: int = 0
