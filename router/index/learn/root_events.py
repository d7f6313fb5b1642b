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

import msgspec

from kvatlas.publisher.block_hash import (
    NO_EXTRAS,
    HashChain,
    HashScheme,
    MultimodalItem,
    PromptExtras,
    block_hashes,
    extra_keys,
)
from kvatlas.publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash

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
