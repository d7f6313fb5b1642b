"""A router process for the drain tests: its argument is ENGINE_URL; prints its port."""

from __future__ import annotations

import sys

import structlog

from kvatlas.router.http.server import ProxyServer, listen_config
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.proxy.app import ProxyApp
from tests.support.proxy_rig import FakePlanner


class Announcing(ProxyServer):
    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


if __name__ == "__main__":
    listen = ListenSettings(drain_s_max=60.0)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    app = ProxyApp(FakePlanner(sys.argv[1]))
    server = Announcing(listen_config(app, port=0, listen=listen, lifespan="off"))
    server.run()
    print(server.draining, flush=True)
