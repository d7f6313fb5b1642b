"""Configuration of an Envoy with an endpoint picker (docs/gateway.md describes the same).

Pure. It contains what gateways of the Inference Extension set up themselves: the filter, and clusters that
use the picker's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Return a cluster of these endpoints."""
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


def original_dst() -> Json:
    """Return a cluster that goes to any address that the picker names."""
    return {
        "name": "original_dst",
        "type": "ORIGINAL_DST",
        "connect_timeout": "2s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def pickers(endpoints: Sequence[str]) -> Json:
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
    return {
        "name": name,
        "address": address(f"127.0.0.1:{port}"),
        "filter_chains": [{"filters": [network]}],
    }


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
    """Return one HTTP filter."""
    typed = {"@type": f"{_FILTERS}.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}
