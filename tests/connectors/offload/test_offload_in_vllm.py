"""The connector as vLLM uses it: versions, settings, statistics, the classes it makes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvatlas.connectors import CONNECTORS, compat, offload
from kvatlas.connectors.offload import HybridOffloadConnector, TieredConnector, WorkerResults, check_engine
from kvatlas.connectors.reports import COUNTERS, GAUGES, OffloadPromMetrics, OffloadStats
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.transfer.base import StepResults
from tests.connectors.offload.sim_engine import Prompt, Setup, SimConnector, SimEngineCore
from tests.vllm.forked import run
from tests.vllm.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[3]
GROUPS = ({"kind": "full_attention", "block_size": 16},)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> SimEngineCore:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
    return SimEngineCore(Setup(groups=GROUPS, num_blocks=40), SimConnector(), str(model), seed=1)


class TestVersions:
    @pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1", "0.33.0"])
    def test_tested_ones_are_taken(self, version: str) -> None:
        compat.require_tested_vllm("X", version)

    @pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3.2", "1.32.0", "dev"])
    def test_others_are_refused_in_words(self, version: str) -> None:
        with pytest.raises(
            RuntimeError, match=rf"X was tested with vLLM 0\.32\.x, 0\.33\.x, .*{version}.*install"
        ):
            compat.require_tested_vllm("X", version)

    def test_another_one_is_taken_where_it_was_allowed_by_name(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(logging.getLogger("connectors"), "propagate", True)
        monkeypatch.setenv(compat.ALLOW_UNTESTED, "0.34")
        compat.require_tested_vllm("X", "0.34.1")
        assert "not with 0.34.1" in caplog.text
        with pytest.raises(RuntimeError, match=r"KVATLAS_ALLOW_UNTESTED_VLLM=0\.35"):
            compat.require_tested_vllm("X", "0.35.0")

    @pytest.mark.parametrize("module", sorted(CONNECTORS.values()))
    def test_an_untested_one_is_refused_when_vllm_imports_the_class(self, module: str) -> None:
        """Before weights are loaded, that is, and not in the constructor minutes later."""
        words = ["tests.connectors.offload.import_untested", module]
        done = run(sys.executable, words, cwd=ROOT, env=os.environ, timeout=300)
        assert done.returncode == 1
        assert "this is vLLM 0.99.0: install one of these" in done.stderr

    def test_a_missing_method_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "_PROBES", ((TieredConnector, ("shutdown", "no_such_method")),))
        with pytest.raises(RuntimeError, match=r"TieredConnector of this vLLM .* lacks no_such_method"):
            compat.require_tested_vllm("X")

    def test_the_constructor_asks_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "TESTED_VERSIONS", ("0.20",))
        with pytest.raises(RuntimeError, match=r"HybridOffloadConnector was tested with vLLM 0\.20\.x"):
            HybridOffloadConnector(None, compat.KVConnectorRole.SCHEDULER, None)


class TestEngineConfig:
    def config(self, **changes: Any) -> Any:
        parallel = {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        }
        role = changes.pop("kv_role", "kv_both")
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role=role),
            parallel_config=SimpleNamespace(**parallel | changes),
        )

    def cache(self, *specs: Any) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    def test_a_plain_engine_is_accepted(self) -> None:
        align = SimpleNamespace(mamba_cache_mode="align")
        check_engine(self.config(), self.cache(SimpleNamespace(), align))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("kv_role", "kv_producer"),
            ("pipeline_parallel_size", 2),
            ("decode_context_parallel_size", 2),
            ("prefill_context_parallel_size", 2),
        ],
    )
    def test_impossible_settings_are_refused(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            check_engine(self.config(**{key: value}), self.cache())
        assert (caught.value.key, caught.value.value) == (key, value)

    def test_states_between_boundaries_are_refused_also_inside_a_mixed_group(self) -> None:
        spec = SimpleNamespace(kv_cache_specs={"a": SimpleNamespace(mamba_cache_mode="all")})
        with pytest.raises(ConfigError, match="mamba_cache_mode = 'all'"):
            check_engine(self.config(), self.cache(spec))

    @pytest.mark.parametrize("extra", [{"host_bytes": 100}, {"host_bytes": "1GiB", "polcy": "lru"}, {}])
    def test_bad_settings_fail_in_both_constructors(self, core: SimEngineCore, extra: dict[str, Any]) -> None:
        transfer = core.config.kv_transfer_config
        good = transfer.kv_connector_extra_config
        transfer.kv_connector_extra_config = extra
        try:
            for role in compat.KVConnectorRole:
                with pytest.raises(ConfigError, match="kv_connector_extra_config"):
                    HybridOffloadConnector(core.config, role, core.scheduler.kv_cache_config)
        finally:
            transfer.kv_connector_extra_config = good

    def test_the_memory_of_all_ranks_together_must_be_available(
        self, core: SimEngineCore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each rank's own share would be; taking them all would end the engine without a word."""
        host_bytes = core.config.kv_transfer_config.kv_connector_extra_config["host_bytes"]
        monkeypatch.setattr(offload, "available_bytes", lambda: host_bytes - 1)
        cache = core.scheduler.kv_cache_config
        HybridOffloadConnector(core.config, compat.KVConnectorRole.SCHEDULER, cache)
        with pytest.raises(ConfigError, match=r"host_bytes.*together ask for \d+ bytes and \d+ are avail"):
            HybridOffloadConnector(core.config, compat.KVConnectorRole.WORKER, cache)


class TestClass:
    def test_vllm_makes_it_and_keeps_the_hybrid_cache(self, core: SimEngineCore) -> None:
        connector = core.scheduler.connector
        assert isinstance(connector, HybridOffloadConnector)
        assert isinstance(connector, compat.SupportsHMA)
        assert not connector.requires_kv_delivery
        assert not connector.requires_piecewise_for_cudagraph({})
        assert HybridOffloadConnector.get_required_kvcache_layout(core.config) == "BLHNC"

    def test_the_layout_is_the_engines_own_where_that_was_set(
        self, core: SimEngineCore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extra = core.config.kv_transfer_config.kv_connector_extra_config
        monkeypatch.setitem(extra, "layout", "engine")
        assert HybridOffloadConnector.get_required_kvcache_layout(core.config) is None
        monkeypatch.setitem(extra, "layout", "NHD")
        with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.layout = 'NHD'"):
            HybridOffloadConnector.get_required_kvcache_layout(core.config)

    def test_each_role_refuses_the_others_calls(self, core: SimEngineCore) -> None:
        with pytest.raises(RuntimeError, match="worker's part"):
            core.scheduler.connector.wait_for_save()
        with pytest.raises(RuntimeError, match="scheduler's part"):
            core.workers[0].has_pending_push_work()

    def test_it_is_registered_under_its_name(self) -> None:
        assert CONNECTORS["HybridOffloadConnector"] == HybridOffloadConnector.__module__


class TestStats:
    def test_reports_add_up_and_stay_plain(self) -> None:
        one, other = OffloadStats(data={"a/x": 1}), OffloadStats(data={"a/x": 2, "b": 3})
        both = one.aggregate(other)
        assert both.to_dict() == {"a/x": 3, "b": 3}
        assert one.to_dict() == {"a/x": 1}
        assert HybridOffloadConnector.build_kv_connector_stats(both.to_dict()).to_dict() == both.to_dict()
        assert both.reduce() == {"a x": 3, "b": 3}
        now = OffloadStats(data={"rows/used": 9}).aggregate(OffloadStats(data={"rows/used": 4, "b": 1}))
        assert now.to_dict() == {"rows/used": 4, "b": 1}
        both.reset()
        assert both.is_empty()

    def test_prometheus_has_every_sum_under_its_labels(self, core: SimEngineCore) -> None:
        registry = CollectorRegistry()

        def counter(**options: Any) -> Counter:
            return Counter(**options, registry=registry)

        def gauge(**options: Any) -> Gauge:
            return Gauge(**options, registry=registry)

        metrics = OffloadPromMetrics(
            core.config, {Gauge: gauge, Counter: counter, Histogram: Histogram}, ["engine"], {0: ["0"]}
        )
        metrics.observe({"bytes/load/5": 7, "hit_tokens": 32, "unknown": 1, "bytes/load": 1})
        metrics.observe({"bytes/load/5": 3}, engine_idx=0)
        metrics.observe({"jobs_waiting/load": 7, "blocks_pinned": 2})
        metrics.observe({"jobs_waiting/load": 3})
        labels = {"engine": "0", "direction": "load", "group": "5"}
        waiting = {"engine": "0", "direction": "load"}
        assert registry.get_sample_value("kvatlas_offload_jobs_waiting", waiting) == 3
        assert registry.get_sample_value("kvatlas_offload_blocks_pinned", {"engine": "0"}) == 2
        assert registry.get_sample_value("kvatlas_offload_bytes_total", labels) == 10
        assert registry.get_sample_value("kvatlas_offload_hit_tokens_total", {"engine": "0"}) == 32

    def test_everything_the_halves_count_has_a_metric(
        self, core: SimEngineCore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names: set[str] = set()
        report = core.scheduler.connector.get_kv_connector_stats

        def watched() -> Any:
            stats = report()
            names.update(stats.to_dict() if stats else ())
            return stats

        monkeypatch.setattr(core.scheduler.connector, "get_kv_connector_stats", watched)
        core.engines[0].failure_rate = 0.3
        for turn in range(12):
            core.add(Prompt([turn % 2, *range(120)]), 3)
            while core.busy:
                core.step()
            core.reset()
        core.engines[0].failure_rate = 0
        names |= set(core.reported)
        assert {"hit_tokens", "jobs/store/ok", "blocks_stored"} <= names
        for name in names:
            metric, *labels = name.split("/")
            assert len(labels) == len((COUNTERS | GAUGES)[metric][0]), name
        assert {"rows/used", "rows/all", "jobs_waiting/store", "bandwidth_bytes_per_second/load"} <= names


def test_answers_of_ranks_are_merged_in_any_order() -> None:
    parts = [WorkerResults(StepResults([rank])) for rank in (1, 2, 3)]  # type: ignore[list-item]
    one = parts[0].aggregate(parts[1]).aggregate(parts[2])
    other = parts[2].aggregate(parts[1].aggregate(parts[0]))
    ranks: list[list[Any]] = [sorted(cast(list[Any], merged.results.results)) for merged in (one, other)]
    assert ranks == [[1, 2, 3]] * 2
