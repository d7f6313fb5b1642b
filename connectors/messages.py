"""What the scheduler's half and the worker's half of a connector tell each other, once per step.

The two halves live in different processes; these values are pickled between them, so they hold plain data
only. Job ids are given by the scheduler's half and never reused. Every job is answered once by every rank.
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
    """Load job id -> the request that waits for it; a request waits for one load job at a time."""


@dataclass(slots=True)
class StepResults:
    """Worker to scheduler: what ended, by rank. ``merge`` is associative and commutative."""

    results: list[TransferResult] = field(default_factory=list)

    def merge(self, other: StepResults) -> StepResults:
        return StepResults(self.results + other.results)


# Block keys: the name of one block of one KV cache group, outside the GPU.
#
# A key is the engine's full block hash followed by the model's group index, 4 bytes big-endian. The hash is
# chained over the whole prefix, so a key names a block's content within one engine configuration; stores
# that several engines share put a namespace in front (``connectors.store.namespace``). Keys are compared as
# bytes, never truncated: the 64-bit hashes of KV events are for the router, not for finding bytes.


_GROUP_BYTES = 4


def block_key(block_hash: bytes, group_idx: int) -> bytes:
    """The key of the block with this hash in this group. OverflowError outside 0 <= group_idx < 2**32."""
    return block_hash + group_idx.to_bytes(_GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """(full block hash, group index) of a key. ValueError where it is too short to be one."""
    if len(key) <= _GROUP_BYTES:
        raise ValueError(f"not a block key: {len(key)} bytes, need a hash and {_GROUP_BYTES} bytes of group")
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def group_of(key: bytes) -> int:
    """Group index of a sound key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


def block_hashes_of(keys: Iterable[bytes]) -> list[bytes]:
    """The full block hash of each of many sound keys."""
    return [key[:-_GROUP_BYTES] for key in keys]


# Counts of what a connector's half did since they were last taken; both halves and every rank add up.
#
# A name is ``metric`` or ``metric/label/...``, values are sums. ``messages.stats`` carries them to vLLM's
# log and Prometheus; nothing here needs vLLM.


_FADES = 0.95
"""Of a job's weight in a rate, with each later job."""


class Tally:
    """Sums by name; not safe to share between threads."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        if value:
            self._sums[name] = self._sums.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """All sums, which are zero afterwards."""
        sums, self._sums = self._sums, {}
        return sums

    def transfer(self, result: TransferResult) -> None:
        """Count one ended job of one rank. Its time is shared among its groups by their bytes."""
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
                self._sums[result.direction] = _FADES * size + moved, _FADES * seconds + result.seconds

    def bytes_per_second(self) -> dict[str, float]:
        """By direction; those that moved nothing yet are left out."""
        return {
            direction.value: size / seconds
            for direction, (size, seconds) in self._sums.items()
            if seconds > 0
        }
