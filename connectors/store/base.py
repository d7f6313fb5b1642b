"""A store of block values that several engines share.

Keys are opaque bytes (already under a namespace), values are whole rows framed by ``connectors.store.frame``.
Every call ends by its deadline. A store never raises for a missing, corrupt or foreign value: that is a miss,
and counted; it raises ``StoreUnavailable`` when it cannot be asked at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreUnavailable(Exception):  # noqa: N818
    """The store could not be reached, or did not answer by the deadline."""


class BlockStore(Protocol):
    """Safe to call from several threads at once."""

    name: str
    """What KV events call it (``ownership``)."""

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """One answer per key; ``deadline_s``: seconds from now for the whole call."""

    def put(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Write values; one that exists is left, or replaced by an equal one. True: others can read it."""

    def get_into(self, items: Sequence[tuple[bytes, memoryview]], deadline_s: float) -> list[bool]:
        """Fill each buffer with its key's value, of exactly its length. False: a miss, buffer undefined."""

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Drop values found bad; absent ones are no error."""

    def close(self) -> None: ...
