"""Knowledge about an engine's cache and hashes: groups and layout, hash scheme, and their certainty.

Groups come from stored events (``layout.py``), the scheme from events and prompts (``hash_scheme.py``). Until
a scheme is proven, prefixes are learned beside it (``LearnedKeys``), from the first event on. Invariant:
``changed`` is called whenever a basis of predictions may have changed; invalid events are counted in
``rejected``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvatlas.publisher.block_hash import SGLANG, HashScheme, PromptExtras
from kvatlas.publisher.events import BlockStored
from kvatlas.publisher.groups import Family, GroupSpec, hash_unit, scheduler_block_size
from kvatlas.router.index.learn.facts import (
    NO_EVIDENCE,
    Certainty,
    DropReceipts,
    Fact,
    SetupEvidence,
    drops,
    find_facts,
    layout_facts,
    level,
)
from kvatlas.router.index.learn.hash_scheme import Detection, SchemeDetector, learned_scheme
from kvatlas.router.index.learn.layout import CacheLayout, GroupLearner, ModelFacts, make_layout
from kvatlas.router.index.learn.learned_keys import LearnedKeys
from kvatlas.router.index.learn.root_events import root_event


def _nobody() -> None:
    """Default of ``changed``: no listener."""


class EngineKnowledge:
    """Groups, layout, facts and hash scheme of one engine; not the blocks it holds."""

    def __init__(
        self,
        engine_id: str,
        facts: ModelFacts,
        known_schemes: Callable[[], Iterable[HashScheme]],
        shared_layouts: dict[CacheLayout, CacheLayout],
    ) -> None:
        self.engine_id = engine_id
        self._configured = facts
        # Facts to predict with: configured or found.
        self.facts = facts
        # Each of these facts with its source and certainty.
        self.found_facts: tuple[Fact, ...] = ()
        self._setup = NO_EVIDENCE
        self._drop_receipts = DropReceipts()
        self.rejected: Counter[str] = Counter()
        # Called whenever layout, scheme, mode or stores may have changed.
        self.changed: Callable[[], None] = _nobody
        # Scheme to hash prompts with: the engine's own, until it is proven the router's; None before events.
        self.scheme: HashScheme | None = None
        self._known_schemes = known_schemes
        self._shared_layouts = shared_layouts

    def _unlearn(self, expected: tuple[GroupSpec, ...], *, inside_seen: bool) -> None:
        """Reset all knowledge except the expected groups, and whether hits end inside a block of them."""
        self._groups = GroupLearner(self.facts, expected, inside_seen=inside_seen)
        self._detector = SchemeDetector(self.facts.hash_seeds, self._known_schemes)
        self._note_kind()
        self._detected: tuple[Detection, HashScheme | None] = Detection.WAITING, None
        self.assumed: HashScheme | None = None
        self._learned: LearnedKeys | None = LearnedKeys()
        self._layout: CacheLayout | None = None
        self._lookahead = 0
        self._chunk_blocks = 0
        self._find_facts()

    def _inherit(self, old: EngineKnowledge) -> None:
        """Take over knowledge of the same engine process that is missing here."""
        if self._detector.state is not Detection.NATIVE:
            if self._learned is not None and old._learned is not None:
                self._learned.keep(old._learned)
            if old._detector.state is not Detection.WAITING:
                self._detector, self._detected, self.assumed = old._detector, old._detected, old.assumed
                self._learned = None if old._learned is None else self._learned
                self._relayout()
        self._setup, self._drop_receipts = old._setup, old._drop_receipts
        self._chunk_blocks = max(self._chunk_blocks, old._chunk_blocks)
        if self._layout is None:
            self._groups, self._layout, self._lookahead = old._groups, old._layout, old._lookahead
            self.facts, self.found_facts = old.facts, old.found_facts
        else:
            self._relayout()

    def learn_setup(self, evidence: SetupEvidence) -> None:
        """Use these statements of the engine and hints of its model's file from now on."""
        if evidence != self._setup:
            self._setup = evidence
            self._drop_receipts.restart()
            self._note_kind()
            self._relayout()
            self._after_detection()

    def _note_kind(self) -> None:
        if self._setup.kind == "sglang":
            namespaced = any(stated.namespaced for stated in self._setup.statements)
            self._detector.expect_pages(computable=not namespaced)

    def fits(self, scheme: HashScheme | None) -> bool:
        """Whether the engine may have this scheme, by its software."""
        return self._detector.fits(scheme)

    def learn_receipt(self, predicted: int, actual: int, prompt_tokens: int) -> None:
        """Learn from a receipt: the engine took ``actual`` tokens of a prompt from its GPU cache,
        ``predicted`` were expected.
        """
        layout = self._layout
        if layout is None or layout.lookahead or self._configured.eagle_groups is not None:
            return
        if not predicted and not actual:
            return
        receipts = self._drop_receipts
        if predicted == actual and receipts.agree:
            receipts.add_exact()
            return
        agreed, behind = receipts.agree, receipts.looks_behind
        # All but the block that is dropped, or that and the one before it.
        ends = prompt_tokens - layout.alignment, prompt_tokens - 2 * layout.alignment
        if (
            len(layout.groups) == 1
            and layout.dropped_tokens
            and not prompt_tokens % layout.alignment
            and {predicted, actual} == set(ends)
            and (agreed or drops(self._setup, layout.groups)[2] == "certain")
        ):
            receipts.looked_behind(found=actual == ends[0])
            if behind != receipts.looks_behind:
                self._relayout()
            return
        blocks = {layout.alignment, *(c.block_size for c in layout.classes if c.family is Family.FULL)}
        change = receipts.add(predicted - actual, blocks, single=len(layout.classes) == 1)
        if change and level(self._setup, receipts, layout.groups, change) is not None:
            receipts.shifted(change)
        elif agreed == receipts.agree:
            return
        self._relayout()

    def _find_facts(self) -> None:
        self.facts, self.found_facts = find_facts(
            self._configured,
            self._setup,
            self._drop_receipts,
            self._groups.known,
            self._lookahead,
            self._chunk_blocks,
        )
        self._groups.take_facts(self.facts)

    @property
    def detection(self) -> Detection:
        return self._detector.state

    def _settle(self) -> None:
        """Recompute the scheme and call ``changed``."""
        self.scheme = self._found_scheme()
        self.changed()

    def check_integrity(self) -> list[str]:
        """Recompute the stored scheme; returns one sentence per contradiction."""
        if self.scheme != self._found_scheme():
            return [f"{self.engine_id}: scheme {self.scheme} is kept, {self._found_scheme()} was found"]
        return []

    def _found_scheme(self) -> HashScheme | None:
        return self._detector.scheme or self.learned_scheme

    @property
    def learned_scheme(self) -> HashScheme | None:
        """Scheme of own keys; None before the first stored block, and in native mode."""
        if self._learned is None or self._layout is None:
            return None
        return learned_scheme(self._layout.hash_block_size, self._lookahead)

    @property
    def mode(self) -> str:
        """How hashes are obtained: the state of detection, or ``assumed`` while a scheme is only assumed."""
        return str(self.detection) if self.assumed is None else "assumed"

    def expect(self, groups: tuple[GroupSpec, ...]) -> None:
        """Expect the groups of another engine of the same model: engines that fetch prompts from others
        may never have published some of them.
        """
        if self._groups.expect(groups):
            self._relayout()

    def offer(self, prompt: Sequence[int], extras: PromptExtras) -> bool:
        """Search a prompt to be placed for blocks that this engine published.

        Returns whether that (or ``confirm``) changed the knowledge about its hashes.
        """
        if self._groups.groups:
            self._detector.offer(prompt, extras, self._unit())
        return self._after_detection()

    def confirm(self, scheme: HashScheme) -> None:
        """Accept ``scheme``: the engine holds blocks of a prompt hashed with it."""
        self._detector.confirm(scheme)
        self._after_detection()

    def doubt(self) -> None:
        """Record a receipt with more cached tokens than the assumed scheme predicted."""
        self._detector.doubt()
        self._after_detection()
        self._settle()

    @property
    def doubted(self) -> bool:
        """Whether receipts contradicted the assumed scheme."""
        return self._detector.doubted

    @property
    def unproven(self) -> bool:
        """Whether no hash scheme is proven or abandoned."""
        return self._detector.unproven

    @property
    def learned(self) -> LearnedKeys | None:
        """Translation of own keys to engine hashes; None in native mode."""
        return self._learned

    @property
    def layout(self) -> CacheLayout | None:
        """Layout learned so far; None before the first stored block."""
        return self._layout

    @property
    def assumed_kinds(self) -> frozenset[int]:
        """Groups assumed to be full attention because nothing names their kind."""
        return frozenset(self._groups.assumed_kinds)

    @property
    def scheme_mismatches(self) -> int:
        return self._detector.mismatches

    @property
    def searching(self) -> bool:
        """Whether seeds are left to try."""
        return self._detector.searching

    def advance_detection(self) -> None:
        """Run one bounded slice of a running seed search."""
        self._detector.advance()
        self._after_detection()

    def finish_detection(self) -> None:
        """Run a seed search to its end (for tools without an event loop)."""
        self._detector.finish()
        self._after_detection()

    def _learn_group(self, event: BlockStored, held: Callable[[], bool]) -> bool:
        if event.num_tokens() < max(1, len(event.block_hashes)) * event.block_size or not event.block_size:
            self.rejected["tokens_do_not_fill_blocks"] += 1
            return False
        try:
            changed = self._groups.observe(event, held)
        except ValueError:
            self.rejected["unknown_kind"] += 1
            return False
        ahead = event.lookahead_token_ids
        if ahead and len(ahead[0]) != self._lookahead:
            self._lookahead, changed = len(ahead[0]), True
        if changed:
            self._relayout()
        return True

    def _learn_chunk(self, event: BlockStored, tokens: int) -> None:
        """Learn from an event of one chunk outside the GPU, of this many tokens (``chunk_blocks``)."""
        sizes = {group.group_idx: group.block_size for group in self._groups.groups}
        size = sizes.get(event.group_idx or 0, 0)
        if size and not tokens % size and tokens // size > max(self._chunk_blocks, 1):
            self._chunk_blocks = tokens // size
            self._relayout()

    def _relayout(self) -> None:
        self._find_facts()
        scheme = self._detector.scheme or self.assumed
        if self._groups.groups:
            unit = scheme.hash_block_size if scheme is not None else self._unit()
            layout = make_layout(
                self._groups.groups,
                self.facts,
                unit,
                self._lookahead,
                inside_seen=self._groups.inside_seen,
                sglang=self._setup.kind == "sglang" or (scheme is not None and scheme.algo == SGLANG),
            )
            self._layout = self._shared_layouts.setdefault(layout, layout)
            proven = self._detector.scheme is not None
            hashes: Certainty = "certain" if proven else "likely" if self.assumed is None else "assumed"
            self.found_facts += tuple(layout_facts(layout, self.facts, self.found_facts, hashes))
        self._settle()

    def _unit(self) -> int:
        return math.gcd(hash_unit(self._groups.groups), *self._groups.part_sizes)

    def _usual_unit(self) -> int:
        """Default hash block size: with Mamba states at every block it is the scheduler's block size."""
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
        """Apply the detector's result; returns whether anything changed."""
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
