"""Joining of a step's stores into one job for the transfer engine, and splitting of its result.

A decode step fills a block in some of its requests: a dozen jobs of one block each. The engine would check,
order and answer each of them separately, on the step's thread. Invariants: every store is answered once,
with the result of the joined job. A failed block named by the engine fails the store that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvatlas.connectors.transfer.base import TransferJob, TransferResult, joined


class JoinedStores:
    """Stores that were submitted to the engine as one job."""

    def __init__(self) -> None:
        # Id of the joined job (its first store's) -> its stores, if there are several.
        self._stores: dict[int, list[TransferJob]] = {}

    def join(self, stores: list[TransferJob]) -> TransferJob:
        if len(stores) > 1:
            self._stores[stores[0].job_id] = stores
        return joined(stores)

    def split(self, results: Iterable[TransferResult]) -> list[TransferResult]:
        """Split results of joined jobs into one per store, with its share of the seconds."""
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
        # A failure that names only blocks of other stores does not concern this one.
        ok = result.ok or (bool(failed) and not own)
        # Seconds of one job would otherwise count once for each of its stores.
        part = sum(moved.values()) / max(sum(result.bytes_by_group.values()), 1)
        seconds = result.seconds * part if result.bytes_by_group else result.seconds / len(stores)
        found.append(
            TransferResult(store.job_id, store.direction, ok, seconds, moved, "" if ok else result.error, own)
        )
    return found
