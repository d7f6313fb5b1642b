"""``HybridMultiConnector``: several connectors in one. Blocks are saved to all and loaded from the best.

``--kv-transfer-config '{"kv_connector": "HybridMultiConnector", "kv_connector_module_path":
"connectors.multi", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config":
{"connectors": [{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path": "connectors.offload",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}, ...]}}'``

Every child receives every call. The child that offers the most tokens loads (the first of equals); a child
without an answer makes the request wait.

Invariants: a request whose load failed is computed next, even if another child could load it. Blocks that
children save after a request's end stay until the last of them is done. Statistics, events and answers of a
child are never lost and never reach another child.
"""

from __future__ import annotations

from connectors.multi.group import MultiWorkerPart
from connectors.multi.scheduler import MultiSchedulerPart


class HybridMultiConnector(MultiSchedulerPart, MultiWorkerPart):
    """vLLM's ``MultiConnector``, loading from the best child.

    ``ConfigError`` if a child does not support this engine.
    """
