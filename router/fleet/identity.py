"""One engine of the fleet: (base URL, data-parallel rank), and where its events come from."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NewType
from urllib.parse import urlsplit

import msgspec

Role = Literal["prefill", "decode", "both"]
EngineKind = Literal["vllm", "sglang"]
# Names an engine in metrics, receipts, headers and leases. Made only by ``EngineAddress.engine_id`` and
# never parsed: use the engine's address instead.
EngineId = NewType("EngineId", str)


class EngineAddress(msgspec.Struct, frozen=True):
    """Identity and addresses of an engine; leave out ``events`` for an engine that publishes none."""

    base_url: str
    """``http://host:port``, without ``/v1``."""
    dp_rank: int | None = None
    """Data-parallel rank of this entry, sent to the server as ``x-data-parallel-rank``; not set without data
    parallelism."""
    events: str | None = None
    """ZMQ address its events are published at, e.g. ``tcp://host:5557``."""
    replay: str | None = None
    """ZMQ address that sends missed events again, e.g. ``tcp://host:5558``."""
    topic: str = ""
    """ZMQ prefix to subscribe to, the ``topic`` of the engine's ``--kv-events-config``; "" subscribes to
    every topic."""
    snapshot: str | None = None
    """ZMQ address that serves snapshots, if the engine has a separate one; otherwise ``replay`` is asked."""
    role: Literal["prefill", "decode", "both"] | None = None
    """``prefill``: computes prompts for others; ``decode``: fetches what those computed, and answers;
    ``both``: either. Not set: an engine for itself ([prefill-decode.md](prefill-decode.md))."""
    kind: Literal["vllm", "sglang"] | None = None
    """The engine's software. Not set: found from its `/v1/models` and `/server_info`
    ([engines.md](engines.md))."""
    kv_source: str | None = None
    """``HOST:PORT`` at which other engines fetch blocks from its host memory: the `p2p` tier of vLLM's
    OffloadingConnector, of rank 0 if there are several. Not set: the host of ``base_url`` and
    `pd.offloading_port` ([pull.md](pull.md))."""

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for other engines."""
        return self.role in {"prefill", "both"}

    @property
    def answers(self) -> bool:
        """Whether it generates responses for clients."""
        return self.role != "prefill"

    @property
    def decodes(self) -> bool:
        """Whether it fetches prompts computed by other engines."""
        return self.role in {"decode", "both"}

    @property
    def engine_id(self) -> EngineId:
        """Stable name in metrics, receipts and headers: ``http://host:port`` or ``...#dp1``."""
        return EngineId(self.base_url if self.dp_rank is None else f"{self.base_url}#dp{self.dp_rank}")


@lru_cache(maxsize=4096)
def endpoint_of(base_url: str) -> str:
    """Return ``host:port`` of a base URL, IPv6 addresses in brackets, as gateways name it."""
    url = urlsplit(base_url)
    host = url.hostname or ""
    return f"[{host}]:{url.port or 80}" if ":" in host else f"{host}:{url.port or 80}"


class DiscoveredEngine(msgspec.Struct, frozen=True):
    """One engine as a source sees it now."""

    engine: EngineAddress
    held: str = ""
    """Why it must get no new requests; "" if it may get them."""
    identity: str = ""
    """Identity of the process at that address, e.g. a pod's uid. If it changes, all known state is
    dropped."""
