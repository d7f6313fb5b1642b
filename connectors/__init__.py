"""vLLM KV connectors that keep evicted blocks of hybrid models outside the GPU, group by group.

Importing this package imports nothing else: vLLM imports connector modules in processes that never touch a
device, and ``kvatlas.connectors.transfer`` must run where there is torch, triton and numpy but no vLLM.

``register`` is called by vLLM (entry point ``vllm.general_plugins``). vLLM rebuilds a connector's statistics
by its registered name, also for one loaded by module path, so the names are registered wherever the package
is installed. Without vLLM, or with a version that has its factory elsewhere, it does nothing: the connectors
check the version themselves when they are used.
"""

from __future__ import annotations

CONNECTORS = {
    "HybridOffloadConnector": "kvatlas.connectors.offload",
    "SharedStoreConnector": "kvatlas.connectors.shared_store",
    "HybridMultiConnector": "kvatlas.connectors.multi",
}


def register() -> None:
    """Register every connector once; existing names are kept."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415
    except ImportError:
        return
    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # noqa: SLF001
            KVConnectorFactory.register_connector(name, module, name)
