"""Find a prompt's hit in the same way as the engine: one finder per lookup class, repeated until no class
shortens the prefix.

A finder takes the hashes of a prompt and a limit. It returns the longest prefix that its groups can serve,
with the copies that serve it, block by block (0 for a block that is not needed). Nothing here changes the
pool. The algorithm differs from that of the router's index on purpose, so that tests can compare the two.
Sources: ``v1/core/kv_cache_coordinator.py`` and ``single_type_kv_cache_manager.py`` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvatlas.publisher.groups import Family, GroupSpec, SpecClass
from kvatlas.publisher.pool.layout import PoolLayout
from kvatlas.publisher.pool.store import NULL, Copies, WireHash

Maps = list[dict[WireHash, Copies]]
Column = list[Copies]


class Hit(NamedTuple):
    """A hit of ``length`` tokens.

    ``boundary`` is the longest prefix that any class could serve if that is longer, else 0. ``columns`` has
    the copies of every group, by group index.
    """

    length: int
    boundary: int
    columns: list[Column]


class Found(NamedTuple):
    """Prefix that one class can serve: tokens, and a column per group of the class."""

    length: int
    columns: list[Column]


_PIECE = 64
"""Hashes looked up at a time."""


class ClassFinder:
    """Base of the finders; sizes in tokens, ``scale`` in hash blocks per block."""

    def __init__(self, maps: Maps, cls: SpecClass, layout: PoolLayout) -> None:
        spec: GroupSpec = cls.spec
        self.group_idxs = cls.group_idxs
        self.maps = [maps[group_idx] for group_idx in cls.group_idxs]
        self.drops_last = spec.is_eagle
        self.block_size = spec.block_size
        self.hash_size = layout.hash_block_size
        self.alignment = layout.alignment
        self.scale = spec.block_size // layout.hash_block_size
        self.fine = layout.alignment < spec.block_size
        self.margin = self.hash_size if layout.partial_hits else spec.block_size

    @property
    def is_full(self) -> bool:
        return False

    def find(self, hashes: Sequence[WireHash], limit: int, *, drop: bool) -> Found:
        raise NotImplementedError

    def view(self, hashes: Sequence[WireHash], limit: int) -> Sequence[WireHash]:
        """The hashes at the ends of the whole blocks up to ``limit``."""
        count = limit // self.block_size * self.scale
        return hashes[:count] if self.scale == 1 else hashes[self.scale - 1 : count : self.scale]

    def present(self, block_hash: WireHash) -> bool:
        """Whether every group of the class holds a block of this hash."""
        return all(block_hash in mapping for mapping in self.maps)

    def columns(self, hashes: Sequence[WireHash], start: int) -> list[Column]:
        """Columns with null blocks up to ``start``, then the blocks of ``hashes``."""
        pad: Column = [NULL] * start
        return [pad + list(map(mapping.__getitem__, hashes)) for mapping in self.maps]

    def held_blocks(self, hashes: Sequence[WireHash], count: int) -> int:
        """Number of leading blocks, of ``count``, that every group of the class holds."""
        scale, done = self.scale, 0
        while done < count:
            piece = hashes[done * scale : min(done + _PIECE, count) * scale]
            piece = piece if scale == 1 else piece[scale - 1 :: scale]
            run = self.run_length(piece)
            done += run
            if run < len(piece) or not piece:
                break
        return done

    def run_length(self, hashes: Sequence[WireHash]) -> int:
        """Number of leading hashes that every group of the class holds."""
        length = len(hashes)
        for mapping in self.maps:
            # In pieces: most prompts are held almost whole, or hardly at all.
            for start in range(0, length, _PIECE):
                piece = hashes[start : min(start + _PIECE, length)]
                held = list(map(mapping.__contains__, piece))
                if False in held:
                    length = start + held.index(False)
                    break
        return length


class FullFinder(ClassFinder):
    """The contiguous run from the start; with sub-block hits, up to the next block's last held boundary."""

    @property
    def is_full(self) -> bool:
        return True

    def find(self, hashes: Sequence[WireHash], limit: int, *, drop: bool) -> Found:
        view = self.view(hashes, limit)
        count = self.run_length(view)
        columns = self.columns(view[:count], 0)
        length = count * self.block_size
        if self.fine:
            # Only the first block after the run can be held in part:
            # ``FullAttentionManager.find_longest_cache_hit``, vLLM 0.32.
            end = min((count + 1) * self.scale - 1, limit // self.hash_size, len(hashes))
            for position in range(end - 1, count * self.scale - 1, -1):
                if self.present(hashes[position]):
                    for column, mapping in zip(columns, self.maps, strict=True):
                        column.append(mapping[hashes[position]])
                    length = (position + 1) * self.hash_size
                    break
        if drop and length:
            # EAGLE needs the hidden state of the token before the first new one, so the engine drops the last
            # unit of a hit and computes it again.
            length -= min(self.alignment, self.block_size)
        length -= length % self.alignment
        blocks = -(-length // self.block_size)
        for column in columns:
            del column[blocks:]
        return Found(length, columns)


class WindowFinder(ClassFinder):
    """The rightmost run that covers the window, or a run that reaches the start."""

    def __init__(self, maps: Maps, cls: SpecClass, layout: PoolLayout) -> None:
        super().__init__(maps, cls, layout)
        self.need = window_blocks(cls.spec)

    def find(self, hashes: Sequence[WireHash], limit: int, *, drop: bool) -> Found:
        view = self.view(hashes, limit)
        start, run, whole = self._last_run(view, drop=drop)
        # A run that fills the window is aligned already; one that reaches the start is cut to the alignment.
        end = start + run if whole else self._aligned(run)
        if drop and end:
            # Dropping the EAGLE block may break the alignment (hybrids with different block sizes): align
            # again, as ``SlidingWindowManager`` does.
            end = self._aligned(end - 1)
        return Found(end * self.block_size, self.columns(view[start:end], min(start, end)))

    def _last_run(self, view: Sequence[WireHash], *, drop: bool) -> tuple[int, int, bool]:
        """First block and length of the rightmost run that serves a hit, and whether it fills the window."""
        size, alignment, need = self.block_size, self.alignment, self.need + drop
        only = self.maps[0] if len(self.maps) == 1 else None
        run = 0
        for position in range(len(view) - 1, -1, -1):
            block_hash = view[position]
            if block_hash in only if only is not None else self.present(block_hash):
                # The first block from the right must end at the alignment once the EAGLE block is dropped.
                # Blocks to its left need not: they only fill the window.
                if not run and size != alignment and (position + 1 - drop) * size % alignment:
                    continue
                run += 1
                if run >= need:
                    return position, run, True
            else:
                run = 0
        return 0, run, False

    def _aligned(self, blocks: int) -> int:
        per = max(self.alignment // self.block_size, 1)
        return blocks - blocks % per


class ChunkedFinder(ClassFinder):
    """A contiguous run from the start of the current chunk; blocks before it need no lookup."""

    def __init__(self, maps: Maps, cls: SpecClass, layout: PoolLayout) -> None:
        super().__init__(maps, cls, layout)
        self.chunk = cls.spec.attention_chunk_size or cls.spec.block_size

    def find(self, hashes: Sequence[WireHash], limit: int, *, drop: bool) -> Found:
        # The layout refuses EAGLE here, as the engine does.
        del drop
        # Tokens before the current chunk are not attended to, so the engine puts null blocks there.
        start = limit // self.chunk * self.chunk // self.block_size
        view = self.view(hashes, limit)[start:]
        count = self.run_length(view)
        return Found((start + count) * self.block_size, self.columns(view[:count], start))


class MambaFinder(ClassFinder):
    """The last aligned boundary whose state is held; earlier states are not needed."""

    def find(self, hashes: Sequence[WireHash], limit: int, *, drop: bool) -> Found:
        del drop  # draft models have no Mamba layers
        size = self.hash_size if self.fine else self.block_size
        view = hashes[: limit // size] if self.fine else self.view(hashes, limit)
        per = 1 if self.fine else max(self.alignment // size, 1)
        # From the right: one state holds everything before it, so the last one that is held is enough.
        for position in range(len(view) // per * per - 1, -1, -per):
            if self.present(view[position]):
                length = (position + 1) * size
                block = -(-length // self.block_size) - 1
                return Found(length, self.columns([view[position]], block))
        return Found(0, [[] for _ in self.maps])


_FINDERS: dict[Family, type[ClassFinder]] = {
    Family.FULL: FullFinder,
    Family.WINDOW: WindowFinder,
    Family.CHUNKED: ChunkedFinder,
    Family.MAMBA: MambaFinder,
}


def window_blocks(spec: GroupSpec) -> int:
    """Blocks that a sliding window of ``w`` tokens needs before a boundary: those of ``w - 1`` tokens."""
    return -(-((spec.sliding_window or 1) - 1) // spec.block_size)


class HitFinder:
    """Find the prefix that all classes of a layout serve, in the hash maps of one pool."""

    def __init__(self, layout: PoolLayout, maps: Maps) -> None:
        self._layout = layout
        self._finders = [_FINDERS[cls.spec.family](maps, cls, layout) for cls in layout.classes]
        # Tokens beyond what full attention holds that may matter: a part of its next block, and for drafters
        # the next block of each class.
        self._beyond = max(2 * max(one.block_size, one.alignment) + one.margin for one in self._finders)
        self._one_pass = len(self._finders) == 2 and self._finders[0].is_full

    def find(self, hashes: Sequence[WireHash], limit: int) -> Hit:
        """The longest prefix of at most ``limit`` tokens that every class serves."""
        # One group has no common alignment: ``UnitaryKVCacheCoordinator`` asks its manager directly.
        if self._layout.single:
            finder = self._finders[0]
            found = finder.find(hashes, limit, drop=finder.drops_last)
            return Hit(found.length, 0, found.columns)
        length, longest, found_by = self._fixed_point(hashes, limit)
        columns: list[Column] = [[] for _ in self._layout.groups]
        for position, finder in enumerate(self._finders):
            # Only full attention is cut to the common length; other columns end there already.
            keep = -(-length // finder.block_size) if finder.is_full else None
            for group_idx, column in zip(finder.group_idxs, found_by[position].columns, strict=True):
                columns[group_idx] = column[:keep]
        return Hit(length, longest if longest > length else 0, columns)

    def find_lengths(self, hashes: Sequence[WireHash], limit: int) -> tuple[int, int]:
        """``length`` and ``boundary`` of what ``find`` returns. Costs what full attention holds of the
        prompt, not what the prompt has: no class serves more than a block beyond that."""
        first = self._finders[0]
        if first.is_full:
            held = first.held_blocks(hashes, limit // first.block_size)
            if not held and not first.fine:
                return 0, 0
            reach = held * first.block_size + self._beyond
            if reach < limit:
                limit, hashes = reach, hashes[: reach // self._layout.hash_block_size]
        found = self.find(hashes, limit)
        return found.length, found.boundary

    def find_of_full(self, hashes: Sequence[WireHash], limit: int) -> Hit:
        """The hit of a request whose Mamba states are loaded with the rest of its prompt.

        Its length is that of full attention; the columns have the blocks of the other classes. The same as
        ``find`` if the model has no states, or if another class reaches further. Source:
        ``get_computed_blocks_for_connector`` of vLLM 0.30 to 0.33.
        """
        # A connector loads the Mamba state together with the blocks after the hit, so the states on the GPU
        # do not limit the hit.
        full = next((finder for finder in self._finders if finder.is_full), None)
        if full is None or not any(isinstance(finder, MambaFinder) for finder in self._finders):
            return self.find(hashes, limit)
        hashed = len(hashes) * self._layout.hash_block_size
        length, columns = 0, list[Column]([] for _ in self._layout.groups)
        for finder in self._finders:
            looks_on = finder.drops_last and not isinstance(finder, MambaFinder)
            reach = min(limit + finder.margin, hashed) if looks_on else limit
            found = finder.find(hashes, reach, drop=finder.drops_last)
            if finder is full:
                length = found.length
            elif found.length > length:
                return self.find(hashes, limit)
            for group_idx, column in zip(finder.group_idxs, found.columns, strict=True):
                columns[group_idx] = column
        return Hit(length, 0, columns)

    def _fixed_point(self, hashes: Sequence[WireHash], limit: int) -> tuple[int, int, dict[int, Found]]:
        """Common length, longest length that any class reached, and the last result of each class.

        A class with the EAGLE rule looks one block further and drops it, once for each candidate length.
        """
        hashed = len(hashes) * self._layout.hash_block_size
        found_by: dict[int, Found] = {}
        dropped: set[int] = set()
        longest = 0
        while True:
            length = limit
            for position, finder in enumerate(self._finders):
                # Full attention is downward closed: a shorter limit only cuts its run, so one lookup is
                # enough.
                if finder.is_full and position in found_by:
                    length = min(length, found_by[position].length)
                    continue
                drop = finder.drops_last and position not in dropped
                reach = length
                if drop and not isinstance(finder, MambaFinder):
                    # The EAGLE rule finds one unit more and drops it. Mamba is excluded, since its finder
                    # drops nothing and the hit would exceed the candidate.
                    reach = min(length + finder.margin, hashed)
                found = finder.find(hashes, reach, drop=drop)
                if drop:
                    dropped.add(position)
                # A shorter candidate has not been verified with the drop yet (vLLM issue #32802).
                elif found.length < length:
                    dropped.clear()
                length = found.length
                found_by[position] = found
                # The longest length of any class is a prefix that requests share and sparse groups have not
                # stored: vLLM stores its end when it is computed.
                longest = max(longest, length)
            if length >= limit:
                return limit, longest, found_by
            limit = length
            # vLLM stops after one pass for full attention and one other class (``is_simple_hybrid``): the
            # second result cannot lengthen the first.
            if self._one_pass:
                return limit, longest, found_by
