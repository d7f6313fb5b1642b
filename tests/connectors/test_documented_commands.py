"""vLLM and the connectors accept what docs/connectors.md tells to write on the command line."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="needs vLLM; make test-connectors runs it")

from kvatlas.connectors.compat import KVConnectorFactory, KVTransferConfig
from kvatlas.connectors.multi import read_children
from tests.docs.pages import transfer_configs
from tests.support.paths import ROOT

CONFIGS = transfer_configs(ROOT / "docs" / "connectors.md")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config["kv_connector"]))
def test_vllm_finds_the_connector(config: dict[str, Any]) -> None:
    made = KVTransferConfig(**config)
    assert KVConnectorFactory.supports_hma_config(made)
    assert KVConnectorFactory.get_connector_class(made).__name__ == config["kv_connector"]
    extra = config["kv_connector_extra_config"]
    if config["kv_connector"] == "HybridMultiConnector":
        assert len(read_children(extra)) == len(extra["connectors"])
