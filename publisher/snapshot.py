"""Ledger of the blocks an engine holds, updated from its published events, and snapshots of that ledger.

``SnapshotLedger`` counts copies per (medium, group, locality, owner) and block. A ``Snapshot`` is its content
between two batches, encoded slice by slice while further batches arrive. Blocks are sharded by hash. A shard
that a later batch is about to change is encoded first, so a snapshot shows one moment although each step
handles one shard only.

Invariants: the stored blocks in a snapshot, counted, are exactly the copies held at its cut. ``blocks_max``
bounds memory: beyond it the ledger gives up (``lost`` has the reason) until all blocks are cleared, rather
than be wrong.

A chunk is an event batch. It has, for each group, the first blocks of one stored prompt with their tokens, so
that the reader learns group, block size and hash scheme. Then come the blocks held, without tokens, one hash
per copy; then a removal for each block sent only as a sample. The form is that of vLLM #57789.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvatlas.publisher.events import (
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

# Eight bytes on purpose: a publisher without snapshots reads it as a seq that it never reached.
REQUEST = b"snapshot"
# Cut of an answer without a snapshot; the reader may retry later.
UNAVAILABLE = -2

# A shard is copied in one turn of the loop: 4,000 blocks at the bound of 4 million.
_SHARDS = 1024
_SHARD_MASK = _SHARDS - 1
_HASHES_PER_EVENT = 1024
_EVENTS_PER_CHUNK = 64
# Enough to show block size and hash scheme; their tokens are sent too.
_SAMPLE_BLOCKS_MAX = 4
_SAMPLE_TOKENS_MAX = 1 << 16
# Media and groups come from events: an invalid publisher must not create dictionaries without end.
_SCOPES_MAX = 256
_NO_TOKENS = encode_tokens([])

Scope = tuple[str, int | None, str | None, str | None]
"""(medium, group, locality, ownership)."""


class SnapshotLedger:
    """Copies of every block, by scope. Call ``apply`` with every batch, in order, before it is sent."""

    def __init__(self, *, blocks_max: int = 4_000_000) -> None:
        # Reason for having no snapshot; empty when snapshots are available.
        self.lost = ""
        self.unknown_removals = 0
        self._blocks_max = blocks_max
        self._blocks = 0
        self._scopes: dict[Scope, list[dict[BlockHash, int] | None]] = {}
        self._samples: dict[tuple[Scope, int], BlockStored] = {}
        self._open: list[Snapshot] = []
        self._offload_seen = False

    def __len__(self) -> int:
        """Distinct (scope, hash) pairs held."""
        return self._blocks

    def apply(self, batch: DecodedBatch) -> None:
        """Count the blocks of one published batch."""
        # An unread event may have stored or removed blocks: no snapshot is better than a wrong one.
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
        """Number of copies of a block, over all localities and owners."""
        shards = [held for scope, held in self._scopes.items() if scope[:2] == (medium, group_idx)]
        return sum((each[block & _SHARD_MASK] or {}).get(block, 0) for each in shards)

    def snapshot(self) -> Snapshot:
        """Begin a snapshot of the current content. Call its ``step`` to encode it, or ``close`` to drop
        it."""
        snapshot = Snapshot(self, self._samples.values())
        self._open.append(snapshot)
        return snapshot

    def shards(self) -> dict[Scope, list[dict[BlockHash, int] | None]]:
        """The live content, read by ``Snapshot``."""
        return self._scopes

    def closed(self, snapshot: Snapshot) -> None:
        """Stop protecting a snapshot from changes."""
        if snapshot in self._open:
            self._open.remove(snapshot)

    def _store(self, event: BlockStored) -> None:
        scope = _scope(event)
        self._offload_seen = self._offload_seen or scope[0] != "GPU"
        if scope[0] == "GPU" and event.block_size and (scope, event.block_size) not in self._samples:
            self._keep_sample(scope, event)
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
        remaining = counts if counts is not None and len(counts) == len(event.block_hashes) else None
        for number, wire in enumerate(event.block_hashes):
            block = to_block_hash(wire)
            shard = self._shard(scope, block)
            held = shard.get(block, 0)
            left = remaining[number] if remaining is not None else None
            # The engine's own count is believed; without it a removal takes one copy.
            now = left if left is not None else held - 1
            if now > 0:
                shard[block] = now
            elif held:
                del shard[block]
            self.unknown_removals += now < 0
            self._blocks += (now > 0) - (held > 0)

    def _clear(self) -> None:
        """Drop the blocks of the engine's pool; other tiers keep theirs."""
        gone = [scope for scope in self._scopes if scope[0] == "GPU"]
        for scope in gone:
            self._blocks -= sum(len(shard) for shard in self._scopes.pop(scope) if shard)
        # A clear empties the GPU only; with other tiers their content stays unknown.
        if self.lost and not self._offload_seen:
            self.lost = ""

    def _lose(self, reason: str) -> None:
        self.lost = reason
        for snapshot in list(self._open):
            snapshot.close()
        self._scopes.clear()
        self._blocks = 0

    def _shard(self, scope: Scope, block: BlockHash) -> dict[BlockHash, int]:
        """The shard of a block, for a change; open snapshots encode it first."""
        shards = self._scopes.get(scope)
        if shards is None:
            shards = self._scopes[scope] = [None] * _SHARDS
        number = block & _SHARD_MASK
        for snapshot in self._open:
            # Copied before the change, so that the snapshot shows one moment.
            snapshot.encode_shard(scope, number)
        shard = shards[number]
        if shard is None:
            shard = shards[number] = {}
        return shard

    def _keep_sample(self, scope: Scope, event: BlockStored) -> None:
        """Keep the beginning of the first prompt stored in a scope, for each block size seen there."""
        if event.parent_block_hash is not None or len(self._samples) >= _SCOPES_MAX:
            return
        tokens, size = event.num_tokens(), event.block_size
        full = bool(event.block_hashes) and tokens == len(event.block_hashes) * size
        if tokens > _SAMPLE_TOKENS_MAX and not full:
            return
        kept = min(_SAMPLE_BLOCKS_MAX, len(event.block_hashes)) if full else 0
        self._samples[scope, size] = msgspec.structs.replace(
            event,
            block_hashes=event.block_hashes[:kept],
            token_ids=encode_tokens(event.tokens()[: max(kept, 1) * size]),
            extra_keys=event.extra_keys[:kept] if full and event.extra_keys else None,
            lookahead_token_ids=event.lookahead_token_ids[:kept] if event.lookahead_token_ids else None,
        )


class Snapshot:
    """The ledger at one moment. Call ``step`` until it returns False; then ``chunks`` is complete."""

    def __init__(self, ledger: SnapshotLedger, samples: Iterable[BlockStored]) -> None:
        self.chunks: list[bytes] = []
        self.size_bytes = 0
        self.done = False
        # Closed before it was complete.
        self.failed = False
        self._ledger = ledger
        self._samples = list(samples)
        # Refer to the shard lists, not the ledger: a clear gives the ledger new lists and keeps these.
        self._shards = dict(ledger.shards())
        self._left = {scope: set(range(_SHARDS)) for scope in self._shards}
        self._events: list[Event] = []
        self._hashes: dict[Scope, list[int]] = {}
        for event in self._samples:
            self._add(event)
        self._flush()

    def step(self) -> bool:
        """Encode one more shard that has blocks; False when all are encoded."""
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

    def encode_shard(self, scope: Scope, number: int) -> None:
        """Encode a shard that is about to change, unless it is encoded already."""
        numbers = self._left.get(scope)
        if numbers is not None and number in numbers:
            numbers.discard(number)
            self._write(scope, self._shards[scope][number])

    def close(self) -> None:
        """Drop the snapshot; it has failed unless it is complete."""
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
            self._add_hashes(scope)

    def _add_hashes(self, scope: Scope) -> None:
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
            self._add_hashes(scope)
        for event in self._samples:
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
