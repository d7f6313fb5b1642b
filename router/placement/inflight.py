"""Prefixes shared with prompts in flight, per engine: keeps prompts with equal beginnings together.

Siblings of one prompt arrive within seconds, before the first of them has made the engine publish anything.
By published blocks alone all are cold and would be spread over the fleet. So the prompts sent to each engine
are kept here until the index can know them. Two numbers result for a new prompt and an engine: the blocks it
has in common with a prompt in flight there (counts towards ``shared_prefix``), and how many of those the
engine will keep when it reaches that prompt (``coming``: first in, first out, so they are a hit by the time
the new one is served).

A radix tree over block hashes. A block hash covers the whole prefix before it, so two hash lists are equal up
to some position and different from there on: the end of a match inside a node is found by bisection, and
hashes of engines with different schemes never match. What an engine keeps of a prompt is a few ranges
(``Kept``), whatever the layout and the prompt's length: with full attention it keeps every block, and a node
for each of them cost 750 bytes a block and the square of the length. Marks at kept ends in a dictionary
cannot take the tree's place: the common prefix ends between them.

Invariants: memory is O(prompts kept) beside 8 bytes a block, adding a prompt and a look-up are
O(branch points on the path * log blocks + engines); nothing is done per block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, NamedTuple

import msgspec

from kvatlas.publisher.events import BlockHash
from kvatlas.publisher.groups import Family
from kvatlas.router.index.learn.layout import CacheLayout
from kvatlas.router.placement.candidate import Hit


class InflightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds. A block costs 8 bytes, in an array shared with the prompt."""

    prompts_max: int = 8192
    blocks_max: int = 32_000_000
    grace_s: float = 2.0
    """How long events are awaited: after the first token, and after the answer's end."""


class InflightStats(msgspec.Struct):
    """Counters for metrics; ``prompts`` and ``blocks`` are current."""

    prompts: Annotated[int, "kvatlas_inflight_prompts"] = 0
    """Prompts in flight, whose blocks their engine will soon hold."""
    blocks: Annotated[int, "kvatlas_inflight_blocks"] = 0
    """Blocks of these prompts; one that several prompts have counts for each."""
    evicted: Annotated[int, "kvatlas_inflight_evicted_total"] = 0
    """Prompts removed before their end because there were too many."""


Kept = tuple[range, ...]
"""Ends of the prefixes of a prompt that an engine keeps, in hash blocks: ranges that are not empty, by their
last end. A range of one end is that end alone."""


_Ends = tuple[int, int]
_AT_END: _Ends = (0, 0)
_Mark = tuple[int, int, _Ends]


class InflightPrompt(msgspec.Struct, eq=False, gc=False):
    """One prompt on one engine; opaque to its holder."""

    engine_id: str
    hashes: Sequence[BlockHash]
    num_blocks: int
    keeps: Kept = ()
    marks: Sequence[_Mark] = ()
    """Its ``keeps``, as nodes count them."""
    kept: bool = True
    computed: bool = False
    """Its first token arrived: ``keeps`` is the part that no applied batch has stored yet."""
    rank: float = 0.0
    """Its place among those that wait in an engine that schedules by priority, lower first; 0: unknown."""

    @property
    def last_kept(self) -> BlockHash:
        """The hash at the end of the longest prefix that its engine keeps; there is one."""
        return self.hashes[self.keeps[-1][-1] - 1]


class Common(msgspec.Struct, gc=False):
    """Leading hash blocks shared with prompts in flight, per engine; engines without any are absent."""

    blocks: dict[str, int]
    coming: dict[str, int]
    """Of those, blocks that the engine will hold in every group once it has computed the prompt in flight."""


class KeptRule(NamedTuple):
    """Facts of a layout that decide which prefixes of a prompt an engine keeps; sizes in tokens."""

    alignment: int
    hash_block_size: int
    every_block: bool = False
    """All groups keep all blocks, except that the last ``unproven_tokens`` of a prompt prove no boundary."""
    all_full: bool = False
    unproven_tokens: int = 0
    state_tokens: int = 0
    """Blocks of states that exist only where a chunk ends (Mamba mode ``align``); 0 without."""
    window_tokens: int = 0
    """Blocks that a window needs before a boundary, of the shortest one; 0 without, or beside states."""
    dropped_tokens: int = 0
    """Tokens that a lookup drops for EAGLE: the prefixes include them."""
    splits: bool = False
    """A prompt that enters the engine in the same step as the one ahead may miss what that one keeps: the
    first chunk of that one ends before the attention blocks that prove its state are stored."""


@lru_cache(maxsize=256)
def kept_rule(layout: CacheLayout) -> KeptRule:
    """Return what ``kept_prefixes`` reads of a layout."""
    families = {c.family for c in layout.classes}
    states = [c.block_size for c in layout.classes if c.spec.mamba_cache_mode == "align"]
    windows = [
        -(-((c.spec.sliding_window or 1) - 1) // c.block_size) * c.block_size
        for c in layout.classes
        if c.family is Family.WINDOW
    ]
    alone = families <= {Family.FULL, Family.WINDOW} and not layout.dropped_tokens
    return KeptRule(
        layout.alignment,
        layout.hash_block_size,
        every_block=families <= {Family.FULL, Family.CHUNKED},
        all_full=families == {Family.FULL},
        unproven_tokens=layout.lookahead,
        state_tokens=max(states, default=0),
        window_tokens=min(windows, default=0) if alone else 0,
        dropped_tokens=layout.dropped_tokens,
        splits=bool(states)
        and (bool(layout.dropped_tokens) or max(c.block_size for c in layout.classes) > layout.alignment),
    )


def kept_prefixes(rule: KeptRule, prompt_tokens: int, hit: Hit, retention_interval: int | None = 0) -> Kept:
    """Return the prefixes of a prompt, in hash blocks, that an engine can hit once it has computed it.

    ``hit``: the prompt's own. vLLM keeps the windows and states at the last aligned boundary of the prompt,
    at the junction that its lookup finds (the end of the shared prefix) and at multiples of the retention
    interval (states only where it ends a chunk); all boundaries if that is None. What ends within the
    prompt's own hit is not computed, so the prompt leaves nothing there.
    """
    alignment, drop, states = rule.alignment, rule.dropped_tokens, rule.state_tokens
    # Full attention computes, loads or holds every block; a chunk's start is a hit without blocks before.
    held = 0 if rule.all_full else hit.whole_tokens
    if rule.every_block:
        # Its own look-up spares the last token, but all full blocks are stored
        # (``KVCacheManager.allocate_slots``, vLLM 0.32): a longer prompt hits the whole of it.
        first, unit = (held // alignment + 1) * alignment, rule.hash_block_size
        end = (prompt_tokens - rule.unproven_tokens) // alignment * alignment
        step = alignment // unit if end > first else 1
        return () if end < first else (range(first // unit, end // unit + 1, step),)
    last, shared_prefix = prompt_tokens - 1, hit.shared_prefix_tokens
    step = alignment if retention_interval is None else retention_interval
    if not (drop or states or step):
        # Most engines: its last boundary, and the one where the prefix ends that prompts share.
        end = last // alignment * alignment
        junction = shared_prefix // alignment * alignment
        few = [junction, end] if held < junction < end else [end]
        return _between_ends(few, held, rule) if end > held else ()
    # The same prompt again, and with EAGLE also a longer one, which can drop a block behind the last token
    # (``replay_boundaries``, v1/core/kv_cache_coordinator.py, vLLM 0.32).
    again = last // alignment * alignment
    whole = prompt_tokens // alignment * alignment if drop else again
    # vLLM stores the state at the end of a prefix that prompts share (``shared_prefix_boundary``), so that
    # the third prompt can hit it.
    junction = whole
    if shared_prefix < last:
        step = max(states, alignment)
        junction = shared_prefix // step * step + drop
    ends = {min(junction, whole), whole}
    spans: list[range] = []
    if not states:
        ends.add(again)
        step = alignment if retention_interval is None else retention_interval
        # vLLM refuses an interval that is no multiple of it.
        step += -step % alignment
        if step:
            spans.append(range(step + drop, prompt_tokens + 1, step))
    elif states > alignment and not drop:
        # A chunk ends at the last whole block too, before the one that ends with the last hash block
        # (``_mamba_block_aligned_split``, v1/core/sched/scheduler.py, vLLM 0.32).
        ends.add(last // states * states)
    ends = {end for end in ends if end - drop > held}
    if not spans:
        return _between_ends(sorted(ends), held, rule)
    spans = [span[bisect_right(span, held + drop) :] for span in spans]
    if rule.window_tokens:
        spans = _with_windows_met(ends, spans, held, rule)
    alone = [range(end, end + 1) for end in ends if not any(end in span for span in spans)]
    return kept_ranges((*spans, *alone), rule.hash_block_size)


def _between_ends(ends: list[int], held: int, rule: KeptRule) -> Kept:
    """Return these ends, and the boundaries between two whose windows meet (``_with_windows_met``)."""
    alignment, unit, base = rule.alignment, rule.hash_block_size, held
    spans: list[list[int]] = []
    for end in ends:
        first = (base // alignment + 1) * alignment if end <= base + rule.window_tokens else end
        if spans and first == base + alignment:
            spans[-1][1] = end
        else:
            spans.append([first, end])
        base = end
    step = alignment // unit
    return tuple([range(low // unit, end // unit + 1, step if end > low else 1) for low, end in spans])


def _with_windows_met(ends: set[int], spans: list[range], held: int, rule: KeptRule) -> list[range]:
    """Add the boundaries between two kept ends whose windows meet, all of which are hits. In tokens."""
    alignment, window = rule.alignment, rule.window_tokens
    near = {held, *ends}
    for number, span in enumerate(spans):
        if span.step <= window and span:
            spans[number] = span = range(span[0], span[-1] + 1, alignment)  # noqa: PLW2901
        # Ends of a range further apart than a window meet only those beside them.
        for end in (held, *ends):
            at = bisect_right(span, end)
            near.update(span[max(0, at - 1) : at + 1])
    base, met = held, []
    for end in sorted(near):
        first = (base // alignment + 1) * alignment
        if first < end <= base + window and not any(first in span for span in spans):
            met.append(range(first, end, alignment))
        base = max(base, end)
    return spans + met


def kept_ranges(spans: Iterable[range], unit: int = 1) -> Kept:
    """Return those that are not empty, by their last end; divided by ``unit``, the tokens of a hash block."""
    found = []
    for span in spans:
        if span and span[-1] >= unit:
            first, step = max(span[0], unit) // unit, max(1, span.step // unit)
            found.append(range(first, span[-1] // unit + 1, step if len(span) > 1 else 1))
    if len(found) > 1:
        found.sort(key=_last)
    return tuple(found)


_first, _last = itemgetter(0), itemgetter(-1)


def coming_hit(layout: CacheLayout, kept_tokens: int, prompt_tokens: int) -> int:
    """Return the tokens that a prompt will hit of a prefix kept by one ahead of it."""
    # The lookup drops a block of what is stored for EAGLE, and the last token is computed.
    found = min(kept_tokens - layout.dropped_tokens, prompt_tokens - 1)
    # The engine would compute all of it again.
    return 0 if found <= layout.replay_tokens else found


class PrefixNode(msgspec.Struct, eq=False, gc=False):
    """A node of the tree: hashes ``[start, end)`` of ``hashes``, shared by every prompt that passes through.

    It keeps a slice of one prompt's hash list (no copy), the number of open prompts of each engine that pass
    through it, and the number of those that keep prefixes ending in it, by which of its ends these are: all
    that leave a remainder when divided by a step, (step, remainder), or only its own end, ``_AT_END``.
    ``cuts`` counts the prompts with ranges that begin or end where it ends. Invariants: positions are
    absolute in the prompt, a child starts where its parent ends, and a range of kept ends covers whole nodes.
    """

    hashes: Sequence[BlockHash]
    start: int
    end: int
    children: dict[BlockHash, PrefixNode] = {}
    engines: dict[str, int] = {}
    keepers: dict[_Ends, dict[str, int]] = {}
    cuts: int = 0

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """First position, after ``start``, where ``hashes`` leaves this node; ``end`` if it does not."""
        own, low, high, count = self.hashes, self.start + 1, self.end, len(hashes)
        high = count if count < high else high  # noqa: FURB136
        # A hash covers the whole prefix before it: equal at one position means equal up to it, and different
        # from there on.
        if own[high - 1] == hashes[high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if own[middle] == hashes[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def split(self, at: int) -> None:
        """Split this node in two at position ``at``; the upper part stays this object."""
        # The upper part stays this object: other nodes and prompts refer to it.
        lower = PrefixNode(
            self.hashes, at, self.end, self.children, self.engines.copy(), self.keepers, self.cuts
        )
        upper = {ends: counts.copy() for ends, counts in self.keepers.items() if ends != _AT_END}
        self.end, self.keepers, self.cuts = at, upper, 0
        self.children = {self.hashes[at]: lower}

    def join(self) -> None:
        """Merge an only child that the same prompts pass through."""
        while len(self.children) == 1 and not self.cuts:
            (child,) = self.children.values()
            # Joined only if the same prompts pass through both, or their counts would be wrong.
            if child.engines != self.engines:
                break
            self.hashes, self.end, self.cuts = child.hashes, child.end, child.cuts
            self.children, self.keepers = child.children, child.keepers

    def kept_up_to(self, limit: int) -> list[tuple[int, dict[str, int]]]:
        """Return its last kept ends up to ``limit``, the longest first, with the engines that keep them."""
        found = []
        for ends, engines in self.keepers.items():
            step, remainder = ends
            end = limit - (limit - remainder) % step if step else self.end
            if self.start < end <= limit:
                found.append((end, engines))
        if len(found) > 1:
            found.sort(key=_first, reverse=True)
        return found


def _count_kept(path: Sequence[PrefixNode], engine_id: str, marks: Sequence[_Mark], by: int) -> None:
    """Count one more (1) or less (-1) of the prompts that pass through these nodes and keep these."""
    first = min(marks)[0]
    for node in path:
        start, end = node.start, node.end
        if end < first:
            continue
        cut, keepers = 0, node.keepers
        for low, last, ends in marks:
            if end in (last, low):
                cut = by
            if (low <= start and end <= last) or low == end == last:
                counts = keepers.setdefault(ends, {})
                if count := counts.get(engine_id, 0) + by:
                    counts[engine_id] = count
                else:
                    del counts[engine_id]
                    if not counts:
                        del keepers[ends]
        node.cuts += cut


def _marks(keeps: Kept) -> list[_Mark]:
    """Return where the nodes of each range begin and end (they are cut there, so that each range covers whole
    ones), and which of their ends it keeps. A single end begins where it ends."""
    marks = []
    for span in keeps:
        last, step = span[-1], span.step
        if len(span) > 1:
            marks.append((span[0] - step, last, (step, last % step)))
        else:
            marks.append((last, last, _AT_END))
    return marks


class InflightPrefixes:
    """Prompts in flight of the whole fleet. One writer; call ``expire`` regularly, for times without
    calls."""

    def __init__(self, settings: InflightSettings | None = None) -> None:
        self.settings = settings or InflightSettings()
        self.stats = InflightStats()
        self.is_stored: Callable[[str, BlockHash], bool] = lambda engine_id, block: True
        """Whether the index knows that this engine stored this block, or will never know by events."""
        self._ranked = 0
        self._root = PrefixNode((), 0, 0)
        self._prompts: dict[InflightPrompt, None] = {}  # in the order of arrival
        self._by_engine: dict[str, dict[InflightPrompt, None]] = {}
        self._unstored: dict[str, dict[InflightPrompt, None]] = {}  # computed, by engine
        # Computed and ended prompts until their grace period is over, in the order of these events: (until,
        # prompt, whether it ended).
        self._grace: deque[tuple[float, InflightPrompt, bool]] = deque()

    def add(
        self,
        engine_id: str,
        hashes: Sequence[BlockHash],
        now: float,
        keeps: Kept = (),
        rank: float = 0.0,
    ) -> InflightPrompt:
        """Add a prompt sent to this engine, which will keep these prefixes of it (``kept_prefixes``).

        ``hashes`` is held, not copied: it may grow, but not change.
        """
        if self._grace and self._grace[0][0] <= now:
            self.expire(now)
        num_blocks = len(hashes)
        # Schemes with look-ahead lack the last hashes.
        if keeps and keeps[-1][-1] > num_blocks:
            keeps = kept_ranges(span[: bisect_right(span, num_blocks)] for span in keeps)
        prompt = InflightPrompt(engine_id, hashes, num_blocks, keeps, _marks(keeps), rank=rank)
        self._insert(prompt)
        self._ranked += rank != 0
        self._prompts[prompt] = self._by_engine.setdefault(engine_id, {})[prompt] = None
        stats, settings = self.stats, self.settings
        stats.prompts += 1
        stats.blocks += num_blocks
        # Bounded: the oldest prompts are the likeliest to be known by events.
        while stats.prompts > settings.prompts_max or stats.blocks > settings.blocks_max:
            stats.evicted += 1
            self.drop(next(iter(self._prompts)))
        return prompt

    def prefilled(self, prompt: InflightPrompt, now: float) -> None:
        """Note its first token: events will show the kept blocks soon."""
        if self._await_events(prompt):
            self._grace.append((now + self.settings.grace_s, prompt, False))

    def _await_events(self, prompt: InflightPrompt) -> bool:
        """Note that the prompt is computed. Returns whether events of its kept blocks are awaited from now
        on."""
        if prompt.computed or not prompt.keeps or not prompt.kept:
            return False
        prompt.computed = True
        # Events are exact once the block is stored, evictions included; until then the prompt in flight is
        # the better source. The batch may come later than a whole short answer.
        if self.is_stored(prompt.engine_id, prompt.last_kept):
            self._settle(prompt)
            return False
        self._unstored.setdefault(prompt.engine_id, {})[prompt] = None
        return True

    def applied(self, engine_id: str) -> None:
        """Note that a batch of events of this engine was applied to the index."""
        unstored = self._unstored.get(engine_id)
        if unstored:
            for prompt in [one for one in unstored if self.is_stored(engine_id, one.last_kept)]:
                self._settle(prompt)

    def _settle(self, prompt: InflightPrompt) -> None:
        """Clear its coming blocks."""
        if prompt.keeps:
            path = self._path(prompt)
            self._unkeep(prompt, path)
            for node in reversed(path):
                if len(node.children) == 1:
                    node.join()

    def end(self, prompt: InflightPrompt, now: float) -> None:
        """Note the answer's end; the prompt still counts as common for the grace period."""
        # Awaited events have the same time, and the prompt is removed then.
        self._await_events(prompt)
        self._grace.append((now + self.settings.grace_s, prompt, True))
        if self._grace[0][0] <= now:
            self.expire(now)

    def drop(self, prompt: InflightPrompt) -> None:
        """Remove a prompt that its engine failed. Removing twice changes nothing."""
        if not prompt.kept:
            return
        prompt.kept = False
        del self._prompts[prompt]
        own = self._by_engine[prompt.engine_id]
        del own[prompt]
        if not own:
            del self._by_engine[prompt.engine_id]
        self._remove(prompt)
        self._ranked -= prompt.rank != 0
        self.stats.prompts -= 1
        self.stats.blocks -= prompt.num_blocks

    def common(self, hashes: Sequence[BlockHash], now: float, coming_max: int | None = None) -> Common:
        """Return what a prompt shares with the prompts in flight on each engine.

        ``coming_max``: the longest prefix, in hash blocks, that can prove a hit of the prompt (its last token
        is always computed). Of a longer one that an engine keeps, the next shorter one that it keeps counts.
        """
        if self._grace and self._grace[0][0] <= now:
            self.expire(now)
        path: list[tuple[PrefixNode, int]] = []
        node, depth = self._root, 0
        while depth < len(hashes):
            child = node.children.get(hashes[depth])
            if child is None:
                break
            depth = child.match(hashes)
            path.append((child, depth))
            if depth < child.end:
                break
            node = child
        blocks: dict[str, int] = {}
        coming: dict[str, int] = {}
        most = len(path[0][0].engines) if path else 0
        coming_max = depth if coming_max is None else coming_max
        # deepest first; engines below are also above, so all are found soon
        for node, depth in reversed(path):
            if len(blocks) < most:
                for engine_id in node.engines:
                    blocks.setdefault(engine_id, depth)
            if node.keepers and len(coming) < most:
                limit = coming_max if coming_max < depth else depth  # noqa: FURB136
                for end, engines in node.kept_up_to(limit):
                    for engine_id in engines:
                        coming.setdefault(engine_id, end)
        return Common(blocks, coming)

    def passed(
        self, engine_id: str, hashes: Sequence[BlockHash], hit: Hit, unit: int, rank: float
    ) -> float | None:
        """Return the rank of the prompt whose blocks this ``hit`` relies on, if a prompt of ``rank`` may be
        computed before it; else None. ``unit``: tokens of a hash block."""
        blocks = hit.coming_tokens // unit
        if hit.coming_tokens <= hit.gpu_tokens or not blocks or not (rank or self._ranked):
            return None
        first: float | None = None
        for prompt in self._by_engine.get(engine_id, ()):
            keeps = prompt.keeps
            if not keeps or keeps[-1][-1] < blocks:
                continue
            if prompt.hashes[blocks - 1] != hashes[blocks - 1]:
                continue
            if prompt.computed or prompt.rank <= rank:
                return None
            first = prompt.rank if first is None else min(first, prompt.rank)
        return first

    def forget(self, engine_id: str) -> None:
        """Remove all prompts of an engine that restarted or left."""
        for prompt in list(self._by_engine.get(engine_id, ())):
            self.drop(prompt)

    def check_integrity(self) -> list[str]:
        """Recount the tree; an empty list, or one sentence per contradiction."""
        problems = self._recounted()
        unstored = {prompt for prompts in self._unstored.values() for prompt in prompts}
        if unstored != {p for p in self._prompts if p.computed and p.keeps}:
            problems.append("computed prompts whose blocks no event stored are not those awaited")
        if self.stats.blocks != sum(p.num_blocks for p in self._prompts):
            problems.append("blocks kept are not their sum")
        return problems

    def _recounted(self) -> list[str]:
        problems: list[str] = []
        through: Counter[tuple[int, str, _Ends | None]] = Counter()
        cut: Counter[int] = Counter()
        for prompt in self._prompts:
            for node in self._path(prompt):
                through[id(node), prompt.engine_id, None] += 1
                cut[id(node)] += any(node.end in {low, last} for low, last, _ in prompt.marks)
                for span, mark in zip(prompt.keeps, prompt.marks, strict=True):
                    low, last = span[0] - span.step, span[-1]
                    covered = low <= node.start and node.end <= last
                    if covered if len(span) > 1 else node.end == last:
                        through[id(node), prompt.engine_id, mark[-1]] += 1
        stack = list(self._root.children.items())
        while stack:
            first, node = stack.pop()
            if node.start >= node.end or node.hashes[node.start] != first:
                problems.append(f"node [{node.start}, {node.end}) does not start with its key")
            for ends, counts in ((None, node.engines), *node.keepers.items()):
                for engine_id, count in counts.items():
                    if through.pop((id(node), engine_id, ends), 0) != count:
                        problems.append(f"node [{node.start}, {node.end}): count of {engine_id} is off")
            if node.cuts != cut[id(node)]:
                problems.append(f"node [{node.start}, {node.end}): count of cuts is off")
            stack.extend(node.children.items())
        if through:
            problems.append(f"{len(through)} prompts pass nodes that do not count them")
        return problems

    def expire(self, now: float) -> None:
        """Stop awaiting events of prompts whose grace period is over; remove ended ones."""
        grace = self._grace
        while grace and grace[0][0] <= now:
            _, prompt, ended = grace.popleft()
            if ended:
                self.drop(prompt)
            elif prompt.kept:
                self._settle(prompt)

    def _insert(self, prompt: InflightPrompt) -> None:
        hashes, engine_id, marks = prompt.hashes, prompt.engine_id, prompt.marks
        node, depth, cuts = self._root, 0, [prompt.num_blocks]
        for low, last, _ in marks:
            cuts += (low, last)
        cuts.sort()
        path: list[PrefixNode] = []
        for cut in cuts:
            while depth < cut:
                child = node.children.get(hashes[depth])
                if child is None:
                    child = node.children[hashes[depth]] = PrefixNode(hashes, depth, cut)
                else:
                    at = child.match(hashes)
                    at = cut if cut < at else at  # noqa: FURB136
                    if at < child.end:
                        child.split(at)
                child.engines[engine_id] = child.engines.get(engine_id, 0) + 1
                node, depth = child, child.end
                path.append(node)
        if marks:
            _count_kept(path, engine_id, marks, 1)

    def _unkeep(self, prompt: InflightPrompt, path: Sequence[PrefixNode]) -> None:
        engine_id = prompt.engine_id
        if prompt.computed and (unstored := self._unstored.get(engine_id)) is not None:
            unstored.pop(prompt, None)
            if not unstored:
                del self._unstored[engine_id]
        _count_kept(path, engine_id, prompt.marks, -1)
        prompt.keeps = prompt.marks = ()

    def _path(self, prompt: InflightPrompt) -> list[PrefixNode]:
        """The nodes of an inserted prompt, from the root down."""
        path: list[PrefixNode] = []
        node, depth, hashes, end = self._root, 0, prompt.hashes, prompt.num_blocks
        while depth < end:
            node = node.children[hashes[depth]]
            path.append(node)
            depth = node.end
        return path

    def _remove(self, prompt: InflightPrompt) -> None:
        path, engine_id = self._path(prompt), prompt.engine_id
        if prompt.keeps:
            self._unkeep(prompt, path)
        above = self._root
        for depth, node in enumerate(path):
            _less(node.engines, engine_id)
            # No other prompt passes here, so none below either.
            if not node.engines:
                del above.children[node.hashes[node.start]]
                path = path[:depth]
                break
            above = node
        for node in reversed(path):
            if len(node.children) == 1:
                node.join()


def _less(counts: dict[str, int], engine_id: str) -> None:
    count = counts[engine_id]
    if count > 1:
        counts[engine_id] = count - 1
    else:
        del counts[engine_id]
