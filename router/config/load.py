"""Reads the configuration from its four sources, and records the source of each value.

In ascending precedence: defaults, the TOML file, environment variables (``KVATLAS_<SECTION>_<KEY>``, e.g.
``KVATLAS_POLICY_SPREAD``), command-line flags. Every value is checked at start; an error names the key, the
value and the remedy (``ConfigError``).
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvatlas.router.config.checks import check_config, check_engine, unreadable
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.removed import REMOVED, refusal
from kvatlas.router.config.schema import Config, ModelConfig
from kvatlas.router.config.unused import without_effect
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.http.error_texts import describe_error
from kvatlas.router.http.setting_texts import meant, misfit
from kvatlas.router.prompts.settings import ANY_MODEL
from kvatlas.router.replication.index_url import has_password, redacted
from kvatlas.router.replication.settings import IndexSettings

ENV_PREFIX = "KVATLAS_"
_REFERENCE = " (all settings: docs/configuration.md)"
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_LISTS = (tuple[str, ...], frozenset[str])
# Sections that do not consist of plain keys, and where to set them.
_TABLES = {
    "engines": "engines are given by --engine URL, or as [[engines]] in the --config file",
    "stores": "stores are described in the --config file, as [[stores]]",
    "models": 'models are described in the --config file, under [models."NAME"]; --tokenizer is for any',
    "aliases": "aliases are given in the --config file, under [aliases]",
}
_S = TypeVar("_S", bound=msgspec.Struct)


def _sections(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, type[msgspec.Struct]]:
    found: dict[str, type[msgspec.Struct]] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found[f"{prefix}{field.name}"] = field.type
            found |= _sections(field.type, f"{prefix}{field.name}.")
    return found


# Sections whose keys are plain values, so that a flag or an environment variable can set each.
SECTIONS = _sections(Config)


def variable(section: str, key: str = "") -> str:
    """Return the environment variable of a setting; without ``key``, the prefix of its section."""
    return f"{ENV_PREFIX}{section}_{key}".replace(".", "_").upper()


def plain_keys(section: str) -> list[str]:
    names = SECTIONS[section].__struct_fields__
    return [key for key in names if f"{section}.{key}" not in {*SECTIONS, *REMOVED}]


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, and the source of every value that is not a default (``section.key`` -> source)."""

    config: Config
    sources: dict[str, str]
    unused: tuple[str, ...] = ()
    """Settings that have no effect, with the reason."""


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    index_file: Path | None = None,
    engines: tuple[EngineAddress, ...] = (),
    models: Mapping[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Merge all sources. ``flags`` and a command's own ``defaults`` map ``section.key`` to a value;
    ``index_file`` contains ``index.url``.

    Raises ``ConfigError``, also for a password among the flags, which every user of the machine can read.
    """
    tree = _read_toml(path) if path is not None else {}
    sources = dict.fromkeys(_leaves(tree), f"file {path}")
    for key, value in (defaults or {}).items():
        if key not in sources:
            _put(tree, key, value)
    for key, text, name in _environment(environ):
        _put(tree, key, text)
        sources[key] = f"environment {name}"
    if index_file is not None:
        _put(tree, "index.url", _read_url(index_file))
        sources["index.url"] = f"file {index_file}"
    for key, value in (flags or {}).items():
        if key == "index.url" and has_password(str(value)):
            raise ConfigError(
                "index.url: a password on the command line can be read by every user of this machine; put "
                f"the URL into a file (--index-file PATH) or into the environment ({ENV_PREFIX}INDEX_URL)"
            )
        _put(tree, key, value)
        sources[key] = "flag"
    unused = []
    if engines and tree.get("engines"):
        unused.append(f"engines of {sources.get('engines', f'file {path}')} have no effect beside --engine")
    if engines:
        tree["engines"] = [msgspec.to_builtins(engine) for engine in engines]
        sources["engines"] = "flag"
    for name, settings in (models or {}).items():
        tree.setdefault("models", {}).setdefault(name, {}).update(settings)
        sources |= {f"models.{name}.{key}": "flag" for key in settings}
    config = _build(tree, Config, "")
    check_config(config)
    return Loaded(config, sources, (*unused, *without_effect(config)))


def parse_engine(text: str) -> EngineAddress:
    """Parse ``URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N][,role=..][,kind=..]``, the value
    of ``--engine``."""
    url, *options = text.split(",")
    values: dict[str, Any] = {"base_url": url.rstrip("/")}
    kinds = {field.name: field.type for field in msgspec.structs.fields(EngineAddress)}
    names = {name: name for name in ("events", "replay", "topic", "role", "kind")} | {"dp-rank": "dp_rank"}
    for option in options:
        name, separator, value = option.partition("=")
        if name not in names or not separator:
            raise ConfigError(
                f"--engine {text!r}: {option!r} is not one of {', '.join(names)} with =VALUE"
                f"{meant(name, names)}"
            )
        try:
            values[names[name]] = msgspec.convert(value, kinds[names[name]], strict=False)
        except msgspec.ValidationError:
            raise ConfigError(
                f"--engine {text!r}: {name}={value}: {misfit(value, kinds[names[name]])}"
            ) from None
    engine = EngineAddress(**values)
    check_engine(engine)
    return engine


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {describe_error(error)}") from None


def _read_url(path: Path) -> str:
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--index-file {path}: {describe_error(error)}") from None
    if not url:
        raise ConfigError(f"--index-file {path}: is empty; write the URL into it, e.g. redis://HOST:6379/0")
    return url


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (key, text, variable) of every variable that sets a setting. An unknown one is an error."""
    known = {variable(*key.rsplit(".", 1)): key for key in _all_keys()}
    removed = {variable(*key.rsplit(".", 1)): key for key in REMOVED}
    found = []
    for name, text in environ.items():
        if name in removed:
            raise ConfigError(refusal(removed[name], f"environment variable {name}"))
        if name in known:
            found.append((known[name], text, name))
        elif name.startswith(ENV_PREFIX) and not _of_kubernetes(name, text):
            hint = meant(name, known, prefix=ENV_PREFIX)
            if hint or any(name.startswith(variable(section)) for section in SECTIONS):
                raise ConfigError(f"environment variable {name} is not a known setting{hint}{_REFERENCE}")
    return found


def _of_kubernetes(name: str, text: str) -> bool:
    """Whether Kubernetes set this variable: it does so in every pod for each service named ``kvatlas...``."""
    return _SERVICE_LINK.search(name) is not None or (name.endswith("_PORT") and "://" in text)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    if key in REMOVED:
        raise ConfigError(refusal(key))
    section, _, field = key.rpartition(".")
    if section not in SECTIONS or field not in plain_keys(section):
        raise ConfigError(f"{key} is not a known setting{_elsewhere(key)}")
    table: Any = tree
    for part in section.split("."):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: expected a table of settings, got {table!r}")
    table[field] = value


def _elsewhere(key: str) -> str:
    """Describe where a setting that is unknown by this name is probably set."""
    if key.partition(".")[0] in _TABLES:
        return f": {_TABLES[key.partition('.')[0]]}"
    return f"{meant(key, _all_keys())}{_REFERENCE}"


def _all_keys() -> list[str]:
    return [f"{section}.{key}" for section in SECTIONS for key in plain_keys(section)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in tree.items():
        keys += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


def _build(tree: Any, struct: type[_S], prefix: str) -> _S:
    """Build ``struct`` from ``tree``, key by key. Raises ``ConfigError`` that names the key and the value."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix.rstrip('.')}: expected a table of settings, got {tree!r}")
    known = msgspec.structs.fields(struct)
    types = {field.name: field.type for field in known if f"{prefix}{field.name}" not in REMOVED}
    values = {}
    for name, value in tree.items():
        if f"{prefix}{name}" in REMOVED:
            raise ConfigError(refusal(f"{prefix}{name}"))
        if name not in types:
            near = meant(f"{prefix}{name}", [f"{prefix}{key}" for key in types], prefix=prefix)
            if not near and (not prefix or prefix.rstrip(".") in SECTIONS):
                near = meant(f"{prefix}{name}", _all_keys())
            full = ((key, f"{prefix}{key}") for key in sorted(types))
            names = ", ".join(key for key, path in full if path not in SECTIONS or plain_keys(path))
            raise ConfigError(f"unknown key {prefix}{name}{near or ';'} known: {names}")
        values[name] = _value(value, types[name], f"{prefix}{name}")
    try:
        return struct(**values)
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None
    except TypeError:
        missing = [f.name for f in msgspec.structs.fields(struct) if f.required and f.name not in values]
        raise ConfigError(f"{prefix.rstrip('.')}: {', '.join(missing)} must be given") from None


def _value(value: Any, kind: Any, key: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _build(value, kind, f"{key}.")
    if key == "models" and isinstance(value, dict):
        return {name: _build(settings, ModelConfig, f"models.{name}.") for name, settings in value.items()}
    if key == "engines" and isinstance(value, list):
        return tuple(_engine(fields, f"engines[{number}].") for number, fields in enumerate(value))
    if key == "stores" and isinstance(value, list):
        return tuple(
            _build(fields, StoreSettings, f"stores[{number}].") for number, fields in enumerate(value)
        )
    if isinstance(value, str) and kind in _LISTS:  # from a flag or a variable
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, ValueError):
        raise ConfigError(f"{key} = {value!r}: {misfit(value, kind)}") from None


def _engine(fields: Any, prefix: str) -> EngineAddress:
    engine = _build(fields, EngineAddress, prefix)
    return msgspec.structs.replace(engine, base_url=engine.base_url.rstrip("/"))


def describe(loaded: Loaded) -> str:
    """Return the merged configuration as ``key = value`` lines, with the source unless it is a default."""
    lines = []
    for key, value in _flatten(msgspec.to_builtins(loaded.config)):
        if key in REMOVED:
            continue
        shown = redacted(value) if key == "index.url" else value
        source = next(
            (s for k, s in loaded.sources.items() if key == k or key.startswith(f"{k}[")), "default"
        )
        lines.append(f"{key} = {msgspec.json.encode(shown).decode()}  # {source}\n")
    return "".join(lines)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        pairs = [(f"{prefix}.{name}" if prefix else name, value) for name, value in tree.items()]
        return [leaf for name, value in pairs for leaf in _flatten(value, name)]
    if isinstance(tree, list | tuple) and tree and isinstance(tree[0], dict):
        return [leaf for i, value in enumerate(tree) for leaf in _flatten(value, f"{prefix}[{i}]")]
    return [(prefix, tree)]


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
    for text in loaded.unused:
        print(f"kvatlas: {text}", file=sys.stderr)
    if print_config:
        print(describe(loaded), end="")
        return 0
    if check_config:
        faults = unreadable(loaded.config)
        if faults:
            raise ConfigError("\n".join(faults))
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
