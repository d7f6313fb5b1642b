"""A prompt with known tokens: the engine's key for its prefix cache.

It shares its hash chains with the prompt cache, so that a next turn hashes only its new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from publisher.block_hash import HashChain, HashScheme, PromptExtras, num_hash_blocks
from publisher.events import BlockHash
from router.fleet.status import Frontend
from router.prompts.cuts import Ids
from router.prompts.prompt_cache import Entry
from router.prompts.stats import PromptStats


class Prompt(msgspec.Struct, eq=False, gc=False):
    """Token ids of a request's (first) prompt, in the order in which the engine computes them.

    ``source``: computed here, or by a render server or an engine; ``by`` describes the tokenizer.
    ``num_prompts`` above 1: the request has further prompts, which are not in ``token_ids``. ``skips_cache``:
    the engine does not read its prefix cache for this request (it asks for prompt log-probabilities), so its
    hit is 0.
    """

    _entry: Entry
    _stats: PromptStats
    source: Literal["local", "renderer", "engine"]
    by: str = ""
    num_prompts: int = 1
    skips_cache: bool = False
    answer_tokens_max: int = 0
    """Limit that the request sets to its answer; 0: none."""
    frontend: Frontend = "python"
    """The engines' API server that tokenizes the request in this way."""
    variants: dict[Frontend, Prompt] = {}
    """In a fleet with several frontends: this prompt and the others, as far as they are known."""
    _hashes: dict[HashScheme, Sequence[BlockHash]] = {}

    def behind(self, frontend: Frontend) -> Prompt | None:
        """Return the prompt of engines with this frontend; None: unknown."""
        return self if frontend == self.frontend else self.variants.get(frontend)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self._entry.ids)

    @property
    def token_ids(self) -> Ids:
        """The ids, as an array; must not be changed."""
        return self._entry.ids

    @property
    def extras(self) -> PromptExtras:
        """Adapter, salt and multimodal items: what hashes cover besides tokens."""
        return self._entry.extras

    def hashes(self, scheme: HashScheme) -> Sequence[BlockHash]:
        """All block hashes under ``scheme``; must not be changed. ``ValueError`` for an unknown algorithm."""
        known = self._hashes.get(scheme)
        if known is None:
            known = self._hashes[scheme] = self._chain(scheme)
        return known

    def _chain(self, scheme: HashScheme) -> Sequence[BlockHash]:
        entry, stats = self._entry, self._stats
        chain = entry.chains.get(scheme)
        if chain is None:
            chain = HashChain(scheme, entry.extras)
        known = len(chain.hashes)
        hashes = chain.extend(entry.ids)
        stats.blocks_reused += known
        stats.blocks_hashed += len(hashes) - known
        entry.chains[scheme] = chain
        return cast("Sequence[BlockHash]", hashes)

    def num_blocks(self, scheme: HashScheme) -> int:
        """Number of hashes."""
        return num_hash_blocks(len(self._entry.ids), scheme)

    def num_new_blocks(self, scheme: HashScheme) -> int:
        """Number of hashes not computed yet: about 2.5 us each."""
        chain = self._entry.chains.get(scheme)
        return num_hash_blocks(len(self._entry.ids), scheme) - (len(chain.hashes) if chain else 0)

    def forked_chain(self, scheme: HashScheme) -> HashChain:
        """Copy the hashes so far, to be extended in a worker thread: another prompt may extend this one's
        meanwhile."""
        chain = self._entry.chains.get(scheme)
        return chain.fork(len(chain.hashes)) if chain else HashChain(scheme, self.extras)

    def adopt(self, chain: HashChain) -> None:
        """Replace the hashes by a ``forked_chain`` that was extended."""
        self._stats.blocks_hashed += self.num_new_blocks(chain.scheme)
        self._entry.chains[chain.scheme] = chain
