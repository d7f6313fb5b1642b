"""LMCache's chunks as the engines' blocks. Its hashes are its own, over chunks of tokens (256 by default) and
the chunk before: BLAKE3, or one of vLLM's algorithms, in neither case a block's. A chunk's block is found by
its tokens.

Publishers: its coordinator (LMCache #4768, not released), and its connector inside vLLM, in the engine's
events (LMCache #5076, in 0.5.6: one chunk per event, medium ``cpu``, no group, also removals).
"""

from __future__ import annotations

from collections.abc import Callable

from kvatlas.publisher.block_hash import HashChain, HashScheme
from kvatlas.publisher.events import BlockRemoved, BlockStored, EventDecodeError, WireHash, to_block_hash
from kvatlas.router.index.stores import CHUNKS_MAX, STORE_MEDIA_MAX, StoreChange


class LmcacheChunks:
    """LMCache's hash of a chunk -> the engines' hash at its end, found by the chunk's tokens."""

    def __init__(self, scheme: Callable[[], HashScheme | None], unused: Callable[[str], None]) -> None:
        self._scheme_now = scheme
        self._unused = unused
        self._scheme: HashScheme | None = None
        # Full hashes of the engines, and who has which: two of LMCache's for one is a salt or an adapter,
        # which its events do not tell.
        self._ends: dict[bytes, bytes] = {}
        self._owner: dict[bytes, bytes] = {}

    def clear(self) -> None:
        self._ends.clear()
        self._owner.clear()

    def changes(self, event: BlockStored | BlockRemoved, medium: int, size: int) -> list[StoreChange | None]:
        """Changes that an event of chunks of ``size`` tokens means."""
        found: list[StoreChange | None] = []
        if isinstance(event, BlockRemoved):
            for key in map(_as_bytes, event.block_hashes):
                end = self._ends.get(key)
                if end is not None and self._owner.get(end) == key:
                    found.append(_change(end, medium, stored=False))
            return found
        scheme = self._scheme_now()
        if scheme != self._scheme:
            self._scheme = scheme
            self.clear()
            found.append(None)
        end = None if scheme is None else self._end_of(event, size, scheme)
        if end is None:
            return found
        if len(self._ends) >= CHUNKS_MAX:
            oldest = self._ends.pop(next(iter(self._ends)))
            self._owner.pop(oldest, None)
            found += [_change(oldest, number, stored=False) for number in range(STORE_MEDIA_MAX)]
        key = _as_bytes(event.block_hashes[0])
        self._ends[key] = end
        if self._owner.setdefault(end, key) == key:
            return [*found, _change(end, medium, stored=True)]
        self._unused("chunks with one text and two hashes (salts, adapters)")
        self._owner[end] = b""
        return [*found, *(_change(end, number, stored=False) for number in range(STORE_MEDIA_MAX))]

    def _end_of(self, event: BlockStored, size: int, scheme: HashScheme) -> bytes | None:
        """The engines' hash at the end of a chunk; None if it cannot be known."""
        parent = event.parent_block_hash
        before = None if parent is None else self._ends.get(_as_bytes(parent))
        if not size or size % scheme.hash_block_size or scheme.lookahead:
            self._unused("chunks that blocks do not divide")
        elif len(event.block_hashes) != 1 or event.num_tokens() != size:
            self._unused(f"events of other than one chunk of {size} tokens")
        elif parent is not None and before is None:
            self._unused("chunks behind unknown ones")
        else:
            chain = HashChain(scheme, parent=before)
            try:
                chain.extend(event.tokens())
            except EventDecodeError:
                self._unused("tokens that are no numbers")
                return None
            return chain.whole()[-1]
        return None


def _change(end: bytes, medium: int, *, stored: bool) -> StoreChange:
    return StoreChange(stored, 0, to_block_hash(end), 0, medium)


def _as_bytes(value: WireHash) -> bytes:
    return value if isinstance(value, bytes) else (value & (1 << 64) - 1).to_bytes(8, "big")
