"""``kvatlas sidecar``: from a checked configuration to a listening process, and back at SIGTERM."""

from __future__ import annotations

import structlog

from router import __version__
from router.api.admin.tokens import AdminFileError
from router.config.errors import ConfigError
from router.config.schema import Config
from router.http.tls import TlsError
from router.observe.traces import TracesNotInstalledError
from router.serve.interpreter import share_the_interpreter, tame_garbage_collection
from router.serve.logs import configure_logging
from router.serve.server import RouterServer, run_server, server_ends_within_s, server_of
from router.sidecar.app import Sidecar

_log = structlog.get_logger()


def check(config: Config) -> RouterServer:
    """Build everything that can be wrong before listening. Raises ``ConfigError`` naming the key."""
    try:
        return make_server(Sidecar(config))
    except (AdminFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None


def make_server(sidecar: Sidecar) -> RouterServer:
    """The server of this sidecar, not started yet."""
    server = server_of(sidecar, sidecar.config, sidecar.certificates, sidecar.listen_stats)
    sidecar.draining = lambda: server.draining
    return server


def tend(config: Config) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    configure_logging(config.server.log_level, config.server.log_format)
    server = check(config)
    tame_garbage_collection()
    share_the_interpreter()
    _log.info("kvatlas sidecar starts", version=__version__, engine=config.sidecar.engine)
    return run_server(server, lambda: server_ends_within_s(config.listen))
