"""Evidence about an engine's hashes: stored events that start at token 0, and other published blocks.

An event that starts at token 0 contains both the tokens and their hashes (``RootEvent``). A root span whose
blocks are all masked lists no hash, but the next event of the prompt names the hash of the whole span as its
parent: ``PendingRoots`` joins the two. Invariant: parsing returns a ``RootEvent`` or None, whatever an
event's extra keys or token ids contain.

If no event contains a prompt from its first token, two proofs remain (``PublishedBlocks``). An event that
names its parent's *whole* hash (engines that publish hashes as bytes) contains everything its own first hash
covers: it proves the algorithm, but not the seed. And a prompt that the router had to place may contain the
tokens of an event: then the prompt up to there is a root span, with its real extras and the event's hashes.

A pair of event and prompt is only *evidence*, to be tried with real hashes: equal tokens after different
first tokens match nothing. Equal tokens with different extra keys (a salt, an image) or different look-ahead
tokens are not paired, if the event shows these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from kvatlas.publisher.block_hash import (
    NO_EXTRAS,
    HashChain,
    HashScheme,
    MultimodalItem,
    PromptExtras,
    block_hashes,
    extra_keys,
    hash_function,
)
from kvatlas.publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash
from kvatlas.router.index.base import Plane

_PENDING_MAX = 8
_PARENTS_MAX = 64
_PUBLISHED_MAX = 256
# Maximum number of published events with the same tokens and different extra keys.
_KEYS_MAX = 8

# Longest span that is hashed completely, in tokens: 10 ms of the event loop and more (measured). Prompts are
# searched for events up to it, because every candidate hashes the span from the start.
_SPAN_TOKENS_MAX = 1 << 15
_INT_HASH_BYTES = 8


class RootEvent(msgspec.Struct, frozen=True):
    """A stored event that starts at token 0, ready to be compared with computed hashes."""

    tokens: list[int]
    block_size: int
    hashes: list[BlockHash]
    extras: PromptExtras
    lookahead: int
    full: bool
    """Whether every block of the span is listed, so that hash i covers block i."""
    keyed: int = 0
    """Index of the first listed block with extra keys; 0 if none has any."""
    any_hash: bool = False
    """Whether one matching hash is sufficient: ``hashes`` are alternatives for the end of the span."""
    joined: bool = False
    """Whether only the end is from the event; everything before is from a prompt that continues with the
    same tokens.
    """

    @property
    def plain(self) -> bool:
        """Whether the event contains everything its hashes cover."""
        return self.full and self.extras == NO_EXTRAS

    @property
    def legible(self) -> bool:
        """Whether the first block contains everything its hash covers, if a bare key is a salt.

        A digest of prompt embeddings looks the same. The extent of a multimodal item is not shown.
        """
        within = self.block_size + self.lookahead
        return self.full and not any(item.offset < within for item in self.extras.multimodal)

    @property
    def first_block(self) -> RootEvent:
        """Reduce a full event to its first block; without extra keys there it is plain."""
        extras = NO_EXTRAS if self.keyed else self.extras
        return msgspec.structs.replace(self, hashes=self.hashes[:1], extras=extras, keyed=0)

    @property
    def cost(self) -> int:
        """Number of tokens to hash to try a scheme on it."""
        return self.block_size if self.full else len(self.tokens)


class PendingRoots:
    """The latest root spans without a listed hash, each with the hash of its end under every candidate."""

    def __init__(self) -> None:
        self._spans: deque[tuple[RootEvent, dict[BlockHash, HashScheme]]] = deque(maxlen=_PENDING_MAX)
        self._parents: deque[BlockHash] = deque(maxlen=_PARENTS_MAX)
        self._tried: deque[list[int]] = deque(maxlen=_PENDING_MAX)

    def add(self, root: RootEvent, candidates: Iterable[HashScheme]) -> None:
        """Wait for a child of this span. Every group of an engine publishes the same span."""
        if any(root.tokens == known.tokens and root.extras == known.extras for known, _ in self._spans):
            return
        ends = {end_hash(root, scheme): scheme for scheme in candidates}
        self._spans.append((root, {end: scheme for end, scheme in ends.items() if end is not None}))

    def continued_by(self, event: BlockStored) -> HashScheme | None:
        """Return the candidate under which the event's parent is the end of a waiting span."""
        if event.parent_block_hash is None:
            return None
        parent = to_block_hash(event.parent_block_hash)
        if parent not in self._parents:
            self._parents.append(parent)
        return next((ends[parent] for _, ends in self._spans if parent in ends), None)

    def tried(self, root: RootEvent) -> None:
        """Record that a search used this evidence: a span may have no child."""
        self._tried.append(root.tokens)

    def evidence(self) -> RootEvent | None:
        """Return the shortest untried span, with all parents that it may end with; None before both exist."""
        spans = [root for root, _ in self._spans if root.tokens not in self._tried]
        if not spans or not self._parents:
            return None
        shortest = min(spans, key=lambda root: root.cost)
        return msgspec.structs.replace(shortest, hashes=list(self._parents), any_hash=True)


def root_event(event: BlockStored, lora_paths: dict[str, str]) -> RootEvent | None:
    """Return the comparable form of ``event``; None if it starts elsewhere, is too long or lacks a hash
    input.
    """
    return None if event.parent_block_hash is not None else shown(event, lora_paths)


def shown(event: BlockStored, lora_paths: dict[str, str]) -> RootEvent | None:
    """Parse ``event`` as if it started at token 0; None if it is too long or lacks a hash input."""
    if event.block_size == 0:
        return None
    extras = event_extras(event, lora_paths)
    if extras is None:
        return None
    try:
        tokens = event.tokens()
    except EventDecodeError:
        return None
    if len(tokens) < event.block_size:
        return None
    hashes = [to_block_hash(wire) for wire in event.block_hashes]
    full = len(hashes) > 0 and len(tokens) == event.block_size * len(hashes)
    if not full and len(tokens) > _SPAN_TOKENS_MAX:
        return None
    ahead = event.lookahead_token_ids or []
    if ahead and ahead[-1]:
        tokens = tokens + ahead[-1]
    keyed = next((number for number, keys in enumerate(event.extra_keys or ()) if keys), 0)
    if keyed * event.block_size > _SPAN_TOKENS_MAX:
        keyed = 0
    return RootEvent(tokens, event.block_size, hashes, extras, len(ahead[-1]) if ahead else 0, full, keyed)


def event_extras(event: BlockStored, lora_paths: dict[str, str]) -> PromptExtras | None:
    """Return the hash inputs of a root event besides tokens.

    None if the LoRA's path is unknown, or the extra keys are not in vLLM's form. The length of a multimodal
    item is not on the wire; the blocks that list it show its extent.
    """
    path = None
    if event.lora_name is not None:
        path = lora_paths.get(event.lora_name)
        if path is None:
            return None
    salt = event.cache_salt
    reach: dict[tuple[str, int], int] = {}
    ahead = event.num_lookahead()
    for number, keys in enumerate(event.extra_keys or ()):
        if keys is not None and not isinstance(keys, list):
            return None
        for position, key in enumerate(keys or ()):
            match key:
                case str():
                    if not (position == 0 and key == event.lora_name):
                        salt = key
                case [str() as name, int() as offset]:
                    start = number * event.block_size + offset
                    reach[name, start] = (number + 1) * event.block_size + ahead - start
                case _:
                    return None
    items = tuple(MultimodalItem(name, start, length) for (name, start), length in reach.items())
    return PromptExtras(event.lora_name, path, salt, items)


def matches(root: RootEvent, scheme: HashScheme) -> bool:
    """Whether ``scheme`` gives the hashes of this event.

    For a full event the hash of its first block with extra keys is compared (a hash covers all before it),
    for a masked one every listed hash.
    """
    if scheme.lookahead != root.lookahead or root.block_size % scheme.hash_block_size:
        return False
    per_block = root.block_size // scheme.hash_block_size
    if root.full:
        ends = (root.keyed + 1) * root.block_size
        computed = block_hashes(root.tokens[: ends + root.lookahead], scheme, root.extras)
        return computed[-1:] == root.hashes[root.keyed : root.keyed + 1]
    found = set(block_hashes(root.tokens, scheme, root.extras)[per_block - 1 :: per_block])
    return not found.isdisjoint(root.hashes) if root.any_hash else found.issuperset(root.hashes)


def end_hash(root: RootEvent, scheme: HashScheme) -> BlockHash | None:
    """Return the hash of a whole span under a scheme; None if the span does not end at a hash block."""
    if scheme.lookahead != root.lookahead or len(root.tokens) % scheme.hash_block_size:
        return None
    return block_hashes(root.tokens, scheme, root.extras)[-1]


# The meaning of "removed" for a publisher, inferred from its events, with counts of the evidence. PER_COPY:
# one of several copies was removed (vLLM to date); proof: a block of which a removal left copies is removed
# again, without a store in between. COUNTED: the event carries the number of remaining copies
# (``remaining_copy_counts``). LAST_COPY: sent when no copy is left; assumed when the index holds more copies
# than the engine's pool has blocks and PER_COPY is not proven; revoked by that proof at any time. Undecided
# counts as PER_COPY: blocks that stay long are no evidence, since hot ones do. Copies beyond the pool of a
# proven PER_COPY publisher mean re-reports (``kv_cache_report_mode=full``), which are then detected. A
# decision holds until the engine restarts. At most ``_WATCHED_MAX`` removals are watched.


_WATCHED_MAX = 4096


class Removals(StrEnum):
    """Meaning of removal events."""

    UNDECIDED = "undecided"
    PER_COPY = "per_copy"
    COUNTED = "counted"
    LAST_COPY = "last_copy"


class RemovalEvidence:
    """Evidence about one publisher's removals. Counters since its start."""

    def __init__(self) -> None:
        self.semantics = Removals.UNDECIDED
        # Blocks removed twice in a row: removals are per copy.
        self.removed_again = 0
        self.told_counts = 0
        # Number of audits that found more copies than blocks.
        self.phantoms = 0
        self.re_reports_suspected = False
        self._watched: dict[tuple[Plane, BlockHash], None] = {}

    @property
    def open(self) -> bool:
        """Whether removals may still prove something."""
        return self.semantics in {Removals.UNDECIDED, Removals.LAST_COPY}

    @property
    def watching(self) -> bool:
        """Whether stores currently affect the evidence."""
        return bool(self._watched)

    def counted(self) -> None:
        """Record an event with the number of remaining copies."""
        self.told_counts += 1
        self.semantics = Removals.COUNTED
        self._watched.clear()

    def stored(self, plane: Plane, hashes: Iterable[BlockHash]) -> None:
        """Record stored blocks: a later removal of them proves nothing."""
        for block in hashes:
            self._watched.pop((plane, block), None)

    def removed(self, plane: Plane, hashes: Iterable[BlockHash], left: Iterable[BlockHash]) -> None:
        """Record removed blocks; those in ``left`` still have copies in the index."""
        for block in hashes:
            if (plane, block) in self._watched:
                self.removed_again += 1
        if self.removed_again:
            self.semantics = Removals.PER_COPY
            self._watched.clear()
            return
        for block in left:
            if len(self._watched) >= _WATCHED_MAX:
                del self._watched[next(iter(self._watched))]
            self._watched[plane, block] = None

    def phantom(self) -> list[tuple[Plane, BlockHash]]:
        """Record that the index holds more copies than the pool has blocks.

        Returns blocks now known to be removed.
        """
        self.phantoms += 1
        if self.semantics is Removals.PER_COPY:
            self.re_reports_suspected = True
        if self.semantics is not Removals.UNDECIDED:
            return []
        self.semantics = Removals.LAST_COPY
        return list(self._watched)


# Learned mode: engine hashes are looked up by token prefix if they cannot be computed. For every stored event
# with known tokens and parent, the router's own chained key of the prefix is computed and mapped to the
# engine's hash. A query computes the own keys of its prompt and translates them. Blocks whose position is
# unknown (parent unknown, masked blocks that no full event of another group names, several media items in a
# block larger than a hash block) are left out and counted: learned mode under-predicts but never invents a
# block. Beyond ``_ENTRIES_MAX`` keys the oldest half is dropped.


# About 150 MB (measured); engines hold fewer blocks than this.
_ENTRIES_MAX = 1 << 19

# Placeholder for "no such block": hashes on the wire are never negative, so no index holds it.
_ABSENT = BlockHash(-1)


class LearnedKeys:
    """Maps own prefix keys to the hashes of one engine."""

    def __init__(self) -> None:
        self._digest = hash_function("learned")
        self._digest_of: dict[BlockHash, bytes] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.unplaced = 0

    def __len__(self) -> int:
        return len(self._hash_of)

    def observe(self, event: BlockStored, unit: int) -> None:
        """Learn from one stored event; ``unit`` is the hash block size in tokens."""
        hashes, size = event.block_hashes, event.block_size
        if not hashes or size == 0 or size % unit:
            return
        if event.num_tokens() != len(hashes) * size:
            # masked: the positions of its blocks are learned from full events only.
            return
        parent = self._parent(event)
        if parent is None:
            self.unplaced += len(hashes)
            return
        try:
            self._learn(event, event.tokens(), parent, unit)
        except (EventDecodeError, _BadExtraKeysError):
            self.unplaced += len(hashes)
        self._bound()

    def translate(self, own_keys: Sequence[int]) -> list[BlockHash]:
        """Return the engine's hash for each own key; -1, which no index holds, if unknown."""
        get = self._hash_of.get
        return [get(key, _ABSENT) for key in own_keys]

    def _parent(self, event: BlockStored) -> bytes | None:
        if event.parent_block_hash is None:
            return self._digest("")
        return self._digest_of.get(to_block_hash(event.parent_block_hash))

    def _learn(self, event: BlockStored, tokens: list[int], parent: bytes, unit: int) -> None:
        size, per_block = event.block_size, event.block_size // unit
        for number, wire in enumerate(event.block_hashes):
            extra = _with_lookahead(event, number, _extra(event, number))
            if extra is not None and per_block > 1:
                self.unplaced += len(event.block_hashes) - number
                return
            for start in range(number * size, (number + 1) * size, unit):
                parent = self._digest((parent, tuple(tokens[start : start + unit]), extra))
            block = to_block_hash(wire)
            self._digest_of[block] = parent
            self._hash_of[int.from_bytes(parent[-8:], "big")] = block

    def _bound(self) -> None:
        tables: tuple[dict[Any, Any], ...] = (self._hash_of, self._digest_of)
        for table in tables:
            if len(table) > _ENTRIES_MAX:
                for key in list(islice(table, _ENTRIES_MAX // 2)):
                    del table[key]


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


class PublishedBlocks:
    """The latest stored blocks, by their own tokens."""

    def __init__(self) -> None:
        self._events: dict[tuple[int, tuple[int, ...]], dict[str, BlockStored]] = {}

    def add(self, event: BlockStored) -> None:
        """Remember one stored event that lists hashes."""
        try:
            tokens = event.tokens()
        except EventDecodeError:
            return
        size = event.block_size
        if not event.block_hashes or not size or len(tokens) < size:
            return
        alike = self._events.setdefault((size, tuple(tokens[:size])), {})
        alike[str(event.extra_keys and event.extra_keys[0])] = event
        if len(alike) > _KEYS_MAX:
            del alike[next(iter(alike))]
        if len(self._events) > _PUBLISHED_MAX:
            del self._events[next(iter(self._events))]

    def evidence(self, prompt: Sequence[int], extras: PromptExtras) -> Iterator[RootEvent]:
        """Yield the spans of this prompt that end with published blocks, the shortest first."""
        limit = min(len(prompt), _SPAN_TOKENS_MAX)
        sizes = {size for size, _ in self._events}
        ends = [(end, size) for size in sizes for end in range(size, limit + 1, size)]
        for end, size in sorted(ends):
            for event in self._events.get((size, tuple(prompt[end - size : end])), {}).values():
                root = _span(event, prompt, end - size, extras)
                if root is not None:
                    yield root


def _span(event: BlockStored, prompt: Sequence[int], start: int, extras: PromptExtras) -> RootEvent | None:
    """Return the prompt up to the end of the event's first block, or of all blocks if some are masked."""
    if (event.parent_block_hash is None) != (start == 0) or event.lora_name != extras.lora_name:
        return None
    size, ahead = event.block_size, event.num_lookahead()
    full = event.num_tokens() == size * len(event.block_hashes)
    end = start + (size if full else event.num_tokens())
    listed = 1 if full else len(event.block_hashes)
    tokens = list(prompt[: end + ahead])
    if len(tokens) < end + ahead or (not full and tokens[start:end] != event.tokens()):
        return None
    if not _alike(event, tokens, range(start, end, size), extras, listed):
        return None
    hashes = [to_block_hash(wire) for wire in event.block_hashes[:listed]]
    return RootEvent(tokens, size, hashes, extras, ahead, full=False, joined=start > 0)


def _alike(
    event: BlockStored, tokens: list[int], starts: Iterable[int], extras: PromptExtras, listed: int
) -> bool:
    """Whether blocks of the prompt at ``starts`` have, in order, the extra keys and the look-ahead of the
    event's first ``listed`` blocks.

    The event does not show which blocks these are.
    """
    size, ahead = event.block_size, event.num_lookahead()
    keys, lookahead = event.extra_keys, event.lookahead_token_ids
    if any(shown and len(shown) < listed for shown in (keys, lookahead)):
        return False
    blocks = iter(starts)
    for number in range(listed):
        for start in blocks:
            end = start + size
            if lookahead and tokens[end : end + ahead] != lookahead[number]:
                continue
            if not keys or _equal(keys[number], extras, start, end + ahead):
                break
        else:
            return False
    return True


def _equal(keys: object, extras: PromptExtras, start: int, end: int) -> bool:
    """Whether a block's extra keys, as listed in an event, equal those of this part of a prompt."""
    told = [] if keys is None else keys
    ours = extra_keys(extras, start, end, tagged=False)
    return told == [list(key) if isinstance(key, tuple) else key for key in ours]


def proven_algorithm(
    event: BlockStored, candidates: Iterable[HashScheme], lora_paths: dict[str, str]
) -> HashScheme | None:
    """Return the first candidate (with any seed) that leads from the event's whole parent hash to its
    first hash.
    """
    parent, first = event.parent_block_hash, next(iter(event.block_hashes), None)
    if not isinstance(parent, bytes) or not isinstance(first, bytes) or len(parent) <= _INT_HASH_BYTES:
        return None
    root = shown(event, lora_paths)
    if root is None or not root.full or root.extras.cache_salt is not None:
        return None
    span = root.tokens[: root.block_size + root.lookahead]
    for scheme in candidates:
        if scheme.lookahead == root.lookahead and root.block_size % scheme.hash_block_size == 0:
            chain = HashChain(scheme, root.first_block.extras, parent=parent)
            chain.extend(span)
            if chain.whole(len(chain.hashes) - 1) == [first]:
                return scheme
    return None
