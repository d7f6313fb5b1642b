from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.connectors.store.base import EPOCHS_MAX, Namespace, weights_digest

ENGINE = "engine-1"


def namespace(engine: str = ENGINE, **fields: str) -> Namespace:
    return Namespace({"model": "m", "tp": "2"} | fields, ((0, 0, 0), (1, 0, 0)), engine)


def test_equal_configurations_share_and_each_rank_has_its_own_name() -> None:
    one, other = namespace(), namespace(engine="engine-2")
    assert one.digests() == other.digests()
    assert len(set(one.digests())) == 2
    assert all(len(digest) == 16 for digest in one.digests())


def test_any_difference_parts_every_rank_and_can_be_named() -> None:
    one, other = namespace(), namespace(model="n")
    assert not set(one.digests()) & set(other.digests())
    assert "extra=x" in namespace(extra="x").describe()
    assert "model=n" in other.describe()


def test_later_epochs_are_the_engines_own() -> None:
    one, other = namespace(), namespace(engine="engine-2")
    names = {one.digest(0, epoch) for epoch in range(5)} | {other.digest(0, epoch) for epoch in range(5)}
    assert len(names) == 9


def test_a_ticket_is_read_by_the_same_namespace_only() -> None:
    for epoch in (0, 1, EPOCHS_MAX - 1):
        ticket = namespace().ticket(epoch)
        assert 0 <= ticket < 1 << 52
        assert namespace().read_ticket(ticket) == epoch
        with pytest.raises(ValueError, match="model=n"):
            namespace(model="n").read_ticket(ticket)


class TestWeights:
    def test_a_name_that_is_no_path_has_none(self) -> None:
        assert weights_digest("some/model-on-a-hub") == ""

    def test_equal_copies_are_equal_wherever_they_lie(self, tmp_path: Path) -> None:
        for name in ("one", "other"):
            self._model(tmp_path / name)
        assert weights_digest(str(tmp_path / "one")) == weights_digest(str(tmp_path / "other")) != ""

    @pytest.mark.parametrize("change", ["weights", "config", "size", "name"])
    def test_other_weights_differ(self, tmp_path: Path, change: str) -> None:
        self._model(tmp_path)
        before = weights_digest(str(tmp_path))
        weights = tmp_path / "model.safetensors"
        if change == "weights":  # a fine-tune: everything a little different
            weights.write_bytes(bytes((byte + 1) % 256 for byte in weights.read_bytes()))
        elif change == "config":
            (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 20000}))
        elif change == "size":
            weights.write_bytes(weights.read_bytes() + b"x")
        else:
            weights.rename(tmp_path / "other.safetensors")
        assert weights_digest(str(tmp_path)) != before

    @staticmethod
    def _model(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"rope_theta": 10000}))
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 200)
        (folder / "README.md").write_text("not about bytes")


class TestOfVllm:
    """From what vLLM's configuration says; its specs and hash functions are the real ones."""

    @pytest.fixture
    def config(self) -> Any:
        with warnings.catch_warnings():  # its import warns, and here warnings are errors
            warnings.simplefilter("ignore")
            pytest.importorskip(
                "vllm.v1.core.sched.scheduler", reason="needs vLLM; make test-connectors runs it"
            )
        return SimpleNamespace(
            model_config=SimpleNamespace(
                model="org/model", revision="main", dtype="torch.bfloat16", quantization=None,
                hf_overrides={}, hf_config=SimpleNamespace(_commit_hash="abc"),
            ),
            cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1
            ),
            attention_config=SimpleNamespace(backend=None),
            device_config=SimpleNamespace(device_type="cuda"),
            speculative_config=None,
            kv_transfer_config=SimpleNamespace(engine_id=ENGINE),
        )  # fmt: skip

    @staticmethod
    def _cache(**changes: Any) -> Any:
        import torch  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: PLC0415

        shape: dict[str, Any] = {
            "block_size": 16,
            "num_kv_heads": 4,
            "head_size": 64,
            "dtype": torch.bfloat16,
        }
        full = FullAttentionSpec(**shape | changes)
        window = SlidingWindowSpec(**shape, sliding_window=1024)
        return SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=full), SimpleNamespace(kv_cache_spec=window)],
            kv_cache_layout="BLHNC",
            hash_block_size=16,
        )

    def _of(self, config: Any, cache: Any = None, label: str = "") -> Namespace:
        from kvatlas.connectors.store.base import namespace_of  # noqa: PLC0415

        return namespace_of(config, cache or self._cache(), label=label)

    def test_both_halves_come_to_the_same(self, config: Any) -> None:
        one, other = self._of(config), self._of(config)
        assert one.digests() == other.digests()
        assert len(one.ranks) == 2
        assert not one.private_reason

    @pytest.mark.parametrize(
        "change",
        [
            lambda c: setattr(c.model_config, "model", "org/other"),
            lambda c: setattr(c.model_config, "revision", "v2"),
            lambda c: setattr(c.model_config, "dtype", "torch.float16"),
            lambda c: setattr(c.model_config, "quantization", "fp8"),
            lambda c: setattr(c.model_config, "hf_overrides", {"rope_theta": 1}),
            lambda c: setattr(c.model_config.hf_config, "_commit_hash", "def"),
            lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
            lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
            lambda c: setattr(c.parallel_config, "tensor_parallel_size", 4),
            lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
            lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
            lambda c: setattr(c.attention_config, "backend", "FLASHINFER"),
            lambda c: setattr(c.device_config, "device_type", "cpu"),
            lambda c: setattr(c, "speculative_config", SimpleNamespace(method="eagle", model="org/draft")),
        ],
    )
    def test_engines_that_differ_never_meet(self, config: Any, change: Callable[[Any], None]) -> None:
        before = self._of(config)
        change(config)
        assert not set(self._of(config).digests()) & set(before.digests())

    @pytest.mark.parametrize(
        "changes", [{"block_size": 32}, {"num_kv_heads": 8}, {"head_size": 128}, {"sliding_window": 64}]
    )
    def test_groups_of_another_kind_never_meet(self, config: Any, changes: dict[str, int]) -> None:
        other = self._of(config, self._cache(**changes))
        assert not set(self._of(config).digests()) & set(other.digests())
        here, there = self._of(config).fields, other.fields
        assert [name for name in here if here[name] != there[name]] == ["groups"]

    def test_releases_of_vllm_never_meet(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        vllm = pytest.importorskip("vllm")
        digests = []
        for version in ("0.32.0", "0.32.1", "0.33.0"):
            monkeypatch.setattr(vllm, "__version__", version)
            digests.append(self._of(config).digest(0))
        assert digests[0] == digests[1] != digests[2]

    def test_layouts_labels_and_hash_blocks_part_engines(self, config: Any) -> None:
        cache, finer = self._cache(), self._cache()
        cache.kv_cache_layout, finer.hash_block_size = "LBHNC", 8
        found = [
            self._of(config),
            self._of(config, cache),
            self._of(config, finer),
            self._of(config, label="b"),
        ]
        assert len({each.digest(0) for each in found}) == 4

    def test_the_seed_of_the_hash_chain_counts(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        seeds = {}
        for seed in ("0", "1", None):
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
            if seed is not None:
                monkeypatch.setenv("PYTHONHASHSEED", seed)
            seeds[seed] = self._of(config).digest(0)
        assert len(set(seeds.values())) == 3

    def test_a_random_seed_is_reported_and_not_shared(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("xxhash")
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        config.cache_config.prefix_caching_hash_algo = "xxhash"
        mine = self._of(config)
        assert "PYTHONHASHSEED" in mine.private_reason
        # Both halves of one engine still agree; another engine does not.
        assert self._of(config).digests() == mine.digests()
        config.kv_transfer_config.engine_id = "engine-2"
        assert self._of(config).digest(0) != mine.digest(0)
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        assert not self._of(config).private_reason
