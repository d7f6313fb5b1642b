"""Physical blocks: their users, their content, and the order in which they are reused.

Block 0 is the null block. A free block stays findable by its hash until ``take`` allocates it, which removes
its hashes, with one event each. Source: ``BlockPool`` and ``FreeKVCacheBlockQueue`` of vLLM 0.32. Every
operation is O(1) per block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from kvatlas.publisher.block_hash import NO_EXTRAS, HashChain, HashScheme, PromptExtras, extra_keys
from kvatlas.publisher.events import BlockRemoved, BlockStored, Event, encode_tokens
from kvatlas.publisher.groups import GroupSpec

WireHash = int | bytes
Copies = int | dict[int, None]
"""The block that holds a hash, or several, oldest first (0 is the null block)."""

NULL = 0
MEDIUM = "GPU"


class IntegrityError(RuntimeError):
    """The pool's state is inconsistent: a defect of this package."""


def first_copy(copies: Copies) -> int:
    """The copy that a hit takes: the oldest."""
    return copies if isinstance(copies, int) else next(iter(copies))


class BlockStore:
    """``num_blocks`` blocks shared by all groups; ``events`` is None if events are off."""

    def __init__(self, num_blocks: int, num_groups: int, *, events: bool) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks {num_blocks}: block 0 is the null block, so at least 2")
        self.num_blocks = num_blocks
        self.events: list[Event] | None = [] if events else None
        self.maps: list[dict[WireHash, Copies]] = [{} for _ in range(num_groups)]
        self.refs = [0] * num_blocks
        self.group_of = [0] * num_blocks
        self.hash_of: list[WireHash | None] = [None] * num_blocks
        self.span_of = [0] * num_blocks
        # Number of allocations of each block: a reader of a freed block sees whether its content was
        # replaced.
        self.writes = [0] * num_blocks
        self._extra: dict[int, list[WireHash]] = {}
        # Blocks without a hash, reused last in, first out and before all others (``BlockPool.free_blocks``).
        self._front: list[int] = []
        # Hashed blocks, in the order they were freed. A deque: a block taken out of the middle leaves a stale
        # entry.
        self._back: deque[int] = deque(range(1, num_blocks))
        self._stale = [0] * num_blocks
        self.num_free = num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks and drop their content. The caller has checked ``num_free``."""
        front, back, stale = self._front, self._back, self._stale
        refs, hash_of, writes = self.refs, self.hash_of, self.writes
        blocks: list[int] = []
        # Blocks without a hash first: reusing them evicts nothing.
        if front and count:
            blocks = front[-count:][::-1]
            del front[-count:]
            for block in blocks:
                refs[block] = 1
                writes[block] += 1
        missing = count - len(blocks)
        while missing:
            block = back.popleft()
            if stale[block]:
                stale[block] -= 1
                continue
            missing -= 1
            blocks.append(block)
            refs[block] = 1
            writes[block] += 1
            if hash_of[block] is not None:
                self.forget(block)
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a user to each block; null blocks are ignored."""
        refs, stale = self.refs, self._stale
        for block in filter(None, blocks):
            if refs[block]:
                refs[block] += 1
            else:
                refs[block] = 1
                stale[block] += 1
                self.num_free -= 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove a user from each block, in the order of their reuse; null blocks are ignored."""
        refs, hash_of = self.refs, self.hash_of
        hashed: list[int] = []
        bare: list[int] = []
        for block in filter(None, blocks):
            users = refs[block] - 1
            refs[block] = users
            if not users:
                if hash_of[block] is None:
                    bare.append(block)
                else:
                    hashed.append(block)
        # ``prepend_n`` keeps the order of its argument, and ``_front`` is taken from its end.
        bare.reverse()
        self._front += bare
        self._back += hashed
        self.num_free += len(bare) + len(hashed)
        # Rewritten when stale entries outnumber the blocks: memory stays bounded, and the cost is O(1) per
        # freed block.
        if len(self._back) > 2 * self.num_blocks:
            self._rewrite_queue()

    def holds(self, block: int, group_idx: int, block_hash: WireHash) -> bool:
        copies = self.maps[group_idx].get(block_hash)
        return copies == block if isinstance(copies, int) else copies is not None and block in copies

    def insert_run(self, group_idx: int, blocks: Iterable[int], hashes: Iterable[WireHash]) -> None:
        """Make whole blocks findable; hashes of a prefix inside a block are removed first."""
        mapping, hash_of, group_of = self.maps[group_idx], self.hash_of, self.group_of
        # Equal content is never merged, as in vLLM: a block table that is in use must not change. A hash with
        # several blocks keeps them oldest first.
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_of[block] is not None:
                self.forget(block)
            hash_of[block] = block_hash
            group_of[block] = group_idx
            copies = mapping.get(block_hash)
            if copies is None:
                mapping[block_hash] = block
            elif isinstance(copies, int):
                mapping[block_hash] = {copies: None, block: None}
            else:
                copies[block] = None

    def insert(self, block: int, group_idx: int, block_hash: WireHash) -> None:
        """Make a block findable under one more hash."""
        copies = self.maps[group_idx].get(block_hash)
        if copies is None:
            self.maps[group_idx][block_hash] = block
        elif isinstance(copies, int):
            self.maps[group_idx][block_hash] = {copies: None, block: None}
        else:
            copies[block] = None
        if self.hash_of[block] is None:
            self.hash_of[block] = block_hash
            self.group_of[block] = group_idx
        else:
            self._extra.setdefault(block, []).append(block_hash)

    def forget(self, block: int) -> None:
        """Remove every hash of a block, one event each."""
        group_idx, events = self.group_of[block], self.events
        for block_hash in self._drop_hashes(block):
            if events is not None:
                events.append(BlockRemoved([block_hash], MEDIUM, group_idx))

    def move(self, source: int, target: int) -> None:
        """Move the hashes of one block to another, without an event."""
        group_idx, span = self.group_of[source], self.span_of[source]
        for block_hash in self._drop_hashes(source):
            self.insert(target, group_idx, block_hash)
        self.span_of[target] = span

    def reset(self) -> bool:
        """Remove every hash. Returns False, with nothing changed, while any block is in use."""
        # vLLM's ``reset_prefix_cache`` fails too while blocks are in use: their requests would read blocks
        # without hashes as hits.
        if self.num_free != self.num_blocks - 1:
            return False
        for mapping in self.maps:
            mapping.clear()
        self._extra.clear()
        self.hash_of = [None] * self.num_blocks
        return True

    def check_integrity(self, uses: list[int]) -> None:
        """Raise ``IntegrityError`` unless the store agrees with ``uses``, the references per block."""
        if uses != self.refs:
            wrong = [block for block in range(self.num_blocks) if uses[block] != self.refs[block]]
            raise IntegrityError(f"blocks {wrong[:8]}: reference counts are off")
        queued = self._free_queue()
        free = [block for block in range(1, self.num_blocks) if not self.refs[block]]
        if sorted(queued) != free or len(queued) != self.num_free:
            raise IntegrityError(f"free queue has {len(queued)} blocks, {len(free)} are unused")
        held = [
            (block_hash, block) for block, block_hash in enumerate(self.hash_of) if block_hash is not None
        ]
        held += [(block_hash, block) for block, hashes in self._extra.items() for block_hash in hashes]
        listed = 0
        for group_idx, mapping in enumerate(self.maps):
            for copies in mapping.values():
                blocks = (copies,) if isinstance(copies, int) else tuple(copies)
                listed += len(blocks)
                if not blocks or any(self.group_of[block] != group_idx for block in blocks):
                    raise IntegrityError(f"group {group_idx}: a hash without a block of that group")
        if listed != len(held) or not all(self.holds(b, self.group_of[b], h) for h, b in held):
            raise IntegrityError("hash maps and blocks disagree")

    def _drop_hashes(self, block: int) -> list[WireHash]:
        primary = self.hash_of[block]
        if primary is None:
            return []
        self.hash_of[block] = None
        hashes = [primary]
        if block in self._extra:
            hashes += self._extra.pop(block)
        mapping = self.maps[self.group_of[block]]
        for block_hash in hashes:
            copies = mapping[block_hash]
            if isinstance(copies, int) or len(copies) == 1:
                del mapping[block_hash]
            else:
                del copies[block]
        return hashes

    def _free_queue(self) -> list[int]:
        stale = self._stale.copy()
        queue = self._front[::-1]
        for block in self._back:
            if stale[block]:
                stale[block] -= 1
            else:
                queue.append(block)
        return queue

    def _rewrite_queue(self) -> None:
        queue = self._free_queue()
        self._back = deque(queue[len(self._front) :])
        self._stale = [0] * self.num_blocks


class PoolRequest:
    """One request in a block pool: its tokens, its hashes, and its blocks in every group.

    Made by a pool's ``request``. Counts are in tokens. Block tables hold block numbers, 0 for a block
    that is not held (outside the window, or a skipped state). ``loading_to`` is the end of a running load,
    else 0; ``offered`` tokens have been offered to a connector. ``host_hit`` tokens of the hit were loaded
    from the pool's own host memory. Events carry ``session_id``.

    Invariant: ``hashes`` covers every whole hash block of ``token_ids`` (and may extend further if the caller
    supplied it), so nothing is hashed twice even if a request is tried again.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        extras: PromptExtras,
        scheme: HashScheme,
        num_groups: int,
        *,
        hashes: HashChain | Sequence[WireHash] | None,
        int_hashes: bool,
    ) -> None:
        if not token_ids:
            raise ValueError("a request needs at least one token")
        self.token_ids: list[int] = list(token_ids)
        self.extras = extras
        self.session_id: str | None = None
        self.num_prompt_tokens = len(self.token_ids)
        self.shared_prefix_boundary = 0
        self.hit = self.host_hit = 0
        self._hash_block_size, self._ahead = scheme.hash_block_size, scheme.lookahead
        if hashes is None:
            hashes = HashChain(scheme, extras)
        self._chain: HashChain | None = hashes if isinstance(hashes, HashChain) else None
        self.hashes: Sequence[WireHash] = hashes.hashes if isinstance(hashes, HashChain) else hashes
        self._whole: list[WireHash] | None = None if int_hashes or self._chain is None else []
        self.forget_blocks(num_groups)
        self._cover()

    def forget_blocks(self, num_groups: int) -> None:
        """Reset to a request without blocks and computed tokens."""
        self.started = False
        self.num_computed = 0
        self.loading_to = 0
        self.offered = 0
        self.quiet_to = -1
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_cached = [0] * num_groups
        self.dropped = [0] * num_groups
        self.partial: dict[int, tuple[int, int]] = {}
        self.allocated: set[int] = set()
        self.last_state: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def known_hashes(self) -> Sequence[WireHash]:
        """The hashes of the whole hash blocks of the current tokens."""
        count = len(self.token_ids) // self._hash_block_size
        return self.hashes if len(self.hashes) == count else self.hashes[:count]

    def append(self, token_id: int) -> None:
        """Add one generated token; it has KV only after it is computed. Raises ``ValueError`` if the supplied
        hashes are too few.
        """
        self.token_ids.append(token_id)
        # Hashes change only at the end of a whole hash block, or of the token behind it with a look-ahead.
        if not (len(self.token_ids) - self._ahead) % self._hash_block_size:
            self._cover()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add generated tokens. Raises ``ValueError`` if the supplied hashes are too few."""
        before = (len(self.token_ids) - self._ahead) // self._hash_block_size
        self.token_ids.extend(token_ids)
        if (len(self.token_ids) - self._ahead) // self._hash_block_size != before:
            self._cover()

    def _cover(self) -> None:
        if self._chain is not None:
            self._chain.extend(self.token_ids)
            if self._whole is not None:
                self._whole += self._chain.whole(len(self._whole))
                self.hashes = self._whole
        elif len(self.hashes) < len(self.token_ids) // self._hash_block_size:
            raise ValueError(
                f"hashes cover {len(self.hashes) * self._hash_block_size} tokens of {len(self.token_ids)}"
            )


class EventWriter:
    """Append the ``BlockStored`` events of a pool to the store's event list, equal to those of vLLM 0.32.

    An event covers the tokens of all blocks that became full, but lists only the hashes of the stored ones,
    in order; the list may be empty. A boundary stored inside a block is an event of one hash block. LoRA ids
    that are not given count up as names appear.
    """

    def __init__(self, store: BlockStore, hash_block_size: int, lora_ids: dict[str, int]) -> None:
        self._store = store
        self._hash_block_size = hash_block_size
        self._lora_ids = lora_ids

    def stored(
        self, request: PoolRequest, spec: GroupSpec, start: int, end: int, held: Sequence[int]
    ) -> None:
        """Report that blocks ``start`` to ``end`` became full, of which ``held`` are stored (positions)."""
        events = self._store.events
        if events is None:
            return
        size = spec.block_size
        scale = size // self._hash_block_size
        event = self._event(
            request,
            spec,
            block_size=size,
            # Only stored blocks are listed, but the tokens cover all: readers derive the masked blocks from
            # the difference. The list may be empty.
            hash_positions=[(position + 1) * scale - 1 for position in held],
            # The parent is the hash before the first full block, even if that block itself was not stored.
            parent=start * scale - 1,
            span=(start * size, end * size),
            keys=[self._keys(request, position * size, (position + 1) * size) for position in held],
        )
        events.append(event)

    def stored_part(self, request: PoolRequest, spec: GroupSpec, num_tokens: int) -> None:
        """Report a block stored for the prefix of ``num_tokens``, a hash boundary inside it."""
        events = self._store.events
        if events is None:
            return
        size = self._hash_block_size
        start, last = num_tokens - size, num_tokens // size - 1
        event = self._event(
            request,
            spec,
            block_size=size,
            hash_positions=[last],
            parent=last - 1,
            span=(start, num_tokens),
            keys=[self._keys(request, start, num_tokens)],
        )
        events.append(event)

    def _event(
        self,
        request: PoolRequest,
        spec: GroupSpec,
        *,
        block_size: int,
        hash_positions: list[int],
        parent: int,
        span: tuple[int, int],
        keys: list[tuple[Any, ...] | None],
    ) -> BlockStored:
        name = request.extras.lora_name
        return BlockStored(
            block_hashes=[request.hashes[position] for position in hash_positions],
            parent_block_hash=request.hashes[parent] if parent >= 0 else None,
            token_ids=encode_tokens(request.token_ids[slice(*span)]),
            block_size=block_size,
            # vLLM refuses adapter ids below 1 (``LoRARequest``).
            lora_id=None if name is None else self._lora_ids.setdefault(name, len(self._lora_ids) + 1),
            medium=MEDIUM,
            lora_name=name,
            extra_keys=keys or None,
            group_idx=spec.group_idx,
            kv_cache_spec_kind=spec.kind,
            kv_cache_spec_sliding_window=spec.sliding_window,
            session_id=request.session_id,
        )

    @staticmethod
    def _keys(request: PoolRequest, start: int, end: int) -> tuple[Any, ...] | None:
        if request.extras == NO_EXTRAS:
            return None
        return extra_keys(request.extras, start, end, tagged=False) or None
