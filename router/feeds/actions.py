"""Actions that the feed machine returns to its shell."""

from __future__ import annotations

import msgspec

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.feeds.base import FeedState


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Pass this batch to the sink."""

    batch: DecodedBatch


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Tell the sink to drop everything of this engine."""


class RequestReplay(msgspec.Struct, frozen=True, gc=False):
    """Request batches from ``from_seq`` on, after ``delay_s``; an earlier request is void then."""

    request_id: int
    from_seq: int
    delay_s: float


class RequestSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Request a snapshot, after ``delay_s``; an earlier request is void then."""

    request_id: int
    delay_s: float


class Adopt(msgspec.Struct, frozen=True, gc=False):
    """Adopt the staged snapshot: it is everything the engine held at the snapshot's cut."""


class Reconnect(msgspec.Struct, frozen=True, gc=False):
    """Connect the live socket again: its connection is half open."""


class StateChanged(msgspec.Struct, frozen=True, gc=False):
    """The feed's state, or the reason for it, has changed."""

    state: FeedState
    reason: str


Action = Apply | Forget | RequestReplay | RequestSnapshot | Adopt | Reconnect | StateChanged
