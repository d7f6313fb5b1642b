"""``kvatlas sidecar``: from a checked configuration to a listening process, and back at SIGTERM."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from router import __version__
from router.api.admin.tokens import AdminFileError
from router.config.errors import ConfigError
from router.config.schema import Config
from router.http.tls import TlsError
from router.observe.traces import TracesNotInstalledError
from router.serve.check import try_usage_record
from router.serve.interpreter import share_the_interpreter, tame_garbage_collection
from router.serve.logs import configure_logging
from router.serve.reload import Decided, Reloads, decide, hold_back
from router.serve.server import RouterServer, configure, run_server, server_ends_within_s, server_of
from router.sidecar.app import Sidecar, usable

_log = structlog.get_logger()


def check(config: Config) -> tuple[Sidecar, RouterServer]:
    """Build everything that can be wrong before listening. Raises ``ConfigError`` naming the key."""
    try_usage_record(config)
    try:
        sidecar = Sidecar(config)
        return sidecar, make_server(sidecar)
    except (AdminFileError, TlsError, TracesNotInstalledError) as error:
        raise ConfigError(str(error)) from None


def make_server(sidecar: Sidecar) -> RouterServer:
    """The server of this sidecar, not started yet."""
    server = server_of(sidecar, sidecar.config, sidecar.certificates, sidecar.listen_stats)
    sidecar.draining = lambda: server.draining
    sidecar.on_listen = lambda listen: configure(server, listen)
    return server


def reloads_of(sidecar: Sidecar, load: Callable[[], Config]) -> Reloads:
    """Those of a sidecar, which does them from now on."""

    def judge(running: Config) -> Decided:
        return decide(running, load, usable)

    renew = sidecar.certificates.renew
    made = Reloads(lambda: sidecar.config, judge, sidecar.take, renew, on_log=configure_logging)
    sidecar.reloads = made.stats
    sidecar.works.append(made.run)
    return made


def tend(config: Config, load: Callable[[], Config]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. ``load`` reads the configuration again."""
    hold_back()
    configure_logging(config.server.log_level, config.server.log_format)
    sidecar, server = check(config)
    reloads_of(sidecar, load)
    tame_garbage_collection()
    share_the_interpreter()
    _log.info("kvatlas sidecar starts", version=__version__, engine=config.sidecar.engine)
    return run_server(server, lambda: server_ends_within_s(sidecar.config.listen))
