"""``HybridMultiConnector``: several connectors in one. Blocks are saved to all and loaded from the best.

``--kv-transfer-config '{"kv_connector": "HybridMultiConnector", "kv_connector_module_path":
"connectors.multi", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config":
{"connectors": [{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path": "connectors.offload",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}, ...]}}'``

Every child sees every call; the one that offers the most tokens loads (the first of equals), and one that
does not know yet makes the request wait. What always holds: a request whose load failed is computed next,
whichever child could load it; blocks that children save after a request ended stay until the last of them is
done; nothing that a child counts, announces or answers is lost or reaches another child.
"""

from __future__ import annotations

from connectors.multi.scheduler import MultiSchedulerPart
from connectors.multi.worker import MultiWorkerPart


class HybridMultiConnector(MultiSchedulerPart, MultiWorkerPart):
    """vLLM's ``MultiConnector`` that loads from the best. ``ConfigError`` where a child cannot work in this
    engine."""
