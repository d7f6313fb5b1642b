"""The stores of a step as one job for the transfer engine, and its result as one result for each of them.

A decode step fills a block in some of its requests: a dozen jobs of one block each, of which an engine would
check, order and answer every one by itself, on the step's own thread. What always holds: every store is
answered once, and ends as the joined job ended; failed blocks named by the engine are blamed on the store
that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.transfer.base import TransferJob, TransferResult, joined


class JoinedStores:
    """Which stores went to the engine as one."""

    def __init__(self) -> None:
        self._stores: dict[int, list[TransferJob]] = {}
        """Id of the joined job (that of its first store) -> its stores, if they are several."""

    def join(self, stores: list[TransferJob]) -> TransferJob:
        """One job for all of them; at least one is given."""
        if len(stores) > 1:
            self._stores[stores[0].job_id] = stores
        return joined(stores)

    def apart(self, results: Iterable[TransferResult]) -> list[TransferResult]:
        """The same results, those of joined jobs as one for each store, with its share of the seconds."""
        found: list[TransferResult] = []
        for result in results:
            stores = self._stores.pop(result.job_id, None)
            if stores is None:
                found.append(result)
            else:
                found += _shares(stores, result)
        return found


def _shares(stores: list[TransferJob], result: TransferResult) -> list[TransferResult]:
    rows: dict[int, int] = {}
    for store in stores:
        for moves in store.groups:
            rows[moves.group_idx] = rows.get(moves.group_idx, 0) + len(moves.slots)
    failed = set(result.failed_keys)
    found = []
    for store in stores:
        moved: dict[int, int] = {}
        for moves in store.groups:
            whole = result.bytes_by_group.get(moves.group_idx, 0)
            if whole:
                share = whole * len(moves.slots) // rows[moves.group_idx]
                moved[moves.group_idx] = moved.get(moves.group_idx, 0) + share
        own = tuple(key for moves in store.groups for key in moves.keys if key in failed)
        # A failure that names blocks of other stores only is not this one's.
        ok = result.ok or (bool(failed) and not own)
        # Seconds of one job would otherwise count once for each of its stores.
        part = sum(moved.values()) / max(sum(result.bytes_by_group.values()), 1)
        seconds = result.seconds * part if result.bytes_by_group else result.seconds / len(stores)
        found.append(
            TransferResult(store.job_id, store.direction, ok, seconds, moved, "" if ok else result.error, own)
        )
    return found
