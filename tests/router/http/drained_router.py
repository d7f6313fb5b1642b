"""A router process for the drain tests: its arguments are ENGINE_URL DRAIN_S DELAY_S; prints its port."""

from __future__ import annotations

import sys

import structlog

from router.http.server.server import ProxyServer, listen_config
from router.http.server.settings import ListenSettings
from router.openai.request import InboundRequest
from router.proxy.app import ProxyApp


class Placed:
    def __init__(self, url: str) -> None:
        self.engine_id = self.base_url = url
        self.engine_headers = self.client_headers = ()

    def first_byte(self) -> None: ...

    def finished(self, usage: object) -> None: ...

    def failed(self, reason: str) -> None: ...


class OneEngine:
    async def place(self, request: InboundRequest, *, exclude: frozenset[str]) -> Placed:
        return Placed(sys.argv[1])


class Announcing(ProxyServer):
    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    listen = ListenSettings(drain_s_max=float(sys.argv[2]), drain_delay_s=float(sys.argv[3]))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    server = Announcing(listen_config(ProxyApp(OneEngine()), port=0, listen=listen, lifespan="off"))
    server.run()
    print(server.draining, flush=True)
