"""Several connectors in one: who loads, what each hears, what is refused, and that nothing is lost."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput

from kvatlas.connectors.multi import HybridMultiConnector
from kvatlas.connectors.settings import ConfigError
from tests.connectors.multi.fake_children import (
    SHUT_DOWN,
    child,
    config_of,
    multi,
    request,
)


def test_the_longest_offer_is_taken_and_the_first_of_equals() -> None:
    connector, (a, b, c) = multi(child("a"), child("b"), child("c"))
    connector.on_new_request(request())
    for offers, taken, loads in (
        ((16, 64, 64), 64, (0, 64, 0)),
        ((64, 64, 16), 64, (64, 0, 0)),
        ((0, 0, 32), 32, (0, 0, 32)),
        ((0, 0, 0), 0, (0, 0, 0)),
    ):
        for account, tokens in zip((a, b, c), offers, strict=True):
            account.offers["r"] = (tokens, tokens > 0)
        assert connector.get_num_new_matched_tokens(request(), 0) == (taken, taken > 0)
        connector.update_state_after_alloc(request(), None, taken)
        assert tuple(account.calls[-1] for account in (a, b, c)) == tuple(("alloc", "r", n) for n in loads)


def test_one_child_that_does_not_know_makes_the_request_wait_and_all_are_asked() -> None:
    connector, (a, b) = multi(child("a"), child("b"))
    connector.on_new_request(request())
    a.offers["r"], b.offers["r"] = (None, False), (64, True)
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)
    assert ("lookup", "r") in b.calls
    a.offers["r"] = (0, False)
    assert connector.get_num_new_matched_tokens(request(), 0) == (64, True)


def test_the_child_that_loads_says_which_groups_and_from_where() -> None:
    connector, (_, b) = multi(child("a"), child("second"))
    connector.on_new_request(request())
    b.offers["r"] = (32, True)
    connector.get_num_new_matched_tokens(request(), 0)
    assert connector.get_loaded_kv_cache_group_ids(request()) == (6, 7)
    assert sum(connector.get_external_cache_hit_sources(request(), 32).values()) == 32
    b.offers["r"] = (0, False)
    connector.get_num_new_matched_tokens(request(), 0)
    with pytest.raises(RuntimeError, match="no connector offered"):
        connector.update_state_after_alloc(request(), None, 32)


def test_after_a_failed_load_the_request_is_computed_whichever_connector_could_load_it() -> None:
    connector, (a, b) = multi(child("a"), child("b"))
    connector.on_new_request(request())
    a.offers["r"], b.offers["r"] = (64, True), (32, True)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), None, 64)
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r", "gone"}))
    for _ in range(2):
        assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)
    connector.update_state_after_alloc(request(), None, 0)
    assert connector.get_num_new_matched_tokens(request(), 0) == (64, True)


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "restore_kv_caches"), reason="vLLM 0.32 asks for neither")
def test_sleep_and_waking_up_reach_every_child() -> None:
    connector, accounts = multi(child("a"), child("b"))
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert [account.calls for account in accounts] == [[("unregister",), ("restore",)]] * 2


@pytest.mark.parametrize(("last", "able"), [({}, True), ({"sleeps": False}, False)])
def test_sleep_mode_needs_every_child(last: dict[str, Any], able: bool) -> None:
    settings = config_of(child("a"), child("b", **last)).kv_transfer_config
    assert HybridMultiConnector.supports_sleep_mode(settings) is able


def test_a_child_without_hma_is_refused_before_any_is_made() -> None:
    SHUT_DOWN.clear()
    with pytest.raises(ConfigError) as refused:
        multi(child("breaks first", breaks=True), child("old", "Plain"))
    assert "connectors[1].kv_connector = 'Plain'" in str(refused.value)
    assert "--disable-hybrid-kv-cache-manager" in str(refused.value)
    connector, (_, plain) = multi(child("a"), child("old", "Plain"), hma=False)
    connector.request_finished_all_groups(request(), ([1, 2],))
    assert plain.calls[-1] == ("finished", "r", [1, 2])


def test_in_tree_children_are_checked_too() -> None:
    example = {"kv_connector": "ExampleConnector"}
    with pytest.raises(ConfigError, match=r"ExampleConnector.*SupportsHMA"):
        multi(child("a"), example)
    inside = [example | {"kv_role": "kv_both"}]
    nested = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inside}}
    with pytest.raises(ConfigError, match=r"connectors\[1\].*MultiConnector.*SupportsHMA"):
        multi(child("a"), nested)


REFUSALS = """
import warnings
warnings.simplefilter("ignore")
from tests.connectors.multi.fake_children import child, config_of, multi, request
from kvatlas.connectors.settings import ConfigError
assert False, "assertions are on"

def refused(what, call):
    try:
        call()
    except Exception as error:
        print(what, "|", type(error).__name__, "|", error)
    else:
        print(what, "| accepted")

refused("hma", lambda: multi(child("a"), child("old", "Plain")))
connector, (a, b) = multi(child("a"), child("b"))
a.finish["r"] = b.finish["r"] = (False, {"key": 1})
refused("clash", lambda: connector.request_finished_all_groups(request(), ([1],)))
refused("loader", lambda: connector.update_state_after_alloc(request(), None, 16))
"""


def test_refusals_do_not_depend_on_assertions() -> None:
    run = subprocess.run(
        [sys.executable, "-O", "-c", REFUSALS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = dict(line.split(" | ", 1) for line in run.stdout.splitlines() if " | " in line)
    assert list(said) == ["hma", "clash", "loader"], run.stderr[-2000:]
    assert said["hma"].startswith("ConfigError | ")
    assert "Plain" in said["hma"]
    assert said["clash"].startswith("RuntimeError | Key clash")
    assert "'key'" in said["clash"]
    assert "no connector offered" in said["loader"]


@pytest.mark.parametrize(
    ("children", "says"),
    [
        ([], "list the connectors"),
        ("none", "list the connectors"),
        (["text"], "connectors[0]"),
        (
            [{"kv_connector_module_path": "kvatlas.connectors.multi"}],
            "connectors[0].kv_connector",
        ),
        ([child("a") | {"kv_conector": 1}], "kv_conector"),
        ([child("a") | {"kv_load_failure_policy": "fail"}], "an engine has one policy"),
        ([child("a", "Missing")], "Missing not found in tests.connectors.multi.fake_children"),
        ([child("a") | {"kv_connector_module_path": "no_such_module"}], "no_such_module"),
        ([child("a") | {"kv_role": "kv_all"}], "kv_all"),
        ([{"kv_connector": "NixlConnector"}], "MultiConnector"),
        ([{"kv_connector": "HybridMultiConnector"}], "list its connectors here"),
    ],
)
def test_bad_settings_are_refused_with_their_place(children: Any, says: str) -> None:
    config = config_of()
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": children}
    with pytest.raises(ConfigError) as refused:
        HybridMultiConnector(config, KVConnectorRole.WORKER, None)
    assert says in str(refused.value)
    with pytest.raises(ConfigError, match="host_bytes"):
        HybridMultiConnector(config_of(child("a"), host_bytes=1), KVConnectorRole.WORKER, None)


def test_a_child_that_cannot_be_made_takes_the_others_down() -> None:
    SHUT_DOWN.clear()
    with pytest.raises(ValueError, match="c breaks"):
        multi(child("a"), child("b"), child("c", breaks=True))
    assert SHUT_DOWN == ["a", "b"]


def test_children_inherit_role_and_engine_id() -> None:
    config = config_of(child("a"), child("b") | {"engine_id": "own", "kv_role": "kv_consumer"})
    connector = HybridMultiConnector(config, KVConnectorRole.SCHEDULER, None)
    a, b = (made._kv_transfer_config for made in connector.sub_connectors)
    assert (a.engine_id, a.kv_role) == (config.kv_transfer_config.engine_id, "kv_both")
    assert (b.engine_id, b.kv_role) == ("own", "kv_consumer")


def test_layouts_agree_or_the_disagreement_is_named() -> None:
    ours = {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "kvatlas.connectors.offload",
        "kv_connector_extra_config": {"host_bytes": "1GiB"},
    }

    def layout(*children: Any) -> str | None:
        return HybridMultiConnector.get_required_kvcache_layout(config_of(*children))

    assert layout(child("a"), child("b")) is None
    assert layout(child("a", layout="LBHNC"), child("b"), child("c", layout="LBHNC")) == "LBHNC"
    assert layout(ours, child("a")) == "BLHNC"
    assert layout(ours, child("a", layout="LBNHC")) == "LBNHC"
    with pytest.raises(ConfigError, match="Fake requires LBHNC, Resettable requires BLHNC"):
        layout(child("a", layout="LBHNC"), child("b", "Resettable", layout="BLHNC"))


def test_cuda_graphs_are_split_as_soon_as_one_child_needs_it() -> None:
    for children, piecewise in (([child("a")], False), ([child("a"), child("b", piecewise=True)], True)):
        assert HybridMultiConnector.requires_piecewise_for_cudagraph({"connectors": children}) is piecewise


def test_statistics_and_metrics_of_children_are_distinguished_by_their_class() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()

    def in_registry(kind: Any) -> Any:
        return lambda *args, **settings: kind(*args, registry=registry, **settings)

    kinds = (prometheus.Gauge, prometheus.Counter, prometheus.Histogram)
    near, far = (
        {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}
        for name, module, extra in (
            ("HybridOffloadConnector", "kvatlas.connectors.offload", {"host_bytes": "1GiB"}),
            ("SharedStoreConnector", "kvatlas.connectors.shared_store", {"host_bytes": "1GiB", "store": {}}),
        )
    )
    metrics = HybridMultiConnector.build_prom_metrics(
        config_of(near, far, near), {kind: in_registry(kind) for kind in kinds}, ["engine"], {0: ["0"]}
    )
    report = {near["kv_connector"]: {"blocks_stored": 3}, far["kv_connector"]: {"blocks_stored": 4}}
    metrics.observe(report, 0)

    def counted(child: dict[str, Any]) -> float | None:
        labels = {"engine": "0", "connector": child["kv_connector"]}
        return registry.get_sample_value("kvatlas_offload_blocks_stored_total", labels)

    assert (counted(near), counted(far)) == (3, 4)


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        ([child("a"), child("b")], True),
        ([child("a"), child("b", "Resettable")], True),
        ([child("a", "Resettable", stuck=True), child("b", "Resettable")], False),
    ],
)
def test_reset_reaches_all_and_fails_if_one_fails(kinds: list[Any], outcome: bool) -> None:
    connector, accounts = multi(*kinds)
    assert connector.reset_cache() is outcome
    resettable = [a for a, kind in zip(accounts, kinds, strict=True) if kind["kv_connector"] == "Resettable"]
    assert all(account.calls == [("reset",)] for account in resettable)


def test_childrens_final_parameters_are_merged_and_clashes_are_named() -> None:
    connector, (a, b) = multi(child("a"), child("b"))
    assert connector.request_finished_all_groups(request(), ([1],)) == (False, None)
    a.finish["r"], b.finish["r"] = (False, {"x": 1}), (True, {"y": 2})
    assert connector.request_finished_all_groups(request(), ([1],)) == (True, {"x": 1, "y": 2})
    b.finish["r"] = (False, {"x": 1})
    with pytest.raises(RuntimeError, match=r"Key clash.*'x'"):
        connector.request_finished_all_groups(request(), ([1],))


def test_blocks_stay_until_the_child_that_took_partial_ones_is_done_too() -> None:
    scheduler, (a, b) = multi(child("a"), child("b"))
    worker, (on_a, on_b) = multi(child("a"), child("b"), role=KVConnectorRole.WORKER)
    scheduler.on_new_request(request())
    a.takes_tail, b.finish["r"] = True, (True, None)
    assert scheduler.register_finished_partial_tail(request(), ([1],), [(0, 1, 5)])
    assert scheduler.request_finished_all_groups(request(), ([1],)) == (True, None)
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(scheduler.build_connector_meta(None))))
    on_b.sending = {"r"}
    assert worker.get_transfer_results(set()).finished_sending == set()
    on_a.sending = {"r"}
    assert worker.get_transfer_results(set()).finished_sending == {"r"}


ALIKE = {"has_connector_metadata", "role", "get_kv_connector_kv_cache_events"}
"""Members that the base class implements for any connector, without the children; vLLM's MultiConnector
passes on no events of workers."""


def test_whatever_vllm_asks_of_a_connector_is_asked_of_the_children() -> None:
    asked = {
        name for kind in (KVConnectorBase_V1, SupportsHMA) for name in vars(kind) if not name.startswith("_")
    }
    own = {
        name
        for kind in HybridMultiConnector.__mro__
        if kind not in (KVConnectorBase_V1, SupportsHMA) and issubclass(kind, KVConnectorBase_V1)
        for name in vars(kind)
    }
    assert asked - own == ALIKE


def test_kv_need_not_be_delivered_unless_a_child_says_so() -> None:
    for children, required in (([child("a")], False), ([child("a"), child("b", delivers=True)], True)):
        connector, _ = multi(*children)
        assert connector.requires_kv_delivery is required
