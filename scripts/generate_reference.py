"""Writes the reference pages from the code: docs/cli.md, docs/configuration.md and docs/metrics.md.

    python scripts/generate_reference.py [--out docs]

Commands and flags come from the cyclopts application, settings from ``config.schema.Config``, metrics from
what the exporter yields for a small router. Texts live in the code only: flag helps, class docstrings, and
the string below a field, which is read from the source. The same code gives the same bytes; a test compares.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
from cyclopts import App, Argument
from prometheus_client.metrics_core import Metric
from struct_source import Field, code, fields, prose, shown, table

from kvatlas.publisher.simulator.settings import PRESETS, EngineSettings
from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.gate import KeyGate
from kvatlas.router.admission.key_file import KeyFile
from kvatlas.router.api.admin_auth import AdminStats
from kvatlas.router.api.metrics_page import ReloadStats, RouterCollector, Sources
from kvatlas.router.app import Router
from kvatlas.router.cli import app
from kvatlas.router.config.load import ENV_PREFIX, SECTIONS, plain_keys, variable
from kvatlas.router.config.reload import LIVE
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.feeds.base import FeedState, FeedStats
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.settings import ListenStats
from kvatlas.router.index.learn.hash_scheme import Detection
from kvatlas.router.observe.histogram import Histogram
from kvatlas.router.observe.receipts import Outcome
from kvatlas.router.observe.traces import TraceStats
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.pd.settings import PdStats
from kvatlas.router.placement import policies
from kvatlas.router.placement.candidate import PullSettings
from kvatlas.router.placement.own_pulls import Pulls
from kvatlas.router.placement.probing import ProbeStats
from kvatlas.router.placement.shadow import ShadowSettings
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.services.epp.settings import EppStats
from kvatlas.router.workers.gossip import DELAY_BUCKETS, WorkerGossipStats
from kvatlas.router.workers.merged_view import group_families, worker_families

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = """\
[server]
host = "0.0.0.0"
port = 8000

[[engines]]                        # asked for its event endpoints (vLLM 0.31 and later)
base_url = "http://10.0.0.11:8000"

[[engines]]                        # told them
base_url = "http://10.0.0.12:8000"
events = "tcp://10.0.0.12:5557"
replay = "tcp://10.0.0.12:5558"

[models."*"]                       # any served model; a served name instead of * wins over it
tokenizer = "/models/my-model"

[proxy]
first_byte_timeout_s = 300
"""
_ALIASES = """\
```toml
[aliases]
"gpt-4o" = "gpt-oss-20b"

[aliases."gpt-next"]
"gpt-oss-20b" = 0.95
"gpt-oss-120b" = 0.05
```
"""
_MADE = "<!-- Made by scripts/generate_reference.py from the code; `make docs` writes it. -->\n"
_CLI = """\
Status: 0 done; 1 the answer is no, or it could not be done; 2 bad arguments or configuration; 130
interrupted. Flags of `serve` win over environment variables, those over the file; what no flag says is in
[configuration.md](configuration.md). `--help` works everywhere, `kvatlas --version` prints the version.
`kvatlas --install-completion` installs tab completion for the shell it is run in (bash, zsh or fish) and says
which file it wrote. An error that ends a command is one line on stderr; with `KVATLAS_TRACEBACK=1` in the
environment an unexpected error shows its traceback too.
"""
_CONFIGURATION = f"""\
`kvatlas serve --config FILE` reads TOML. Four sources, the later one winning: defaults, the file,
environment variables (`{ENV_PREFIX}<SECTION>_<KEY>`), flags (`--set SECTION.KEY=VALUE`). Unknown keys and
values that cannot be used are refused at start, with the key and the remedy.
`kvatlas serve --config FILE --check-config` checks and stops; `--print-config` prints every value and where
it came from. Names end in their unit (`_s` seconds, `_bytes`, `_tokens`); `_max` is a bound.
"""
_ENGINES = """\
One table per engine; on the command line
`--engine URL[,events=..][,replay=..][,topic=..][,dp-rank=N]`.
"""
_METRICS = """\
`GET /metrics`, Prometheus text format. A histogram `NAME` is exported as `NAME_bucket`, `NAME_sum` and
`NAME_count`. `engine` is the engine's id (`http://host:port`, with `#dpN` for a data-parallel rank), `model`
the name of a base model. Which of them to watch: [operations.md](operations.md).
"""
_RELOADING = """\
## Reloading

SIGHUP makes the router read all of it again (`kill -HUP PID`; with workers, of the parent) and take what can
be changed while it runs. A configuration that cannot be used is refused as a whole: the old one stays, the
log says why. Changes that need a restart are logged and not applied. More:
[operations.md](operations.md#reloading).
"""
_FLAGS = ("argument", "default", "meaning")


# -- docs/cli.md ------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its arguments."""
    parts = [_MADE, "# Command line\n", f"{app.help}\n", _CLI]
    for name in commands():
        command = command_of(name)
        parts += [f"## kvatlas {name}\n", f"{prose(command.help)}\n", table(_FLAGS, _flags(command))]
        if name == "engine":
            parts += [
                "### Keys of `kvatlas engine --set`\n",
                f"{prose(EngineSettings.__doc__)}\n",
                f"Presets of `groups`: {', '.join(map(code, PRESETS))}.\n",
                table(
                    ("key", "type", "default", "meaning"),
                    (
                        (code(f.name), code(f.kind), _engine_default(f), f.text)
                        for f in fields(EngineSettings)
                    ),
                ),
            ]
    return "\n".join(parts)


def commands() -> list[str]:
    """Names of the subcommands, those of a group as ``group name``."""
    names = [name for name in app if not name.startswith("-")]
    within = {name: [inner for inner in app[name] if not inner.startswith("-")] for name in names}
    return [f"{name} {inner}".rstrip() for name in names for inner in within[name] or [""]]


def command_of(name: str) -> App:
    """A subcommand by its name as ``commands`` gives it."""
    command = app
    for word in name.split():
        command = command[word]
    return command


def _arguments(command: App) -> list[Argument]:
    """Its arguments, without the structs that hold some of them."""
    return [
        one
        for one in command.assemble_argument_collection(default_parameter=app.default_parameter)
        if one.names != ("*",)
    ]


def flag_names(command: App) -> dict[str, set[str]]:
    """Every flag of a command with its aliases and its negative form, by its first name."""
    return {argument.names[0]: set(argument.names) for argument in _arguments(command)}


def _flags(command: App) -> Iterator[tuple[str, str, str]]:
    for argument in _arguments(command):
        names = ", ".join(map(code, argument.names))
        default = argument.field_info.default
        if default is None or default is False or default is inspect.Parameter.empty:
            default = ""
        yield names, code(default), prose(argument.parameter.help)


def _engine_default(field: Field) -> str:
    if field.name == "tokenizer_dir":
        return "the shipped demo tokenizer"
    return "`none`" if field.default is None else shown(field.default)


# -- docs/configuration.md --------------------------------------------------------------------------------


def configuration_page() -> str:
    """Every section and key."""
    parts = [
        _MADE,
        "# Configuration\n",
        _CONFIGURATION,
        f"```toml\n{EXAMPLE}```\n",
        _reloading(),
        "## `[[engines]]`\n",
        f"{prose(EngineAddress.__doc__)}\n",
        _ENGINES,
        _keys(EngineAddress),
        "## `[[stores]]`\n",
        f"{prose(StoreSettings.__doc__)}\n",
        _keys(StoreSettings),
        '## `[models."NAME"]`\n',
        f"{prose(_text_of(Config, 'models'))}\n",
        f"{prose(ModelConfig.__doc__)}\n",
        _keys(ModelConfig),
        '### `[models."NAME".shadow]`\n',
        f"{prose(ShadowSettings.__doc__)}\n",
        _keys(ShadowSettings),
        "## `[aliases]`\n",
        f"{prose(_text_of(Config, 'aliases'))}\n",
        _ALIASES,
    ]
    for name, struct in SECTIONS.items():
        if not plain_keys(name):
            continue
        parts += [f"## `[{name}]`\n", f"{prose(struct.__doc__)}\n", _keys(struct, section=name)]
        if name == "policy":
            parts += [_policies()]
        if name == "proxy":
            refused = sorted(struct().refused_paths)  # type: ignore[attr-defined]
            parts += [f"`refused_paths` by default: {', '.join(map(code, refused))}.\n"]
    return "\n".join(parts)


def _reloading() -> str:
    """Keys that can be changed without a restart, by section."""
    whole = sorted(key for key in LIVE if "." not in key)
    parts = sorted(key for key in LIVE if "." in key)
    kinds = (("Whole sections", whole), ("Keys", parts))
    listed = (f"{kind}: {', '.join(map(code, keys))}.\n" for kind, keys in kinds)
    return "\n".join((_RELOADING, *listed))


def _text_of(struct: type[msgspec.Struct], name: str) -> str:
    return next(field.text for field in fields(struct) if field.name == name)


def _keys(struct: type[msgspec.Struct], section: str | None = None) -> str:
    head = ["key", "type", "default", "meaning"]
    listed = [f for f in fields(struct) if section is None or f.name in plain_keys(section)]
    rows = [[code(f.name), code(f.kind), shown(f.default), f.text] for f in listed]
    if section is not None:
        head.insert(3, "environment")
        for row, field in zip(rows, listed, strict=True):
            row.insert(3, code(variable(section, field.name)) if _from_text(field) else "")
    return table(head, rows)


def _from_text(field: Field) -> bool:
    """Whether a variable or flag can give the value."""
    return not field.kind.startswith("dict")


def _policies() -> str:
    rows = [(code(name), prose(policies.policy(name).__doc__)) for name in sorted(policies.POLICIES)]
    return "Policies:\n\n" + table(("name", "what it does"), rows)


# -- docs/metrics.md --------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every metric family."""
    sources = _sources()
    rows = [
        (code(name), kind, ", ".join(map(code, labels)), text)
        for name, kind, labels, text in families(sources)
    ]
    values = [
        ("`state` of `kvatlas_feed_state`", [str(state) for state in FeedState]),
        ("`mode` of `kvatlas_index_mode`", [str(state) for state in Detection]),
        ("`outcome` of `kvatlas_receipts_total`", list(get_args(Outcome))),
    ]
    return "\n".join(
        [
            _MADE,
            "# Metrics\n",
            _METRICS,
            table(("name", "type", "labels", "meaning"), rows),
            "Label values:\n",
            table(("label", "values"), ((label, ", ".join(map(code, names))) for label, names in values)),
        ]
    )


def families(sources: Sources) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name as exported, type, labels, help) of every family."""
    for family in RouterCollector(sources).collect():
        suffix = "_total" if family.type == "counter" else ""
        yield f"{family.name}{suffix}", family.type, _labels(family), family.documentation


def _labels(family: Metric) -> tuple[str, ...]:
    return tuple(family._labelnames)  # type: ignore[attr-defined]  # noqa: SLF001  # nowhere else before a sample


def _sources() -> Sources:
    """The sources of a router with two engines, in no use."""
    index = IndexSettings(url="redis://localhost")
    router = Router(
        Config(
            engines=(
                EngineAddress("http://engine:8000", role="prefill"),
                EngineAddress("http://other:8000", role="decode"),
            ),
            stores=(StoreSettings(name="pool", kind="mooncake", events=("tcp://h:1",), model="m"),),
            index=index,
            usage=UsageSettings(path="log"),
            queue=QueueSettings(saturation_s=1.0),
        )
    )
    for engine in router.fleet:
        engine.feed = FeedStats()
    if router.peers.blocks is not None:
        router.peers.blocks.index_of("model")
    if router.peers.shared is not None:
        router.peers.shared.share_limits(_gate(), "")
    pulls = Pulls()
    pulls.configure(PullSettings(enabled=True), 0)
    sources = Sources(
        router.fleet,
        router.scopes,
        router.accounts,
        router.proxy.stats,
        router.reader.stats,
        ListenStats,
        router.proxy.requests,
        router.sources.history,
        router.peers.shared,
        router.fleet_sources,
        AdminStats(),
        _gate(),
        traces=TraceStats(),
        usage=router.usage,
        reloads=ReloadStats(),
        epp=EppStats(),
        pd=PdStats(),
        pulls=pulls,
        stores=router.lifecycle.stores,
        probes=ProbeStats(),
        more=lambda: (
            *worker_families(0, WorkerGossipStats(), Histogram(DELAY_BUCKETS), None),
            *group_families(1, {0}, {}),
        ),
    )
    router.reader.close()
    return sources


def _gate() -> KeyGate:
    """With one tenant, who was refused something."""
    with tempfile.NamedTemporaryFile() as file:
        gate = KeyGate(KeyFile(Path(file.name), clock=time.monotonic), clock=time.monotonic)
    gate.account("tenant").stats.refused["model"] = 0
    return gate


PAGES = {"cli.md": cli_page, "configuration.md": configuration_page, "metrics.md": metrics_page}


def main() -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description="Write the reference pages from the code.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (out / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
