"""What the feed machine tells its shell to do."""

from __future__ import annotations

import msgspec

from publisher.events import DecodedBatch
from router.feeds.base import FeedState


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Hand this batch to the sink."""

    batch: DecodedBatch


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Tell the sink to drop everything of this engine."""


class RequestReplay(msgspec.Struct, frozen=True, gc=False):
    """Ask for batches from ``from_seq`` on, after ``delay_s``; an earlier request is then void."""

    request_id: int
    from_seq: int
    delay_s: float


class RequestSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Ask for all that the engine holds, after ``delay_s``; an earlier request is then void."""

    request_id: int
    delay_s: float


class Adopt(msgspec.Struct, frozen=True, gc=False):
    """What the snapshot's answer staged in the sink is all that the engine held at the snapshot's cut."""


class StateChanged(msgspec.Struct, frozen=True, gc=False):
    """The feed's state, or the reason for it, is another now."""

    state: FeedState
    reason: str


Action = Apply | Forget | RequestReplay | RequestSnapshot | Adopt | StateChanged
