"""What an engine holds, kept up to date from the events it publishes, and told whole on request.

``SnapshotLedger`` counts copies per (medium, group, locality, owner) and block as the events go by; a
``Snapshot`` is its content between two batches, encoded slice by slice while further batches keep coming.
Blocks lie in shards by hash: a shard that a later batch is about to change is encoded first, so a snapshot
is of one moment although nobody ever waits for more than a shard.

Always true: the stores of a snapshot, counted, are exactly the copies held at its cut; memory is bounded by
``blocks_max``, beyond which the ledger is lost (``lost`` says why) rather than wrong, until all is cleared.

A chunk is an event batch: first, for each group, the first blocks of one stored prompt with their tokens, so
that the reader learns group, block size and hash scheme; then the blocks held, without tokens, a hash once
per copy; then a removal for each block that was only taught. The form is that of vLLM #57789.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    Event,
    encode_batch,
    encode_tokens,
    to_block_hash,
)

REQUEST = b"snapshot"
"""Eight bytes on purpose: a publisher that knows replay only takes it for a seq it never reached."""
UNAVAILABLE = -2
"""The cut of an answer that has no snapshot: come back later."""

_SHARDS = 1024
_SHARD_MASK = _SHARDS - 1
_HASHES_PER_EVENT = 1024
_EVENTS_PER_CHUNK = 64
_TAUGHT_BLOCKS_MAX = 4
_TAUGHT_TOKENS_MAX = 1 << 16
_SCOPES_MAX = 256
_NO_TOKENS = encode_tokens([])

Scope = tuple[str, int | None, str | None, str | None]
"""(medium, group, locality, ownership)."""


class SnapshotLedger:
    """Copies of every block, by scope. ``apply`` what was published, in order, before it is sent."""

    def __init__(self, *, blocks_max: int = 4_000_000) -> None:
        self.lost = ""
        """Why there is no snapshot; empty when there is one."""
        self.unknown_removals = 0
        self._blocks_max = blocks_max
        self._blocks = 0
        self._scopes: dict[Scope, list[dict[BlockHash, int] | None]] = {}
        self._taught: dict[tuple[Scope, int], BlockStored] = {}
        self._open: list[Snapshot] = []
        self._offload_seen = False

    def __len__(self) -> int:
        """Distinct (scope, hash) pairs held."""
        return self._blocks

    def apply(self, batch: DecodedBatch) -> None:
        """One published batch."""
        if batch.rejected:
            self._lose("an event could not be read")
        for event in batch.events:
            if self.lost and not isinstance(event, AllBlocksCleared):
                continue
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear()

    def copies(self, medium: str, group_idx: int | None, block: BlockHash) -> int:
        """How many copies of a block are held, whoever holds them."""
        shards = [held for scope, held in self._scopes.items() if scope[:2] == (medium, group_idx)]
        return sum((each[block & _SHARD_MASK] or {}).get(block, 0) for each in shards)

    def snapshot(self) -> Snapshot:
        """The content as it is now; encode it by stepping it, and ``close`` it if it is not wanted."""
        snapshot = Snapshot(self, self._taught.values())
        self._open.append(snapshot)
        return snapshot

    def shards(self) -> dict[Scope, list[dict[BlockHash, int] | None]]:
        """The live content, for ``Snapshot``."""
        return self._scopes

    def closed(self, snapshot: Snapshot) -> None:
        """The snapshot needs no protection from changes any more."""
        if snapshot in self._open:
            self._open.remove(snapshot)

    def _store(self, event: BlockStored) -> None:
        scope = _scope(event)
        self._offload_seen = self._offload_seen or scope[0] != "GPU"
        if scope[0] == "GPU" and event.block_size and (scope, event.block_size) not in self._taught:
            self._teach(scope, event)
        if scope not in self._scopes and len(self._scopes) >= _SCOPES_MAX:
            self._lose(f"more than {_SCOPES_MAX} media and groups")
            return
        for wire in event.block_hashes:
            block = to_block_hash(wire)
            shard = self._shard(scope, block)
            count = shard.get(block, 0)
            self._blocks += not count
            shard[block] = count + 1
        if self._blocks > self._blocks_max:
            self._lose(f"more than {self._blocks_max} blocks")

    def _remove(self, event: BlockRemoved) -> None:
        scope = _scope(event)
        if scope not in self._scopes:
            self.unknown_removals += len(event.block_hashes)
            return
        counts = event.remaining_copy_counts
        told = counts if counts is not None and len(counts) == len(event.block_hashes) else None
        for number, wire in enumerate(event.block_hashes):
            block = to_block_hash(wire)
            shard = self._shard(scope, block)
            held = shard.get(block, 0)
            left = told[number] if told is not None else None
            now = left if left is not None else held - 1
            if now > 0:
                shard[block] = now
            elif held:
                del shard[block]
            self.unknown_removals += now < 0
            self._blocks += (now > 0) - (held > 0)

    def _clear(self) -> None:
        """The engine's pool was emptied; other tiers keep what they have."""
        gone = [scope for scope in self._scopes if scope[0] == "GPU"]
        for scope in gone:
            self._blocks -= sum(len(shard) for shard in self._scopes.pop(scope) if shard)
        if self.lost and not self._offload_seen:
            self.lost = ""

    def _lose(self, reason: str) -> None:
        self.lost = reason
        for snapshot in list(self._open):
            snapshot.close()
        self._scopes.clear()
        self._blocks = 0

    def _shard(self, scope: Scope, block: BlockHash) -> dict[BlockHash, int]:
        """The shard to be changed; open snapshots have taken it down first."""
        shards = self._scopes.get(scope)
        if shards is None:
            shards = self._scopes[scope] = [None] * _SHARDS
        number = block & _SHARD_MASK
        for snapshot in self._open:
            snapshot.take(scope, number)
        shard = shards[number]
        if shard is None:
            shard = shards[number] = {}
        return shard

    def _teach(self, scope: Scope, event: BlockStored) -> None:
        """Keep the beginning of the first prompt stored in a scope, for each block size seen there."""
        if event.parent_block_hash is not None or len(self._taught) >= _SCOPES_MAX:
            return
        tokens, size = event.num_tokens(), event.block_size
        full = bool(event.block_hashes) and tokens == len(event.block_hashes) * size
        if tokens > _TAUGHT_TOKENS_MAX and not full:
            return
        kept = min(_TAUGHT_BLOCKS_MAX, len(event.block_hashes)) if full else 0
        self._taught[scope, size] = msgspec.structs.replace(
            event,
            block_hashes=event.block_hashes[:kept],
            token_ids=encode_tokens(event.tokens()[: max(kept, 1) * size]),
            extra_keys=event.extra_keys[:kept] if full and event.extra_keys else None,
            lookahead_token_ids=event.lookahead_token_ids[:kept] if event.lookahead_token_ids else None,
        )


class Snapshot:
    """The ledger at one moment. ``step`` until it returns False; then ``chunks`` is the whole of it."""

    def __init__(self, ledger: SnapshotLedger, taught: Iterable[BlockStored]) -> None:
        self.chunks: list[bytes] = []
        self.size_bytes = 0
        self.done = False
        self.failed = False
        """Closed before it was whole."""
        self._ledger = ledger
        self._taught = list(taught)
        # The lists, not the ledger: a clear gives the ledger new ones and leaves these as they were.
        self._shards = dict(ledger.shards())
        self._left = {scope: set(range(_SHARDS)) for scope in self._shards}
        self._events: list[Event] = []
        self._hashes: dict[Scope, list[int]] = {}
        for event in self._taught:
            self._add(event)
        self._flush()

    def step(self) -> bool:
        """Take down one more shard with blocks; False when all are."""
        for scope, numbers in self._left.items():
            shards = self._shards[scope]
            while numbers:
                number = numbers.pop()
                if shards[number]:
                    self._write(scope, shards[number])
                    return True
        if not self.done:
            self._end()
        return False

    def take(self, scope: Scope, number: int) -> None:
        """A shard is about to change: take it down now, unless that was done."""
        numbers = self._left.get(scope)
        if numbers is not None and number in numbers:
            numbers.discard(number)
            self._write(scope, self._shards[scope][number])

    def close(self) -> None:
        """It is not wanted any more, or cannot be had."""
        self.failed = self.failed or not self.done
        self._left.clear()
        self._ledger.closed(self)

    def _write(self, scope: Scope, shard: dict[BlockHash, int] | None) -> None:
        if not shard:
            return
        hashes = self._hashes.setdefault(scope, [])
        for block, copies in shard.items():
            hashes.append(block)
            if copies > 1:
                hashes.extend([block] * (copies - 1))
        if len(hashes) >= _HASHES_PER_EVENT:
            self._name(scope)

    def _name(self, scope: Scope) -> None:
        hashes = self._hashes.pop(scope, [])
        medium, group, locality, ownership = scope
        for start in range(0, len(hashes), _HASHES_PER_EVENT):
            piece = hashes[start : start + _HASHES_PER_EVENT]
            self._add(
                BlockStored(
                    block_hashes=piece,  # type: ignore[arg-type]  # ints are wire hashes
                    parent_block_hash=None,
                    token_ids=_NO_TOKENS,
                    block_size=0,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=group,
                    locality=locality,
                    ownership=ownership,
                )
            )

    def _end(self) -> None:
        for scope in list(self._hashes):
            self._name(scope)
        for event in self._taught:
            for block in event.block_hashes:
                self._add(
                    BlockRemoved([block], event.medium, event.group_idx, event.locality, event.ownership)
                )
        self._flush()
        self.done = True
        self._ledger.closed(self)

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= _EVENTS_PER_CHUNK:
            self._flush()

    def _flush(self) -> None:
        if self._events:
            chunk = encode_batch(0.0, self._events)
            self._events = []
            self.chunks.append(chunk)
            self.size_bytes += len(chunk)


def _scope(event: BlockStored | BlockRemoved) -> Scope:
    return event.medium or "GPU", event.group_idx, event.locality, event.ownership
