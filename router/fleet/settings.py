"""Where engines come from, how often they are asked, how long is waited; all defaults live here."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from router.fleet.sources.dns.resolver import parse_server

_DNS_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_PORT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,14})")
_NAMESPACE = re.compile(r"\*|[a-z0-9]([a-z0-9-]{0,62})")


class FileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines listed in a file that is read again whenever it changes (TOML, or JSON if it ends in `.json`).

    It holds `[[engines]]` tables with the keys of the main file, and `drain = true` for an engine that is to
    get no new requests. What cannot be read or understood changes nothing, and is said and counted.
    """

    path: str | None = None
    """Switches this source on. Best replaced in one step (rename), as mounted ConfigMaps are."""
    interval_s: float = 1.0
    """How often it is read. New content counts once two readings in a row are the same."""
    bytes_max: int = 1 << 20

    @property
    def on(self) -> bool:
        return self.path is not None


class DnsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines found by DNS: every address of a name. Asked again when the answer's TTL has passed."""

    names: tuple[str, ...] = ()
    """Switches this source on: `HOST:PORT` for the addresses of a host, `_SERVICE._PROTOCOL.NAME` for SRV
    records, which tell the ports (of several priorities the lowest number counts)."""
    servers: tuple[str, ...] = ()
    """`ADDRESS` or `ADDRESS:PORT` of the servers to ask; those of `/etc/resolv.conf` where none is given."""
    events_port: int | None = None
    """Port of each engine's events; engines are asked for theirs where not given."""
    replay_port: int | None = None
    interval_s_min: float = 2.0
    """Shorter TTLs are taken for this long."""
    interval_s_max: float = 30.0
    """Longer TTLs are taken for this long; also the longest pause after failures."""
    timeout_s: float = 2.0
    """For one question to one server."""
    empty_answers: int = 3
    """An answer without any address is believed after so many in a row."""

    def __post_init__(self) -> None:
        for name in self.names:
            if not _dns_target(name):
                raise ValueError(f"names: {name!r} is neither HOST:PORT nor _SERVICE._PROTOCOL.NAME")
        for server in self.servers:
            try:
                parse_server(server)
            except ValueError as error:
                raise ValueError(f"servers: {error}") from None
        if self.interval_s_min > self.interval_s_max:
            raise ValueError(
                f"interval_s_min: {self.interval_s_min} is above interval_s_max = {self.interval_s_max}"
            )
        if self.replay_port is not None and self.events_port is None:
            raise ValueError("replay_port: without events_port there is nothing to complete; give both")
        for key in ("events_port", "replay_port"):
            port = getattr(self, key)
            if port is not None and not 0 < port < 1 << 16:
                raise ValueError(f"{key}: {port} is not a port number")

    @property
    def on(self) -> bool:
        return bool(self.names)


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines found in Kubernetes, by list and watch. Needs get, list and watch on what is selected below.

    Annotations of a pod: `kvatlas.io/port`, `kvatlas.io/events-port`, `kvatlas.io/replay-port`,
    `kvatlas.io/snapshot-port`, `kvatlas.io/topic`, `kvatlas.io/data-parallel-size` (event ports are base +
    rank), `kvatlas.io/drain: "true"` (no new requests), `kvatlas.io/ignore: "true"` (not an engine).
    """

    selector: str = ""
    """Label selector of the engines' pods, e.g. `app=vllm`. Switches this source on."""
    service_selector: str = ""
    """Label selector of EndpointSlices, e.g. `kubernetes.io/service-name=vllm`. With `selector`: a pod gets
    requests only while these say that it is ready. Alone: every endpoint is an engine."""
    namespaces: tuple[str, ...] = ()
    """The router's own where none is given; `*` for all, which needs a ClusterRole."""
    port_name: str = "http"
    """Name of the HTTP port. Without one of that name: the only port there is, else `port`."""
    port: int = 8000
    events_port_name: str = "kv-events"
    """Name of the port of events; without one the engine is asked (`GET /kv_event_sources`)."""
    replay_port_name: str = "kv-replay"
    kubeconfig: str | None = None
    """Outside a cluster. Its current context counts; a client certificate or a token, no login plug-ins."""
    api: str | None = None
    """URL of the API server, e.g. of `kubectl proxy`; inside a cluster it is found by itself."""
    credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Has `token`, `ca.crt` and `namespace`; the token is read again for every request."""
    watch_s: float = 60.0
    """How long the API server keeps one watch open. A connection that died unnoticed costs this at most."""
    retry_s_max: float = 30.0
    """Longest pause after failures in a row."""
    objects_max: int = 10_000
    """More pods or slices than this are an error, and what was known stays."""

    def __post_init__(self) -> None:
        for key in ("port_name", "events_port_name", "replay_port_name"):
            if not _PORT_NAME.fullmatch(getattr(self, key)):
                raise ValueError(f"{key}: {getattr(self, key)!r} is no port name (at most 15 of a-z, 0-9, -)")
        for namespace in self.namespaces:
            if not _NAMESPACE.fullmatch(namespace):
                raise ValueError(f"namespaces: {namespace!r} is no namespace; * stands for all")
        if "*" in self.namespaces and len(self.namespaces) > 1:
            raise ValueError("namespaces: * is all of them already; give it alone")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"port: {self.port} is not a port number")
        if self.watch_s < 1:
            raise ValueError(f"watch_s: {self.watch_s} is below 1 s")
        if self.api is not None and self.kubeconfig is not None:
            raise ValueError("api: the kubeconfig names the API server already; give one of the two")
        if self.api is not None and urlsplit(self.api).scheme not in {"http", "https"}:
            raise ValueError(f"api: {self.api!r} is not http(s)://HOST:PORT")

    @property
    def on(self) -> bool:
        return bool(self.selector or self.service_selector)


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. Raises ``ValueError`` for a time that is none."""

    poll_interval_s: float = 5.0
    poll_down_interval_s: float = 0.5
    """While an engine does not answer: how quickly its return is noticed."""
    poll_timeout_s: float = 3.0
    polls_missed_max: int = 3
    """An engine is down when its port refuses, or after this many polls in a row without a sound answer."""
    gauge_interval_s: float = 2.0
    answer_bytes_max: int = 8 << 20
    warm_up_s_max: float = 30.0
    """How long /ready waits for sources to be heard and feeds to catch up before traffic is taken without."""
    engines_max: int = 1024
    """Servers beyond this many are left out, counted and said."""
    api_key_file: str | None = None
    """File with the key that engines started with ``--api-key`` want; sent with the router's own questions.
    Clients' requests carry their own ``Authorization``, which passes through."""
    file: FileSettings = FileSettings()
    """Engines listed in a watched file."""
    dns: DnsSettings = DnsSettings()
    """Engines found by DNS."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Engines found in Kubernetes."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "poll_down_interval_s", "poll_timeout_s", "gauge_interval_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")

    @property
    def discovers(self) -> bool:
        """Whether engines may come by themselves."""
        return self.file.on or self.dns.on or self.kubernetes.on

    def headers(self) -> dict[str, str]:
        """What the router's own requests to engines carry. Raises ``ValueError`` for a key file of no use."""
        if self.api_key_file is None:
            return {}
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"fleet.api_key_file: {error}") from None
        if not key or not key.isprintable():
            raise ValueError(f"fleet.api_key_file: {self.api_key_file} does not hold one line with a key")
        return {"authorization": f"Bearer {key}"}


def _dns_target(name: str) -> bool:
    if name.startswith("_"):
        return bool(_DNS_NAME.fullmatch(name)) and name.count(".") >= 2
    host, _, port = name.rpartition(":")
    return bool(_DNS_NAME.fullmatch(host)) and port.isdecimal() and 0 < int(port) < 1 << 16
