"""Which hash scheme an engine uses, found from its own events; never guessed.

An event that starts at token 0 shows both the tokens and the hashes the engine computed for them. Every
known scheme is tried on it: algorithm, seed, hash block size (the divisors of the event's block size),
with or without tagged extra keys; a match on 64 bits settles it. Seeds are tried in three rounds: those the
operator named or the fleet already uses, vLLM's fixed default, then the small integers people give to
PYTHONHASHSEED. The last round is long, so ``advance`` does it a slice at a time. Where all fail (xxhash
with a random seed, a custom hash), the scheme is *unknown* and the engine is read in learned mode.

A root span whose blocks are all masked shows no hash of its own, but the next event of the prompt names the
hash of the whole span as its parent: ``PendingRoots`` joins the two.

A settled scheme is checked again on a sample of later root events; repeated mismatches start over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from publisher.block_hash import (
    ALGORITHMS,
    DEFAULT_SEED,
    HashScheme,
    MultimodalItem,
    PromptExtras,
    block_hashes,
)
from publisher.events import BlockHash, BlockStored, EventDecodeError, to_block_hash

SEEDS_MAX = 1 << 16
"""PYTHONHASHSEED values 0..65535 are tried; others must be configured as ``hash_seeds``."""

_SEEDS_PER_SLICE = 256
"""One slice costs about 3 ms of the event loop."""

_PENDING_MAX = 8
_CHECK_EVERY = 64
_MISMATCHES_MAX = 3


class Detection(StrEnum):
    """What is known about an engine's scheme."""

    WAITING = "waiting"
    SEARCHING = "searching"
    NATIVE = "native"
    LEARNED = "learned"


class RootEvent(msgspec.Struct, frozen=True):
    """A stored event that starts at token 0, ready to be compared with computed hashes."""

    tokens: list[int]
    block_size: int
    hashes: list[BlockHash]
    extras: PromptExtras
    lookahead: int
    full: bool
    """Whether every block of the span is listed, so that hash i covers block i."""


class PendingRoots:
    """Root spans without a listed hash, waiting for an event that continues them (the latest few)."""

    def __init__(self) -> None:
        self._spans: deque[RootEvent] = deque(maxlen=_PENDING_MAX)

    def add(self, root: RootEvent) -> None:
        self._spans.append(root)

    def continued_by(self, event: BlockStored) -> Iterator[RootEvent]:
        """Each waiting span as if it had listed the event's parent as the hash of its end."""
        if event.parent_block_hash is None or event.block_size == 0:
            return
        parent = to_block_hash(event.parent_block_hash)
        for span in self._spans:
            if len(span.tokens) % span.block_size == 0:
                yield msgspec.structs.replace(span, hashes=[parent])


def root_event(event: BlockStored, lora_paths: dict[str, str]) -> RootEvent | None:
    """The comparable form of ``event``; None if it starts elsewhere or hides what its hashes need."""
    if event.parent_block_hash is not None or event.block_size == 0:
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
    ahead = event.lookahead_token_ids or []
    if ahead and ahead[-1]:
        tokens = tokens + ahead[-1]
    return RootEvent(tokens, event.block_size, hashes, extras, len(ahead[-1]) if ahead else 0, full)


def event_extras(event: BlockStored, lora_paths: dict[str, str]) -> PromptExtras | None:
    """What entered the hashes of a root event besides tokens; None where the LoRA's path is unknown.

    The length of a multimodal item is not on the wire; the blocks that list it tell how far it reaches.
    """
    path = None
    if event.lora_name is not None:
        path = lora_paths.get(event.lora_name)
        if path is None:
            return None
    salt: str | None = None
    reach: dict[tuple[str, int], int] = {}
    for number, keys in enumerate(event.extra_keys or ()):
        for position, key in enumerate(keys or ()):
            if isinstance(key, str):
                if not (position == 0 and key == event.lora_name):
                    salt = key
            elif isinstance(key, list | tuple) and len(key) == 2:
                start = number * event.block_size + int(key[1])
                reach[str(key[0]), start] = (number + 1) * event.block_size - start
    items = tuple(MultimodalItem(name, start, length) for (name, start), length in reach.items())
    return PromptExtras(event.lora_name, path, salt, items)


def matches(root: RootEvent, scheme: HashScheme) -> bool:
    """Whether ``scheme`` gives the hashes of this event."""
    if scheme.lookahead != root.lookahead or root.block_size % scheme.hash_block_size:
        return False
    per_block = root.block_size // scheme.hash_block_size
    if root.full:
        first = root.tokens[: root.block_size + root.lookahead]
        return block_hashes(first, scheme, root.extras)[per_block - 1 : per_block] == root.hashes[:1]
    computed = set(block_hashes(root.tokens, scheme, root.extras)[per_block - 1 :: per_block])
    return computed.issuperset(root.hashes)


class SchemeDetector:
    """Detection for one engine; fed with its root events in order."""

    def __init__(self, seeds: Iterable[str] = (), known: Iterable[HashScheme] = ()) -> None:
        self._seeds = list(dict.fromkeys((*seeds, DEFAULT_SEED)))
        self._known = list(known)
        self._pending = PendingRoots()
        self._search: Iterator[HashScheme | None] | None = None
        self._exhausted = False
        self._since_check = 0
        self._mismatches_in_row = 0
        self.state = Detection.WAITING
        self.scheme: HashScheme | None = None
        self.mismatches = 0

    def wants(self, *, root: bool) -> bool:
        """Whether the next event, starting at token 0 or not, would be looked at (asked for every event)."""
        if self.state is Detection.NATIVE:
            self._since_check += root
            return root and self._since_check >= _CHECK_EVERY
        return self.state is Detection.WAITING

    def observe(self, root: RootEvent, unit: int) -> None:
        """Look at one root event; ``unit`` is the gcd of the block sizes known so far."""
        if self.state is Detection.NATIVE:
            self._recheck(root)
        elif self.state is Detection.WAITING:
            if root.hashes:
                self._settle(root, unit)
            else:
                self._pending.add(root)

    def observe_child(self, event: BlockStored) -> None:
        """Look at an event that goes on from a parent: it may continue a root span that listed no hash."""
        if self.state is not Detection.WAITING:
            return
        for root in self._pending.continued_by(event):
            scheme = next((s for s in self._candidates(root) if matches(root, s)), None)
            if scheme is not None:
                self._found(scheme)
                return

    def advance(self) -> None:
        """Try one slice of numeric seeds if a search is on."""
        if self._search is None:
            return
        found = next(self._search, None)
        if found is not None:
            self._found(found)
        elif self._exhausted:
            self._search, self.state = None, Detection.LEARNED

    def finish(self) -> None:
        """Run a search to its end (tools that replay recorded streams have no event loop to spare)."""
        while self._search is not None:
            self.advance()

    def _settle(self, root: RootEvent, unit: int) -> None:
        for scheme in self._candidates(root):
            if matches(root, scheme):
                self._found(scheme)
                return
        if root.extras.multimodal or not root.full:
            return  # too little to give up on: a later event may show more
        self._exhausted = False
        self._search = self._numeric(root, unit)
        self.state = Detection.SEARCHING

    def _candidates(self, root: RootEvent) -> Iterator[HashScheme]:
        yield from self._known
        for seed in self._seeds:
            for algo in ALGORITHMS:
                for size in _divisors(root.block_size):
                    yield HashScheme(algo, seed, size, root.lookahead)
                    if root.extras != PromptExtras():
                        yield HashScheme(algo, seed, size, root.lookahead, tagged=False)

    def _numeric(self, root: RootEvent, unit: int) -> Iterator[HashScheme | None]:
        sizes = sorted({root.block_size, unit}, reverse=True)
        for start in range(0, SEEDS_MAX, _SEEDS_PER_SLICE):
            found = None
            for number in range(start, start + _SEEDS_PER_SLICE):
                for algo in ALGORITHMS:
                    for size in sizes:
                        scheme = HashScheme(algo, str(number), size, root.lookahead)
                        if matches(root, scheme):
                            found = scheme
            yield found
        self._exhausted = True

    def _recheck(self, root: RootEvent) -> None:
        if not root.hashes:
            return
        self._since_check = 0
        scheme = self.scheme
        if scheme is None or matches(root, scheme):
            self._mismatches_in_row = 0
            return
        other = msgspec.structs.replace(scheme, tagged=not scheme.tagged)
        if root.extras != PromptExtras() and matches(root, other):
            self.scheme = other
            return
        self.mismatches += 1
        self._mismatches_in_row += 1
        self._since_check = _CHECK_EVERY  # look at the very next root event too
        if self._mismatches_in_row >= _MISMATCHES_MAX:
            self.state, self.scheme, self._mismatches_in_row = Detection.WAITING, None, 0

    def _found(self, scheme: HashScheme) -> None:
        self._search, self.scheme, self.state = None, scheme, Detection.NATIVE


def _divisors(size: int) -> list[int]:
    return [size // n for n in range(1, size + 1) if size % n == 0]


def learned_scheme(unit: int, lookahead: int = 0) -> HashScheme:
    """Our own chain, used where the engine's cannot be reproduced: token prefix -> engine hash is learned."""
    return HashScheme("learned", "", unit, lookahead, tagged=False)
