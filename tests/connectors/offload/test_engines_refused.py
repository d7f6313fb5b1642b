"""Engines that the connectors refuse, or warn of, as vLLM's own configuration describes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch; make test-connectors runs it")
pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from kvatlas.connectors import compat
from kvatlas.connectors.multi import read_children
from kvatlas.connectors.offload import HybridOffloadConnector
from kvatlas.connectors.settings import ConfigError
from kvatlas.connectors.shared_store import SharedStoreConnector
from tests.connectors.offload.sim_engine import Setup, SimConnector, SimEngineCore
from tests.vllm.tiny_model import write_tiny_model

GROUPS = ({"kind": "full_attention", "block_size": 16},)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> SimEngineCore:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
    return SimEngineCore(Setup(groups=GROUPS, num_blocks=40), SimConnector(), str(model), seed=1)


def make(core: SimEngineCore, role: Any) -> HybridOffloadConnector:
    return HybridOffloadConnector(core.config, role, core.scheduler.kv_cache_config)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_encoder_decoder_models_are_refused_without_an_assertion(
    core: SimEngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(core.config.model_config.__dict__, "is_encoder_decoder", True)
    for role in compat.KVConnectorRole:
        with pytest.raises(ConfigError, match="is_encoder_decoder"):
            make(core, role)


@pytest.mark.parametrize(("policy", "warns"), [("fail", True), ("recompute", False)])
def test_a_policy_that_fails_requests_is_warned_of_once(
    core: SimEngineCore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(core.config.kv_transfer_config, "kv_load_failure_policy", policy)
    monkeypatch.setattr(logging.getLogger("connectors"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="connectors"):
        for role in compat.KVConnectorRole:
            make(core, role)
    found = [text for text in warnings_of(caplog) if "kv_load_failure_policy" in text]
    assert len(found) == warns
    if warns:
        assert "'fail'" in found[0]
        assert '"recompute"' in found[0]


def test_children_know_the_engines_policy() -> None:
    entry = {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "kvatlas.connectors.offload",
        "kv_connector_extra_config": {"host_bytes": "1GiB"},
    }
    for policy in ("fail", "recompute"):
        ((_, child),) = read_children({"connectors": [entry]}, kv_load_failure_policy=policy)
        assert child.kv_load_failure_policy == policy


def test_no_connector_of_ours_claims_sleep_mode() -> None:
    for connector in (HybridOffloadConnector, SharedStoreConnector):
        assert connector.supports_sleep_mode(None) is False


def test_a_shared_store_asks_for_the_version_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TESTED_VERSIONS", ("0.20",))
    with pytest.raises(RuntimeError, match=r"SharedStoreConnector was tested with vLLM 0\.20\.x"):
        SharedStoreConnector(None, compat.KVConnectorRole.SCHEDULER, None)
