"""Which hash scheme an engine uses, found from its own events; never guessed.

An event that starts at token 0 shows both the tokens and the hashes the engine computed for them. Every
known scheme is tried on it: algorithm, seed, hash block size (the divisors of the event's block size),
with or without tagged extra keys; a match on 64 bits settles it. Seeds are tried in three rounds: those the
operator named or the fleet already uses, vLLM's fixed default, then the small integers people give to
PYTHONHASHSEED. The last round is long, so ``advance`` does it a slice at a time. Where all fail (xxhash
with a random seed, a custom hash), the scheme is *unknown* and the engine is read in learned mode.

Only a *plain* root event (every block listed, no extra keys) shows all that its hashes cover, so only such an
event can prove anything: that the search is worth starting, or that a settled scheme no longer holds. Engines
that show none (all blocks masked, every prompt with an adapter of unknown path) are searched, or given up,
after ``_PATIENCE`` root events.

A settled scheme is checked again on a sample of later root events, and repeated mismatches start over; so is
a given-up one, which a plain event after all may settle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from publisher.block_hash import ALGORITHMS, DEFAULT_SEED, NO_EXTRAS, HashScheme
from publisher.events import BlockStored
from router.index.learn.root_events import PendingRoots, RootEvent, matches

SEEDS_MAX = 1 << 16
"""PYTHONHASHSEED values 0..65535 are tried; others must be configured as ``hash_seeds``."""

_HASHES_PER_SLICE = 1024
"""One slice of the search costs about 3 ms of the event loop."""

_SEARCH_TOKENS_MAX = 4096
"""A masked root span is searched with only if it is this short: every seed hashes it whole."""

_PATIENCE = 64

_CHECK_EVERY = 64
_MISMATCHES_MAX = 3


class Detection(StrEnum):
    """What is known about an engine's scheme."""

    WAITING = "waiting"
    SEARCHING = "searching"
    NATIVE = "native"
    LEARNED = "learned"


class SchemeDetector:
    """Detection for one engine; fed with its root events in order."""

    def __init__(self, seeds: Iterable[str] = (), known: Iterable[HashScheme] = ()) -> None:
        self._seeds = list(dict.fromkeys((*seeds, DEFAULT_SEED)))
        self._known = list(known)
        self._pending = PendingRoots()
        self._search: Iterator[HashScheme | None] | None = None
        self._exhausted = False
        self._unmatched = 0
        self._shortest: RootEvent | None = None
        self._since_check = 0
        self._mismatches_in_row = 0
        self.state = Detection.WAITING
        self.scheme: HashScheme | None = None
        self.mismatches = 0

    def wants(self, *, root: bool) -> bool:
        """Whether the next event, starting at token 0 or not, would be looked at (asked for every event)."""
        if self.state is Detection.WAITING:
            return True
        if not root or self.state is Detection.SEARCHING:
            return False
        self._since_check += 1
        return self._since_check >= _CHECK_EVERY

    def observe(self, root: RootEvent | None, unit: int) -> None:
        """Look at one root event (None: one that hides what its hashes need); ``unit`` is the gcd of the
        block sizes known so far."""
        if self.state is Detection.WAITING:
            self._settle(root, unit)
        elif root is not None and self.state is Detection.NATIVE:
            self._recheck(root)
        elif root is not None and root.plain and self.state is Detection.LEARNED:
            self._since_check = 0
            self._try_known(root)

    def observe_child(self, event: BlockStored) -> None:
        """Look at an event that goes on from a parent: it may continue a root span that listed no hash."""
        if self.state is not Detection.WAITING:
            return
        scheme = self._pending.continued_by(event)
        if scheme is not None:
            self._found(scheme)

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

    def _settle(self, root: RootEvent | None, unit: int) -> None:
        if root is not None:
            if root.hashes and self._try_known(root):
                return
            if root.plain:
                self._start_search(root, unit)
                return
            self._keep(root)
        self._unmatched += 1
        if self._unmatched < _PATIENCE:
            return
        if self._shortest is not None:
            self._start_search(self._shortest, unit)
        else:
            self.state = Detection.LEARNED

    def _keep(self, root: RootEvent) -> None:
        """Remember a span that a child may complete, or the cheapest to search with if no plain one comes."""
        if not root.hashes:
            self._pending.add(root, self._candidates(root))
        elif root.extras != NO_EXTRAS or len(root.tokens) > _SEARCH_TOKENS_MAX:
            return
        elif self._shortest is None or len(root.tokens) < len(self._shortest.tokens):
            self._shortest = root

    def _try_known(self, root: RootEvent) -> bool:
        """Settle on the first candidate that gives the event's hashes; False where none does.

        Where none gives the hash of the first block with extra keys (how far a multimodal item reaches is not
        on the wire), the blocks before it are proof enough.
        """
        scheme = next((s for s in self._candidates(root) if matches(root, s)), None)
        if scheme is None and root.full and root.keyed:
            root = msgspec.structs.replace(root, keyed=0)
            scheme = next((s for s in self._candidates(root) if matches(root, s)), None)
        if scheme is not None:
            self._found(scheme)
        return scheme is not None

    def _start_search(self, root: RootEvent, unit: int) -> None:
        self._exhausted = False
        self._search = self._numeric(root, unit)
        self.state = Detection.SEARCHING

    def _candidates(self, root: RootEvent) -> Iterator[HashScheme]:
        yield from self._known
        for seed in self._seeds:
            for algo in ALGORITHMS:
                for size in _hash_block_sizes(root):
                    yield HashScheme(algo, seed, size, root.lookahead)
                    if root.extras != NO_EXTRAS:
                        yield HashScheme(algo, seed, size, root.lookahead, tagged=False)

    def _numeric(self, root: RootEvent, unit: int) -> Iterator[HashScheme | None]:
        sizes = sorted({root.block_size, unit}, reverse=True)
        hashed_tokens = root.block_size if root.full else len(root.tokens)
        hashes_per_seed = len(ALGORITHMS) * sum(1 + hashed_tokens // size for size in sizes)
        per_slice = max(1, _HASHES_PER_SLICE // hashes_per_seed)
        for start in range(0, SEEDS_MAX, per_slice):
            found = None
            for number in range(start, min(start + per_slice, SEEDS_MAX)):
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
        if root.extras != NO_EXTRAS and matches(root, other):
            self.scheme = other
            return
        if not root.plain:
            return  # its extra keys may be hidden or not what they seem
        self.mismatches += 1
        self._mismatches_in_row += 1
        self._since_check = _CHECK_EVERY  # look at the very next root event too
        if self._mismatches_in_row >= _MISMATCHES_MAX:
            self.state, self.scheme, self._mismatches_in_row = Detection.WAITING, None, 0

    def _found(self, scheme: HashScheme) -> None:
        self._search, self.scheme, self.state = None, scheme, Detection.NATIVE
        self._unmatched, self._shortest, self._since_check = 0, None, 0


def _hash_block_sizes(root: RootEvent) -> list[int]:
    """Sizes to try. A masked span is hashed whole for each, so only those that models have."""
    divisors = [root.block_size // n for n in range(1, root.block_size + 1) if root.block_size % n == 0]
    return divisors if root.full else [size for size in divisors if size >= min(16, root.block_size)]


def learned_scheme(unit: int, lookahead: int = 0) -> HashScheme:
    """Our own chain, used where the engine's cannot be reproduced: token prefix -> engine hash is learned."""
    return HashScheme("learned", "", unit, lookahead, tagged=False)
