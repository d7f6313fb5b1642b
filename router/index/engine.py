"""Writer of one engine's residency: applies its events to the index.

For each event in order: determine its plane (medium, group), learn groups and hashes from it
(``learn/knowledge.py``), and add or remove a copy in the index. Blocks outside the GPU are counted by
``offloaded.py`` and teach nothing. Invalid events (unknown medium or kind) are skipped and counted by reason.
Copies are counted, never merged; re-reports of an engine with ``kv_cache_report_mode=full`` are detected and
not counted, if the operator configures that they occur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from kvatlas.publisher.block_hash import HashScheme, PromptExtras
from kvatlas.publisher.events import (
    UNKNOWN_TYPES_MAX,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    to_block_hash,
)
from kvatlas.publisher.groups import Family, GroupSpec
from kvatlas.router.index.base import Index, Plane, PoolListener, Rows
from kvatlas.router.index.hit_rules import ALL_WORD, evaluate
from kvatlas.router.index.learn.facts import SetupEvidence
from kvatlas.router.index.learn.knowledge import EngineKnowledge
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts
from kvatlas.router.index.learn.learning_budget import LearningBudget
from kvatlas.router.index.learn.removals import RemovalEvidence, Removals
from kvatlas.router.index.offloaded_blocks import OffloadedBlocks
from kvatlas.router.index.places import GPU, ON_GPU

# Suffix of the temporary index id used while a snapshot is staged; no engine id contains a NUL.
_STAGED = "\x00staged"

# Maximum number of (group, block size) pairs remembered; engines have a handful.
_SETTLED_MAX = 1024

# Number of consecutive unusable events after which an engine with earlier usable events counts as having
# none.
_UNUSABLE_IN_ROW = 64

# Longest hit that is hashed to learn from a report: some milliseconds.
_REPORTED_TOKENS_MAX = 1 << 15

# A block that no index holds: hashes are not negative.
_UNNAMED = BlockHash(-1)


class EngineResidency(EngineKnowledge):
    """Residency of one engine, its cache layout and its hash scheme."""

    def __init__(
        self,
        engine_id: str,
        index: Index,
        facts: ModelFacts,
        known_schemes: Callable[[], Iterable[HashScheme]] = tuple,
        shared_layouts: dict[CacheLayout, CacheLayout] | None = None,
    ) -> None:
        layouts = {} if shared_layouts is None else shared_layouts
        super().__init__(engine_id, facts, known_schemes, layouts)
        self.index = index
        self.events = 0
        self.re_reports = 0
        # Clears of the GPU cache that events have shown.
        self.clears = 0
        # Events of unknown types, by type; ``other`` beyond ``UNKNOWN_TYPES_MAX`` types.
        self.unknown_types: Counter[str] = Counter()
        self.budget = LearningBudget()
        # Receives each block stored and removed on the GPU.
        self.pool: PoolListener | None = None
        # Receives the session id and blocks of events that have one, of the layout's first group.
        self.session_stored: Callable[[str, list[BlockHash]], None] | None = None
        # The batch being applied, the event in it, and the end of a series of stores that is decided already.
        self._batch: Sequence[Any] = ()
        self._at = self._series_end = 0
        self._series_repeats = False
        self._outside = OffloadedBlocks(
            engine_id,
            index,
            self.rejected,
            lambda: self._detector.scheme,
            lambda: 0 if self._layout is None else self._layout.hash_block_size,
        )
        self._reset(expected=(), inside_seen=False)

    def _reset(self, expected: tuple[GroupSpec, ...], *, inside_seen: bool) -> None:
        self._unlearn(expected, inside_seen=inside_seen)
        self.removals = RemovalEvidence()
        self._planes: dict[int | None, Plane] = {}
        self._settled: dict[tuple[int | None, int], Plane] = {}
        self._outside.reset()
        self._used = False
        self._rejected_in_row = self._unknown_in_row = 0
        self._settle()

    def _settle(self) -> None:
        self._outside.settle()
        super()._settle()

    @property
    def stores(self) -> frozenset[str]:
        """Shared stores that this engine loads from: it wrote to them, or they are configured."""
        return self._outside.stores.union(self.facts.shared_stores, self._outside.followed)

    def load_from(self, stores: frozenset[str]) -> None:
        """Set the stores with feeds of their own that this engine loads from."""
        if stores != self._outside.followed:
            self._outside.follow(stores)
            self._settle()

    def successor(self) -> EngineResidency:
        """Create a staged residency of the same engine, to be filled from a snapshot; ``supersede``
        activates it.
        """
        name = f"{self.engine_id}{_STAGED}"
        staged = EngineResidency(
            name, self.index, self._configured, self._known_schemes, self._shared_layouts
        )
        staged._reset(expected=self._groups.known, inside_seen=self._groups.inside_seen)
        staged._lookahead = self._lookahead
        staged._outside.followed = self._outside.followed
        return staged

    def learn_setup(self, evidence: SetupEvidence) -> None:
        """Use statements of the engine and hints of its model's file from now on."""
        layout = self._layout
        super().learn_setup(evidence)
        if self._layout is not layout:
            self._settled.clear()  # events of a group may prove something now that they could not before

    def supersede(self, old: EngineResidency) -> None:
        """Replace ``old``, of the same engine process, in one step.

        Knowledge about hashes that the snapshot did not provide is kept from ``old``; the counts are exact.
        """
        self._inherit(old)
        self.pool, self.session_stored = old.pool, old.session_stored
        self.removals = old.removals  # what was learned about the publisher, which is the same
        self.index.adopt(self.engine_id, old.engine_id)
        self.engine_id = self._outside.engine_id = old.engine_id
        self.rejected.update(old.rejected)
        self.events += old.events
        self.clears += old.clears
        self.re_reports += old.re_reports
        self.unknown_types.update(old.unknown_types)
        self._outside.unused.update(old._outside.unused)  # of the same class
        self.budget = old.budget
        self._settle()

    def forget(self) -> None:
        """Discard everything after a restart of the engine; it is expected to have the same groups."""
        self.index.forget(self.engine_id)
        if self.pool is not None:
            self.pool.clear()
        self._reset(expected=self._groups.known, inside_seen=self._groups.inside_seen)

    def clear(self, *, connector: bool = False) -> None:
        """Empty the GPU residency: the engine's pool was reset (by an event, or by a call that this router
        knows of). ``connector``: the host memory of vLLM's own connector too.
        """
        self.index.clear(self.engine_id, GPU)
        if self.pool is not None:
            self.pool.clear()
        self._outside.gpu_cleared(connector=connector)

    def age(self, now_s: float) -> None:
        """Expire shared-store blocks older than the TTL.

        Call it periodically with a monotonic time in seconds.
        """
        self._outside.age(now_s, self.facts.shared_store_ttl_s)

    def apply(self, batch: DecodedBatch) -> None:
        """Apply one batch, its events in order.

        A batch may be split, but not where ``continues_series`` holds: the stores of one request's groups are
        judged together.
        """
        rejected = self.rejected.total()
        self._batch, self._series_end = batch.events, 0
        if batch.rejected:
            self.rejected["undecodable"] += len(batch.rejected)
        for name in batch.unknown:
            known = name in self.unknown_types or len(self.unknown_types) < UNKNOWN_TYPES_MAX
            self.unknown_types[name if known else "other"] += 1
        for self._at, event in enumerate(batch.events):
            self.events += 1
            if type(event) is BlockStored:
                self._stored(event)
            elif type(event) is BlockRemoved:
                self._removed(event)
            elif type(event) is AllBlocksCleared:
                self.clears += 1
                self.clear()
        self._note_use(batch, self.rejected.total() - rejected)

    def _note_use(self, batch: DecodedBatch, rejected: int) -> None:
        if len(batch.events) > rejected - len(batch.rejected):
            self._used = True
            self._rejected_in_row = self._unknown_in_row = 0
        else:
            self._rejected_in_row += rejected
            self._unknown_in_row += len(batch.unknown)

    @property
    def unused(self) -> dict[str, int]:
        """Events that were understood or skipped, and say nothing to the router, by reason."""
        return self._outside.unused | {f"type {name}": count for name, count in self.unknown_types.items()}

    @property
    def unusable_events(self) -> int:
        """Number of consecutive latest events that were unusable, if nothing else arrived or there are many.

        0 if the engine's events are usable. Events of unknown types count only if nothing else arrived: a
        publisher may send them beside usable ones.
        """
        if not self._used:
            return self._rejected_in_row + self._unknown_in_row
        return self._rejected_in_row if self._rejected_in_row >= _UNUSABLE_IN_ROW else 0

    def _stored(self, event: BlockStored) -> None:
        if event.medium not in ON_GPU:
            self._stored_outside(event)
            return
        if not event.block_size and not event.num_tokens():
            self._named(event)
            return
        plane = self._settled.get((event.group_idx, event.block_size))
        if plane is None or event.lookahead_token_ids is not None:
            plane = self._learn(event)
            if plane is None:
                return
        if self._learned is not None:
            if self.budget.take(len(event.block_hashes)):
                self._look_at(event)
        elif event.parent_block_hash is None and self._detector.wants(root=True):
            self._detect(event)
        if event.parent_block_hash is None and self._is_re_report(event):
            self.re_reports += 1
            return
        if event.block_hashes:
            hashes, parent = _hashes(event.block_hashes), event.parent_block_hash
            self._store(plane, hashes)
            if self.pool is not None:
                self.pool.stored(hashes, None if parent is None else to_block_hash(parent))
            self._note_session(event, hashes)

    def lost(self, blocks: Sequence[BlockHash], *, shared_only: bool) -> None:
        """Forget blocks that storage lost without an event."""
        groups = 1 if self._layout is None else len(self._layout.groups)
        self._outside.lost(blocks, groups, shared_only=shared_only)

    def _stored_outside(self, event: BlockStored) -> None:
        known = self._outside.stores
        if tokens := self._outside.stored(event):
            self._learn_chunk(event, tokens)
        if known is not self._outside.stores:
            self._settle()

    def _note_session(self, event: BlockStored, hashes: list[BlockHash]) -> None:
        session_id, layout = event.session_id, self._layout
        if not session_id or self.session_stored is None or layout is None:
            return
        # Whole blocks of one group: no token counts twice.
        if (event.group_idx or 0, event.block_size) == layout.first_group:
            self.session_stored(session_id, hashes)

    def _store(self, plane: Plane, hashes: list[BlockHash]) -> None:
        if self.removals.watching:
            self.removals.stored(plane, hashes)
        self.index.store(self.engine_id, plane, hashes)

    def _named(self, event: BlockStored) -> None:
        """Store blocks of an event without tokens: it shows only that they are held."""
        if event.block_hashes:
            self._store(self._plane(event.group_idx), _hashes(event.block_hashes))

    def _look_at(self, event: BlockStored) -> None:
        """Learn the engine's hashes from a GPU event."""
        if self._detector.wants(root=event.parent_block_hash is None):
            self._detect(event)
        if self._learned is not None and self._layout is not None:
            self._learned.observe(event, self._layout.hash_block_size, self._holds)

    def learn_cached(self, tokens: Sequence[int], extras: PromptExtras, cached: int) -> None:
        """Learn from a report: the engine took more tokens of this prompt from its cache than was known."""
        scheme, layout = self.learned_scheme, self._layout
        if self._learned is None or scheme is None or layout is None or cached > _REPORTED_TOKENS_MAX:
            return
        # A window or a state may be gone although a block behind it is there.
        if all(group.family is Family.FULL for group in layout.groups):
            self._learned.place(tokens, extras, cached, scheme, self._holds)

    def _holds(self, block: BlockHash) -> bool:
        return self.index.holds(self.engine_id, GPU, block)

    def _learn(self, event: BlockStored) -> Plane | None:
        """Return the plane of a stored event after learning its group; None if the event is invalid."""
        plane, layout = self._plane(event.group_idx), self._layout
        if not self._learn_group(event, lambda: self._holds_parent(plane, event)):
            return None
        if self._layout is not layout:
            self._settled.clear()  # the facts shown by one group may make events of another informative
        if not self._groups.watches(plane.group_idx) and len(self._settled) < _SETTLED_MAX:
            self._settled[event.group_idx, event.block_size] = plane
        return plane

    def _holds_parent(self, plane: Plane, event: BlockStored) -> bool:
        slot, parent = self.index.slot(self.engine_id), event.parent_block_hash
        if slot is None or parent is None:
            return False
        held = self.index.lookup([to_block_hash(parent)]).plane(plane, slot.word)
        return bool(int(held[0]) >> slot.bit & 1)

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in ON_GPU:
            self._outside.removed(event)
            return
        plane, hashes = self._plane(event.group_idx), _hashes(event.block_hashes)
        if self.pool is not None:
            self.pool.removed(hashes)
        if self._learned is not None:
            self._learned.evicted(hashes)
        counts = event.remaining_copy_counts
        if counts is None or len(counts) != len(hashes):
            self._remove(plane, hashes)
            return
        if self.removals.semantics is not Removals.COUNTED:
            self.removals.counted()
        for block, left in zip(hashes, counts, strict=True):
            if left is None:
                self.index.remove(self.engine_id, plane, (block,))
            else:
                self.index.set_copies(self.engine_id, plane, block, left)

    def _remove(self, plane: Plane, hashes: list[BlockHash]) -> None:
        left = self.index.remove(self.engine_id, plane, hashes)
        evidence = self.removals
        if not evidence.open or not (left or evidence.watching):
            return
        evidence.removed(plane, hashes, left)
        if evidence.semantics is Removals.LAST_COPY:
            self._gone((plane, block) for block in left)

    def _gone(self, blocks: Iterable[tuple[Plane, BlockHash]]) -> None:
        for plane, block in blocks:
            self.index.set_copies(self.engine_id, plane, block, 0)

    def cached_share(self, pool_blocks: int | None) -> float | None:
        """Return the share of its GPU pool that holds cached blocks, in use by requests or not."""
        return min(1.0, self.index.physical(self.engine_id, GPU) / pool_blocks) if pool_blocks else None

    def audit(self, pool_blocks: int) -> bool:
        """Compare the counted copies with the engine's own number of blocks; False if there are too many."""
        if self._layout is not None and self._layout.has_parts:
            return True
        if self.index.physical(self.engine_id, GPU) <= pool_blocks:
            return True
        self._gone(self.removals.phantom())
        return False

    def _plane(self, group_idx: int | None) -> Plane:
        plane = self._planes.get(group_idx)
        if plane is None:
            plane = self._planes[group_idx] = Plane(GPU, group_idx or 0)
        return plane

    def _is_re_report(self, event: BlockStored) -> bool:
        """Whether a full store from token 0 repeats blocks that were already a hit: a report, not a new
        store.

        One request's events of all groups follow one another, as reports and as stores, so the first one
        decides for all: after it, the index holds a part of what it is asked about.
        """
        if not (self.facts.report_mode_full or self.removals.re_reports_suspected):
            return False
        if self._at >= self._series_end:
            series = _series(self._batch, self._at)
            self._series_end = self._at + len(series)
            self._series_repeats = self._repeats(series)
        return self._series_repeats

    def _repeats(self, series: list[BlockStored]) -> bool:
        """Whether these events report a hit.

        A report lists every block of every group, also those that are not stored
        (``BlockPool.emit_cached_block_events``, vLLM 0.32). A genuine store from token 0 needs a hit of 0; so
        if the index predicts a complete hit for the tokens plus one, the blocks are not new.
        """
        layout, slot = self._layout, self.index.slot(self.engine_id)
        if layout is None or slot is None or layout.missing_facts:
            return False
        if {event.group_idx or 0 for event in series} != {group.group_idx for group in layout.groups}:
            return False
        tokens, unit = series[0].num_tokens(), layout.hash_block_size
        # The events name the prefix's hashes at the ends of their blocks; no class reads any other.
        named = [_UNNAMED] * (tokens // unit)
        for event in series:
            size = event.block_size
            if len(event.block_hashes) * size != tokens or event.num_tokens() != tokens or size % unit:
                return False
            named[size // unit - 1 :: size // unit] = _hashes(event.block_hashes)
        rows = self.index.lookup(named)
        if tokens > layout.alignment:
            rows = _with_first(rows, layout.alignment // unit)
        # The block that EAGLE drops lies behind what a report names; with look-ahead hashes none is dropped.
        layout = replace(layout, lookahead=1)
        hits = evaluate(rows, layout, tokens + 1, word=slot.word)
        return hits.hit[slot.bit] == tokens


def _with_first(rows: Rows, blocks: int) -> Rows:
    """Return ``rows`` as if every engine held the first hash blocks.

    They may have one copy more than counted: a prompt that ends with them and is computed again publishes the
    same as a report. vLLM evicts the end of a prefix before its start (``KVCacheManager.free``, vLLM 0.32).
    """
    columns = {at: column.copy() for at, column in rows.columns.items()}
    for column in columns.values():
        column[:blocks] = ALL_WORD
    return Rows(rows.num_hashes, columns)


def _series(events: Sequence[Any], start: int) -> list[BlockStored]:
    """Return the stores of one request that begin with the root store ``start``."""
    found: list[BlockStored] = [events[start]]
    for event in events[start + 1 :]:
        if not continues_series(found[-1], event):
            break
        found.append(event)
    return found


def continues_series(before: Any, event: Any) -> bool:
    """Whether two events in a row store one request from token 0 on the GPU, group after group."""
    if type(before) is not BlockStored or type(event) is not BlockStored:
        return False
    if before.parent_block_hash is not None or event.parent_block_hash is not None:
        return False
    if before.medium not in ON_GPU or event.medium not in ON_GPU:
        return False
    return (event.group_idx or 0) > (before.group_idx or 0)


def _hashes(wire: list[int | bytes]) -> list[BlockHash]:
    """Convert wire hashes to 64-bit form; the common all-int case needs no call per hash."""
    if len(wire) == 1 and type(wire[0]) is int and wire[0] >= 0:
        return wire  # type: ignore[return-value]  # an int in range is a BlockHash
    if set(map(type, wire)) == {int}:
        ints: list[BlockHash] = wire  # type: ignore[assignment]  # just checked
        if min(ints) >= 0:  # the decoder admits nothing above 64 bits
            return ints
    return [to_block_hash(value) for value in wire]
