"""A real Envoy before engines and an endpoint picker, with one listener for each way of asking the picker."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.ports import free_ports
from tests.support.waiting import until

Json = dict[str, Any]
LISTENERS = ("original_dst", "override_host", "buffered", "buffered_original_dst", "streamed")
DESTINATION = "x-gateway-destination-endpoint"
_FILTERS = "type.googleapis.com/envoy.extensions.filters"
_BODIES = {
    "original_dst": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    "override_host": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    "buffered": ("BUFFERED", "STREAMED"),
    "buffered_original_dst": ("BUFFERED", "STREAMED"),
    "streamed": ("STREAMED", "STREAMED"),
}
"""Body modes of request and answer, by listener; the last one is a gateway that is set up wrongly."""


def program() -> str:
    """The program; the test is skipped where it is not named."""
    found = os.environ.get("KVATLAS_ENVOY")
    if not found:
        pytest.skip("KVATLAS_ENVOY names no envoy; make test-envoy installs one")
    return found


class Envoy:
    """A running gateway."""

    def __init__(self, ports: dict[str, int], admin: int, session: aiohttp.ClientSession) -> None:
        self.ports = ports
        self.session = session
        self._admin = admin

    def url(self, listener: str) -> str:
        return f"http://127.0.0.1:{self.ports[listener]}"

    async def ask(
        self, listener: str, path: str, body: Any = None, *, method: str = "", **options: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        how = method or ("GET" if data is None else "POST")
        async with self.session.request(
            how,
            self.url(listener) + path,
            data=None if data is None else io.BytesIO(data),
            headers=headers,
            **options,
        ) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def stat(self, name: str) -> int:
        """A number of Envoy's own."""
        url = f"http://127.0.0.1:{self._admin}/stats?filter=^{name}$&format=json"
        async with self.session.get(url) as answer:
            found = json.loads(await answer.read())["stats"]
        return sum(int(each["value"]) for each in found if "value" in each)


@asynccontextmanager
async def envoy(
    folder: Path,
    engines: Sequence[str],
    pickers: Sequence[int],
    *,
    subset: Sequence[str] | None = None,
    tls: bool = False,
) -> AsyncIterator[Envoy]:
    """Envoy before engines (``host:port``) and pickers (ports). ``subset``: the hint that it gives."""
    path = program()
    *ports, admin = free_ports(len(LISTENERS) + 1)
    by_name = dict(zip(LISTENERS, ports, strict=True))
    file = folder / "envoy.json"
    file.write_text(json.dumps(_config(by_name, admin, engines, pickers, subset, tls=tls)))
    log = (folder / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(path, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"),
        stdout=log,
        stderr=log,
    )
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def lives() -> bool:
                assert process.returncode is None, (folder / "envoy.log").read_text()[-3000:]
                async with session.get(f"http://127.0.0.1:{admin}/ready") as answer:
                    return answer.status == 200

            await until(lives, "Envoy is ready", ignoring=(aiohttp.ClientError,))
            yield Envoy(by_name, admin, session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


def _config(
    ports: dict[str, int],
    admin: int,
    engines: Sequence[str],
    pickers: Sequence[int],
    subset: Sequence[str] | None,
    *,
    tls: bool,
) -> Json:
    listeners = [_listener(name, port, subset) for name, port in ports.items()]
    picker = _cluster("picker", [f"127.0.0.1:{port}" for port in pickers])
    http2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    picker["health_checks"] = [
        {
            "timeout": "5s",
            "interval": "0.1s",
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
    ]
    picker["typed_extension_protocol_options"] = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": http2,
            # As small as gateways set it: a body that is given back waits for window updates.
            "explicit_http_config": {"http2_protocol_options": {"initial_stream_window_size": 65536}},
        }
    }
    if tls:
        context = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        picker["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": context, "common_tls_context": {"alpn_protocols": ["h2"]}},
        }
    clusters = [
        {
            "name": "original_dst",
            "type": "ORIGINAL_DST",
            "connect_timeout": "2s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        },
        {**_cluster("pool", engines), "load_balancing_policy": _override_host()},
        picker,
    ]
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin}")},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _address(endpoint: str) -> Json:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _cluster(name: str, endpoints: Sequence[str]) -> Json:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _address(each)}} for each in endpoints]}
            ],
        },
    }


def _override_host() -> Json:
    policies = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    robin = f"{policies}.round_robin.v3.RoundRobin"
    return {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.override_host",
                    "typed_config": {
                        "@type": f"{policies}.override_host.v3.OverrideHost",
                        "override_host_sources": [
                            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
                            {"header": DESTINATION},
                        ],
                        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
                        "fallback_policy": {
                            "policies": [
                                {
                                    "typed_extension_config": {
                                        "name": "envoy.load_balancing_policies.round_robin",
                                        "typed_config": {"@type": robin},
                                    }
                                }
                            ]
                        },
                    },
                }
            }
        ]
    }


def _listener(name: str, port: int, subset: Sequence[str] | None) -> Json:
    cluster = "original_dst" if name.endswith("original_dst") else "pool"
    route: Json = {"cluster": cluster, "timeout": "600s"}
    if cluster == "pool":
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    routes = [{"match": {"prefix": "/"}, "route": route}]
    filters = [_ext_proc(*_BODIES[name]), _filter("router", "http.router.v3.Router")]
    if subset is not None:
        value = {f"{DESTINATION}-subset": list(subset)}
        hint = {"metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]}
        filters.insert(0, _filter("set_metadata", "http.set_metadata.v3.Config", **hint))
    manager = "network.http_connection_manager.v3.HttpConnectionManager"
    return {
        "name": name,
        "address": _address(f"127.0.0.1:{port}"),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": {
                            "@type": f"{_FILTERS}.{manager}",
                            "stat_prefix": name,
                            "route_config": {
                                "virtual_hosts": [{"name": "a", "domains": ["*"], "routes": routes}]
                            },
                            "http_filters": filters,
                        },
                    }
                ]
            }
        ],
    }


def _ext_proc(request_body: str, response_body: str) -> Json:
    trailers = "SEND" if request_body == "FULL_DUPLEX_STREAMED" else "SKIP"
    return _filter(
        "ext_proc",
        "http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
        message_timeout="20s",
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": request_body,
            "response_body_mode": response_body,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _filter(name: str, kind: str, **config: Any) -> Json:
    return {"name": f"envoy.filters.http.{name}", "typed_config": {"@type": f"{_FILTERS}.{kind}", **config}}
