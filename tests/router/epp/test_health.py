"""Health checks of the picker, as probes and gateways ask them."""

from __future__ import annotations

from router.epp.grpc import message_frame
from router.epp.messages import bytes_field
from router.epp.settings import EppSettings
from router.fleet.engines import EngineAddress
from tests.support.h2_peer import H2Peer, h2_peer
from tests.support.whole_router import configure, routing, running

SERVICES = (b"liveness", b"readiness", b"envoy.service.ext_proc.v3.ExternalProcessor")
OK = {"grpc-status": "0"}


async def check(peer: H2Peer, service: bytes) -> tuple[bytes, dict[str, str]]:
    """The answer's message, and its last fields."""
    number = peer.open("/grpc.health.v1.Health/Check")
    await peer.send(number, message_frame(bytes_field(1, service)), end=True)
    await peer.until_over(number)
    return peer.data[number][5:], peer.headers[number][-1]


async def test_the_light_pickers_service_serves_once_the_pool_is_known() -> None:
    """Liveness and readiness of the conformance suite's pods: also while nothing is ready."""

    settings = EppSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", tls=False)
    gone = EngineAddress("http://127.0.0.1:9")
    async with routing(configure(gone, epp=settings), wait=False) as rig:
        assert rig.router.picker is not None
        async with h2_peer(rig.router.picker.addresses["health_listen"][1]) as peer:
            assert await check(peer, b"readiness") == (b"\x08\x02", OK)
            assert await check(peer, b"inference-extension") == (b"\x08\x01", OK)
            rig.router.fleet_sources.unsynced = lambda: ["kubernetes"]  # type: ignore[method-assign]
            assert await check(peer, b"inference-extension") == (b"\x08\x02", OK)


async def test_a_router_that_leaves_is_alive_and_not_ready() -> None:
    settings = EppSettings(listen="127.0.0.1:0", health_listen="127.0.0.1:0", tls=False)
    async with running({}) as engines, routing(configure(*engines, epp=settings)) as rig:
        assert rig.router.picker is not None
        for _, port in rig.router.picker.addresses.values():
            async with h2_peer(port) as peer:
                rig.router.draining = lambda: False
                assert [await check(peer, name) for name in SERVICES] == [(b"\x08\x01", OK)] * 3
                rig.router.draining = lambda: True
                answers = [await check(peer, name) for name in SERVICES]
                assert answers == [(b"\x08\x01", OK), (b"\x08\x02", OK), (b"\x08\x02", OK)]
                message, fields = await check(peer, b"nobody")
                assert (message, fields["grpc-status"]) == (b"", "5")
