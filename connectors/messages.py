"""Messages between the scheduler half and the worker half of a connector, block keys, and counters.

The two halves run in different processes; the messages are pickled once per step, so they hold plain data
only. The scheduler half assigns job ids and never reuses them. Every rank answers every job once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from connectors.transfer.base import Direction, TransferJob, TransferResult


@dataclass(slots=True)
class StepJobs:
    """Scheduler to worker."""

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    load_requests: dict[int, str] = field(default_factory=dict)
    """Load job id -> the waiting request; a request waits for one load job at a time."""


@dataclass(slots=True)
class StepResults:
    """Worker to scheduler: results of ended jobs. ``merge`` is associative and commutative."""

    results: list[TransferResult] = field(default_factory=list)

    def merge(self, other: StepResults) -> StepResults:
        return StepResults(self.results + other.results)


# Block keys name one block of one KV cache group outside the GPU.
#
# A key is the engine's full block hash followed by the model's group index, 4 bytes big-endian. The hash is
# chained over the whole prefix, so a key names a block's content within one engine configuration. Stores that
# several engines share prepend a namespace (``connectors.store.base``). Keys are compared as bytes and
# never truncated; the 64-bit hashes of KV events are for the router only.


_GROUP_BYTES = 4


def block_key(block_hash: bytes, group_idx: int) -> bytes:
    """Key of the block with this hash in this group. OverflowError unless 0 <= group_idx < 2**32."""
    return block_hash + group_idx.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Split a key into full block hash and group index. ValueError if it is too short."""
    if len(key) <= _GROUP_BYTES:
        raise ValueError(f"not a block key: {len(key)} bytes, need a hash and {_GROUP_BYTES} bytes of group")
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def group_of(key: bytes) -> int:
    """Group index of a valid key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def block_hashes_of(keys: Iterable[bytes]) -> list[bytes]:
    """Full block hashes of valid keys."""
    return [key[:-_GROUP_BYTES] for key in keys]


# Counters of one half of a connector since the last report; reports of both halves and of all ranks add up.
#
# A name is ``metric`` or ``metric/label/...``, values are sums. ``connectors.reports`` reports them to vLLM's
# log and Prometheus; nothing here needs vLLM.


# Factor on a job's weight in a rate with each later job.
_DECAY = 0.95


class Counts:
    """Sums by name; not safe to share between threads."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        if value:
            self._sums[name] = self._sums.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """Return all sums and reset them to zero."""
        sums, self._sums = self._sums, {}
        return sums

    def transfer(self, result: TransferResult) -> None:
        """Count one ended job of one rank."""
        # Its time is divided among its groups in proportion to their bytes.
        direction = result.direction.value
        self.add(f"jobs/{direction}/{'ok' if result.ok else 'failed'}")
        total = sum(result.bytes_by_group.values())
        for group_idx, size in result.bytes_by_group.items():
            self.add(f"bytes/{direction}/{group_idx}", size)
            self.add(f"seconds/{direction}/{group_idx}", result.seconds * size / total if total else 0)


class Rates:
    """Bytes per second of the latest jobs of each direction."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(Direction, (0.0, 0.0))

    def add(self, results: Iterable[TransferResult]) -> None:
        for result in results:
            if result.ok and result.seconds > 0:
                size, seconds = self._sums[result.direction]
                moved = sum(result.bytes_by_group.values())
                self._sums[result.direction] = _DECAY * size + moved, _DECAY * seconds + result.seconds

    def bytes_per_second(self) -> dict[str, float]:
        """Rates by direction; directions without a finished job are omitted."""
        return {
            direction.value: size / seconds
            for direction, (size, seconds) in self._sums.items()
            if seconds > 0
        }
