"""Facts about one engine that no event carries: value, source and certainty of each.

Sources by rank: configuration, the engine's own statement (``/server_info``, then its metrics), the model's
``config.json``, and without any of these the receipts. A lookup that drops the last block (EAGLE, MTP) is
visible in receipts: predictions that ignore it are repeatedly one alignment unit too high. So receipts can
also revoke what was found, but not what is configured. Invariant: a fact derived from a hint only is never
called certain.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from kvatlas.publisher.groups import Family, GroupSpec, scheduler_block_size, spec_classes
from kvatlas.router.fleet.engines import EngineKind
from kvatlas.router.fleet.statement import EngineStatement
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, has_gaps, open_inside

Source = Literal["configuration", "server_info", "metrics", "config.json", "events", "receipts", "none"]
Certainty = Literal["certain", "confirmed", "likely", "assumed", "disputed"]

# Methods whose lookups drop a block (``SpeculativeConfig.use_eagle``, vLLM 0.32).
_DROPPING: Final = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})
_RECEIPTS_KEPT: Final = 64
_RECEIPTS_MIN: Final = 4
# Number of changes by receipts after which a fact is disputed and no longer changed.
_SHIFTS_MAX: Final = 3

Drops = Literal["none", "last", "all"]
_LEVELS: Final[tuple[Drops, ...]] = ("none", "last", "all")


class Fact(msgspec.Struct, frozen=True):
    """One fact.

    ``certainty``: ``certain`` (stated or proven), ``confirmed`` (receipts agree), ``likely`` (derived from a
    hint), ``assumed`` (no evidence), ``disputed`` (receipts both for and against it).
    """

    name: str
    value: Any
    source: Source
    certainty: Certainty


class SetupEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of the engine, by rank, and hints of its model's ``config.json``."""

    statements: tuple[EngineStatement, ...] = ()
    kind: EngineKind = "vllm"
    drafter: Literal["", "mtp", "eagle"] = ""
    """Kind of drafter that ``config.json`` implies."""
    replay_tokens: int = 0
    """Window that such a model rebuilds by replay, in tokens, if its engine does so."""
    from_file: frozenset[str] = frozenset()
    """Names of facts that come from ``config.json``, not from the configuration."""


NO_EVIDENCE: Final = SetupEvidence()


class DropReceipts:
    """Evidence of dropped blocks in receipts: whether the latest predictions were off by at least one
    block.
    """

    def __init__(self) -> None:
        # Levels of ``Drops`` that receipts add to (negative: subtract from) the level by other evidence.
        self.shift = 0
        self.shifts = 0
        # Hits that only a look-up behind the last token but one explains, since the last one against it.
        self._behind = 0
        self._errors: deque[int] = deque(maxlen=_RECEIPTS_KEPT)
        self.agree = False
        """Whether most of a sufficient number of predictions were exact."""

    def restart(self) -> None:
        """Reset: other evidence has changed."""
        self.shift = self.shifts = self._behind = 0
        self._clear()

    def _clear(self) -> None:
        self._errors.clear()
        self.agree = False

    @property
    def disputed(self) -> bool:
        return self.shifts >= _SHIFTS_MAX

    @property
    def looks_behind(self) -> bool:
        """Whether hits showed that the block dropped for EAGLE may lie behind the last token but one."""
        return self._behind >= _RECEIPTS_MIN

    def looked_behind(self, *, found: bool) -> None:
        """Count the full hit of a prompt that ends with a block: all of it, or a block less, was found."""
        self._behind = self._behind + 1 if found else 0

    def add_exact(self) -> None:
        """Count an exact prediction while they ``agree``: they go on to."""
        self._errors.append(0)

    def add(self, error: int, blocks: Container[int], *, single: bool) -> int:
        """Count a prediction that was too high by ``error`` tokens (negative: too low).

        Args:

          blocks: Sizes in tokens that a dropped block can have.

          single: All groups are of one kind: they drop a block of every hit, so that most predictions are
              wrong. With several kinds, only hits that end at a block show it.

        Returns:

          +1 or -1 if too little or too much is assumed to be dropped, otherwise 0.
        """
        sign = (error > 0) - (error < 0)
        one = abs(error) in blocks
        self._errors.append(sign if one else 2 * sign)
        exact = self._errors.count(0)
        self.agree = exact >= 2 * _RECEIPTS_MIN and exact * 10 >= len(self._errors) * 9
        if self.disputed or not one:
            return 0
        seen = Counter(self._errors)
        times, others = seen[sign], seen[-sign] + seen[-2 * sign]
        # Evictions make a prediction too high by any amount, but never too low; a block that is not dropped
        # may change the hit by more than itself if the kinds have to agree.
        others += seen[2] if sign > 0 else max(0, seen[-2] - times)
        of_all = 8 if single else 1
        proven = (
            times >= _RECEIPTS_MIN << self.shifts
            and times >= 9 * others
            and times * 10 >= of_all * (times + seen[0])
        )
        return sign if proven else 0

    def shifted(self, by: int) -> None:
        """Record a change of the level; earlier receipts referred to the old level and are dropped."""
        self.shift += by
        self.shifts += 1
        self._clear()


def find_facts(
    configured: ModelFacts,
    evidence: SetupEvidence,
    receipts: DropReceipts,
    groups: tuple[GroupSpec, ...],
    lookahead: int,
    chunk_blocks: int = 0,
) -> tuple[ModelFacts, tuple[Fact, ...]]:
    """Return the facts to predict with, and each fact that had to be found, with its source.

    ``chunk_blocks``: blocks of a chunk outside the GPU, by events; 0: none was seen."""
    eagle = _eagle(configured, evidence, receipts, groups, lookahead)
    mode = _mamba_mode(configured, evidence)
    sizes = [_block_size(evidence, name) for name in ("attention_block_size", "mamba_block_size")]
    ranks = _ranks(evidence)
    retention = _retention(configured, evidence)
    replay = _replay(configured, evidence, groups)
    hidden = _hidden(configured, receipts, groups)
    chunk = _chunk(configured, evidence, groups, chunk_blocks)
    facts = replace(
        configured,
        hidden_groups=hidden is not None,
        eagle_groups=eagle.value,
        mamba_cache_mode=None if mode is None else mode.value,
        attention_block_size=None if sizes[0] is None else sizes[0].value,
        mamba_block_size=None if sizes[1] is None else sizes[1].value,
        decode_ranks=1 if ranks is None else ranks.value,
        retention_interval=retention.value,
        replay_tokens=replay.value,
        blocks_per_chunk=None if chunk is None else chunk.value,
    )
    families = {group.family for group in groups}
    sparse = families & {Family.MAMBA, Family.WINDOW}
    shown = [eagle, sizes[0], ranks, retention if sparse else None, replay if replay.value else None]
    shown += [mode, sizes[1]] if Family.MAMBA in families else []
    shown += [hidden, chunk, *_unseen(evidence)]
    shown += _of_the_model(configured, evidence)
    return facts, tuple(fact for fact in shown if fact is not None)


def layout_facts(
    layout: CacheLayout, facts: ModelFacts, found: Iterable[Fact], hashes: Certainty
) -> list[Fact]:
    """Return the hash block size and the alignment of hits, derived from events and the facts ``found``.

    ``hashes`` is the certainty of the hash scheme: ``certain`` if events proved it, ``assumed`` if nothing
    did, ``likely`` if only block sizes are known.
    """
    unit = Fact("hash_block_size", layout.hash_block_size, "events", hashes)
    if hashes == "assumed":
        unit = replace(unit, source="none")
    sources = {fact.name: (fact.source, fact.certainty) for fact in found}
    source: Source = "events"
    certainty: Certainty = "certain"
    if facts.partial_hash_hits is not None:
        source = "configuration"
    elif layout.alignment < scheduler_block_size(layout.groups):
        if not layout.inside_seen:
            source, certainty = sources.get("mamba_cache_mode", ("events", "likely"))
        elif facts.decode_ranks > 1:
            source, certainty = sources["decode_ranks"]
        if certainty == "certain" and hashes != "certain":
            certainty = hashes
    elif (
        any(group.partial_only for group in layout.groups)
        or any(group.family is Family.MAMBA and not group.mamba_cache_mode for group in layout.groups)
        or (open_inside(layout.groups) and "decode_ranks" not in sources)
    ):
        certainty = "likely"
    return [unit, Fact("alignment", layout.alignment, source, certainty)]


def drops(evidence: SetupEvidence, groups: tuple[GroupSpec, ...]) -> tuple[Drops, Source, Certainty]:
    """Return which groups' lookups drop their last block, by evidence other than receipts."""
    for statement in evidence.statements:
        if statement.drafts is False or statement.keeps_last_block:
            return "none", statement.source, "certain"
        if statement.method:
            if statement.method not in _DROPPING:
                return "none", statement.source, "certain"
            one = len(spec_classes(groups)) < 2
            last = statement.method == "mtp" and not one
            return "last" if last else "all", statement.source, "likely" if last else "certain"
    drafting = next((s for s in evidence.statements if s.drafts), None)
    if drafting is None:
        return "none", "none", "assumed"
    if evidence.drafter:
        last = evidence.drafter == "mtp" and len(spec_classes(groups)) > 1
        return "last" if last else "all", "config.json", "likely"
    return "all", drafting.source, "assumed"


def level(
    evidence: SetupEvidence, receipts: DropReceipts, groups: tuple[GroupSpec, ...], change: int = 0
) -> Drops | None:
    """Return the level by all evidence, or the one ``change`` above; None if that level does not exist."""
    levels = [name for name in _LEVELS if name != "last" or _last_group(groups) is not None]
    start = drops(evidence, groups)[0]
    at = (levels.index(start) if start in levels else len(levels) - 1) + receipts.shift + change
    return levels[at] if 0 <= at < len(levels) else None


def _last_group(groups: tuple[GroupSpec, ...]) -> int | None:
    """Return the group assumed to be the last layer's, which is an MTP drafter's: full attention in all
    public models.

    vLLM drops the block of all groups alike (``HybridKVCacheCoordinator``, vLLM 0.32), so any of them is
    correct. None if there is one kind of groups only.
    """
    full = [group.group_idx for group in groups if group.family is Family.FULL]
    return full[-1] if full and len(spec_classes(groups)) > 1 else None


def _eagle(
    configured: ModelFacts,
    evidence: SetupEvidence,
    receipts: DropReceipts,
    groups: tuple[GroupSpec, ...],
    lookahead: int,
) -> Fact:
    if configured.eagle_groups is not None:
        return Fact("eagle_groups", configured.eagle_groups, "configuration", "certain")
    if lookahead:
        return Fact("eagle_groups", (), "events", "certain")
    _, source, certainty = drops(evidence, groups)
    if receipts.shift:
        source = "receipts"
    if receipts.disputed:
        certainty = "disputed"
    elif receipts.shift or (receipts.agree and certainty != "certain"):
        certainty = "confirmed" if receipts.agree else "likely"
    found = level(evidence, receipts, groups)
    value = "all" if found == "all" else (_last_group(groups),) if found == "last" else ()
    return Fact("eagle_groups", value, source, certainty)


def _mamba_mode(configured: ModelFacts, evidence: SetupEvidence) -> Fact | None:
    if configured.mamba_cache_mode is not None:
        return Fact("mamba_cache_mode", configured.mamba_cache_mode, "configuration", "certain")
    for stated in evidence.statements:
        if stated.mamba_cache_mode:
            return Fact("mamba_cache_mode", stated.mamba_cache_mode, stated.source, "certain")
    return None


def _block_size(evidence: SetupEvidence, name: str) -> Fact | None:
    for stated in evidence.statements:
        if size := getattr(stated, name):
            return Fact(name, size, stated.source, "certain")
    return None


def _ranks(evidence: SetupEvidence) -> Fact | None:
    """Find decode context parallelism.

    In mode ``align`` a Mamba block is as long as one rank's block of full attention (``Platform.
    _align_hybrid_block_size``, vLLM 0.32), and the stated block of full attention is that of all ranks.
    """
    for stated in evidence.statements:
        if stated.decode_ranks:
            return Fact("decode_ranks", stated.decode_ranks, stated.source, "certain")
        full, state = stated.attention_block_size, stated.mamba_block_size
        if stated.mamba_cache_mode == "align" and full and state and full > state and not full % state:
            return Fact("decode_ranks", full // state, stated.source, "likely")
    return None


def _retention(configured: ModelFacts, evidence: SetupEvidence) -> Fact:
    if configured.retention_interval is not None:
        return Fact("retention_interval", configured.retention_interval, "configuration", "certain")
    for stated in evidence.statements:
        if stated.retention_interval is not None:
            return Fact("retention_interval", stated.retention_interval, stated.source, "certain")
    # vLLM's default since 0.29.
    return Fact("retention_interval", 0, "none", "assumed")


def _chunk(
    configured: ModelFacts, evidence: SetupEvidence, groups: tuple[GroupSpec, ...], seen: int
) -> Fact | None:
    """Find how many blocks vLLM's own offloading keeps under one hash; None: as by default, one."""
    if configured.blocks_per_chunk is not None:
        return Fact("blocks_per_chunk", configured.blocks_per_chunk, "configuration", "certain")
    for stated in evidence.statements:
        if stated.blocks_per_chunk:
            return Fact("blocks_per_chunk", stated.blocks_per_chunk, stated.source, "certain")
        # ``build_offloading_config`` (kv_connector/v1/offloading/config.py, 0.33) takes tokens too.
        sizes = [group.block_size for group in groups if group.family is Family.FULL]
        if stated.chunk_tokens and sizes and not stated.chunk_tokens % sizes[0]:
            return Fact("blocks_per_chunk", stated.chunk_tokens // sizes[0], stated.source, "likely")
    return Fact("blocks_per_chunk", seen, "events", "certain") if seen > 1 else None


def _unseen(evidence: SetupEvidence) -> Iterator[Fact]:
    """Yield what SGLang's events say nothing of. With pools for windows or Mamba states, hits are predicted
    as for full attention, and may be too high; with a store beyond host memory, they may be too low."""
    for stated in evidence.statements:
        if stated.other_attention:
            yield Fact("other_attention", True, stated.source, "assumed")
            break
    for stated in evidence.statements:
        if stated.silent_store:
            yield Fact("silent_store", stated.silent_store, stated.source, "certain")
            break


def _replay(configured: ModelFacts, evidence: SetupEvidence, groups: Iterable[GroupSpec]) -> Fact:
    """Find whether bounded replay is used.

    Groups rebuilt by replay publish nothing: if windows of this size are published, there is no replay,
    whatever was requested (vLLM disables it where it is unsupported: models/deepseek_v41).
    """
    if configured.replay_tokens:
        return Fact("replay_tokens", configured.replay_tokens, "configuration", "certain")
    stated = any(statement.bounded_replay for statement in evidence.statements)
    published = any(group.sliding_window == evidence.replay_tokens for group in groups)
    if not evidence.replay_tokens or not stated or published:
        return Fact("replay_tokens", 0, "events" if published else "none", "assumed")
    return Fact("replay_tokens", evidence.replay_tokens, "config.json", "likely")


def _hidden(configured: ModelFacts, receipts: DropReceipts, groups: tuple[GroupSpec, ...]) -> Fact | None:
    """Return that there are groups without events (``CacheLayout.hidden_groups``).

    They matter if one group is left. Then vLLM looks up the block that EAGLE drops behind the last token but
    one too, which the hits of prompts that end with a block show.
    """
    if configured.hidden_groups:
        return Fact("hidden_groups", True, "configuration", "certain")
    if has_gaps(groups):
        return Fact("hidden_groups", True, "events", "certain")
    return Fact("hidden_groups", True, "receipts", "likely") if receipts.looks_behind else None


def _of_the_model(configured: ModelFacts, evidence: SetupEvidence) -> list[Fact | None]:
    """Return the facts that are configured or come from the model's file."""
    found: list[Fact | None] = []
    for name in ("attention_chunk_size", "attention_chunk_sizes", "kinds", "windows", "partial_hash_hits"):
        value = getattr(configured, name)
        if value:
            file = name in evidence.from_file
            source: Source = "config.json" if file else "configuration"
            found.append(Fact(name, value, source, "likely" if file else "certain"))
    return found
