"""The ``kvatlas`` command. Each subcommand imports what it needs when it runs, so that --help is quick.

Every subcommand checks its input before it starts anything: bad arguments and bad configuration end with
status 2 and a message that names the argument or key. Other statuses: 0 done, 1 the answer is no (a probe
not exact, a check failed).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from router import __version__
from router.config.checks import LOG_LEVELS
from router.config.errors import ConfigError
from router.config.load import Loaded, load, parse_engine
from router.config.schema import EPP_LISTEN, OPS_PORT, Config, ServerConfig
from router.pd.settings import SidecarSettings
from router.placement.candidate import PolicySettings
from router.placement.policies import POLICIES
from router.prompts.config import ANY_MODEL
from router.simulate.advise.cli import advise
from router.simulate.cli import simulate
from router.tools import cli as capture_cli
from router.tools.doctor.cli import doctor
from router.tools.index.flags import IndexFileFlag, IndexFlag, index_settings
from router.tools.top.cli import top

app = App(
    name="kvatlas",
    version=__version__,
    help="Routes LLM requests to the vLLM engine that has to compute the least, by what its KV cache holds.",
)
app.register_install_completion_command(
    help="Install tab completion for this shell (bash, zsh, fish); --shell names another one."
)
_SERVER = ServerConfig()

EngineFlags = Annotated[
    list[str] | None,
    Parameter(
        name="--engine",
        help="An engine: URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N][,role=..]; repeat "
        "for more. Without events= the engine is asked for its event endpoints; role= is prefill, decode or "
        "both.",
        negative="",
    ),
]

HostFlag = Annotated[
    str | None, Parameter(help=f"Address to listen on; 0.0.0.0 for all (default {_SERVER.host}).")
]
PortFlag = Annotated[
    int | None, Parameter(help=f"Port to listen on; 0 takes a free one (default {_SERVER.port}).")
]
ConfigFlag = Annotated[Path | None, Parameter(help="TOML configuration file (docs/configuration.md).")]
TokenizerFlag = Annotated[
    Path | None, Parameter(help="Directory with tokenizer.json of the served model(s).")
]
SetFlags = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Any other setting: SECTION.KEY=VALUE; repeat for more.", negative=""),
]
PrintFlag = Annotated[
    bool, Parameter(help="Print the merged configuration with its sources, and stop.", negative="")
]
CheckFlag = Annotated[bool, Parameter(help="Check the configuration, and stop.", negative="")]


@app.command
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
        Parameter(help="Add x-kvatlas-engine and x-kvatlas-hit-tokens to every answer (default: no)."),
    ] = None,
    log_level: Annotated[
        str | None,
        Parameter(help=f"Least severity logged: {', '.join(LOG_LEVELS)} (default {_SERVER.log_level})."),
    ] = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the router in front of vLLM engines."""
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
        flags=_given(flags, set_),
        index_file=index_file,
        engines=tuple(parse_engine(text) for text in engine or []),
        models=_models(tokenizer),
    )
    return _start(read, picker=False, print_config=print_config, check_config=check_config)


@app.command
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
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run the endpoint picker: a gateway (Envoy) asks by ext_proc which engine is to get each request."""
    flags = {
        "epp.listen": listen,
        "epp.health_listen": health_listen,
        "epp.tls": tls,
        "epp.fallbacks": fallbacks,
        "index.url": index,
    }
    read = partial(
        load,
        config,
        defaults={"epp.listen": EPP_LISTEN},
        flags=_given(flags, set_),
        index_file=index_file,
        engines=tuple(parse_engine(text) for text in engine or []),
        models=_models(tokenizer),
    )
    return _start(read, picker=True, print_config=print_config, check_config=check_config)


@app.command
def sidecar(
    *,
    engine: Annotated[
        str | None,
        Parameter(help=f"Base URL of the decode engine (default {SidecarSettings().engine})."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        Parameter(
            name="--prefill",
            help="A prefill engine that requests may name: HOST:PORT or NETWORK:PORT; repeat for more.",
            negative="",
        ),
    ] = None,
    host: HostFlag = None,
    port: PortFlag = None,
    ops_port: Annotated[
        str | None,
        Parameter(help=f"Port of /health, /ready and /metrics: 0 takes a free one (default {OPS_PORT})."),
    ] = None,
    config: ConfigFlag = None,
    set_: SetFlags = None,
    print_config: PrintFlag = False,
    check_config: CheckFlag = False,
) -> int:
    """Run beside a decode engine behind a gateway: ask the prefill engine that kvatlas epp has chosen."""
    from router.config.describe import describe
    from router.sidecar import run as running

    flags = {
        "sidecar.engine": engine,
        "sidecar.prefills": prefill,
        "server.host": host,
        "server.port": port,
        "server.ops_port": ops_port,
    }
    loaded = load(config, flags=_given(flags, set_))
    if print_config:
        print(describe(loaded), end="")
        return 0
    if check_config:
        running.check(loaded.config)
        print("configuration ok")
        return 0
    return running.tend(loaded.config)


def _given(flags: Mapping[str, object], assignments: list[str] | None) -> dict[str, object]:
    """The settings that the command line names; ``--set`` wins."""
    return {key: value for key, value in flags.items() if value is not None} | _assignments(assignments or [])


def _models(tokenizer: Path | None) -> dict[str, dict[str, object]]:
    return {} if tokenizer is None else {ANY_MODEL: {"tokenizer": str(tokenizer)}}


def _start(read: Callable[[], Loaded], *, picker: bool, print_config: bool, check_config: bool) -> int:
    """Run the router, or the endpoint picker alone, or say what would run."""
    from router.config.describe import describe
    from router.serve.check import check
    from router.serve.command import pick, serve

    if print_config:
        print(describe(read()), end="")
        return 0
    config = _with_engines(read)
    if check_config:
        check(config)
        print("configuration ok")
        return 0
    again = partial(_with_engines, read)
    return (pick if picker else serve)(config, again)


def _with_engines(read: Callable[[], Loaded]) -> Config:
    """A configuration that has engines, or a way to find some. Raises ``ConfigError``."""
    config = read().config
    if not config.engines and not config.fleet.discovers and not config.admin.enabled:
        raise ConfigError(
            "no engine configured: give --engine URL (repeatable), [[engines]] in the --config file, "
            "or a source of engines (fleet.kubernetes.selector or inference_pool, fleet.dns.names, "
            "fleet.file.path, or the admin API)"
        )
    return config


@app.command
def verify(
    *paths: Annotated[Path, Parameter(help="Recorded traces: files or folders.")],
    json: Annotated[
        bool, Parameter(help="One JSON line per trace and a last one with the total.", negative="")
    ] = False,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
) -> int:
    """Replay recorded truth through the serving code; status 0 only if every prediction is exact."""
    from router.tools.verify.command import run_verify

    shared = None if index is None and index_file is None else index_settings(index, index_file)
    return run_verify(list(paths), as_json=json, index=shared)


index_app = App(name="index", help="Look at an index that several routers share.")
app.command(index_app)

_ModelFlag = Annotated[str | None, Parameter(help="Base model; all models if not given.")]
_NamespaceFlag = Annotated[
    str | None, Parameter(help="Prefix of every key, as configured at the routers (index.namespace).")
]


@index_app.command
def stats(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    json: Annotated[bool, Parameter(help="As JSON.", negative="")] = False,
) -> int:
    """Blocks, bytes per block, engines with their generations, lease holders and feed states."""
    from router.tools.index.command import run_stats

    return run_stats(index_settings(index, index_file, namespace), model=model, as_json=json)


@index_app.command
def dump(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    limit: Annotated[int, Parameter(help="Most blocks to list per model; -1 for all.")] = -1,
) -> int:
    """One JSON line per block: its hash, and which engine holds it where (medium/group)."""
    from router.tools.index.command import run_dump

    return run_dump(index_settings(index, index_file, namespace), model=model, limit=limit)


@index_app.command(name="verify")
def index_verify(
    *,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
    namespace: _NamespaceFlag = None,
    model: _ModelFlag = None,
    engine: Annotated[
        list[str] | None,
        Parameter(
            name="--engine",
            help="Event addresses of an engine where the index has none or others: "
            "URL,events=tcp://..[,replay=tcp://..][,topic=..][,dp-rank=N]; repeat for more.",
            negative="",
        ),
    ] = None,
    settle: Annotated[
        float, Parameter(help="Seconds a difference must persist to count (the index lags by one write).")
    ] = 5.0,
    json: Annotated[bool, Parameter(help="As JSON.", negative="")] = False,
) -> int:
    """Recompute residency from the live feeds and compare; status 0 only if the index is exact."""
    from router.tools.index.command import run_index_verify

    return run_index_verify(
        index_settings(index, index_file, namespace),
        model=model,
        engines=tuple(parse_engine(text) for text in engine or []),
        settle_s=settle,
        as_json=json,
    )


keys_app = App(
    name="keys", help="Keys of clients: make one, look at the file that has them (docs/tenants.md)."
)
app.command(keys_app)

_KeyFileFlag = Annotated[
    Path, Parameter(name="--file", help="The key file (keys.file of the routers); made if it is not there.")
]


@keys_app.command(name="add")
def keys_add(
    *,
    file: _KeyFileFlag,
    tenant: Annotated[str, Parameter(help="Whose key it is; a new tenant has no limits yet.")],
    name: Annotated[str, Parameter(help="What the key is for; people read it in the file.")] = "",
    stdin: Annotated[
        bool, Parameter(help="Take a key that exists already from standard input.", negative="")
    ] = False,
) -> int:
    """Make a key and enter it; it is printed once and stored nowhere."""
    from router.tools.keys import run_add

    return run_add(file, tenant=tenant, name=name, stdin=stdin)


@keys_app.command(name="list")
def keys_list(*, file: _KeyFileFlag) -> int:
    """Tenants, their limits and their keys' digests; status 2 if a router would refuse the file."""
    from router.tools.keys import run_list

    return run_list(file)


@app.command
def engine(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="HTTP port; 0 takes a free one.")] = 0,
    set_: Annotated[
        list[str] | None,
        Parameter(
            name="--set",
            help="Any setting of the simulated engine: KEY=VALUE, e.g. groups=gptoss-like; repeat for more.",
            negative="",
        ),
    ] = None,
) -> int:
    """Run one simulated engine: OpenAI HTTP, vLLM metrics and real KV events, without GPU or model."""
    from router.tools.engine import run_engine

    return run_engine(host, port, set_ or [])


@app.command
def demo(
    *,
    seconds: Annotated[float, Parameter(help="How long the load runs.")] = 20.0,
    engines: Annotated[int, Parameter(help="How many simulated engines.")] = 4,
    port: Annotated[int, Parameter(help="Port of the router; 0 takes a free one.")] = 0,
    json: Annotated[
        bool, Parameter(help="Print only the final summary, as one JSON object.", negative="")
    ] = False,
    keep: Annotated[
        bool, Parameter(help="Keep serving after the load, for trying with curl.", negative="")
    ] = False,
    replicas: Annotated[
        int,
        Parameter(help="Number of routers that share one index (--index, or a server started for the demo)."),
    ] = 1,
    api: Annotated[
        Literal["chat", "messages", "responses"],
        Parameter(help="What the load asks by: messages and responses are agents that work with tools."),
    ] = "chat",
    pd: Annotated[
        bool,
        Parameter(help="A third of the engines compute prompts for the others, which decode.", negative=""),
    ] = False,
    gateway: Annotated[
        bool,
        Parameter(help="A real Envoy carries the requests (port --port) and asks kvatlas.", negative=""),
    ] = False,
    index: IndexFlag = None,
    index_file: IndexFileFlag = None,
) -> int:
    """Simulated engines, the router and a chat load on this machine, with a live table."""
    from router.demo.run import run_demo

    return run_demo(
        seconds=seconds,
        engines=engines,
        port=port,
        as_json=json,
        keep=keep,
        replicas=replicas,
        api=api,
        pd=pd,
        index=index_settings(index, index_file),
        gateway=gateway,
    )


app.command(capture_cli.record)
app.command(capture_cli.replay)
app.command(capture_cli.explain)
app.command(doctor)
app.command(advise)
app.command(simulate)
app.command(top)


def _assignments(texts: list[str]) -> dict[str, object]:
    """``KEY=VALUE`` pairs of ``--set``."""
    pairs: dict[str, object] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r}: expected SECTION.KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def call(words: Sequence[str]) -> int:
    """Run one command; 2 where its arguments or its configuration cannot be used. Raises everything else."""
    try:
        status = app(list(words), result_action="return_value", exit_on_error=False)
    except CycloptsError:  # printed already, with a box around it
        return 2
    except ConfigError as error:
        print(f"kvatlas: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
