"""Settings and counters of the endpoint picker. Names carry units; all defaults live here."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvatlas.router.http.h2_connection import H2Stats
from kvatlas.router.http.tls import TlsFiles, check_tls_files


class EppSettings(msgspec.Struct, frozen=True):
    """The endpoint picker that gateways call by ext_proc ([gateway.md](gateway.md)). Limits of bodies and
    heads are those of `proxy` and `listen`, time-outs of engines those of `proxy`."""

    listen: str = ""
    """`HOST:PORT` for gateways (gRPC); port 0 takes a free one. Empty: there is no endpoint picker. `kvatlas
    epp` listens on `0.0.0.0:9002` if this is not set. Set it to have proxy and picker in one process."""
    health_listen: str = ""
    """`HOST:PORT` of a port without TLS that answers only gRPC health checks, for probes without TLS. Empty:
    checks are answered on `listen` only. Set it for kubelet's gRPC probes, which speak no TLS."""
    tls: bool = True
    """Use TLS on `listen`; without `tls_cert_file` with a certificate made at the start (by openssl), which
    gateways can only accept unverified. Switch it off for gateways that speak h2c to pickers."""
    tls_cert_file: str | None = None
    """Certificate chain of `listen`, PEM. Read again when it changes, like its key. Set it for gateways that
    verify."""
    tls_key_file: str | None = None
    """Private key of that certificate, PEM. Set it with `tls_cert_file`."""
    client_ca_file: str | None = None
    """Certificate authority of gateways, PEM: each gateway must present a certificate signed by it (mTLS).
    Set it if the port is reachable from other pods."""
    fallbacks: int = 0
    """Number of further engines named after the chosen one, in order of preference. 0 if the gateway's
    cluster is of type ORIGINAL_DST, which takes no list. Raise it if the gateway retries at another endpoint
    of the list."""
    answers_watched_share: float = 1.0
    """Share of completions whose answers the gateway shows here, 0 to 1: receipts, times and tenants'
    generated tokens come from those. The end of the others is estimated, and corrected by the engines' own
    numbers of running requests. 0 if the gateway sends no responses. Lower it if the gateway's or the
    picker's CPU is short."""
    sidecar: bool = False
    """Engines have a sidecar that reads `x-prefiller-host-port` and `x-kv-cache-source-host-port` as llm-d's
    does, and their addresses are the sidecars': requests may be split
    ([prefill-decode.md](prefill-decode.md)), and engines may [pull](pull.md). Answers to split requests and
    of engines that pull are always watched. Switch it on if the engines' pods have one."""
    # Not a key of the configuration: config/removed.py.
    request_timeout_s: float = 30.0
    """Longest pause between two messages with a request's head and body, in seconds."""
    drain_delay_s: float = 0.0
    """Seconds from SIGTERM until gateways are sent GOAWAY: the time they need to notice that health checks
    fail. Requests that arrive meanwhile are answered. Set it to the gateway's interval of health checks times
    its failures."""
    drain_s_max: float = 30.0
    """Seconds after that during which running requests may finish before they are cut. Raise it to the
    longest answer that must not be cut."""
    # Not a key of the configuration: config/removed.py.
    connections_max: int = 256
    """Most connections of gateways; further ones are closed at once. A gateway holds one for each of its
    threads."""

    def __post_init__(self) -> None:
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.client_ca_file)
        if self.tls_cert_file is not None and not self.tls:
            raise ValueError("tls: false, but there is a tls_cert_file; leave one of them out")
        if not 0.0 <= self.answers_watched_share <= 1.0:
            raise ValueError(f"answers_watched_share = {self.answers_watched_share}: expected 0 to 1")
        if self.sidecar and not self.answers_watched_share:
            raise ValueError(
                "sidecar: the end of a prefill is seen by the answer; set answers_watched_share above 0, or "
                "leave sidecar out"
            )
        for key in ("listen", "health_listen"):
            if text := getattr(self, key):
                try:
                    parse_listen(text)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None

    @property
    def files(self) -> TlsFiles:
        """TLS files of `listen`; without any, a self-signed certificate or no TLS."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.client_ca_file)


class EppStats(H2Stats):
    """Requests of gateways and their outcomes."""

    picks: Annotated[dict[str, int], "kvatlas_epp_picks_total{mode}"] = msgspec.field(default_factory=dict)
    """Requests sent to an engine, by the gateway's mode: duplex or buffered."""
    immediate: Annotated[int, "kvatlas_epp_immediate_total"] = 0
    """Requests answered by the picker itself: errors, and paths that need no engine."""
    gateways_own: Annotated[int, "kvatlas_epp_gateways_own_total"] = 0
    """Requests that the gateway answered itself before an engine was named (a body too large for it to
    buffer, its own time-out); they count as left by the client."""
    fallbacks_served: Annotated[int, "kvatlas_epp_fallbacks_served_total"] = 0
    """Requests served by another engine than the chosen one."""
    calls_refused: Annotated[dict[str, int], "kvatlas_epp_calls_refused_total{reason}"] = msgspec.field(
        default_factory=dict
    )
    """Calls ended with a gRPC error, by reason: the gateway is configured in a way that cannot work, or broke
    the protocol."""
    cut_before_answer: Annotated[int, "kvatlas_epp_cut_before_answer_total"] = 0
    """Calls that ended after the choice and before an answer was seen: the client left, or the gateway does
    not send responses here (then set `answers_watched_share = 0`)."""
    unwatched: Annotated[int, "kvatlas_epp_unwatched_total"] = 0
    """Requests whose answers were not watched (`answers_watched_share`)."""
    ends_estimated: Annotated[int, "kvatlas_epp_ends_estimated_total"] = 0
    """Of those, the ones that ended by estimate; the others ended when the engine reported fewer running
    requests."""

    def picked(self, mode: str) -> None:
        """Count a request sent to an engine."""
        self.picks[mode] = self.picks.get(mode, 0) + 1


def parse_listen(text: str) -> tuple[str, int]:
    """Parse host and port. Raises ``ValueError``."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ValueError(f"{text!r}: expected HOST:PORT, e.g. 0.0.0.0:9002")
    return host.removeprefix("[").removesuffix("]"), int(port)
