"""SGLang's own ``RadixCache`` beside ours: run by vLLM's interpreter, which has torch.

    python -m tests.support.real_radix WHEEL SEEDS

Random prompts go through both; hits, evictions and events must be equal. Modules of the wheel that the cache
does not need for this are stand-ins, and its C++ hash is written in Python. Prints the number of events.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from array import array
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import msgspec

from publisher.block_hash import SGLANG, HashScheme, PromptExtras
from publisher.events import encode_sglang_batch
from publisher.pool.radix import RadixPool
from tests.support.sglang_wire import Wheel

PAGE = 4
_CACHE = "sglang.srt.mem_cache."
_REAL = {
    *(_CACHE + name for name in ("radix_cache", "events", "evict_policy", "utils")),
    *(_CACHE + name for name in ("cache_init_params", "base_prefix_cache")),
    "sglang.srt.disaggregation.kv_events",
}


def _native_hash(key: Sequence[Any], prior: bytes | None, page_size: int) -> list[str]:
    """As ``fill_regular_page`` and ``fill_bigram_page`` (mem_cache/cpp_utils/hash_binding.cpp)."""
    tokens, digest, made = list(key), prior or b"", []
    for start in range(0, len(tokens), page_size):
        units = tokens[start : start + page_size]
        flat = [token for unit in units for token in unit] if key.is_bigram else units  # type: ignore[attr-defined]
        words = b"".join(token.to_bytes(4, "little") for token in flat)
        digest = hashlib.sha256(digest + words).digest()
        made.append(digest.hex())
    return made


class Pair:
    """One small cache of each kind, and the free pages of SGLang's, which its allocator would count."""

    def __init__(self, rng: random.Random, *, eagle: bool) -> None:
        self._ahead = int(eagle)
        self._rng, self._cache = rng, importlib.import_module(_CACHE + "radix_cache")
        self._params = importlib.import_module(_CACHE + "base_prefix_cache")
        pages = rng.randint(12, 30)
        self.theirs = self._cache.RadixCache.create_simulated(
            mock_allocator=MagicMock(device="cpu"), page_size=PAGE, enable_kv_cache_events=True
        )
        self.theirs.is_eagle = eagle
        self.theirs.kv_events.take()  # that of its construction
        self._free = pages
        self.ours = RadixPool(
            num_blocks=pages + 1,
            scheme=HashScheme(SGLANG, "", PAGE, self._ahead, tagged=False),
            chunk_tokens_max=512,
        )

    def serve(self) -> int:
        """One request in both; returns the number of its events."""
        prompt = [self._rng.choice((1, 2)) for _ in range(self._rng.randint(1, 24))]
        salt = self._rng.choice((None, None, "s"))
        request = self.ours.request(prompt, PromptExtras(cache_salt=salt))
        hit = self.ours.start(request)
        assert hit == self._serve(prompt, salt)
        assert self.ours.compute(request, len(prompt) - hit)
        self.ours.finish(request)
        told = msgspec.msgpack.encode([0.0, events := self.theirs.kv_events.take(), 0])
        assert encode_sglang_batch(0.0, self.ours.take_events()) == told
        return len(events)

    def _serve(self, prompt: list[int], salt: str | None) -> int:
        import torch  # noqa: PLC0415  # only vLLM's environment has it

        found = self._match(prompt[:-1], salt)
        hit = int(found.device_prefix_len)
        self.theirs.inc_lock_ref(found.last_device_node)
        needed = -(-len(prompt) // PAGE) - hit // PAGE
        if needed > self._free:
            evicted = self.theirs.evict(self._params.EvictParams(num_tokens=(needed - self._free) * PAGE))
            self._free += evicted.num_tokens_evicted // PAGE
        key, value = self._key(prompt, salt), torch.zeros(len(prompt), dtype=torch.int64)
        known = self.theirs.insert(self._params.InsertParams(key=key, value=value)).prefix_len
        self._free -= (len(prompt) - self._ahead - known) // PAGE
        self._match(prompt, salt)
        self.theirs.dec_lock_ref(found.last_device_node)
        return hit

    def _match(self, tokens: list[int], salt: str | None) -> Any:
        return self.theirs.match_prefix(self._params.MatchPrefixParams(key=self._key(tokens, salt)))

    def _key(self, tokens: list[int], salt: str | None) -> Any:
        return self._cache.RadixKey(array("q", tokens), cache_salt=salt)


def main(wheel: str, seeds: int) -> int:
    """Returns the number of events that were equal."""
    sys.meta_path.insert(0, Wheel(wheel, _REAL))
    # An attribute of a stand-in exists before its module is imported, so no ``from`` import.
    vars(importlib.import_module(_CACHE + "utils"))["get_native_hash"] = _native_hash
    pairs = [Pair(random.Random(seed), eagle=bool(seed % 2)) for seed in range(seeds)]
    return sum(pair.serve() for pair in pairs for _ in range(40))


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])))
