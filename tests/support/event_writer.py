"""Events as an engine with any hash scheme would write them, block by block, for the tests of detection."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from kvatlas.publisher.block_hash import (
    NO_EXTRAS,
    HashChain,
    HashScheme,
    PromptExtras,
    block_hashes,
    extra_keys,
)
from kvatlas.publisher.events import BlockHash, BlockRemoved, BlockStored, DecodedBatch, Event, encode_tokens

FULL = "full_attention"
WINDOW = "sliding_window"


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


def batch(*events: Event) -> DecodedBatch:
    return DecodedBatch(0.0, list(events), 0, None, [])


def removed(*hashes: int | bytes, group: int | None = 0, medium: str | None = "GPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


class Writer:
    """One engine's way to write ``BlockStored``: its scheme, its group's block size, ints or bytes.

    ``chain`` replaces the hash chain, for engines whose hashes no router can compute.
    """

    def __init__(
        self,
        scheme: HashScheme,
        *,
        size: int | None = None,
        group: int | None = 0,
        kind: str | None = FULL,
        window: int | None = None,
        as_bytes: bool = False,
        chain: Callable[[Sequence[int], PromptExtras], list[bytes]] | None = None,
    ) -> None:
        self.scheme = scheme
        self.size = size or scheme.hash_block_size
        self.group, self.kind, self.window = group, kind, window
        self.as_bytes = as_bytes
        self._chain = chain or self._native

    def _native(self, token_ids: Sequence[int], extras: PromptExtras) -> list[bytes]:
        chain = HashChain(self.scheme, extras)
        chain.extend(token_ids)
        return chain.whole()

    def hashes(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> list[int | bytes]:
        """The group's block hashes of a prompt, as they stand on the wire."""
        per_block = self.size // self.scheme.hash_block_size
        whole = self._chain(token_ids, extras)[per_block - 1 :: per_block]
        return list(whole) if self.as_bytes else [int.from_bytes(block[-8:], "big") for block in whole]

    def stored(
        self,
        token_ids: Sequence[int],
        extras: PromptExtras = NO_EXTRAS,
        *,
        start: int = 0,
        stop: int | None = None,
        keep: Iterable[int] | None = None,
        parent: int | bytes | None = None,
    ) -> BlockStored:
        """Blocks ``start`` to ``stop`` of a prompt; ``keep`` lists those not masked."""
        hashes = self.hashes(token_ids, extras)
        stop = len(hashes) if stop is None else stop
        listed = [n for n in range(start, stop) if keep is None or n in keep]
        size, ahead = self.size, self.scheme.lookahead
        keys = [
            _wire_keys(extra_keys(extras, n * size, (n + 1) * size + ahead, tagged=False)) for n in listed
        ]
        lookahead = [list(token_ids[(n + 1) * size : (n + 1) * size + ahead]) for n in listed]
        return BlockStored(
            [hashes[n] for n in listed],
            parent if parent is not None else hashes[start - 1] if start else None,
            encode_tokens(list(token_ids[start * size : stop * size])),
            size,
            None,
            "GPU",
            extras.lora_name,
            extra_keys=keys or None,
            group_idx=self.group,
            kv_cache_spec_kind=self.kind,
            kv_cache_spec_sliding_window=self.window,
            lookahead_token_ids=lookahead if ahead else None,
        )


def _wire_keys(keys: tuple[object, ...]) -> list[object] | None:
    return [list(key) if isinstance(key, tuple) else key for key in keys] or None


def random_chain(seed: int, size: int) -> Callable[[Sequence[int], PromptExtras], list[bytes]]:
    """Hashes that cannot be reproduced: every distinct (prefix, extras) gets random bytes."""
    rng, known = random.Random(seed), {}  # type: ignore[var-annotated]

    def chain(token_ids: Sequence[int], extras: PromptExtras) -> list[bytes]:
        ends = range(size, len(token_ids) + 1, size)
        return [known.setdefault((tuple(token_ids[:end]), extras), rng.randbytes(32)) for end in ends]

    return chain


class Prompt:
    """A prompt that ``predict`` takes."""

    def __init__(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> None:
        self.token_ids, self.extras = token_ids, extras

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, scheme: HashScheme) -> list[BlockHash]:
        return block_hashes(self.token_ids, scheme, self.extras)
