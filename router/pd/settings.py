"""Settings of prefill and decode on different engines; all defaults live here."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec


class PdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines with the roles `prefill` and `decode`: when a request is split between two of them, and how
    long the blocks may be fetched ([prefill-decode.md](prefill-decode.md)). Raises ``ValueError`` for a value
    out of range."""

    connector: Literal["auto", "nixl", "mooncake", "offloading"] = "auto"
    """The engines' KV connector: `nixl` (NixlConnector), `mooncake` (MooncakeConnector), `offloading`
    (OffloadingConnector with its `p2p` tier). `auto`: detect which of the first two by the answer of a
    prefill engine. Set it for `offloading`, which is not detected."""
    mooncake_bootstrap_port: int = 8998
    """Port of the bootstrap server in a prefill engine's pod (`VLLM_MOONCAKE_BOOTSTRAP_PORT`). Set it as the
    engines were started."""
    offloading_port: int = 5710
    """Port of an engine's `p2p` tier (`VLLM_P2P_SIDE_CHANNEL_PORT`), of rank 0 if there are several. Set it
    as the engines were started."""
    lease_s: float = 30.0
    """The engines' `kv_lease_duration`: how long a prefill engine keeps blocks that are not fetched. Set it
    as the engines were started."""
    # Not a key of the configuration: config/removed.py.
    lease_margin_s: float | None = None
    """Part of ``lease_s`` that is left to the decode engine; None: as ``margin_s`` derives it."""
    min_remote_tokens: int = 256
    """Prompts of which the decode engine lacks fewer tokens than this are never prefilled elsewhere. Raise it
    on a slow network between the engines."""
    transfer_s_per_token: float = 1e-5
    """Seconds to transfer the KV of one token. Default: 100 KB per token at 10 GB/s. Set it to bytes of KV
    per token divided by the measured bandwidth."""
    leg_overhead_s: float = 0.01
    """Seconds that the second request and the handshake add to a time to first token. Set it to the measured
    time to first token of a split short prompt less that of a whole one."""
    decode_delay_weight: float = 1.0
    """Weight of a second for which a prefill delays one running sequence, in seconds of waiting for a first
    token. 0: only the prompt counts, and decode engines prefill whenever they are idle. Raise it if steady
    tokens matter more than first ones."""
    # Not a key of the configuration: config/removed.py.
    prefills_max: int = 2
    """Maximum number of prefill engines asked for one request; then the decode engine computes the prompt."""
    mix_versions: bool = False
    """Pair engines whose `/version` differs or is unknown. vLLM's NIXL connector refuses other versions.
    Switch it on for a rolling upgrade with a connector that accepts it."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None or isinstance(value, bool | str):
                continue
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name in ("mooncake_bootstrap_port", "offloading_port"):
            if not 0 < getattr(self, name) < 1 << 16:
                raise ValueError(f"{name} = {getattr(self, name)}: expected a port")

    @property
    def margin_s(self) -> float:
        """The decode engine is not asked with less than this left of the lease: the request must be in its
        scheduler before the lease ends, or it reads blocks that hold something else by then."""
        return self.lease_s / 3 if self.lease_margin_s is None else self.lease_margin_s


# The next three tell the sidecar of a decode engine whom to ask: llm-d's, whose sidecar reads them. No
# client's own reaches one. This one: ``HOST:PORT`` of the engine that computes the prompt.
PREFILLER: Final = b"x-prefiller-host-port"
# Request field: the engine whose host memory holds a prefix of the prompt, by its HTTP address. The sidecar
# knows the port of the ``p2p`` tiers.
KV_SOURCE: Final = b"x-kv-cache-source-host-port"
# Request field: rank of the answering engine, which has no meaning for the prefill engine.
RANK: Final = b"x-data-parallel-rank"


class PdStats(msgspec.Struct):
    """Monotone counters."""

    split: Annotated[int, "kvatlas_pd_split_total"] = 0
    """Requests sent to a prefill and a decode engine, retries included."""
    aggregated: Annotated[dict[str, int], "kvatlas_pd_aggregated_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Requests of fleets with roles that stayed on one engine, by reason."""
    handoffs: Annotated[int, "kvatlas_pd_handoffs_total"] = 0
    """Prefills whose blocks a decode engine was asked to fetch."""
    prefill_failures: Annotated[dict[str, int], "kvatlas_pd_prefill_failures_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Prefills without blocks to hand over, by reason."""
    leases_late: Annotated[int, "kvatlas_pd_leases_late_total"] = 0
    """Prefills discarded because too little was left of their lease."""
    answers_late: Annotated[int, "kvatlas_pd_answers_late_total"] = 0
    """Answers discarded because they began after the end of the lease on their blocks: the decode engine
    paused or was overloaded."""
    handoffs_lost: Annotated[int, "kvatlas_pd_handoffs_lost_total"] = 0
    """Decode engines that failed after the handoff; the blocks are not handed to another one."""
    handoffs_redirected: Annotated[int, "kvatlas_pd_handoffs_redirected_total"] = 0
    """Decode engines that could not be reached, so that another one got the same handoff."""
    gap_s: Annotated[float, "kvatlas_pd_gap_seconds_total"] = 0.0
    """Seconds between the two requests, summed over all handoffs."""
    prefill_s: Annotated[float, "kvatlas_pd_prefill_seconds_total"] = 0.0
    """Seconds that prefill engines took to answer, summed over all handoffs."""

    def count(self, counts: dict[str, int], reason: str) -> None:
        """Increment a counter by reason."""
        counts[reason] = counts.get(reason, 0) + 1
