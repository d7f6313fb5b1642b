"""Tells vLLM the names of our connectors (entry point ``vllm.general_plugins``).

vLLM rebuilds a connector's statistics by its registered name, also for one that was loaded by module path, so
the names are registered wherever the package is installed. Without vLLM, or in a version whose factory is
elsewhere, this does nothing: the connectors themselves say what they need when they are used.
"""

from __future__ import annotations

CONNECTORS = {
    "HybridOffloadConnector": "connectors.offload",
    "SharedStoreConnector": "connectors.shared_store",
    "HybridMultiConnector": "connectors.multi",
}


def register() -> None:
    """Register every connector once; names that are taken are left alone."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415
    except ImportError:
        return
    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # noqa: SLF001
            KVConnectorFactory.register_connector(name, module, name)
