"""Settings of the fleet: sources of engines and polling; all defaults live here."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvatlas.router.http.addresses import port_fault
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.secret_files import warn_if_public
from kvatlas.router.http.tls import TlsFiles

_DNS_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_PORT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,14})")
_DNS_PORT = 53
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAMESPACE = re.compile(r"\*|[a-z0-9]([a-z0-9-]{0,62})")


class FileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines listed in a file that is read again whenever it changes (TOML, or JSON if it ends in `.json`).

    The file holds `[[engines]]` tables with the keys of the main file; `drain = true` keeps new requests from
    an engine. A file that cannot be read or parsed changes nothing; it is logged and counted.
    """

    path: str | None = None
    """File to watch; switches this source on. Replace it in one step (rename), as mounted ConfigMaps are. Set
    it if a tool of yours lists the engines."""
    # Not a key of the configuration: config/removed.py.
    interval_s: float = 1.0
    """Seconds between two readings. New content counts once two readings in a row agree."""

    @property
    def on(self) -> bool:
        return self.path is not None


class DnsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines found by DNS: every address of a name. The name is resolved again when the TTL has passed."""

    names: tuple[str, ...] = ()
    """Names to resolve; switches this source on. `HOST:PORT` for the addresses of a host,
    `_SERVICE._PROTOCOL.NAME` for SRV records, which carry the ports (only the records with the lowest
    priority number count). Set it if a headless Service or a registry has the engines."""
    servers: tuple[str, ...] = ()
    """DNS servers as `ADDRESS` or `ADDRESS:PORT`; those of `/etc/resolv.conf` where none is given. Set it if
    the system's servers do not know the names."""
    events_port: int | None = None
    """Port of each engine's event socket. Not set: the engine is asked (`GET /kv_event_sources`). Set it for
    vLLM before 0.31."""
    replay_port: int | None = None
    """Port of each engine's replay socket; only together with `events_port`. Set it with that."""
    # Not a key of the configuration: config/removed.py.
    interval_s_max: float = 30.0
    """Longest pause between two questions; a longer TTL is cut to this. Also the longest pause after
    failures."""
    # Not a key of the configuration: config/removed.py.
    timeout_s: float = 2.0
    """Time-out of one question to one server, in seconds."""

    def __post_init__(self) -> None:
        for name in self.names:
            if not _dns_target(name):
                raise ValueError(f"names: {name!r} is neither HOST:PORT nor _SERVICE._PROTOCOL.NAME")
        for server in self.servers:
            try:
                parse_server(server)
            except ValueError as error:
                raise ValueError(f"servers: {error}") from None
        if self.replay_port is not None and self.events_port is None:
            raise ValueError("replay_port: needs events_port; set both")
        for key in ("events_port", "replay_port"):
            port = getattr(self, key)
            if port is not None and (fault := port_fault(port, lowest=1)):
                raise ValueError(f"{key}: {fault}")

    @property
    def on(self) -> bool:
        return bool(self.names)


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Engines found in Kubernetes, by list and watch. The service account needs get, list and watch on pods,
    EndpointSlices and InferencePools, as selected below.

    Annotations of a pod: `kvatlas.io/port`, `kvatlas.io/events-port`, `kvatlas.io/replay-port`,
    `kvatlas.io/snapshot-port`, `kvatlas.io/topic`, `kvatlas.io/kv-source-port` (the `p2p` tier that other
    engines [pull](pull.md) from), `kvatlas.io/data-parallel-size` (event and `p2p` ports are base + rank),
    `kvatlas.io/drain: "true"` (no new requests), `kvatlas.io/ignore: "true"` (not an engine). The label
    `llm-d.ai/role` (`prefill`, `decode`, `prefill-decode`) gives its role.
    """

    selector: str = ""
    """Label selector of the engines' pods, e.g. `app=vllm`; switches this source on. Set it if the engines
    run in the same cluster."""
    inference_pool: str = ""
    """Name of an InferencePool (`inference.networking.k8s.io/v1`) whose selector and target ports say which
    pods are engines, instead of `selector`; switches this source on. Its namespace is the one of
    `namespaces`, else the router's own. Set it where a gateway uses the same pool."""
    service_selector: str = ""
    """Label selector of EndpointSlices, e.g. `kubernetes.io/service-name=vllm`. With `selector` or
    `inference_pool`: a pod gets requests only while its endpoint is ready. Alone: every endpoint is an
    engine. Set it if readiness gates of a Service should count."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; the router's own where none is given. `*` is all of them and needs a ClusterRole.
    Set it if engines run in other namespaces."""
    port_name: str = "http"
    """Name of the container port that serves HTTP. A pod without a port of this name: its only port, else
    `port`. Set it as the pods name theirs."""
    port: int = 8000
    """HTTP port of pods that name none. Set it if that is not 8000."""
    events_port_name: str = "kv-events"
    """Name of the container port of events; a pod without one is asked (`GET /kv_event_sources`). Set it as
    the pods name theirs."""
    replay_port_name: str = "kv-replay"
    """Name of the container port of the replay socket. Set it as the pods name theirs."""
    kubeconfig: str | None = None
    """Path of a kubeconfig, for a router outside the cluster. Its current context is used: client
    certificate, token, or login plug-in (`exec`), which runs again when its token is refused. Set it on a
    machine outside."""
    api: str | None = None
    """URL of the API server, e.g. of `kubectl proxy`; not needed inside a cluster. Set it for a proxy of the
    API server."""
    # Not a key of the configuration: config/removed.py.
    credentials_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with `token`, `ca.crt` and `namespace`; the token is read again when it is
    refused, the CA for every request."""
    # Not a key of the configuration: config/removed.py.
    watch_s: float = 60.0
    """How long the API server keeps one watch open, in seconds; also the longest time a dead connection
    stays unnoticed."""
    deletion_costs: bool = False
    """Write the annotation `controller.kubernetes.io/pod-deletion-cost` of the engines' pods: the worth of
    each cache in milliseconds of prefill per minute, -1 for a drained engine. A Deployment that scales down
    removes the pods with the lowest costs first. The service account also needs patch on pods. Switch it on
    if an autoscaler removes engines."""

    def __post_init__(self) -> None:
        for key in ("port_name", "events_port_name", "replay_port_name"):
            if not _PORT_NAME.fullmatch(getattr(self, key)):
                raise ValueError(
                    f"{key}: {getattr(self, key)!r} is not a port name (at most 15 of a-z, 0-9, -)"
                )
        for namespace in self.namespaces:
            if not _NAMESPACE.fullmatch(namespace):
                raise ValueError(f"namespaces: {namespace!r} is not a namespace; * stands for all")
        if "*" in self.namespaces and len(self.namespaces) > 1:
            raise ValueError("namespaces: * covers all namespaces; give it alone")
        if self.inference_pool:
            self._check_pool()
        if fault := port_fault(self.port, lowest=1):
            raise ValueError(f"port: {fault}")
        if self.deletion_costs and not (self.selector or self.inference_pool):
            raise ValueError("deletion_costs: pods must be selected; set selector or inference_pool")
        if self.api is not None and self.kubeconfig is not None:
            raise ValueError("api: the kubeconfig names the API server already; give one of the two")
        if self.api is not None and urlsplit(self.api).scheme not in {"http", "https"}:
            raise ValueError(f"api: {self.api!r} is not http(s)://HOST:PORT")

    def _check_pool(self) -> None:
        if not _OBJECT_NAME.fullmatch(self.inference_pool):
            raise ValueError(f"inference_pool: {self.inference_pool!r} is not the name of an object")
        if self.selector:
            raise ValueError("inference_pool: it has a selector of its own; leave out selector")
        if len(self.namespaces) > 1 or "*" in self.namespaces:
            raise ValueError("namespaces: an inference_pool is in one namespace; give that one")

    @property
    def on(self) -> bool:
        return bool(self.selector or self.service_selector or self.inference_pool)


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often engines are polled, and how many there may be. Raises ``ValueError`` for a time out of
    range."""

    poll_interval_s: float = 5.0
    """Seconds between two health polls of an engine that is up. Its `/metrics` (running and waiting requests,
    KV usage) are read at 0.4 of this, which takes 0.35 to 0.5 ms of CPU each time: at 5 s about 1 % of a core
    with 64 engines and 25 % with 1,024. Raise it in a large fleet whose routers lack CPU; lower it for queues
    that other routers fill too."""
    # Not a key of the configuration: config/removed.py.
    poll_down_interval_s: float | None = None
    """Seconds between two health polls of an engine that is down; None: as ``down_interval_s`` derives it."""
    poll_timeout_s: float = 3.0
    """Time-out of one poll, in seconds. Raise it if healthy engines on crowded machines are reported down."""
    # Not a key of the configuration: config/removed.py.
    polls_missed_max: int = 3
    """An engine is down when its port refuses connections, or after this many failed polls in a row."""
    # Not a key of the configuration: config/removed.py.
    gauge_interval_s: float | None = None
    """Seconds between two readings of an engine's `/metrics`; None: as ``gauges_s`` derives it."""
    warm_up_s_max: float = 30.0
    """Longest time after start during which `/ready` answers 503 because sources of engines have not answered
    yet or feeds are still replaying. Raise it if engines take longer to be found; lower it if a rollout must
    not wait."""
    engines_max: int = 1024
    """Most servers in the fleet; further ones are ignored, counted and logged. Raise it for a larger fleet;
    lower it if a wrong selector or DNS name could add thousands."""
    probe: bool = False
    """Probe engines that join, restart or come back: two short prompts in each API, with one generated token
    each, show whether they report cached tokens, publish the events of what they store, and hit as
    predicted; with `[pull]` also whether others reach their host memory. Only engines at which nothing waits
    are asked. Hits that are not proven count less in decisions, and `/kvatlas/engines`, status page and
    doctor show why. Switch it on if engines of other makers, releases or proxies may join."""
    probes_max: int = 2
    """Most requests of probes in flight, in the whole fleet. Raise it if many engines join at once."""
    api_key_file: str | None = None
    """File with the key for engines started with ``--api-key``, sent with the router's own requests. Clients'
    requests keep their own ``Authorization``. Set it for such engines."""
    ca_file: str | None = None
    """Certificate authority of engines with `https://` addresses, PEM; the system's where not set. Read again
    when it changes, as the next two. Set it for a private authority."""
    client_cert_file: str | None = None
    """Certificate that the router presents to such engines, PEM. Set it if the engines ask for client
    certificates."""
    client_key_file: str | None = None
    """Private key of that certificate, PEM. Set it with `client_cert_file`."""
    file: FileSettings = FileSettings()
    """Engines listed in a watched file."""
    dns: DnsSettings = DnsSettings()
    """Engines found by DNS."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Engines found in Kubernetes."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "poll_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.probes_max < 1:
            raise ValueError(f"probes_max must be at least 1, got {self.probes_max}; set probe = false")
        if (self.client_cert_file is None) != (self.client_key_file is None):
            raise ValueError("client_cert_file: needs client_key_file, and that needs client_cert_file")

    @property
    def down_interval_s(self) -> float:
        """Seconds between two health polls of an engine that is down; bounds how late its return is seen."""
        if self.poll_down_interval_s is not None:
            return self.poll_down_interval_s
        return min(0.5, self.poll_interval_s / 2)

    @property
    def gauges_s(self) -> float:
        """Seconds between two readings of an engine's `/metrics` (running and waiting requests, KV usage)."""
        if self.gauge_interval_s is not None:
            return self.gauge_interval_s
        return 0.4 * self.poll_interval_s

    @property
    def tls(self) -> TlsFiles:
        """Connection settings for requests to engines."""
        return TlsFiles(self.client_cert_file, self.client_key_file, self.ca_file)

    @property
    def discovers(self) -> bool:
        """Whether engines may come by themselves."""
        return self.file.on or self.dns.on or self.kubernetes.on

    def headers(self) -> dict[str, str]:
        """Return the headers of the router's own requests to engines. Raises ``ValueError`` for a bad key
        file.
        """
        if self.api_key_file is None:
            return {}
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"fleet.api_key_file: {self.api_key_file}: {describe_error(error)}") from None
        warn_if_public(Path(self.api_key_file), "fleet.api_key_file")
        if not key or not key.isprintable():
            raise ValueError(f"fleet.api_key_file: {self.api_key_file} does not hold one line with a key")
        return {"authorization": f"Bearer {key}"}


def _dns_target(name: str) -> bool:
    if name.startswith("_"):
        return bool(_DNS_NAME.fullmatch(name)) and name.count(".") >= 2
    host, _, port = name.rpartition(":")
    return bool(_DNS_NAME.fullmatch(host)) and port.isdecimal() and 0 < int(port) < 1 << 16


def parse_server(text: str) -> tuple[str, int]:
    """A DNS server as ``ADDRESS``, ``ADDRESS:PORT`` or ``[IPV6]:PORT``. Raises ``ValueError``."""
    host, separator, port = text.rpartition(":")
    if not separator or (":" in host and not host.startswith("[")):
        host, port = text, str(_DNS_PORT)
    try:
        address = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        address = ""
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is not ADDRESS or ADDRESS:PORT")
    return address, int(port)
