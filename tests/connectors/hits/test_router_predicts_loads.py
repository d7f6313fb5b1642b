"""The router's prediction of an engine's loads equals the result of the connectors' resolver."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

WHY = "needs torch and vLLM; make test-connectors runs it"
pytest.importorskip("torch", reason=WHY)
pytest.importorskip("vllm.v1.core.kv_cache_coordinator", reason=WHY)

from kvatlas.publisher.events import BlockHash  # noqa: E402
from kvatlas.publisher.groups import GroupSpec  # noqa: E402
from kvatlas.router.index.base import Plane  # noqa: E402
from kvatlas.router.index.hit_rules import evaluate  # noqa: E402
from kvatlas.router.index.learn.layout import CacheLayout, ModelFacts, make_layout  # noqa: E402
from kvatlas.router.index.memory import MemoryIndex  # noqa: E402
from kvatlas.router.index.offloaded import loaded, tier_extents  # noqa: E402
from tests.connectors.hits.engine_groups import MIXES, Mix, hashes, keys_of  # noqa: E402
from tests.connectors.hits.test_hits_engine import residency  # noqa: E402

Held = set[tuple[int, bytes]]

KINDS = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
}


def layout_of(mix: Mix) -> CacheLayout:
    """The layout that the router learns of this mix, group by group as the engine numbers them."""
    groups = []
    for idx, spec in enumerate(mix.specs):
        if spec.prefix_cacheable:
            eagle = idx in mix.eagle_groups or (mix.eagle and not mix.eagle_groups)
            extra: dict[str, Any] = {
                "sliding_window": getattr(spec, "sliding_window", None),
                "attention_chunk_size": getattr(spec, "attention_chunk_size", None),
                "mamba_cache_mode": getattr(spec, "mamba_cache_mode", None),
            }
            kind = KINDS[type(spec).__name__]
            groups.append(GroupSpec(idx, kind, spec.block_size, is_eagle=eagle, **extra))
    return make_layout(tuple(groups), ModelFacts(), mix.hash_block)


def wire(name: bytes) -> BlockHash:
    return BlockHash(int.from_bytes(name[-8:], "big"))


def predicted(mix: Mix, num_tokens: int, gpu: Held, tier: Held) -> tuple[int, dict[str, int]]:
    """The GPU hit, and what is loaded beyond it by medium, in tokens."""
    layout, index = layout_of(mix), MemoryIndex()
    for medium, held in (("GPU", gpu), ("CPU@kvatlas-host", tier)):
        for group_idx, name in held:
            index.store("e", Plane(medium, group_idx), [wire(name)])
    rows = index.lookup([wire(name) for name in hashes(num_tokens // mix.hash_block)])
    on_gpu = evaluate(rows, layout, num_tokens)
    return on_gpu.hit[0], loaded(tier_extents(rows, layout, num_tokens, 0, on_gpu), 0, on_gpu.hit[0])


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
@settings(max_examples=examples(80))
@given(data=st.data())
def test_the_router_predicts_what_the_resolver_loads(mix: Mix, data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 80))
    names = hashes(num_tokens // mix.hash_block)
    gpu, tier = data.draw(residency(mix, len(names))), data.draw(residency(mix, len(names)))
    hit, by_medium = predicted(mix, num_tokens, gpu, tier)
    local = hit // mix.scheduler_block * mix.scheduler_block
    resolver = mix.resolver(mix.coordinator())
    found = resolver.find_hit(names, num_tokens, keys_of(tier), num_local_tokens=local)
    assert by_medium == ({"CPU": found - hit} if found > hit else {})
