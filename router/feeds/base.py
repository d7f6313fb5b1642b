"""Interface of a feed: its states, counters and settings, its sink, and the strategies that fetch missing
batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec

from kvatlas.publisher.events import DecodedBatch
from kvatlas.router.feeds.frames import PAYLOAD_BYTES_MAX, Frame


class FeedState(StrEnum):
    """State of knowledge about the engine's residency."""

    COLD = "cold"
    """Not connected yet."""
    REPLAYING = "replaying"
    """The history is being fetched from the engine's replay socket; the known part grows in order."""
    READY = "ready"
    """Every batch since the engine's start (or its last cache clear) has been applied."""
    DEGRADED = "degraded"
    """In use, but something is unknown:

    ``FeedStats.reason`` gives the reason, ``missing_batches`` the number.
    """
    STALE = "stale"
    """Silent although events are due: the known state may be out of date."""


class FeedStats(msgspec.Struct):
    """Counters and gauges of one feed; all counts since the feed was created."""

    state: FeedState = FeedState.COLD
    reason: str = ""
    last_seq: Annotated[int | None, "kvatlas_feed_last_seq"] = None
    """Seq of the last applied batch."""
    missing_batches: Annotated[int, "kvatlas_feed_missing_batches"] = 0
    """Batches whose content is unknown now; 0 after a restart, a cache clear or a full re-sync."""
    known_batches: Annotated[int, "kvatlas_feed_known_batches"] = 0
    """Applied batches that the known residency is based on."""
    waiting_batches: Annotated[int, "kvatlas_feed_waiting_batches"] = 0
    """Batches that exist but have not been applied yet, nor given up."""
    unconfirmed: Annotated[bool, "kvatlas_feed_unconfirmed"] = False
    """1 from the loss of the connection until a replay or a batch has shown which process the engine
    is; meanwhile its blocks count for nothing."""
    held_batches: Annotated[int, "kvatlas_feed_held_batches"] = 0
    """Live batches waiting for a gap before them to be repaired."""
    batches: Annotated[int, "kvatlas_feed_batches_total"] = 0
    """Event batches applied."""
    events: Annotated[int, "kvatlas_feed_events_total"] = 0
    """Events applied."""
    rejected_events: Annotated[int, "kvatlas_feed_rejected_events_total"] = 0
    """Events skipped because they could not be decoded or were inconsistent."""
    last_rejection: str = ""
    unknown_events: Annotated[int, "kvatlas_feed_unknown_events_total"] = 0
    """Events skipped because their type is not known to this version."""
    duplicate_batches: Annotated[int, "kvatlas_feed_duplicate_batches_total"] = 0
    """Batches received twice; skipped."""
    late_batches: Annotated[int, "kvatlas_feed_late_batches_total"] = 0
    """Batches that arrived after the feed had given them up or had applied them from replay; skipped."""
    gaps: Annotated[int, "kvatlas_feed_gaps_total"] = 0
    """Times a batch was missing in the live stream, which starts a replay."""
    lost_batches: Annotated[int, "kvatlas_feed_lost_batches_total"] = 0
    """Batches given up as lost: not available from replay, or not decodable."""
    replays: Annotated[int, "kvatlas_feed_replays_total"] = 0
    """Replays requested from the engine."""
    replay_failures: Annotated[int, "kvatlas_feed_replay_failures_total"] = 0
    """Replays without an answer, or without the requested batches."""
    restarts: Annotated[int, "kvatlas_feed_restarts_total"] = 0
    """Restarts of the engine seen; all that was known of it was dropped."""
    resyncs: Annotated[int, "kvatlas_feed_resyncs_total"] = 0
    """Full resyncs: everything dropped and replayed from the engine's first batch."""
    snapshots: Annotated[int, "kvatlas_feed_snapshots_total"] = 0
    """Snapshots adopted."""
    snapshot_failures: Annotated[int, "kvatlas_feed_snapshot_failures_total"] = 0
    """Snapshots that could not be fetched, or came from another process."""
    phantom_alarms: Annotated[int, "kvatlas_feed_phantom_alarms_total"] = 0
    """Times the index held more copies than the engine has blocks."""
    disconnects: Annotated[int, "kvatlas_feed_disconnects_total"] = 0
    """Times the connection to the event socket was lost."""
    buffer_overflows: Annotated[int, "kvatlas_feed_buffer_overflows_total"] = 0
    """Times more batches waited behind a gap than the limit; the missing ones were given up as lost."""
    sink_errors: Annotated[int, "kvatlas_feed_sink_errors_total"] = 0
    """Batches or snapshots that the index refused: a bug of the router, see its log."""
    malformed_frames: Annotated[dict[str, int], "kvatlas_feed_malformed_frames_total{reason}"] = (
        msgspec.field(default_factory=dict)
    )
    """Messages of the live and replay sockets that could not be parsed, by reason."""
    last_batch_monotonic: Annotated[float | None, "kvatlas_feed_last_batch_monotonic_seconds"] = None
    """Time of the last live batch, on the feed's clock."""
    lag_s: Annotated[float | None, "kvatlas_feed_lag_seconds"] = None
    """Age of the last live batch on arrival, by the two machines' wall clocks."""

    def malformed(self, reason: str) -> None:
        self.malformed_frames[reason] = self.malformed_frames.get(reason, 0) + 1


class FeedSettings(msgspec.Struct, frozen=True):
    """Bounds and time-outs of event feeds, which suit an engine with about 100 batches per second.

    None is a key of the configuration (config/removed.py); tests give other values.
    """

    hold_batches_max: int = 4096
    """Most live batches held back while a gap before them is repaired (half of vLLM's default replay
    buffer)."""
    hold_bytes_max: int = 32 << 20
    """Most bytes of live batches held back while a gap is repaired."""
    hold_s_max: float = 10.0
    """Longest time without progress of a repair, in seconds; then live batches are applied across the gap
    and the feed is DEGRADED."""
    recent_batches_max: int = 1024
    """Number of applied batches whose digests are kept, to tell a repeated batch from a restart."""
    replay_timeout_s: float = 5.0
    """Silence of the replay socket, in seconds, after which a replay request has failed."""
    replay_backoff_s: float = 0.2
    """Seconds before the first repeated replay request; doubles each time."""
    resync_backoff_s: float = 5.0
    """Seconds before replay is tried again after a repair was given up; doubles with each failure in a
    row."""
    resync_backoff_s_max: float = 300.0
    """Upper bound of `resync_backoff_s`' doubling."""
    heartbeats: bool = False
    """Whether publishers send empty batches when idle: silence then makes a feed STALE. vLLM's own publisher
    sends none; a publisher that does is recognised by its first empty batch."""
    stale_after_s: float = 5.0
    """Seconds without events after which a feed is STALE, where events are due: the engine's answers show
    that it stored blocks, or the publisher sends heartbeats."""
    tick_s: float = 0.25
    """Seconds between two checks of a feed's time-outs."""
    receive_queue_max: int = 20_000
    """ZMQ receive high-water mark, in messages. ZMQ drops live messages beyond it, which shows as a gap
    and is repaired by replay."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """Largest batch; a larger one is counted as malformed."""
    snapshots: bool = True
    """Request snapshots from engines; publishers without them answer so at once, and get a replay request."""


class FeedSink(Protocol):
    """Destination of a feed's batches. Called from the event loop, never concurrently for one engine."""

    def apply(self, engine_id: str, batch: DecodedBatch) -> None:
        """Apply one batch; batches come in seq order, each at most once."""

    def forget(self, engine_id: str) -> None:
        """Drop everything of that engine: it restarted, is being resynced, or its feed was removed."""

    def stage(self, engine_id: str, batch: DecodedBatch) -> None:
        """Stage a piece of a snapshot; the current state stays in use until ``adopt``."""

    def adopt(self, engine_id: str) -> None:
        """Replace the current state by the staged one, in one step."""

    def unstage(self, engine_id: str) -> None:
        """Drop the staged state, if any."""


class ResyncError(Exception):
    """Missing batches could not be fetched; ``str()`` gives the reason."""


class SnapshotUnsupportedError(ResyncError):
    """This publisher does not support snapshots."""


class Cut(msgspec.Struct, frozen=True, gc=False):
    """Extent of a snapshot: all batches up to ``seq`` (-1: none) of one process, and none after."""

    seq: int
    publisher_id: bytes | None = None
    offload: bool = False
    """Whether it contains blocks outside the GPU."""


class SnapshotSource(Protocol):
    """Fetches everything that an engine holds."""

    def fetch(self) -> AsyncGenerator[DecodedBatch | Cut, None]:
        """Yield the snapshot in small batches, in order, and its cut last.

        Raises ``SnapshotUnsupportedError``, or ``ResyncError`` if it is unavailable this time.
        """


class Resync(Protocol):
    """Fetches the batches that a feed missed."""

    def fetch(self, from_seq: int) -> AsyncGenerator[Frame, None]:
        """Yield the batches from ``from_seq`` on that the engine still has, in order of arrival.

        Ends when the engine reports that it has sent all. Raises ``ResyncError`` if it falls silent or is
        unreachable.
        """
