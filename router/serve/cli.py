"""The arguments of ``kvatlas serve`` and ``epp``. Light to import: the work is loaded when it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from router.config.errors import ConfigError
from router.config.flags import (
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
    any_model,
    given,
    start,
)
from router.config.load import Loaded, load, parse_engine
from router.config.schema import EPP_LISTEN, OPS_PORT, Config, ServerConfig
from router.placement.candidate import PolicySettings
from router.placement.policies import POLICIES

_SERVER = ServerConfig()


def serve(
    *,
    engine: EngineFlags = None,
    config: ConfigFlag = None,
    tokenizer: TokenizerFlag = None,
    renderer: Annotated[
        list[str] | None,
        Parameter(
            name="--renderer",
            help="A render server (vllm launch render): http://host:port, asked for tokens before engines; "
            "repeat for more.",
            negative="",
        ),
    ] = None,
    host: HostFlag = None,
    port: PortFlag = None,
    workers: Annotated[
        str | None,
        Parameter(help="Processes that share the port, or auto: one per core (default 1)."),
    ] = None,
    ops_port: Annotated[
        str | None,
        Parameter(
            help="Port of /metrics and /kvatlas/*: 0 takes a free one, off answers nowhere, public on --port "
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
        Parameter(help="Add x-kvatlas-engine and what was predicted to every answer (default: no)."),
    ] = None,
    log_level: Annotated[
        str | None,
        Parameter(help=f"Least severity logged: debug, info, warning, error (default {_SERVER.log_level})."),
    ] = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the router in front of vLLM engines."""
    from router.serve.command import serve as run

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
    read = partial(
        load,
        config,
        flags=given(flags, set_),
        index_file=index_file,
        engines=tuple(parse_engine(text) for text in engine or []),
        models=any_model(tokenizer),
    )
    return _start(run, read, print_config=print_config, check_config=check_config)


def epp(
    *,
    listen: Annotated[
        str | None,
        Parameter(help=f"HOST:PORT on which gateways ask; port 0 takes a free one (default {EPP_LISTEN})."),
    ] = None,
    health_listen: Annotated[
        str | None, Parameter(help="HOST:PORT of health checks without TLS (default: none).")
    ] = None,
    engine: EngineFlags = None,
    config: ConfigFlag = None,
    tokenizer: TokenizerFlag = None,
    tls: Annotated[
        bool | None, Parameter(help="Speak TLS to gateways (default: yes, with a certificate of its own).")
    ] = None,
    fallbacks: Annotated[
        int | None, Parameter(help="Further engines that a gateway is told, in order (default 0).")
    ] = None,
    pool_name: Annotated[
        str | None, Parameter(help="InferencePool whose pods are the engines, in Kubernetes.")
    ] = None,
    pool_namespace: Annotated[
        str | None, Parameter(help="Its namespace (default: the picker's own).")
    ] = None,
    grpc_port: Annotated[
        int | None, Parameter(help="Port on which gateways ask, at every address: --listen in short.")
    ] = None,
    grpc_health_port: Annotated[
        int | None, Parameter(help="Port of health checks, at every address: --health-listen in short.")
    ] = None,
    zap_encoder: Annotated[
        str | None, Parameter(help="Form of the log, json or console, as the light picker's flag has it.")
    ] = None,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the endpoint picker: a gateway (Envoy) asks by ext_proc which engine is to get each request."""
    from router.serve.command import pick

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
    read = partial(
        load,
        config,
        defaults={"epp.listen": EPP_LISTEN},
        flags=given(flags, set_),
        index_file=index_file,
        engines=tuple(parse_engine(text) for text in engine or []),
        models=any_model(tokenizer),
    )
    return _start(pick, read, print_config=print_config, check_config=check_config)


def _at(name: str, address: str | None, port_name: str, port: int | None) -> str | None:
    """HOST:PORT from either flag. Raises ``ConfigError`` for both."""
    if port is None:
        return address
    if address is not None:
        raise ConfigError(f"{port_name} {port} and {name} {address}: give one of them")
    return f"0.0.0.0:{port}"


def _start(
    run: Callable[[Config, Callable[[], Config]], int],
    read: Callable[[], Loaded],
    *,
    print_config: bool,
    check_config: bool,
) -> int:
    """See ``start``."""
    from router.serve.check import check

    return start(read, check, run, print_config=print_config, check_config=check_config)
