"""Learned mode: engine hashes are looked up by token prefix until they can be computed.

For every stored event with known tokens and parent, the router's own chained key of the prefix is computed
and mapped to the engine's hash, of whatever kind and width. A query computes the own keys of its prompt and
translates them. Blocks whose position is unknown (parent unknown, masked blocks that no full event of another
group names, several media items in a block larger than a hash block) are left out and counted: learned mode
under-predicts but never invents a block. So are prefixes that are held under two hashes: these cover more
than the events tell (a salt or an adapter with TensorRT-LLM). Beyond ``_ENTRIES_MAX`` blocks some are
forgotten, those that the engine evicted longest ago first.

Where the router came later than a prefix, no event shows it, and the parent of what follows is unknown. Then
a report tells: the engine took the first tokens of a prompt from its cache, and published those after them.
Such a prefix counts while the latest block published behind it is held: engines evict ends before starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from kvatlas.publisher.block_hash import HashChain, HashScheme, PromptExtras, hash_function
from kvatlas.publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash

# About 150 MB (measured); engines hold fewer blocks than this.
_ENTRIES_MAX = 1 << 19
# Blocks forgotten at once: some milliseconds.
_FORGOTTEN = 1 << 11

# Events of unknown parents that wait for a report of their prompt, the longest of them, and tokens of all:
# about 6 MB.
_ORPHANS_MAX, _ORPHAN_TOKENS_MAX, _ORPHANS_TOKENS_MAX = 64, 1 << 15, 1 << 17
# Reports that wait for such an event.
_REPORTS_MAX = 8

# Hash blocks after a reported hit in which a published block is looked for.
_NEXT_BLOCKS = 64

# Placeholder for "no such block": hashes are never negative here, so no index holds it.
_ABSENT = BlockHash(-1)


_Report = tuple[Sequence[int], PromptExtras, int, HashScheme]


class LearnedKeys:
    """Maps own prefix keys to the hashes of one engine."""

    def __init__(self) -> None:
        self._digest = hash_function("learned")
        self._digest_of: dict[BlockHash, bytes] = {}
        self._hash_of: dict[int, BlockHash] = {}
        # Keys of prefixes that no event showed -> key of the end of the longest one -> the latest block that
        # was published behind it.
        self._within: dict[int, int] = {}
        self._behind: dict[int, BlockHash] = {}
        # By their tokens; None: two with the same tokens and other parents.
        self._orphans: dict[tuple[int, ...], BlockStored | None] = {}
        # Arguments of ``place`` for which no event has come yet.
        self._reports: list[_Report] = []
        # Blocks that were evicted, in that order.
        self._evicted: dict[BlockHash, None] = {}
        self.left_out: Counter[str] = Counter()
        """Blocks without a position: ``unplaced``, ``ambiguous`` (a prefix has two hashes), ``forgotten``."""

    def __len__(self) -> int:
        return len(self._digest_of)

    def observe(self, event: BlockStored, unit: int, held: Callable[[BlockHash], bool]) -> None:
        """Learn from one stored event; ``unit`` is the hash block size in tokens. ``held``: whether the
        engine holds a block, before this event."""
        hashes, size = event.block_hashes, event.block_size
        if not hashes or size == 0 or size % unit:
            return
        if event.num_tokens() != len(hashes) * size:
            # masked: the positions of its blocks are learned from full events only.
            return
        parent = self._parent(event)
        if parent is None:
            self.left_out["unplaced"] += len(hashes)
            for report in self._await_report(event):
                self.place(*report, held)
            return
        if _key(parent) in self._behind:
            self._behind[_key(parent)] = to_block_hash(hashes[0])
        try:
            self._learn(event, event.tokens(), parent, unit, held)
        except (EventDecodeError, _BadExtraKeysError):
            self.left_out["unplaced"] += len(hashes)
        if len(self._digest_of) > _ENTRIES_MAX:
            self._forget(held)

    def evicted(self, hashes: Sequence[BlockHash]) -> None:
        """Record removals: these blocks are forgotten first."""
        known = self._digest_of
        self._evicted.update({block: None for block in hashes if block in known})

    def keep(self, earlier: LearnedKeys) -> None:
        """Add what was learned before of the same process of the engine."""
        self._digest_of = earlier._digest_of | self._digest_of
        self._hash_of = earlier._hash_of | self._hash_of
        self._within, self._behind = earlier._within | self._within, earlier._behind | self._behind
        self.left_out += earlier.left_out

    def translate(self, own_keys: Sequence[int]) -> list[BlockHash]:
        """Return the engine's hash for each own key; -1, which no index holds, if unknown."""
        get = self._hash_of.get
        if self._within:
            within, behind = self._within.get, self._behind.get
            return [get(key, behind(within(key, 0), _ABSENT)) for key in own_keys]
        return [get(key, _ABSENT) for key in own_keys]

    def place(
        self,
        tokens: Sequence[int],
        extras: PromptExtras,
        cached: int,
        scheme: HashScheme,
        held: Callable[[BlockHash], bool],
    ) -> None:
        """Learn that the engine took the first ``cached`` tokens of this prompt from its cache: a block that
        it published behind them shows that they are there. ``scheme``: of own keys."""
        unit, after = scheme.hash_block_size, tuple(tokens[cached : cached + _ORPHAN_TOKENS_MAX])
        if cached % unit or not cached:
            return
        chain = HashChain(scheme, extras)
        keys = chain.extend(tokens[: cached + _NEXT_BLOCKS * unit + scheme.lookahead])
        cut = cached // unit
        named = (one for one in self._orphans if one[:unit] == after[:unit] and one == after[: len(one)])
        event = self._orphans.get(next(named, ()))
        if event is not None and event.parent_block_hash is not None:
            self._digest_of[to_block_hash(event.parent_block_hash)] = chain.whole(cut - 1)[0]
        for name, waiting in list(self._orphans.items()):
            if waiting is not None and self._parent(waiting) is not None:
                del self._orphans[name]
                self.observe(waiting, unit, held)
        behind = next((self._hash_of[key] for key in keys[cut:] if key in self._hash_of), None)
        if behind is None:
            # The event may come after the report.
            tokens = tokens[: cached + _ORPHAN_TOKENS_MAX]
            self._reports = [*self._reports[1 - _REPORTS_MAX :], (tokens, extras, cached, scheme)]
            return
        if len(self._within) + cut > _ENTRIES_MAX:
            self._within.clear()
            self._behind.clear()
        self._within.update({key: keys[cut - 1] for key in keys[:cut] if key not in self._hash_of})
        self._behind[keys[cut - 1]] = behind

    def _await_report(self, event: BlockStored) -> list[_Report]:
        """Keep an event of an unknown parent; returns the reports of its prompt that came already."""
        if event.num_tokens() > _ORPHAN_TOKENS_MAX:
            return []
        try:
            tokens = tuple(event.tokens())
        except EventDecodeError:
            return []
        other = self._orphans.pop(tokens, event)
        alike = other is not None and other.parent_block_hash == event.parent_block_hash
        self._orphans[tokens] = event if alike else None
        while len(self._orphans) > _ORPHANS_MAX or sum(map(len, self._orphans)) > _ORPHANS_TOKENS_MAX:
            del self._orphans[next(iter(self._orphans))]
        first = tokens[: event.block_size]
        found = [one for one in self._reports if tuple(one[0][one[2] : one[2] + len(first)]) == first]
        self._reports = [one for one in self._reports if all(one is not each for each in found)]
        return found

    def named(self, hashes: Sequence[BlockHash]) -> tuple[list[BlockHash], list[BlockHash], list[BlockHash]]:
        """Return the blocks of ``hashes`` whose prefix is known; the own key of each, which others can
        compute; and the block that has this prefix now (-1 if it is ambiguous)."""
        known = [block for block in hashes if block in self._digest_of]
        keys = [BlockHash(_key(self._digest_of[block])) for block in known]
        return known, keys, self.translate(keys)

    def _parent(self, event: BlockStored) -> bytes | None:
        if event.parent_block_hash is None:
            return self._digest("")
        return self._digest_of.get(to_block_hash(event.parent_block_hash))

    def _learn(
        self,
        event: BlockStored,
        tokens: list[int],
        parent: bytes,
        unit: int,
        held: Callable[[BlockHash], bool],
    ) -> None:
        size, per_block = event.block_size, event.block_size // unit
        for number, wire in enumerate(event.block_hashes):
            extra = _with_lookahead(event, number, _extra(event, number))
            if extra is not None and per_block > 1:
                self.left_out["unplaced"] += len(event.block_hashes) - number
                return
            for start in range(number * size, (number + 1) * size, unit):
                parent = self._digest((parent, tuple(tokens[start : start + unit]), extra))
            block, key = to_block_hash(wire), _key(parent)
            known = self._hash_of.get(key)
            if known is not None and known != block and (known == _ABSENT or held(known)):
                self.left_out["ambiguous"] += 1
                self._hash_of[key] = _ABSENT
            else:
                self._hash_of[key] = block
            self._digest_of[block] = parent
            self._evicted.pop(block, None)

    def _forget(self, held: Callable[[BlockHash], bool]) -> None:
        first = list(islice(self._evicted, _FORGOTTEN))
        for block in first:
            del self._evicted[block]
        gone = [block for block in first if not held(block)]
        for block in gone or list(islice(self._digest_of, _FORGOTTEN)):
            digest = self._digest_of.pop(block, None)
            if digest is None:
                continue
            self.left_out["forgotten"] += 1
            if self._hash_of.get(_key(digest)) in {block, _ABSENT}:
                del self._hash_of[_key(digest)]


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class _BadExtraKeysError(ValueError):
    """Extra keys that vLLM never writes."""


def _extra(event: BlockStored, number: int) -> tuple[Any, ...] | None:
    """Return the extra keys of one listed block in the untagged form that ``block_hash.extra_keys`` gives."""
    if event.extra_keys is None:
        return _fields(event, number)
    keys = event.extra_keys[number] if number < len(event.extra_keys) else None
    if not keys:
        return None
    if not isinstance(keys, list):
        raise _BadExtraKeysError
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)


def _fields(event: BlockStored, number: int) -> tuple[str, ...] | None:
    """Return the extra keys of an engine that sends separate fields instead (SGLang)."""
    first = number == 0 and event.parent_block_hash is None
    keys = (event.lora_name, event.cache_salt if first else None)
    return tuple(key for key in keys if key) or None


def _with_lookahead(event: BlockStored, number: int, keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the extra that a look-ahead hash covers: the keys and the tokens after the block."""
    ahead = event.lookahead_token_ids
    if not ahead or number >= len(ahead) or not ahead[number]:
        return keys
    return (keys, *ahead[number])
