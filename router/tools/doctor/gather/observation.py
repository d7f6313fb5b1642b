"""Observations at one engine's sockets: state of each connection, and what arrived."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

import msgspec


class Connectivity(StrEnum):
    """How far a socket connection got."""

    NONE = "none"
    """No address, or an invalid one."""
    REFUSED = "refused"
    """Nothing accepts connections at the address."""
    NO_HANDSHAKE = "no_handshake"
    """Something accepts connections but is not the expected socket."""
    UP = "up"


class ReplayState(StrEnum):
    """State of the single replay request."""

    NOT_ASKED = "not_asked"
    WAITING = "waiting"
    COMPLETE = "complete"
    CUT_SHORT = "cut_short"
    """It began to respond and stopped."""
    SILENT = "silent"


class Observation(msgspec.Struct):
    """Everything received from one engine."""

    events_link: Connectivity = Connectivity.NONE
    events_problem: str = ""
    replay_link: Connectivity = Connectivity.NONE
    replay_state: ReplayState = ReplayState.NOT_ASKED
    replay_problem: str = ""
    disconnects: int = 0
    live_batches: int = 0
    replayed_batches: int = 0
    first_seq: int | None = None
    """Lowest number still available from replay."""
    last_seq: int | None = None
    missing: int = 0
    """Numbers skipped among the received ones."""
    restarts: int = 0
    malformed: Counter[str] = msgspec.field(default_factory=Counter)
    topics: set[str] = msgspec.field(default_factory=set)
    sink_problem: str = ""
    """Why a batch could not be applied to the index."""
    lags_s: list[float] = msgspec.field(default_factory=list)
    """Local clock minus the time stamp of live batches, in seconds."""


class ReplayComparison(msgspec.Struct, frozen=True):
    """Batches received live, compared with those returned by the replay socket; sequence numbers."""

    state: ReplayState
    received: int = 0
    missing: int = 0
    """Received live and absent from the response, although older ones are present."""
    different: int = 0
