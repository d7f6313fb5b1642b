"""One engine's events turned into residency: the writer's side of the index.

For every event in order: its plane (medium, group) is found, the group learned, the hash scheme detected,
and the index told of one more or one less copy. Blocks outside the GPU teach nothing; ``offloaded.py`` counts
them. Events that make no sense (unknown medium or kind) cost
themselves only and are counted by reason. Copies are counted, never merged; re-reports of a
``kv_cache_report_mode=full`` engine are recognised and not counted where the operator says they occur.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from publisher.block_hash import HashScheme, PromptExtras, block_hashes
from publisher.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    DecodedBatch,
    to_block_hash,
)
from publisher.groups import Family, GroupSpec, scheduler_block_size
from router.index.base import Index, Plane
from router.index.learn.hash_scheme import Detection, SchemeDetector, learned_scheme
from router.index.learn.layout import CacheLayout, GroupLearner, ModelFacts, make_layout
from router.index.learn.prefixes import LearnedKeys
from router.index.learn.removals import RemovalEvidence, Removals
from router.index.learn.root_events import root_event
from router.index.media import GPU
from router.index.offloaded import Outside
from router.index.rules.hits import evaluate

_STAGED = "\x00staged"
"""Ends the index's name of a picture under construction; no engine id holds a NUL."""

_SETTLED_MAX = 1024
"""Distinct (group, block size) remembered; engines have a handful."""

_ON_GPU = frozenset({None, "", GPU})
"""How events name the engine's own pool."""


def _nobody() -> None:
    """There is nobody to tell."""


class EngineResidency:
    """What one engine holds, how its cache is laid out, and how its hashes are made."""

    def __init__(
        self,
        engine_id: str,
        index: Index,
        facts: ModelFacts,
        known_schemes: Callable[[], Iterable[HashScheme]] = tuple,
        shared_layouts: dict[CacheLayout, CacheLayout] | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.index = index
        self.facts = facts
        self.rejected: Counter[str] = Counter()
        self.events = 0
        self.re_reports = 0
        self._known_schemes = known_schemes
        self.changed: Callable[[], None] = _nobody
        """Told whenever layout, scheme, mode or stores may have changed."""
        self.scheme: HashScheme | None = None
        """The scheme to hash prompts with: the engine's own, or ours in learned mode; None before either."""
        self._shared_layouts = {} if shared_layouts is None else shared_layouts
        self._outside = Outside(engine_id, index, self.rejected)
        self._reset(expected=())

    def _reset(self, expected: tuple[GroupSpec, ...]) -> None:
        self._groups = GroupLearner(self.facts, expected)
        self._detector = SchemeDetector(self.facts.hash_seeds, self._known_schemes())
        self._detected: tuple[Detection, HashScheme | None] = Detection.WAITING, None
        self.assumed: HashScheme | None = None
        self._learned: LearnedKeys | None = LearnedKeys()
        self._layout: CacheLayout | None = None
        self._lookahead = 0
        self.removals = RemovalEvidence()
        self._planes: dict[int | None, Plane] = {}
        self._settled: dict[tuple[int | None, int], Plane] = {}
        self._outside.reset()
        self._settle()

    @property
    def detection(self) -> Detection:
        return self._detector.state

    def _settle(self) -> None:
        """Something changed that predictions rest on."""
        self.scheme = self._found_scheme()
        self.changed()

    def check_integrity(self) -> list[str]:
        """Works out anew what is kept; an empty list, or one sentence per contradiction."""
        if self.scheme != self._found_scheme():
            return [f"{self.engine_id}: scheme {self.scheme} is kept, {self._found_scheme()} was found"]
        return []

    def _found_scheme(self) -> HashScheme | None:
        if self._detector.scheme is not None:
            return self._detector.scheme
        if self._detector.state is Detection.LEARNED and self._groups.groups:
            return learned_scheme(self._unit(), self._lookahead)
        return None

    @property
    def mode(self) -> str:
        """How its hashes are had: the state of detection, or ``assumed`` while a scheme is only assumed."""
        return str(self.detection) if self.assumed is None else "assumed"

    def offer(self, prompt: Sequence[int], extras: PromptExtras) -> bool:
        """A prompt to be placed somewhere: blocks that this engine told of may stand in it. True if that (or
        ``confirm``) changed what is known of its hashes."""
        if self._groups.groups:
            self._detector.offer(prompt, extras, self._unit())
        return self._after_detection()

    def confirm(self, scheme: HashScheme) -> None:
        """It holds blocks of a prompt hashed by this scheme: that is the proof."""
        self._detector.confirm(scheme)
        self._after_detection()

    def doubt(self) -> None:
        """It reported more cached tokens than the assumed scheme made expect."""
        self._detector.doubt()
        self._after_detection()
        self._settle()

    @property
    def doubted(self) -> bool:
        """Whether receipts spoke against what was assumed."""
        return self._detector.doubted

    @property
    def unproven(self) -> bool:
        """Whether nothing is known of its hashes for sure; see ``SchemeDetector``."""
        return self._detector.unproven

    @property
    def learned(self) -> LearnedKeys | None:
        """The translation to use for look-ups; None in native mode."""
        return self._learned if self._detector.state is Detection.LEARNED else None

    @property
    def layout(self) -> CacheLayout | None:
        """Learned so far; None before the first stored block."""
        return self._layout

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Configuration without which this model's hits cannot be predicted."""
        return self._layout.missing_facts if self._layout is not None else ()

    @property
    def assumed_kinds(self) -> frozenset[int]:
        """Groups taken for full attention because nothing says what they are."""
        return frozenset(self._groups.assumed_kinds)

    @property
    def scheme_mismatches(self) -> int:
        return self._detector.mismatches

    @property
    def stores(self) -> frozenset[str]:
        """Shared stores that this engine loads from: it wrote to them, or they are configured."""
        return self._outside.stores.union(self.facts.shared_stores)

    def successor(self) -> EngineResidency:
        """A picture of the same engine to be built beside this one, from a snapshot; see ``supersede``."""
        staged = EngineResidency(
            f"{self.engine_id}{_STAGED}", self.index, self.facts, self._known_schemes, self._shared_layouts
        )
        staged._reset(expected=self._groups.known)
        staged._lookahead = self._lookahead
        return staged

    def supersede(self, old: EngineResidency) -> None:
        """Take the place of ``old``, of the same process, in one step.

        What the snapshot did not teach of the engine's hashes stays as it was known; its counts are exact.
        """
        if self._detector.state is not Detection.NATIVE and old._detector.state is not Detection.WAITING:
            self._detector, self._detected, self._learned = old._detector, old._detected, old._learned
            self.assumed = old.assumed
            self._relayout()
        if self._layout is None:
            self._groups, self._layout, self._lookahead = old._groups, old._layout, old._lookahead
        self.removals = old.removals  # what was learned of the publisher; it is the same
        self.index.adopt(self.engine_id, old.engine_id)
        self.engine_id = self._outside.engine_id = old.engine_id
        self.rejected.update(old.rejected)
        self.events += old.events
        self.re_reports += old.re_reports
        self._settle()

    def forget(self) -> None:
        """The engine restarted: nothing it said before holds, but it is expected to have the same groups."""
        self.index.forget(self.engine_id)
        self._reset(expected=self._groups.known)

    def clear(self) -> None:
        """The engine's GPU pool was reset (by an event, or by a reset this router passed on)."""
        self.index.clear(self.engine_id, GPU)

    def age(self, now_s: float) -> None:
        """Expire shared-store blocks older than the TTL. Call it periodically; monotonic clock."""
        self._outside.age(now_s, self.facts.shared_store_ttl_s)

    def apply(self, batch: DecodedBatch) -> None:
        """One batch, its events in order."""
        if batch.rejected:
            self.rejected["undecodable"] += len(batch.rejected)
        for event in batch.events:
            self.events += 1
            if type(event) is BlockStored:
                self._stored(event)
            elif type(event) is BlockRemoved:
                self._removed(event)
            elif type(event) is AllBlocksCleared:
                self.clear()
        if self._detector.state is Detection.SEARCHING:
            self.advance_detection()

    def advance_detection(self) -> None:
        """One bounded slice of a running seed search."""
        self._detector.advance()
        self._after_detection()

    def finish_detection(self) -> None:
        """Run a seed search to its end (for tools without an event loop)."""
        self._detector.finish()
        self._after_detection()

    def _stored(self, event: BlockStored) -> None:
        if event.medium not in _ON_GPU:
            known = self._outside.stores
            self._outside.stored(event)
            if known is not self._outside.stores:
                self._settle()
            return
        if not event.block_size and not event.num_tokens():
            self._named(event)
            return
        plane = self._settled.get((event.group_idx, event.block_size))
        if plane is None or event.lookahead_token_ids is not None:
            plane = self._learn(event)
            if plane is None:
                return
        looked_at = event.parent_block_hash is None or self._learned is not None
        if looked_at and not self._is_new(event):
            return
        if event.block_hashes:
            self._store(plane, _hashes(event.block_hashes))

    def _store(self, plane: Plane, hashes: list[BlockHash]) -> None:
        if self.removals.watching:
            self.removals.stored(plane, hashes)
        self.index.store(self.engine_id, plane, hashes)

    def _named(self, event: BlockStored) -> None:
        """Blocks without tokens: that they are held is all such an event says."""
        if event.block_hashes:
            self._store(self._plane(event.group_idx), _hashes(event.block_hashes))

    def _is_new(self, event: BlockStored) -> bool:
        """Learn what a GPU event shows of the engine's hashes; False for one that only reports again."""
        if self._detector.wants(root=event.parent_block_hash is None):
            self._detect(event)
        if self._learned is not None and self._layout is not None:
            self._learned.observe(event, self._layout.hash_block_size)
        if (self.facts.report_mode_full or self.removals.re_reports_suspected) and self._is_re_report(event):
            self.re_reports += 1
            return False
        return True

    def _learn(self, event: BlockStored) -> Plane | None:
        """The plane of a stored event, its group learned; None where it makes no sense."""
        if not self._learn_group(event):
            return None
        plane = self._plane(event.group_idx)
        if not self._groups.expecting and len(self._settled) < _SETTLED_MAX:
            self._settled[event.group_idx, event.block_size] = plane
        return plane

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in _ON_GPU:
            self._outside.removed(event)
            return
        plane, hashes = self._plane(event.group_idx), _hashes(event.block_hashes)
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
        """Share of its GPU pool that holds cached blocks, whether requests use them or not."""
        return min(1.0, self.index.physical(self.engine_id, GPU) / pool_blocks) if pool_blocks else None

    def audit(self, pool_blocks: int) -> bool:
        """Hold the copies counted against the engine's own number of blocks; False if there are too many."""
        if self.index.physical(self.engine_id, GPU) <= pool_blocks:
            return True
        self._gone(self.removals.phantom())
        return False

    def _plane(self, group_idx: int | None) -> Plane:
        plane = self._planes.get(group_idx)
        if plane is None:
            plane = self._planes[group_idx] = Plane(GPU, group_idx or 0)
        return plane

    def _learn_group(self, event: BlockStored) -> bool:
        if event.num_tokens() < max(1, len(event.block_hashes)) * event.block_size or not event.block_size:
            self.rejected["tokens_do_not_fill_blocks"] += 1
            return False
        try:
            changed = self._groups.observe(event)
        except ValueError:
            self.rejected["unknown_kind"] += 1
            return False
        ahead = event.lookahead_token_ids
        if ahead and len(ahead[0]) != self._lookahead:
            self._lookahead, changed = len(ahead[0]), True
        if changed:
            self._relayout()
        return True

    def _relayout(self) -> None:
        scheme = self._detector.scheme or self.assumed
        unit = scheme.hash_block_size if scheme is not None else None
        if self._groups.groups:
            layout = make_layout(self._groups.groups, self.facts, unit, self._lookahead)
            self._layout = self._shared_layouts.setdefault(layout, layout)
        self._settle()

    def _unit(self) -> int:
        return math.gcd(*(group.block_size for group in self._groups.groups))

    def _usual_unit(self) -> int:
        """The hash block of an engine whose operator chose none: with Mamba states at every block it is that
        of the scheduler."""
        groups = self._groups.groups
        dense = any(g.family is Family.MAMBA and g.mamba_cache_mode == "all" for g in groups)
        return scheduler_block_size(groups) if dense else self._unit()

    def _detect(self, event: BlockStored) -> None:
        if event.parent_block_hash is not None:
            self._detector.observe_child(event, self.facts.lora_paths)
        elif self._groups.groups:
            self._detector.observe(root_event(event, self.facts.lora_paths), event, self._unit())
        self._after_detection()

    def _assumed(self) -> HashScheme | None:
        groups = self._groups.groups
        if not groups:
            return None
        hidden = all(group.family is Family.CHUNKED for group in groups)
        return self._detector.assumed(self._usual_unit(), self._lookahead, hidden=hidden)

    def _after_detection(self) -> bool:
        """Take over what the detector found; whether anything changed."""
        now = self._detector.state, self._detector.scheme
        assumed = self._assumed()
        if now == self._detected and assumed == self.assumed:
            return False
        self._detected, self.assumed = now, assumed
        self._relayout()
        if self._detector.state is Detection.NATIVE:
            self._learned = None
        elif self._learned is None:
            self._learned = LearnedKeys()
        self._settle()
        return True

    def _is_re_report(self, event: BlockStored) -> bool:
        """A full store from token 0 of blocks that were already a hit: the engine reports, nothing is new.

        A genuine store from token 0 needs a hit of 0; so if the index predicts that the event's tokens, with
        one more, would hit in full, the blocks are not new.
        """
        scheme, layout = self._detector.scheme, self._layout
        slot = self.index.slot(self.engine_id)
        if event.parent_block_hash is not None or scheme is None or layout is None or slot is None:
            return False
        if layout.missing_facts:
            return False
        root = root_event(event, self.facts.lora_paths)
        if root is None or len(root.tokens) != event.num_tokens():
            return False
        rows = self.index.lookup(block_hashes(root.tokens, scheme, root.extras))
        hits = evaluate(rows, layout, len(root.tokens) + 1, word=slot.word)
        return hits.hit[slot.bit] == len(root.tokens)


def _hashes(wire: list[int | bytes]) -> list[BlockHash]:
    """Wire hashes in 64-bit form; the common all-int case costs no call per hash."""
    if len(wire) == 1 and type(wire[0]) is int and wire[0] >= 0:
        return wire  # type: ignore[return-value]  # an int in range is a BlockHash
    if set(map(type, wire)) == {int}:
        ints: list[BlockHash] = wire  # type: ignore[assignment]  # just checked
        if min(ints) >= 0:  # the decoder admits nothing above 64 bits
            return ints
    return [to_block_hash(value) for value in wire]
