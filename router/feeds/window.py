"""The two bounded memories of a feed around its position: batches held back, and digests of recent ones."""

from __future__ import annotations

from router.feeds.wire import Frame


class HeldBatches:
    """Batches waiting for earlier ones, by seq. Bounded in number and in payload bytes."""

    def __init__(self, *, batches_max: int, bytes_max: int) -> None:
        self._frames: dict[int, Frame] = {}
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> bool:
        """Keep a batch; the first of a seq wins. False: no room, nothing changed."""
        if frame.seq in self._frames:
            return True
        if len(self._frames) >= self._batches_max or self._bytes + frame.size_bytes > self._bytes_max:
            return False
        self._frames[frame.seq] = frame
        self._bytes += frame.size_bytes
        return True

    def pop(self, seq: int) -> Frame | None:
        """Take a batch out; None if it is not here."""
        frame = self._frames.pop(seq, None)
        if frame is not None:
            self._bytes -= frame.size_bytes
        return frame

    def frames(self) -> list[Frame]:
        """All that is held, in order of seq."""
        return [self._frames[seq] for seq in sorted(self._frames)]

    def lowest(self) -> int | None:
        """Smallest seq held."""
        return min(self._frames, default=None)

    def clear(self) -> None:
        self._frames.clear()
        self._bytes = 0


class RecentBatches:
    """Digests of the batches applied last, to tell a repeated batch from a restarted engine's."""

    def __init__(self, batches_max: int) -> None:
        self._seqs = [-1] * batches_max
        self._digests = [0] * batches_max

    def __len__(self) -> int:
        return len(self._seqs)

    def put(self, seq: int, digest: int) -> None:
        slot = seq % len(self._seqs)
        self._seqs[slot] = seq
        self._digests[slot] = digest

    def digest(self, seq: int) -> int | None:
        """Digest of the batch applied under that seq; None if none was, or too long ago."""
        slot = seq % len(self._seqs)
        return self._digests[slot] if self._seqs[slot] == seq else None

    def clear(self) -> None:
        self._seqs = [-1] * len(self._seqs)
