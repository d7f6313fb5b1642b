"""Flags shared by several commands, and the settings that a command line gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from router.config.errors import ConfigError
from router.config.load import Loaded, describe, load
from router.config.schema import Config, ServerConfig
from router.prompts.settings import ANY_MODEL
from router.replication.settings import IndexSettings

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
    str | None,
    Parameter(
        help="Tokenizer of the served model(s), where not what the engines say they serve: a directory with "
        "tokenizer.json, ORG/NAME[@REVISION] of the hub, or off."
    ),
]
SetFlags = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Any other setting: SECTION.KEY=VALUE; repeat for more.", negative=""),
]
PrintFlag = Annotated[
    bool, Parameter(help="Print the merged configuration with its sources, and stop.", negative="")
]
CheckFlag = Annotated[bool, Parameter(help="Check the configuration, and stop.", negative="")]
IndexFlag = Annotated[
    str | None,
    Parameter(
        help="Index shared by several replicas: redis://, rediss://, redis+sentinel://, redis+cluster:// "
        "(docs/redis.md). Without a password; see --index-file."
    ),
]
IndexFileFlag = Annotated[
    Path | None, Parameter(help="File that holds the URL of the shared index, for one with a password.")
]


def given(flags: Mapping[str, object], assignments: list[str] | None) -> dict[str, object]:
    """Return the settings given on the command line; ``--set`` takes precedence."""
    return {key: value for key, value in flags.items() if value is not None} | _assignments(assignments or [])


def any_model(tokenizer: str | None) -> dict[str, dict[str, object]]:
    """Return ``models`` for ``--tokenizer``, which applies to every model not named."""
    return {} if tokenizer is None else {ANY_MODEL: {"tokenizer": tokenizer}}


def index_settings(url: str | None, path: Path | None, namespace: str | None = None) -> IndexSettings:
    """Return the location of the index, from flags and environment. Raises ``ConfigError`` for a password in
    a flag."""
    flags = given({"index.url": url, "index.namespace": namespace}, None)
    return load(flags=flags, index_file=path).config.index


def start(
    read: Callable[[], Loaded],
    check: Callable[[Config], object],
    run: Callable[[Config, Callable[[], Config]], int],
    *,
    print_config: bool,
    check_config: bool,
) -> int:
    """Run a command with a configuration that it can read again, or print what would run."""
    loaded = read()
    if print_config:
        print(describe(loaded), end="")
        return 0
    if check_config:
        check(loaded.config)
        print("configuration ok")
        return 0
    return run(loaded.config, lambda: read().config)


def _assignments(texts: list[str]) -> dict[str, object]:
    """Parse the ``KEY=VALUE`` pairs of ``--set``."""
    pairs: dict[str, object] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text!r}: expected SECTION.KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs
