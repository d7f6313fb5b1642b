"""The ``kvatlas`` command. Each subcommand's arguments are in the ``cli`` module of its package, which
imports its implementation only when it runs, so that --help is quick.

Every subcommand checks its input before it starts anything: bad arguments and bad configuration end with
status 2 and a message that names the argument or key. Other statuses: 0 done, 1 the answer is no (a probe was
not exact, a check failed).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from kvatlas import __version__
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.flags import (
    CheckFlag,
    ConfigFlag,
    EngineFlags,
    HostFlag,
    IndexFileFlag,
    IndexFlag,
    PortFlag,
    PrintFlag,
    SetFlags,
    TokenizerFlag,
)
from kvatlas.router.config.load import Loaded, any_model, given, load, parse_engine, start
from kvatlas.router.config.schema import EPP_LISTEN, OPS_PORT, Config, ServerConfig
from kvatlas.router.placement.candidate import POLICIES, PolicySettings
from kvatlas.router.simulation.cli import advise, simulate
from kvatlas.router.simulation.demo.cli import demo
from kvatlas.router.tools import cli as tools
from kvatlas.router.tools.cli import doctor, index_app, top

_SERVER = ServerConfig()


def serve(
    *,
    engine: EngineFlags = None,
    config: ConfigFlag = None,
    tokenizer: TokenizerFlag = None,
    renderer: Annotated[
        list[str] | None,
        Parameter(
            help="A render server (vllm launch render): http://host:port, used for tokens before engines; "
            "repeat for more."
        ),
    ] = None,
    host: HostFlag = None,
    port: PortFlag = None,
    workers: Annotated[
        str | None, Parameter(help="Processes that share the port, or auto: one per core (default 1).")
    ] = None,
    ops_port: Annotated[
        str | None,
        Parameter(
            help="Port of /metrics and /kvatlas/*: 0 takes a free one, off disables it, public on --port "
            f"(default {OPS_PORT})."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Parameter(help=f"Placement policy: {', '.join(POLICIES)} (default {PolicySettings().policy})."),
    ] = None,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    expose_decision: Annotated[
        bool | None,
        Parameter(
            help="Add x-kvatlas-engine and the prediction to every response (default: no).",
            negative="--no-expose-decision",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        Parameter(help=f"Lowest level logged: debug, info, warning, error (default {_SERVER.log_level})."),
    ] = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the router in front of vLLM engines."""
    from kvatlas.router.serve import serve as run

    flags = {
        "server.host": host,
        "server.port": port,
        "server.workers": workers,
        "server.ops_port": ops_port,
        "server.expose_decision": expose_decision,
        "server.log_level": log_level,
        "policy.policy": policy,
        "index.url": index,
        "prompts.renderers": renderer,
    }
    read = partial(load, config, flags=given(flags, set_), index_file=index_file, models=any_model(tokenizer))
    return _start(run, read, engine, print_config=print_config, check_config=check_config)


def epp(
    *,
    listen: Annotated[
        str | None, Parameter(help=f"HOST:PORT for gateways; port 0 takes a free one (default {EPP_LISTEN}).")
    ] = None,
    health_listen: Annotated[
        str | None, Parameter(help="HOST:PORT of health checks without TLS (default: none).")
    ] = None,
    engine: EngineFlags = None,
    config: ConfigFlag = None,
    tokenizer: TokenizerFlag = None,
    tls: Annotated[
        bool | None,
        Parameter(
            help="Use TLS for gateways (default: yes, with a self-signed certificate).", negative="--no-tls"
        ),
    ] = None,
    fallbacks: Annotated[
        int | None, Parameter(help="Number of further engines named to the gateway, in order (default 0).")
    ] = None,
    pool_name: Annotated[
        str | None, Parameter(help="InferencePool whose pods are the engines, in Kubernetes.")
    ] = None,
    pool_namespace: Annotated[
        str | None, Parameter(help="Its namespace (default: the picker's own).")
    ] = None,
    grpc_port: Annotated[
        int | None, Parameter(help="Port for gateways, at every address: --listen in short.")
    ] = None,
    grpc_health_port: Annotated[
        int | None, Parameter(help="Port of health checks, at every address: --health-listen in short.")
    ] = None,
    zap_encoder: Annotated[
        str | None, Parameter(help="Format of the log, json or console, like the light picker's flag.")
    ] = None,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the endpoint picker: a gateway (Envoy) asks by ext_proc which engine should get each request."""
    from kvatlas.router.serve import pick

    flags = {
        "epp.listen": _at("--listen", listen, "--grpc-port", grpc_port),
        "epp.health_listen": _at("--health-listen", health_listen, "--grpc-health-port", grpc_health_port),
        "fleet.kubernetes.inference_pool": pool_name,
        "fleet.kubernetes.namespaces": pool_namespace,
        "server.log_format": zap_encoder,
        "epp.tls": tls,
        "epp.fallbacks": fallbacks,
        "index.url": index,
    }
    read = partial(load, config, flags=given(flags, set_), index_file=index_file, models=any_model(tokenizer))
    read = partial(read, defaults={"epp.listen": EPP_LISTEN})
    return _start(pick, read, engine, print_config=print_config, check_config=check_config)


def _at(name: str, address: str | None, port_name: str, port: int | None) -> str | None:
    """Return HOST:PORT from either flag. Raises ``ConfigError`` if both are given."""
    if port is None:
        return address
    if address is not None:
        raise ConfigError(f"{port_name} {port} and {name} {address}: give one of them")
    return f"0.0.0.0:{port}"


def _start(
    run: Callable[[Config, Callable[[], Config]], int],
    read: Callable[..., Loaded],
    engines: list[str] | None,
    *,
    print_config: bool,
    check_config: bool,
) -> int:
    """Implement ``start``."""
    from kvatlas.router.startup_check import check

    read = partial(read, engines=tuple(map(parse_engine, engines or [])))
    return start(read, check, run, print_config=print_config, check_config=check_config)


app = App(
    name="kvatlas",
    version=__version__,
    help="Routes LLM requests to the vLLM engine whose KV cache leaves it the least to compute.",
    default_parameter=Parameter(negative=""),
)
app.register_install_completion_command(
    help="Install tab completion for this shell (bash, zsh, fish); --shell names another one."
)
for each in (
    serve,
    epp,
    tools.verify,
    index_app,
    tools.keys_app,
    tools.engine,
    demo,
    tools.record,
    tools.replay,
    tools.explain,
    doctor,
    advise,
    simulate,
    top,
):
    app.command(each)


def call(words: Sequence[str]) -> int:
    """Run one command; returns 2 if its arguments or configuration cannot be used. Raises everything else."""
    try:
        status = app(list(words), result_action="return_value", exit_on_error=False)
    except CycloptsError:  # already printed, in a box
        return 2
    except ConfigError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
