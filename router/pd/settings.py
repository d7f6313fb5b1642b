"""Settings of prefill and decode on different engines; all defaults live here."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec


class PdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines with the roles `prefill` and `decode`: when a request is split between two of them, and how
    long the blocks may be fetched ([prefill-decode.md](prefill-decode.md)). Raises ``ValueError`` for a value
    out of range."""

    connector: Literal["auto", "nixl", "mooncake", "offloading"] = "auto"
    """The engines' KV connector: `nixl` (NixlConnector), `mooncake` (MooncakeConnector), `offloading`
    (OffloadingConnector with its `p2p` tier). `auto`: detect which of the first two by the answer of a
    prefill engine."""
    mooncake_bootstrap_port: int = 8998
    """Port of the bootstrap server in a prefill engine's pod (`VLLM_MOONCAKE_BOOTSTRAP_PORT`)."""
    offloading_port: int = 5710
    """Port of an engine's `p2p` tier (`VLLM_P2P_SIDE_CHANNEL_PORT`), of rank 0 if there are several."""
    lease_s: float = 30.0
    """The engines' `kv_lease_duration`: how long a prefill engine keeps blocks that are not fetched."""
    lease_margin_s: float | None = None
    """Part of ``lease_s`` that is left to the decode engine; None: as ``margin_s`` derives it."""
    min_remote_tokens: int = 256
    """Prompts of which the decode engine lacks fewer tokens than this are never prefilled elsewhere."""
    transfer_s_per_token: float = 1e-5
    """Seconds to transfer the KV of one token. Default: 100 KB per token at 10 GB/s."""
    leg_overhead_s: float = 0.01
    """Seconds that the second request and the handshake add to a time to first token."""
    decode_delay_weight: float = 1.0
    """Weight of a second for which a prefill delays one running sequence, in seconds of waiting for a first
    token. 0: only the prompt counts, and decode engines prefill whenever they are idle."""
    prefills_max: int = 2
    """Maximum number of prefill engines asked for one request; then the decode engine computes the prompt."""
    mix_versions: bool = False
    """Pair engines whose `/version` differs or is unknown. vLLM's NIXL connector refuses other versions."""

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
        if self.margin_s >= self.lease_s:
            raise ValueError(
                f"lease_margin_s = {self.margin_s} leaves nothing of lease_s = {self.lease_s}; "
                "it must be less"
            )
        if self.prefills_max < 1:
            raise ValueError(f"prefills_max must be at least 1, got {self.prefills_max}")

    @property
    def margin_s(self) -> float:
        """The decode engine is not asked with less than this left of the lease: the request must be in its
        scheduler before the lease ends, or it reads blocks that hold something else by then."""
        return self.lease_s / 3 if self.lease_margin_s is None else self.lease_margin_s


class SidecarSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`kvatlas sidecar`, which runs in front of a decode engine behind a gateway
    ([prefill-decode.md](prefill-decode.md#behind-a-gateway)). `server` and `listen` set its ports, `proxy`
    the time-outs and limits, `pd` the rules."""

    engine: str = "http://127.0.0.1:8001"
    """URL of the decode engine."""
    prefills: tuple[str, ...] = ()
    """Engines that requests may name to compute their prompt, or to pull from ([pull.md](pull.md)):
    `HOST:PORT` or `NETWORK:PORT`, e.g. `10.4.0.0/16:8000` or `[fd00::/8]:8000`. Engines from
    `fleet.kubernetes`, `dns` or `file` with a prefill role or without a role are allowed too. All others are
    refused."""
    secret_file: str | None = None
    """File with a secret of pickers and sidecars (at least 32 bytes: `openssl rand -hex 32`). Pickers sign
    [retention hints](connectors.md#retention-hints) under it, and sidecars pass on those alone. Without it,
    no hint goes through a sidecar."""
    prefill_tls: bool = False
    """Use TLS to prefill engines, which are verified by `fleet.ca_file`, or else by the system's
    authorities."""

    def __post_init__(self) -> None:
        url = urlsplit(self.engine)
        if url.scheme not in {"http", "https"} or not url.hostname or url.path not in {"", "/"}:
            raise ValueError(f"engine = {self.engine!r}: expected http://HOST:PORT or https://HOST:PORT")


# Header fields between an endpoint picker and the sidecar of a decode engine.
#
# The request names the engines that may compute the prompt, the best one first, in llm-d's field, which its
# sidecar reads too. The answer names the one that did; other sidecars do not name it. Pure.


# Request field: ``HOST:PORT``, or several separated by commas.
PREFILLERS: Final = b"x-prefiller-host-port"
# Request field: the engine whose host memory holds a prefix of the prompt, by its HTTP address, in llm-d's
# field. A sidecar knows the port of the ``p2p`` tiers.
KV_SOURCE: Final = b"x-kv-cache-source-host-port"
# Request field: a retention hint, signed, since a gateway may forward a client's own field.
RETENTION: Final = b"x-kvatlas-retention-hint"
# Answer field: position in that list and ``cached_tokens`` there, or a dash for either.
PREFILLED: Final = b"x-kvatlas-prefilled"
# Request field: rank of the answering engine, which has no meaning for the prefill engine.
RANK: Final = b"x-data-parallel-rank"
_NAMED_MAX: Final = 8
_ENDPOINT: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z][0-9A-Za-z.-]{0,252}):[0-9]{1,5}")
_TOLD: Final = re.compile(rb"([0-9]{1,3}|-) ([0-9]{1,9}|-)")
_NONE: Final = b"- -"


class Prefilled(NamedTuple):
    """``place`` None: the answering engine computed the prompt itself. ``cached_tokens`` None: unknown."""

    place: int | None
    cached_tokens: int | None


def read_endpoints(fields: Iterable[tuple[bytes, bytes]], field: bytes = PREFILLERS) -> list[str]:
    """Parse the named endpoints in order, skipping invalid ones; at most 8 are read."""
    given = [value for name, value in fields if name == field]
    texts = [text.strip() for text in b",".join(given).decode("latin-1").split(",", _NAMED_MAX)[:_NAMED_MAX]]
    return list(dict.fromkeys(text for text in texts if _ENDPOINT.fullmatch(text)))


def prefilled_field(prefilled: Prefilled) -> tuple[bytes, bytes]:
    """Encode the answer field."""
    if prefilled.place is None:
        return PREFILLED, _NONE
    cached = b"-" if prefilled.cached_tokens is None else b"%d" % prefilled.cached_tokens
    return PREFILLED, b"%d %b" % (prefilled.place, cached)


def read_prefilled(fields: Iterable[tuple[bytes, bytes]]) -> Prefilled | None:
    """Parse the answer field; None if it is missing or unreadable."""
    value = next((value for name, value in fields if name == PREFILLED), b"")
    found = _TOLD.fullmatch(value)
    if found is None:
        return None
    place, cached = (None if part == b"-" else int(part) for part in found.groups())
    return Prefilled(place, None if place is None else cached)


class SidecarHints(NamedTuple):
    """Retention hints as JSON for the engine beside the sidecar and for the prefill engine; empty: none."""

    own: bytes = b""
    prefill: bytes = b""


def hint_field(hint: bytes, secret: bytes, *, own: bool, prefill: bool) -> tuple[bytes, bytes]:
    """Encode the field of a hint, which is ASCII without line breaks, for these of the two engines."""
    text = b"%b%b %b" % (b"o" * own, b"p" * prefill, hint)
    return RETENTION, b"%b %b" % (_signature(text, secret), text)


def read_hints(fields: Iterable[tuple[bytes, bytes]], secret: bytes | None) -> SidecarHints | None:
    """Parse the field; None if there is one that is not signed under the secret."""
    value = next((value for name, value in fields if name == RETENTION), None)
    if value is None:
        return SidecarHints()
    signature, _, text = value.partition(b" ")
    if secret is None or not hmac.compare_digest(signature, _signature(text, secret)):
        return None
    engines, _, hint = text.partition(b" ")
    return SidecarHints(*(hint if engine in engines else b"" for engine in (b"o", b"p")))


def _signature(text: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, b"%b: %b" % (RETENTION, text), hashlib.sha256).hexdigest().encode()


# Counters of requests on two engines; the metrics exporter reads them.


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

    prefillers_refused: Annotated[int, "kvatlas_pd_prefillers_refused_total"] = 0
    """Requests to a sidecar that named only engines it may not ask (`sidecar.prefills`)."""
    kv_sources_refused: Annotated[int, "kvatlas_pd_kv_sources_refused_total"] = 0
    """Requests to a sidecar that named an engine to pull from that its engine may not ask."""
    hints_refused: Annotated[int, "kvatlas_pd_retention_hints_refused_total"] = 0
    """Requests to a sidecar with a retention hint that is not signed under its `sidecar.secret_file`."""
    secret_failures: Annotated[int, "kvatlas_pd_secret_failures_total"] = 0
    """Failed attempts to read the changed `sidecar.secret_file`; the last secret stays in use."""

    def secret_failed(self) -> None:
        """Count a secret that could not be read again."""
        self.secret_failures += 1

    def count(self, counts: dict[str, int], reason: str) -> None:
        """Increment a counter by reason."""
        counts[reason] = counts.get(reason, 0) + 1
