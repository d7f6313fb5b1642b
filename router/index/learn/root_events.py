"""Stored events that start at token 0: the ones that show both the tokens and the hashes of them.

A root span whose blocks are all masked shows no hash of its own, but the next event of the prompt names the
hash of the whole span as its parent: ``PendingRoots`` joins the two. Always true: whatever stands in an
event's extra keys or token ids, reading it gives a ``RootEvent`` or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from publisher.block_hash import NO_EXTRAS, HashScheme, MultimodalItem, PromptExtras, block_hashes
from publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash

_PENDING_MAX = 8
_PARENTS_MAX = 64

_SPAN_TOKENS_MAX = 1 << 15
"""Longer spans are not hashed whole: 10 ms of the event loop and more."""


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
    """The first listed block with extra keys; 0 where none has any."""
    any_hash: bool = False
    """Whether one of ``hashes`` is enough: they are hashes that the span may end with."""
    joined: bool = False
    """Whether only its end is the event's; all before is a prompt's that goes on with the same tokens."""

    @property
    def plain(self) -> bool:
        """Whether the event shows all that its hashes cover."""
        return self.full and self.extras == NO_EXTRAS

    @property
    def legible(self) -> bool:
        """Whether the first block shows all that its hash covers, if a bare key is a salt (a digest of prompt
        embeddings looks the same). How far a multimodal item reaches is not shown."""
        within = self.block_size + self.lookahead
        return self.full and not any(item.offset < within for item in self.extras.multimodal)

    @property
    def first_block(self) -> RootEvent:
        """What a full event shows of its first block alone; without extra keys there it is plain."""
        extras = NO_EXTRAS if self.keyed else self.extras
        return msgspec.structs.replace(self, hashes=self.hashes[:1], extras=extras, keyed=0)

    @property
    def cost(self) -> int:
        """Tokens to be hashed to try a scheme on it."""
        return self.block_size if self.full else len(self.tokens)


class PendingRoots:
    """The latest root spans without a listed hash, each as the hash of its end under every candidate."""

    def __init__(self) -> None:
        self._spans: deque[tuple[RootEvent, dict[BlockHash, HashScheme]]] = deque(maxlen=_PENDING_MAX)
        self._parents: deque[BlockHash] = deque(maxlen=_PARENTS_MAX)
        self._tried: deque[list[int]] = deque(maxlen=_PENDING_MAX)

    def add(self, root: RootEvent, candidates: Iterable[HashScheme]) -> None:
        """Wait for a child of this span. Every group of an engine tells of the same one."""
        if any(root.tokens == known.tokens and root.extras == known.extras for known, _ in self._spans):
            return
        ends = {end_hash(root, scheme): scheme for scheme in candidates}
        self._spans.append((root, {end: scheme for end, scheme in ends.items() if end is not None}))

    def continued_by(self, event: BlockStored) -> HashScheme | None:
        """The candidate under which the event's parent is the end of a waiting span."""
        if event.parent_block_hash is None:
            return None
        parent = to_block_hash(event.parent_block_hash)
        if parent not in self._parents:
            self._parents.append(parent)
        return next((ends[parent] for _, ends in self._spans if parent in ends), None)

    def tried(self, root: RootEvent) -> None:
        """A search with this evidence found nothing, or is to begin: a span may have no child."""
        self._tried.append(root.tokens)

    def evidence(self) -> RootEvent | None:
        """The shortest span not tried before, with all the parents that it may end with; None before there
        are both."""
        spans = [root for root, _ in self._spans if root.tokens not in self._tried]
        if not spans or not self._parents:
            return None
        shortest = min(spans, key=lambda root: root.cost)
        return msgspec.structs.replace(shortest, hashes=list(self._parents), any_hash=True)


def root_event(event: BlockStored, lora_paths: dict[str, str]) -> RootEvent | None:
    """The comparable form of ``event``; None if it starts elsewhere, is too long or hides what it hashes."""
    return None if event.parent_block_hash is not None else shown(event, lora_paths)


def num_lookahead(event: BlockStored) -> int:
    """How many tokens after each block its hash covers."""
    ahead = event.lookahead_token_ids
    return len(ahead[0]) if ahead else 0


def shown(event: BlockStored, lora_paths: dict[str, str]) -> RootEvent | None:
    """``event`` read as if it started at token 0; None if it is too long or hides what it hashes."""
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
    """What entered the hashes of a root event besides tokens; None where the LoRA's path is unknown, or where
    the extra keys are none that vLLM writes.

    The length of a multimodal item is not on the wire; the blocks that list it tell how far it reaches.
    """
    path = None
    if event.lora_name is not None:
        path = lora_paths.get(event.lora_name)
        if path is None:
            return None
    salt = event.cache_salt
    reach: dict[tuple[str, int], int] = {}
    ahead = num_lookahead(event)
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
    """Whether ``scheme`` gives the hashes of this event: of a full one, that of its first block with extra
    keys (a hash covers all before it), of a masked one every listed hash."""
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
    """The hash of a whole span under a scheme; None where the span does not end a hash block."""
    if scheme.lookahead != root.lookahead or len(root.tokens) % scheme.hash_block_size:
        return None
    return block_hashes(root.tokens, scheme, root.extras)[-1]
