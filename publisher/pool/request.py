"""One request in a block pool: its tokens, its hashes, and the blocks it uses in every group.

Always true: ``hashes`` covers every whole hash block of ``token_ids`` (and may run ahead of them where the
caller supplied it), so nothing is hashed twice however often a request is tried. While a load is under way
``loading_to`` is where it ends, else 0; ``offered`` tokens have been offered to a connector.
"""

from __future__ import annotations

from collections.abc import Sequence

from publisher.block_hash import HashChain, HashScheme, PromptExtras
from publisher.pool.store import WireHash


class PoolRequest:
    """Made by ``HybridBlockPool.request``. Counts are in tokens; block tables hold block numbers, 0 for a
    block that is not held (outside the window, or a skipped state)."""

    __slots__ = (
        "_chain",
        "_hash_block_size",
        "_whole",
        "allocated",
        "dropped",
        "extras",
        "hashes",
        "hit",
        "last_state",
        "loading_to",
        "num_cached",
        "num_computed",
        "num_prompt_tokens",
        "offered",
        "partial",
        "quiet_to",
        "shared_prefix_boundary",
        "started",
        "tables",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: Sequence[int],
        extras: PromptExtras,
        scheme: HashScheme,
        num_groups: int,
        *,
        hashes: HashChain | Sequence[WireHash] | None,
        int_hashes: bool,
    ) -> None:
        self.token_ids: list[int] = list(token_ids)
        self.extras = extras
        self.num_prompt_tokens = len(self.token_ids)
        self.shared_prefix_boundary = 0
        self.hit = 0
        self._hash_block_size = scheme.hash_block_size
        if hashes is None:
            hashes = HashChain(scheme, extras)
        self._chain: HashChain | None = hashes if isinstance(hashes, HashChain) else None
        self.hashes: Sequence[WireHash] = hashes.hashes if isinstance(hashes, HashChain) else hashes
        self._whole: list[WireHash] | None = None if int_hashes or self._chain is None else []
        self.forget_blocks(num_groups)
        self._cover()

    def forget_blocks(self, num_groups: int) -> None:
        """Back to a request that holds nothing and has computed nothing."""
        self.started = False
        self.num_computed = 0
        self.loading_to = 0
        self.offered = 0
        self.quiet_to = -1
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_cached = [0] * num_groups
        self.dropped = [0] * num_groups
        self.partial: dict[int, tuple[int, int]] = {}
        self.allocated: set[int] = set()
        self.last_state: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def known_hashes(self) -> Sequence[WireHash]:
        """The hashes of the whole hash blocks there are now."""
        count = len(self.token_ids) // self._hash_block_size
        return self.hashes if len(self.hashes) == count else self.hashes[:count]

    def append(self, token_id: int) -> None:
        """Add one generated token. Raises ``ValueError`` where supplied hashes do not reach that far."""
        self.token_ids.append(token_id)
        if not len(self.token_ids) % self._hash_block_size:
            self._cover()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add generated tokens. Raises ``ValueError`` where supplied hashes do not reach that far."""
        before = len(self.token_ids) // self._hash_block_size
        self.token_ids.extend(token_ids)
        if len(self.token_ids) // self._hash_block_size != before:
            self._cover()

    def _cover(self) -> None:
        if self._chain is not None:
            self._chain.extend(self.token_ids)
            if self._whole is not None:
                self._whole += self._chain.whole(len(self._whole))
                self.hashes = self._whole
        elif len(self.hashes) < len(self.token_ids) // self._hash_block_size:
            raise ValueError(
                f"hashes cover {len(self.hashes) * self._hash_block_size} tokens of {len(self.token_ids)}"
            )
