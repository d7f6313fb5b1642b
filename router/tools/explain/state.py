"""Why a prompt hits as far as it does at each engine of a played capture, block by block.

The hit is the serving code's own prediction. The first boundary beyond it, and the end of the full-attention
prefix where that lies further, are then taken apart: which class lacks which block, and what the journal
knows of that block (never stored, masked, evicted, cleared, lost in a restart).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from publisher.block_hash import HashScheme
from publisher.events import BlockHash, EventDecodeError
from publisher.groups import SpecClass
from router.index.base import Plane
from router.index.learn.layout import CacheLayout, make_layout
from router.index.media import GPU
from router.index.model import HashedPrompt
from router.index.seats import ClassHit, EngineHit, Seat, seat_hits
from router.tools.explain.needs import Need, needs
from router.tools.replay.ledger import EventPosition
from router.tools.replay.player import MaskedSpan, Player

Why = Literal["never stored", "masked", "evicted", "cleared", "restarted", "beyond the prompt", "not learned"]


class MissingBlock(msgspec.Struct, frozen=True):
    """A block that a longer hit would need. ``seq`` and ``event`` (its number in the batch) are of the event
    that took it, or that masked it; ``stored_seq`` of the one that had stored it."""

    spec_class: str
    group: int
    block: int
    tokens: tuple[int, int]
    hash: str | None
    why: Why
    seq: int | None = None
    event: int | None = None
    stored_seq: int | None = None
    offloaded: tuple[str, ...] = ()
    """Places outside the GPU that hold it: medium, and owner where events name one."""


class Boundary(msgspec.Struct, frozen=True):
    """What a hit of ``tokens`` would need and the engine lacks: the first missing block, and how many there
    are."""

    tokens: int
    missing_blocks: int
    first: MissingBlock | None
    by_class: dict[str, int]
    """Missing blocks per spec class that lacks any."""


class EngineExplanation(msgspec.Struct, frozen=True):
    """One engine's answer for one prompt, at ``seq``."""

    engine: str
    seq: int | None
    mode: str
    hit_tokens: int
    offloaded_tokens: int
    """The hit with all that would be loaded; ``storage_tokens`` of it come from storage."""
    trunk_tokens: int
    by_class: tuple[ClassHit, ...]
    ended_by: MissingBlock | None
    """None: the hit is as long as it can be, or nothing can be predicted."""
    whole_prompt: bool
    """The hit ends only because the last token is always computed."""
    next_boundary: Boundary | None
    trunk_boundary: Boundary | None
    why_unknown: str = ""
    storage_tokens: int = 0
    history: str = ""
    """What of the engine's history the capture does not hold; empty: everything since its start is known."""


def explain_engine(
    player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None = None
) -> EngineExplanation:
    """Explain one engine. ``scheme`` overrules what was detected."""
    run, hit = player.run_of(source), _hit(player, source, prompt, scheme)
    known = _Known(player, source, prompt, scheme)
    following = at_trunk = None
    last = 0
    if known.layout is not None and hit.mode != "unknown":
        step, replay = known.layout.alignment, known.layout.replay_tokens
        last = (prompt.num_tokens - 1) // step * step
        last = last if last > replay else 0
        if hit.hit_tokens < last:
            following = known.boundary(max(hit.hit_tokens, replay // step * step) + step)
            if hit.trunk_tokens > following.tokens:
                at_trunk = known.boundary(hit.trunk_tokens)
    blocker = at_trunk or following
    return EngineExplanation(
        engine=source,
        seq=run.last_seq,
        mode=hit.mode,
        hit_tokens=hit.hit_tokens,
        offloaded_tokens=hit.offloaded_tokens,
        trunk_tokens=hit.trunk_tokens,
        by_class=hit.by_class,
        ended_by=blocker.first if blocker is not None else None,
        whole_prompt=hit.mode != "unknown" and hit.hit_tokens >= last,
        next_boundary=following,
        trunk_boundary=at_trunk,
        why_unknown=hit.why_unknown,
        storage_tokens=hit.storage_tokens,
        history=_history(player, source),
    )


def _hit(player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None) -> EngineHit:
    """The serving code's prediction; under ``scheme`` computed with it instead of the detected one."""
    layout = _layout(player, source, scheme)
    if scheme is None or layout is None:
        return player.fleet.predict(prompt, [source], detail=True)[source]
    if layout.missing_facts:
        why = f"configure {', '.join(layout.missing_facts)} for this model"
        return EngineHit("unknown", why_unknown=why)
    slot = player.ledger.slot(source)
    if slot is None:
        return EngineHit("native", alignment=layout.alignment)
    rows = player.ledger.lookup(prompt.hashes(scheme))
    seat = Seat(source, scheme, layout, slot, stores=player.fleet.engine(source).stores)
    return seat_hits(rows, prompt.num_tokens, [seat], detail=True)[source]


def _layout(player: Player, source: str, scheme: HashScheme | None) -> CacheLayout | None:
    layout = player.fleet.engine(source).layout
    if layout is None or scheme is None:
        return layout
    return make_layout(
        layout.groups,
        player.fleet.facts,
        scheme.hash_block_size,
        layout.lookahead,
        inside_seen=layout.inside_seen,
    )


def _history(player: Player, source: str) -> str:
    run = player.run_of(source)
    said = []
    if run.first_seq:
        said.append(f"the capture begins at seq {run.first_seq}")
    if run.missing_batches:
        said.append(f"{run.missing_batches} batches are missing in {run.gaps} gaps")
    if run.undecodable or run.rejected_events:
        said.append(f"{run.undecodable} batches and {run.rejected_events} events could not be read")
    return ", ".join(said)


def _drops_whole_block(layout: CacheLayout) -> bool:
    """A single group with EAGLE: the block it drops must itself lie before the prompt's last token."""
    return layout.single_group and not layout.lookahead and any(c.spec.is_eagle for c in layout.classes)


class _Known:
    """One engine and one prompt, and what the journal says of the prompt's blocks there."""

    def __init__(self, player: Player, source: str, prompt: HashedPrompt, scheme: HashScheme | None) -> None:
        self._player = player
        self._source = source
        self._prompt = prompt
        self.layout = _layout(player, source, scheme)
        engine = player.fleet.engine(source)
        used = scheme or engine.scheme
        self._hashes: Sequence[BlockHash] = () if used is None else prompt.hashes(used)
        if scheme is None and engine.learned is not None:
            self._hashes = engine.learned.translate(self._hashes)
        if self.layout is not None and _drops_whole_block(self.layout):
            self._hashes = self._hashes[: (prompt.num_tokens - 1) // self.layout.hash_block_size]

    def boundary(self, tokens: int) -> Boundary:
        """Everything missing for a hit of ``tokens``; full attention first, as the engine looks."""
        layout = self.layout
        if layout is None:
            raise AssertionError("asked only where the layout is known")
        first: MissingBlock | None = None
        counts: dict[str, int] = {}
        for spec_class in layout.classes:
            for need in needs(layout, spec_class, tokens, self._prompt.num_tokens):
                for group in spec_class.group_idxs:
                    if self._met(need, group):
                        continue
                    counts[spec_class.label] = counts.get(spec_class.label, 0) + 1
                    first = first or self._missing(need, spec_class, group)
        return Boundary(tokens, sum(counts.values()), first, counts)

    def _met(self, need: Need, group: int) -> bool:
        return any(self._copies(end, Plane("GPU", group)) for end in need.ends)

    def _copies(self, end: int, plane: Plane) -> int:
        block = self._hash(end)
        log = None if block is None else self._player.ledger.log(self._source, plane, block)
        return log.copies if log is not None else 0

    def _hash(self, end: int) -> BlockHash | None:
        """The hash of the prefix of ``end`` tokens; None beyond the prompt's last whole block."""
        number = end // (self.layout.hash_block_size if self.layout is not None else 1) - 1
        return self._hashes[number] if number < len(self._hashes) else None

    def _missing(self, need: Need, spec_class: SpecClass, group: int) -> MissingBlock:
        end = need.ends[0]
        why, at, stored = self._why(end, group)
        block = self._hash(end)
        start = need.block * need.block_size
        return MissingBlock(
            spec_class.label,
            group,
            need.block,
            (start, min(end, start + need.block_size)),
            None if block is None or block < 0 else f"{block:016x}",
            why,
            at.seq if at is not None else None,
            at.event if at is not None else None,
            stored.seq if stored is not None else None,
            self._outside(end, group),
        )

    def _outside(self, end: int, group: int) -> tuple[str, ...]:
        """The places outside the GPU that hold the block that ends at ``end``."""
        planes = self._player.ledger.seen_planes(self._source)
        held = (p for p in planes if p.group_idx == group and p.medium != GPU and self._copies(end, p))
        return tuple(sorted(plane.medium for plane in held))

    def _why(self, end: int, group: int) -> tuple[Why, EventPosition | None, EventPosition | None]:
        """What became of the block that ends at ``end``: word, event, and the event that had stored it."""
        block = self._hash(end)
        if block is None:
            return "beyond the prompt", None, None
        if block < 0:
            return "not learned", None, None
        log = self._player.ledger.log(self._source, Plane("GPU", group), block)
        if log is not None and log.how:
            return log.how, log.gone, log.stored
        span = self._masking_span(end, group)
        return ("never stored", None, None) if span is None else ("masked", span.at, None)

    def _masking_span(self, end: int, group: int) -> MaskedSpan | None:
        """The latest stored event that covered this block of this prompt without listing it."""
        spans = self._player.masked.get((self._source, group), {})
        if not spans or self.layout is None:
            return None
        unit, target = self.layout.hash_block_size, self._hash(end)
        found: list[MaskedSpan] = []
        for start in range(0, end, unit):
            parent = None if start == 0 else self._hash(start)
            for span in spans.get(parent, ()):
                covers = start + span.event.num_tokens() >= end
                if covers and target not in span.listed and self._same_tokens(span, start, end):
                    found.append(span)
        return max(found, key=lambda span: span.at, default=None)

    def _same_tokens(self, span: MaskedSpan, start: int, end: int) -> bool:
        """Whether the span is of this prompt. Of redacted ones the parent alone tells, and any listed
        hash."""
        if self._player.run_of(self._source).redacted:
            return start > 0 or any(block in span.listed for block in self._hashes)
        try:
            tokens = span.event.tokens()
        except EventDecodeError:
            return False
        return tokens[: end - start] == list(self._prompt.token_ids[start:end])
