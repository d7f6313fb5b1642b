"""Detection of an engine's hash scheme from its own events; an unproven scheme is reported as assumed.

An event that starts at token 0 contains both the tokens and the hashes the engine computed for them. Every
known scheme is tried on it: algorithm, seed, hash block size (the divisors of the event's block size), with
or without tagged extra keys; a match on 64 bits proves the scheme. If no such event arrives (chunked local
attention and windows alone hide the beginnings of prompts) or none lists a hash, other evidence is tried: a
root span with the parents named by its children, and published blocks that occur in prompts the router had to
place (``PublishedBlocks``). Seeds are tried in three rounds: those configured or already used in the
fleet, vLLM's fixed default, then the small integers that users set as PYTHONHASHSEED. The last round takes
longer than an event may, so ``advance`` runs it in slices. If all fail (another seed, xxhash with a random
one, another maker's hash), the scheme is *unknown* and the engine is used in learned mode. SGLang's only
scheme has no seed (``expect_pages``): the first root event proves it, or the engine is in learned mode at
once.

Only a *plain* root event (every block listed, no extra keys) contains everything its hashes cover, so only
such an event can disprove a scheme: the engine is in learned mode from then on, and the seeds are searched
beside it. Engines without plain events are searched with the best of their other evidence
(``SearchEvidence``), and abandoned after ``PATIENCE`` root events.

Until a scheme is proven, the likeliest one is *assumed* once ``_ASSUME_AFTER`` events were inconclusive, or
the algorithm is proven. Hashes of a wrong scheme match nothing, so predictions based on the assumption are
never too high; a match is the proof. Receipts that report more revoke the assumption.

A proven scheme is rechecked on a sample of later root events, and repeated mismatches restart the detection;
an abandoned one is rechecked too, and a plain event may still prove it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum, StrEnum

import msgspec

from kvatlas.publisher.block_hash import (
    ALGORITHMS,
    DEFAULT_SEED,
    NO_EXTRAS,
    SGLANG,
    HashScheme,
    PromptExtras,
)
from kvatlas.publisher.events import BlockStored
from kvatlas.router.index.learn.root_events import (
    PendingRoots,
    PublishedBlocks,
    RootEvent,
    matches,
    proven_algorithm,
)

# One slice of the search takes up to 1 ms of the event loop (measured).
_HASHES_PER_SLICE = 256


PATIENCE = 64
_WEAK_PATIENCE = 8
# Searches per trust level.
_SEARCHES_MAX = 2
_SEARCHED_MAX = 16

# Longest span that is searched, in tokens: every seed hashes it completely.
_SEARCH_TOKENS_MAX = 4096

# A longer span is searched only after ``PATIENCE`` inconclusive pieces of evidence.
_CHEAP_TOKENS = 512


class Trust(IntEnum):
    """How likely a piece of evidence contains everything its hashes cover; the most trusted first."""

    PLACED = 0
    """A placed prompt with the same first tokens as the event; only this shows the extent of multimodal
    items.
    """
    LEGIBLE = 1
    """An event whose first block lists all of its extra keys."""
    JOINED = 2
    """The block occurs in a placed prompt, but the engine may have published it after different first
    tokens.
    """
    HIDDEN = 3


class SearchEvidence:
    """The best evidence of one engine, and the number of searches made with it: for the search of seeds if no
    event contains everything its hashes cover.

    One piece is kept: the most trusted seen, and of equals the cheapest. Pieces that most likely contain
    everything are searched immediately, others after 8 pieces and again after 64. Every trust level has a
    separate search budget, so that a flaw of one level leaves the searches of the others; no piece is
    searched twice."""

    def __init__(self) -> None:
        self._best: RootEvent | None = None
        self._trust = Trust.HIDDEN
        self._seen = 0
        self._searches = dict.fromkeys(Trust, 0)
        self._searched: deque[RootEvent] = deque(maxlen=_SEARCHED_MAX)

    def keep(self, root: RootEvent, *, placed: bool) -> None:
        """Consider a span that lists hashes; ``placed``: its tokens are those of a prompt to be placed."""
        if root.full:
            root = root.first_block
        if root.cost > _SEARCH_TOKENS_MAX or root in self._searched:
            return
        self._seen += 1
        trust = _trust(root, placed=placed)
        if self._best is None or (trust, root.cost) < (self._trust, self._best.cost):
            self._best, self._trust = root, trust

    def drop(self) -> None:
        """Discard the evidence: the search is over."""
        self._best = None

    def take(self, pending: PendingRoots, unmatched: int) -> RootEvent | None:
        """Return the evidence to search with now; None if it is too early.

        ``unmatched``: inconclusive events so far.
        """
        seen = max(self._seen, unmatched)
        trust = Trust.HIDDEN if self._best is None else self._trust
        if self._searches[trust] >= _SEARCHES_MAX:
            trust = Trust.HIDDEN
        hidden = self._searches[Trust.HIDDEN]
        early = seen < _WEAK_PATIENCE ** (1 + hidden)
        if trust is Trust.HIDDEN and (early or hidden >= _SEARCHES_MAX):
            return None
        evidence = self._best or pending.evidence()
        if evidence is None or evidence.cost > (_CHEAP_TOKENS if seen < PATIENCE else _SEARCH_TOKENS_MAX):
            return None
        self._best, self._seen = None, 0
        self._searched.append(evidence)
        pending.tried(evidence)
        self._searches[trust] += 1
        return evidence


def _trust(root: RootEvent, *, placed: bool) -> Trust:
    if placed:
        return Trust.JOINED if root.joined else Trust.PLACED
    return Trust.LEGIBLE if root.legible else Trust.HIDDEN


# Values of PYTHONHASHSEED that are tried: numbers below ``SEEDS_MAX``, and those that people type. Others are
# configured as ``hash_seeds``: a number drawn at random (of 2^32) is found by no search, and until one ended
# nothing was learned from events (docs/decisions/033-few-seeds.md).
SEEDS_MAX = 1 << 10
_TYPED_SEEDS = 1234, 12345, 123456

# Maximum number of (prompt, published block) pairs that are tried.
_OFFERS_MAX = 64

# Limits how many prompts are searched for published blocks: about 1 ms for a long one (measured).
_PROMPTS_PER_EVENT = 4

_ALGORITHM_TRIES_MAX = 64

_ASSUME_AFTER = 8
_DOUBTS_MAX = 3

_CHECK_EVERY = 64
_MISMATCHES_MAX = 3

# Longest span in tokens that is also tried with hash blocks of fewer than 16 tokens.
_SMALL_UNITS_MAX_TOKENS = 2048


_FINE_UNITS = (32, 16, 8, 4)
_EXHAUSTED = object()


class Detection(StrEnum):
    """State of knowledge about an engine's scheme."""

    WAITING = "waiting"
    SEARCHING = "searching"
    """Seeds are tried on evidence that may be incomplete."""
    NATIVE = "native"
    LEARNED = "learned"


class SchemeDetector:
    """Detection for one engine; receives its root events in order. ``known``: schemes to try first, asked
    for when the first root is tried: with a thousand engines that restart together, not at each restart."""

    def __init__(self, seeds: Iterable[str] = (), known: Callable[[], Iterable[HashScheme]] = tuple) -> None:
        self._seeds = list(dict.fromkeys((*seeds, DEFAULT_SEED)))
        self._ask_known = known
        self._asked_known: list[HashScheme] | None = None
        self._pending = PendingRoots()
        self._published = PublishedBlocks()
        self._search: Iterator[HashScheme | None] | None = None
        self._unmatched = 0
        self._evidence = SearchEvidence()
        self._offers = 0
        self._prompts_seen = 0
        self._algorithm_tries = 0
        self._events_seen = 0
        self._algorithm: HashScheme | None = None
        self._doubts = 0
        self._since_check = 0
        self._mismatches_in_row = 0
        # For SGLang, whether its hashes can be computed; None: vLLM, or not known.
        self._pages: bool | None = None
        self.state = Detection.WAITING
        self.scheme: HashScheme | None = None
        self.mismatches = 0

    def expect_pages(self, *, computable: bool) -> None:
        """The engine is SGLang. Not ``computable``: its hashes cover more than its events tell."""
        self._pages = computable
        if self._search is not None or not computable:
            self._search, self.scheme, self.state = None, None, Detection.LEARNED

    def fits(self, scheme: HashScheme | None) -> bool:
        """Whether the engine may have this scheme, by its software."""
        return scheme is not None and (scheme.algo == SGLANG) == (self._pages is not None)

    def wants(self, *, root: bool) -> bool:
        """Whether the next event should be examined; ``root``: it starts at token 0. Called for every
        event.
        """
        if self.state is Detection.WAITING:
            return True
        if not root or self.state is Detection.SEARCHING:
            return False
        self._since_check += 1
        return self._since_check >= _CHECK_EVERY

    def assumed(self, unit: int, lookahead: int, *, hidden: bool) -> HashScheme | None:
        """Return the scheme to predict with while nothing is proven: one of the fleet, otherwise the
        default seed.

        None if it is too early, or receipts contradicted it. ``hidden``: events of this layout may never be
        conclusive, so do not wait for any.
        """
        if self._pages is not None:
            return HashScheme(SGLANG, "", unit, lookahead, tagged=False) if self.unproven else None
        early = not hidden and self._algorithm is None and self._events_seen < _ASSUME_AFTER
        if not self.unproven or early or self.doubted:
            return None
        first = HashScheme(ALGORITHMS[0], self._seeds[0], unit, lookahead)
        if self._algorithm is not None:
            first = msgspec.structs.replace(self._algorithm, seed=self._seeds[0])
        alike = (k for k in self._known if k.hash_block_size == unit and k.lookahead == lookahead)
        return next((k for k in alike if self._algorithm is None or k.algo == first.algo), first)

    def observe(self, root: RootEvent | None, event: BlockStored, unit: int) -> None:
        """Examine one root event, parsed as ``root`` (None: it lacks inputs of its hashes).

        ``unit`` is the gcd of the block sizes known so far.
        """
        if self.state is Detection.WAITING:
            self._events_seen += 1
            self._published.add(event)
            self._settle(root, unit)
        elif root is not None and self.state is Detection.NATIVE:
            self._recheck(root)
        elif root is not None and root.plain and self.state is Detection.LEARNED:
            self._since_check = 0
            self._try_known(root)

    def observe_child(self, event: BlockStored, lora_paths: dict[str, str]) -> None:
        """Examine an event with a parent: it may continue a root span without listed hashes, or prove the
        algorithm.
        """
        if self.state is not Detection.WAITING:
            return
        self._events_seen += 1
        self._published.add(event)
        scheme = self._pending.continued_by(event)
        if scheme is not None:
            self._found(scheme)
        elif self._algorithm is None and self._algorithm_tries < _ALGORITHM_TRIES_MAX:
            self._algorithm_tries += 1
            sizes = _hash_block_sizes(event.block_size, event.block_size) if event.block_size else []
            self._algorithm = proven_algorithm(
                event, self._of_seed("", sizes, event.num_lookahead(), keyed=True), lora_paths
            )

    def offer(self, prompt: Sequence[int], extras: PromptExtras, unit: int) -> None:
        """Examine a prompt to be placed: it may contain blocks that the engine published."""
        if self.state is not Detection.WAITING or self._offers >= _OFFERS_MAX:
            return
        if self._prompts_seen >= _PROMPTS_PER_EVENT * (self._events_seen + PATIENCE):
            return
        self._prompts_seen += 1
        for root in self._published.evidence(prompt, extras):
            self._offers += 1
            if self._try_known(root):
                return
            self._keep(root, placed=True)
            if self._offers >= _OFFERS_MAX:
                break
        self._search_weak(unit)

    def confirm(self, scheme: HashScheme) -> None:
        """Accept ``scheme``: the engine holds hashes made with it."""
        if self.unproven:
            self._found(scheme)

    def doubt(self) -> None:
        """Record a receipt that reported more than the assumed scheme predicted."""
        self._doubts += self.unproven

    @property
    def unproven(self) -> bool:
        """Whether no scheme is proven or abandoned; a running search on weak evidence does not change
        that.
        """
        return self.state in {Detection.WAITING, Detection.SEARCHING}

    @property
    def doubted(self) -> bool:
        """Whether too many receipts reported more, so that nothing is assumed any more."""
        return self._doubts >= _DOUBTS_MAX

    @property
    def searching(self) -> bool:
        """Whether numeric seeds are left to try."""
        return self._search is not None

    def advance(self) -> None:
        """Try one slice of numeric seeds if a search is running."""
        if self._search is None:
            return
        found = next(self._search, _EXHAUSTED)
        if isinstance(found, HashScheme):
            self._found(found)
        elif found is _EXHAUSTED:
            self._search = None
            if self.state is Detection.SEARCHING:
                self.state = Detection.WAITING

    def finish(self) -> None:
        """Run a search to its end (for tools without an event loop)."""
        while self._search is not None:
            self.advance()

    def _settle(self, root: RootEvent | None, unit: int) -> None:
        if root is not None and root.hashes and self._try_known(root):
            return
        if self._pages is not None:
            self.state = Detection.LEARNED
            return
        if root is not None:
            if root.full and root.first_block.plain:
                self._start_search(root.first_block, unit, Detection.LEARNED)
                return
            self._keep(root)
        self._unmatched += 1
        if self._search_weak(unit) or self._unmatched < PATIENCE:
            return
        self.state = Detection.LEARNED

    def _keep(self, root: RootEvent, *, placed: bool = False) -> None:
        """Keep a span that a child may complete, or one to search with if no plain one arrives."""
        if not root.hashes:
            self._pending.add(root, self._candidates(root))
        else:
            self._evidence.keep(root, placed=placed)

    def _search_weak(self, unit: int) -> bool:
        """Search with the best inconclusive evidence; False if it is too early."""
        if self._pages is not None:
            return False
        evidence = self._evidence.take(self._pending, self._unmatched)
        if evidence is None:
            return False
        self._start_search(evidence, unit, Detection.SEARCHING)
        return True

    @property
    def _known(self) -> list[HashScheme]:
        if self._asked_known is None:
            self._asked_known = list(self._ask_known())
        return self._asked_known

    def _try_known(self, root: RootEvent) -> bool:
        """Accept the first candidate that gives the event's hashes; False if none does.

        If none gives the hash of the first block with extra keys (the extent of a multimodal item is not on
        the wire), the blocks before it are sufficient proof.
        """
        scheme = next((s for s in self._candidates(root) if matches(root, s)), None)
        if scheme is None and root.full and root.keyed:
            root = msgspec.structs.replace(root, keyed=0)
            scheme = next((s for s in self._candidates(root) if matches(root, s)), None)
        if scheme is not None:
            self._found(scheme)
        return scheme is not None

    def _start_search(self, root: RootEvent, unit: int, state: Detection) -> None:
        # After a plain event, which has disproven what is likely, prefixes are learned meanwhile (LEARNED).
        self._search, self.state = self._numeric(root, unit), state

    def _numeric(self, root: RootEvent, unit: int) -> Iterator[HashScheme | None]:
        """Search the seeds for the scheme that gives the hashes of ``root``: with the usual hash block sizes
        first, then with smaller ones. Yields None per slice without a match."""
        usual = sorted({root.block_size, unit}, reverse=True)
        finer = [size for size in _FINE_UNITS if unit % size == 0 and size < unit]
        keyed, hashed = root.extras != NO_EXTRAS, 0
        for sizes in (usual, finer):
            for number in (*range(SEEDS_MAX), *_TYPED_SEEDS):
                for scheme in self._of_seed(str(number), sizes, root.lookahead, keyed=keyed):
                    if matches(root, scheme):
                        yield scheme
                        return
                    hashed += 1 + root.cost // scheme.hash_block_size
                    if hashed >= _HASHES_PER_SLICE:
                        yield None
                        hashed = 0

    def _candidates(self, root: RootEvent) -> Iterator[HashScheme]:
        if self._pages is not False and root.lookahead <= 1:
            yield HashScheme(SGLANG, "", root.block_size, root.lookahead, tagged=False)
        if self._pages is not None:
            return
        yield from self._known
        sizes = _hash_block_sizes(root.block_size, root.cost)
        keyed = root.extras != NO_EXTRAS
        for seed in self._seeds:
            yield from self._of_seed(seed, sizes, root.lookahead, keyed=keyed)

    def _of_seed(
        self, seed: str, sizes: Iterable[int], lookahead: int, *, keyed: bool
    ) -> Iterator[HashScheme]:
        for algo in ALGORITHMS if self._algorithm is None else (self._algorithm.algo,):
            for size in sizes:
                yield HashScheme(algo, seed, size, lookahead)
                if keyed:
                    yield HashScheme(algo, seed, size, lookahead, tagged=False)

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
            # Its extra keys may be incomplete or ambiguous.
            return
        self.mismatches += 1
        self._mismatches_in_row += 1
        self._since_check = _CHECK_EVERY  # examine the next root event too
        if self._mismatches_in_row >= _MISMATCHES_MAX:
            self.state, self.scheme, self._mismatches_in_row = Detection.WAITING, None, 0

    def _found(self, scheme: HashScheme) -> None:
        self._search, self.scheme, self.state = None, scheme, Detection.NATIVE
        self._evidence.drop()
        self._unmatched = self._since_check = 0


def _hash_block_sizes(block_size: int, cost_tokens: int) -> list[int]:
    """Return the hash block sizes to try; for long evidence, uncommon small sizes are left out."""
    divisors = [block_size // n for n in range(1, block_size + 1) if block_size % n == 0]
    if cost_tokens <= block_size:
        return divisors
    least = 4 if cost_tokens <= _SMALL_UNITS_MAX_TOKENS else 16
    return [size for size in divisors if size >= min(least, block_size)]


def learned_scheme(unit: int, lookahead: int = 0) -> HashScheme:
    """Scheme of the router's own chain, used in learned mode: it maps token prefixes to engine hashes."""
    return HashScheme("learned", "", unit, lookahead, tagged=False)
