"""The view of caches that vLLM itself laid out and allocated: its specs, groups, placement and tensors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

WHY = "needs torch and vLLM; make test-connectors runs it"
torch = pytest.importorskip("torch", reason=WHY)
for module in ("vllm.config", "vllm.v1.core.kv_cache_utils", "vllm.v1.worker.utils"):
    pytest.importorskip(module, reason=WHY)

from vllm.config import CacheConfig, VllmConfig  # noqa: E402
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )

from kvatlas.connectors.layout import CacheView, LayoutError, row_bytes_from_config  # noqa: E402
from kvatlas.connectors.registered_tensors import view_of_tensors  # noqa: E402
from kvatlas.connectors.transfer.base import Direction  # noqa: E402
from kvatlas.connectors.transfer.host_engine import HostTransferEngine  # noqa: E402
from tests.connectors.transfer.contract import ArrayMemory, job, move  # noqa: E402
from tests.support.waiting import HANG_S  # noqa: E402

NUM_BLOCKS = 13
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
PAGE_BYTES = 16 * 2 * (8 + 8) * 2


def full(**changes: Any) -> Any:
    return FullAttentionSpec(**{**ATTENTION, **changes})


def window(**changes: Any) -> Any:
    return SlidingWindowSpec(**{**ATTENTION, "sliding_window": 64, **changes})


def mamba(**changes: Any) -> Any:
    return MambaSpec(
        block_size=16,
        shapes=((3, 40), (70,)),
        dtypes=(torch.float32, torch.bfloat16),
        mamba_cache_mode="align",
        page_size_padded=PAGE_BYTES,
        **changes,
    )


def latent(**changes: Any) -> Any:
    return MLAAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 1, "head_size": 36, "dtype": torch.bfloat16, **changes}
    )


def latent_window(**changes: Any) -> Any:
    fields = {"block_size": 16, "head_size": 20, "sliding_window": 128, "alignment": 576, **changes}
    return SlidingWindowMLASpec(num_kv_heads=1, dtype=torch.bfloat16, **fields)


def named(*specs: Any) -> dict[str, Any]:
    return {f"model.layers.{i}.attn": spec for i, spec in enumerate(specs)}


MODELS = {
    "one full group": named(full(), full(), full()),
    "windows and full": named(*[window()] * 5, full(), *[window()] * 5, full()),
    "mamba and full": named(mamba(), mamba(), mamba(), full()),
    "packed latent, indexer and windows": named(
        *[latent(alignment=576), latent(head_size=10, alignment=576), latent_window()] * 3
    ),
    "packed as in DeepSeek V4": named(
        *[
            latent(block_size=64, head_size=292, alignment=576),
            latent(block_size=64, head_size=66, alignment=576),
            latent_window(block_size=64, head_size=292),
        ]
        * 3
    ),
    "one group of two page sizes": named(full(), full(head_size=24), full()),
    "one group of one head and two page sizes": named(latent(), latent(head_size=10), latent()),
}
EVERY = set(LAYOUTS)
COMPACT = {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
"""Layouts that keep a layer's page together: padding and differing page sizes need that."""
EXPRESSIBLE = {
    "one full group": EVERY,
    "windows and full": EVERY,
    "mamba and full": COMPACT,
    "packed latent, indexer and windows": {"BLHNC", "BLNHC"},
    "packed as in DeepSeek V4": {"BLHNC", "BLNHC"},
    "one group of two page sizes": COMPACT,
    "one group of one head and two page sizes": COMPACT,
}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if layout in EXPRESSIBLE[model]]


def plan(model: str, layout: str) -> Any:
    """vLLM's own placement of a model's cache."""
    config = VllmConfig(cache_config=CacheConfig(block_size=16))
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    groups = get_kv_cache_groups(config, copy.deepcopy(MODELS[model]))
    return get_kv_cache_config_from_groups(config, groups, 1 << 24)


def allocate(kv_cache_config: Any, layout: str, kernel_block_size: int | None = None) -> dict[str, Any]:
    """vLLM's own tensors, filled with random bytes."""
    sizes = [kernel_block_size] * len(kv_cache_config.kv_cache_groups) if kernel_block_size else None
    tensors = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout[layout], sizes)
    raw(tensors).random_(-128, 128)
    return tensors


def raw(tensors: dict[str, Any]) -> Any:
    """All bytes of the one allocation."""
    return torch.empty(0, dtype=torch.int8).set_(next(iter(tensors.values())).untyped_storage())


def contents(tensors: dict[str, Any], layers: list[str], block: int) -> list[Any]:
    """Content of a block, layer by layer, read through vLLM's tensors."""
    found = []
    for layer in layers:
        ratio = tensors[layer].shape[0] // NUM_BLOCKS
        found.append(tensors[layer].view(torch.int8)[block * ratio : (block + 1) * ratio].clone())
    return found


def wipe(tensors: dict[str, Any], layers: list[str], block: int) -> None:
    for layer in layers:
        ratio = tensors[layer].shape[0] // NUM_BLOCKS
        tensors[layer].view(torch.int8)[block * ratio : (block + 1) * ratio] = 17


def round_trip(kv_cache_config: Any, tensors: dict[str, Any]) -> CacheView:
    """Save a block of every group, wipe it, load it back into place and into another block."""
    view = view_of_tensors(kv_cache_config, tensors)
    pool = ArrayMemory(view.row_bytes * 8)
    engine = HostTransferEngine(view, pool)
    whole = raw(tensors)
    for number, group in enumerate(view.groups):
        layers = kv_cache_config.kv_cache_groups[group.group_idx].layer_names
        before, held = whole.clone(), contents(tensors, layers, 5)
        engine.submit(job(1 + 3 * number, Direction.STORE, move(group.group_idx, [5], [3])))
        assert engine.wait([1 + 3 * number], HANG_S)
        assert torch.equal(whole, before)
        wipe(tensors, layers, 5)
        assert not torch.equal(whole, before)
        engine.submit(job(2 + 3 * number, Direction.LOAD, move(group.group_idx, [5], [3])))
        assert engine.wait([2 + 3 * number], HANG_S)
        assert torch.equal(whole, before)
        others = [contents(tensors, layers, b) for b in range(NUM_BLOCKS) if b != 9]
        engine.submit(job(3 + 3 * number, Direction.LOAD, move(group.group_idx, [9], [3])))
        assert engine.wait([3 + 3 * number], HANG_S)
        assert all(map(torch.equal, contents(tensors, layers, 9), held))
        for old, block in zip(others, [b for b in range(NUM_BLOCKS) if b != 9], strict=True):
            assert all(map(torch.equal, contents(tensors, layers, block), old))
    assert all(result.ok for result in engine.poll())
    engine.close()
    return view


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_blocks_come_back(model: str, layout: str) -> None:
    config = plan(model, layout)
    view = round_trip(config, allocate(config, layout))
    assert [g.group_idx for g in view.groups] == list(range(len(config.kv_cache_groups)))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("model", ["one full group", "windows and full"])
def test_kernels_that_split_blocks(model: str, layout: str) -> None:
    config = plan(model, layout)
    tensors = allocate(config, layout, kernel_block_size=4)
    assert next(iter(tensors.values())).shape[0] == 4 * NUM_BLOCKS
    round_trip(config, tensors)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_only_a_groups_own_bytes_are_copied(model: str, layout: str) -> None:
    config = plan(model, layout)
    tensors = allocate(config, layout)
    view = view_of_tensors(config, tensors)
    for group in view.groups:
        layers = config.kv_cache_groups[group.group_idx].layer_names
        own = sum(tensors[layer][0].numel() * tensors[layer].element_size() for layer in layers)
        padding = sum(int(line.partition(":")[2]) for line in group.row_format if line.startswith("padding:"))
        assert group.row_bytes == own + padding
        assert padding <= own / 8
        assert not padding or layout.startswith("B")


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_small_padding_between_pages_is_copied_along_to_make_one_piece(layout: str) -> None:
    config = plan("packed as in DeepSeek V4", layout)
    view = view_of_tensors(config, allocate(config, layout))
    assert [sum(len(region.piece_offsets) for region in group.regions) for group in view.groups] == [1, 1]


@pytest.mark.parametrize("model", list(MODELS))
def test_blocks_outermost_make_one_piece_where_pages_are_not_padded(model: str) -> None:
    config = plan(model, "BLHNC")
    view = view_of_tensors(config, allocate(config, "BLHNC"))
    for group in view.groups:
        pieces = sum(len(region.piece_offsets) for region in group.regions)
        padded = "mamba" in model or "packed" in model
        assert pieces == 1 or padded


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_both_halves_compute_the_same_row(model: str, layout: str) -> None:
    config = plan(model, layout)
    view = view_of_tensors(config, allocate(config, layout))
    scheduler = generate_scheduler_kv_cache_config([config])
    assert row_bytes_from_config(scheduler) == row_bytes_from_config(config) == view.row_bytes
    assert view.row_bytes >= max(group.row_bytes for group in view.groups)
    assert view.row_bytes % 64 == 0


def test_layers_that_share_a_cache_are_copied_once() -> None:
    config = plan("one full group", "LBHNC")
    tensors = allocate(config, "LBHNC")
    alone = view_of_tensors(config, tensors)
    tensors["model.layers.9.attn"] = tensors["model.layers.0.attn"]
    config.kv_cache_groups[0].layer_names.append("model.layers.9.attn")
    assert view_of_tensors(config, tensors) == alone


def test_state_lists_hold_the_same_bytes_as_the_page() -> None:
    config = plan("mamba and full", "LBHNC")
    tensors = allocate(config, "LBHNC")
    page = view_of_tensors(config, tensors)
    lists: dict[str, Any] = {}
    for layer, tensor in tensors.items():
        if tensor.shape[-1] == 480 + 140:
            first, second = tensor[..., :480], tensor[..., 480:]
            lists[layer] = [first.view(torch.float32).squeeze(1), second.view(torch.bfloat16).squeeze(1)]
        else:
            lists[layer] = tensor
    assert any(isinstance(value, list) for value in lists.values())
    split = view_of_tensors(config, lists)
    assert [g.regions for g in split.groups] == [g.regions for g in page.groups]


def test_the_row_format_follows_the_meaning_of_rows() -> None:
    def digest(model: str, layout: str, kernel_block_size: int | None = None) -> str:
        config = plan(model, layout)
        view = view_of_tensors(config, allocate(config, layout, kernel_block_size))
        return repr([(group.row_bytes, group.row_format) for group in view.groups])

    same = {digest("windows and full", layout) for layout in ("LBHNC", "BLHNC", "LHBNC")}
    assert len(same) == 1
    others = [
        digest("windows and full", "LBNHC"),
        digest("windows and full", "LBHNC", 4),
        digest("windows and full", "BHLNC"),
        digest("one full group", "LBHNC"),
        digest("mamba and full", "LBHNC"),
    ]
    assert len({*same, *others}) == 6


def test_a_missing_layer_is_named() -> None:
    config = plan("one full group", "LBHNC")
    tensors = allocate(config, "LBHNC")
    del tensors["model.layers.1.attn"]
    with pytest.raises(LayoutError, match=r"layers\.1\.attn"):
        view_of_tensors(config, tensors)


def test_blocks_in_another_dimension_are_refused() -> None:
    config = plan("one full group", "LBHNC")
    tensors = allocate(config, "LBHNC")
    tensors["model.layers.1.attn"] = tensors["model.layers.1.attn"].transpose(0, 1)
    with pytest.raises(LayoutError, match="dimension 0"):
        view_of_tensors(config, tensors)


def test_a_group_on_another_rank_is_empty_here() -> None:
    config = plan("windows and full", "LBHNC")
    tensors = allocate(config, "LBHNC")
    config.kv_cache_groups[0].layer_names = []
    view = view_of_tensors(config, tensors)
    assert (view.groups[0].regions, view.groups[0].row_bytes) == ((), 0)
    engine = HostTransferEngine(view, ArrayMemory(view.row_bytes * 2))
    engine.submit(job(1, Direction.STORE, move(0, [1], [0])))
    assert engine.wait([1], HANG_S)
    [result] = engine.poll()
    assert result.ok
    engine.close()


def test_rows_of_random_blocks_equal_vllms_pages() -> None:
    """The row of an strip_padding, block-compact group is its layers' pages, one after another."""
    config = plan("one full group", "BLHNC")
    tensors = allocate(config, "BLHNC")
    view = view_of_tensors(config, tensors)
    pool = ArrayMemory(view.row_bytes * 2)
    engine = HostTransferEngine(view, pool)
    engine.submit(job(1, Direction.STORE, move(0, [7], [1])))
    engine.close()
    pages = [c.contiguous().view(-1).numpy() for c in contents(tensors, list(tensors), 7)]
    row = pool.read()[view.row_bytes :][: view.groups[0].row_bytes]
    assert np.array_equal(row.view(np.int8), np.concatenate(pages))
