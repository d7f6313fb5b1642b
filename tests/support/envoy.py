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

from kvatlas.router.simulation.demo import gateway as config
from tests.support.ports import free_ports
from tests.support.waiting import HANG_S, until

Json = dict[str, Any]
LISTENERS = (
    "original_dst",
    "override_host",
    "buffered",
    "buffered_original_dst",
    "streamed",
    "no_answers",
    "buffered_no_answers",
)
_BODIES = {
    "original_dst": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    "override_host": ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    "buffered": ("BUFFERED", "STREAMED"),
    "buffered_original_dst": ("BUFFERED", "STREAMED"),
    "streamed": ("STREAMED", "STREAMED"),
    "no_answers": ("FULL_DUPLEX_STREAMED", "NONE"),
    "buffered_no_answers": ("BUFFERED", "NONE"),
}
"""Body modes of request and answer, by listener; ``streamed`` is a gateway that is set up wrongly, and NONE
one that shows nothing of answers."""


def original_dst() -> dict[str, Any]:
    """Return a cluster that goes to any address that the picker names."""
    return {
        "name": "original_dst",
        "type": "ORIGINAL_DST",
        "connect_timeout": "2s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": config.DESTINATION},
    }


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
    tls: Json | None = None,
    idle_s: float | None = None,
) -> AsyncIterator[Envoy]:
    """Envoy before engines (``host:port``) and pickers (ports). ``subset``: the hint that it gives; ``tls``:
    its certificates, where it speaks TLS to pickers; ``idle_s``: its stream_idle_timeout."""
    path = program()
    *ports, admin = free_ports(len(LISTENERS) + 1)
    by_name = dict(zip(LISTENERS, ports, strict=True))
    file = folder / "envoy.json"
    file.write_text(json.dumps(_config(by_name, admin, engines, pickers, subset, tls, idle_s)))
    log = (folder / "envoy.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        path,
        "-c",
        str(file),
        "--disable-hot-restart",
        "--concurrency",
        "1",
        "-l",
        "warning",
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
    tls: Json | None,
    idle_s: float | None,
) -> Json:
    listeners = [_listener(name, port, subset) for name, port in ports.items()]
    for listener in listeners if idle_s is not None else ():
        (network,) = listener["filter_chains"][0]["filters"]
        network["typed_config"]["stream_idle_timeout"] = f"{idle_s}s"
    picker = config.picker_cluster([f"127.0.0.1:{port}" for port in pickers])
    picker["health_checks"] = [
        {
            "timeout": f"{HANG_S}s",
            "interval": "0.1s",
            "no_traffic_interval": "0.1s",
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
    ]
    if tls is not None:
        context = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        picker["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": context, "common_tls_context": {"alpn_protocols": ["h2"], **tls}},
        }
    clusters = [original_dst(), config.pool(engines), picker]
    return config.bootstrap(listeners, clusters, admin=admin)


def _listener(name: str, port: int, subset: Sequence[str] | None) -> Json:
    filters = [config.ext_proc(*_BODIES[name])]
    if subset is not None:
        value = {f"{config.DESTINATION}-subset": list(subset)}
        hint = {"metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]}
        filters.insert(0, config.http_filter("set_metadata", "set_metadata.v3.Config", **hint))
    return config.listener(name, port, "original_dst" if name.endswith("original_dst") else "pool", filters)
