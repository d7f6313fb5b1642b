"""The long search: which small number is the engine's PYTHONHASHSEED.

Every seed is tried with every algorithm and hash block size on one piece of evidence. Only the parent of the
first hash depends on the seed, so what is hashed is written out once, with a mark in the parent's place, and
each try puts its own parent there; that is several times as fast as hashing from the start. What matches is
checked again by the ordinary way, so a defect here can cost a detection but never make a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import xxhash
from msgspec.structs import replace

from publisher.block_hash import NO_EXTRAS, HashScheme, canonical_cbor, hashed_parts, pickled, sha256
from publisher.events import BlockHash
from router.index.learn.root_events import RootEvent, matches

_HASHES_PER_SLICE = 512
"""One slice of the search costs up to 1 ms of the event loop."""

_MARK = bytes(range(100, 132))
"""Stands for a parent; 32 bytes, the first 16 of it for the shorter digests."""

_PARTS: dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes], int]] = {
    "sha256": (pickled, sha256, 32),
    "sha256_cbor": (canonical_cbor, sha256, 32),
    "xxhash": (pickled, xxhash.xxh3_128_digest, 16),
    "xxhash_cbor": (canonical_cbor, xxhash.xxh3_128_digest, 16),
}


class _Trial(NamedTuple):
    """One way to hash the evidence, but for the seed."""

    scheme: HashScheme
    dump: Callable[[object], bytes]
    digest: Callable[[bytes], bytes]
    blocks: list[tuple[bytes, bytes]]
    """What is hashed before and after the parent, block by block."""

    def meets(self, seed: str, told: frozenset[BlockHash], *, last: bool) -> bool:
        """Whether this seed gives one of the hashes ``told`` (``last``: at the last block)."""
        digest, parent = self.digest, self.digest(self.dump(seed))
        for before, after in self.blocks:
            parent = digest(before + parent + after)
            if not last and int.from_bytes(parent[-8:], "big") in told:
                return True
        return last and int.from_bytes(parent[-8:], "big") in told


def search(
    root: RootEvent, sizes: Iterable[int], algos: Iterable[str], seeds_max: int
) -> Iterator[HashScheme | None]:
    """The scheme with a seed below ``seeds_max`` that gives the hashes of ``root``; None per slice without
    one. ``sizes`` are hash block sizes."""
    trials = [t for algo in algos for size in sizes for t in _trials(root, algo, size)]
    told = frozenset(root.hashes[:1] if root.full else root.hashes)
    hashes_per_seed = sum(1 + len(trial.blocks) for trial in trials)
    per_slice = max(1, _HASHES_PER_SLICE // max(1, hashes_per_seed))
    for start in range(0, seeds_max, per_slice):
        found = None
        for number in range(start, min(start + per_slice, seeds_max)):
            for trial in trials:
                if trial.meets(str(number), told, last=root.full):
                    scheme = replace(trial.scheme, seed=str(number))
                    found = scheme if matches(root, scheme) else found
        yield found
        if found is not None:
            return


def _trials(root: RootEvent, algo: str, size: int) -> Iterator[_Trial]:
    """The ways to hash the evidence with this algorithm and hash block: extra keys tagged or not."""
    if root.block_size % size:
        return
    dump, digest, width = _PARTS[algo]
    tokens = root.tokens[: root.block_size + root.lookahead] if root.full else root.tokens
    for tagged in (True, False) if root.extras != NO_EXTRAS else (True,):
        scheme = HashScheme(algo, "", size, root.lookahead, tagged)
        mark = _MARK[:width]
        blocks = [
            dump((mark, block, extra)).partition(mark)
            for block, extra in hashed_parts(tokens, scheme, root.extras)
        ]
        yield _Trial(scheme, dump, digest, [(before, after) for before, _, after in blocks])
