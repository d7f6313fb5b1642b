"""The router's configuration: one frozen tree whose defaults are the only defaults.

Four sources, the later one winning: defaults, the TOML file, environment variables
(``KVATLAS_<SECTION>_<KEY>``, e.g. ``KVATLAS_POLICY_BETA``), command-line flags. Every value is checked at
start; a fault names the key, the value and what would be right (``ConfigError``). ``load`` also tells where
each value came from, for ``--print-config``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from publisher.block_hash import HashScheme
from publisher.groups import GroupSpec
from router.api.admin.settings import AdminSettings
from router.config.checks import ConfigError, check_config, check_engine
from router.feeds.base import FeedSettings
from router.fleet.identity import Engine
from router.fleet.settings import DnsSettings, FileSettings, FleetSettings, KubernetesSettings
from router.index.learn.layout import ModelFacts
from router.observe.access_log import AccessLogSettings
from router.policy.base import PolicySettings
from router.policy.shadow import ShadowSpec
from router.prompts.config import ModelPrompts, PromptSettings
from router.proxy.settings import ListenSettings, ProxySettings
from router.replication.redis.settings import has_password
from router.replication.settings import IndexSettings

ENV_PREFIX = "KVATLAS_"
ANY_MODEL = "*"
_S = TypeVar("_S", bound=msgspec.Struct)


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the block pool of engines that publish no events; assumed where not set."""

    num_blocks: int | None = None
    """Blocks of the engine's KV cache, all groups together; vLLM logs it at start."""
    block_size: int | None = None
    """Tokens per block."""
    sliding_window: int | None = None
    """Adds a sliding-window group of this many tokens to the full-attention group."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One served model: how its prompts become tokens, and the facts about its KV cache that no event
    carries.

    Which of them a model needs: [README](../README.md#with-vllm); why: [exactness.md](exactness.md).
    """

    tokenizer: str | None = None
    """Local directory with `tokenizer.json` (Hugging Face layout). Where not set, an engine is asked for
    the tokens of each prompt."""
    chat_template: str | None = None
    """Chat template as a file or as text; set it if the engines were started with ``--chat-template``."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """The engines' ``--chat-template-content-format``."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """The engines' ``--default-chat-template-kwargs``."""
    exclude_tools_when_tool_choice_none: bool = False
    """Whether the engines were started with ``--exclude-tools-when-tool-choice-none``."""
    lora_paths: dict[str, str] = {}
    """Adapter name -> the path it was loaded from, which enters the block hashes. Adapters not listed here
    use the path that the engine's ``/v1/models`` reports."""
    attention_chunk_size: int | None = None
    """Chunk of chunked local attention, in tokens; required for such models (e.g. Llama 4)."""
    attention_chunk_sizes: dict[str, int] = {}
    """Group number -> chunk of chunked local attention in tokens, where the groups' chunks differ."""
    mamba_cache_mode: str | None = None
    """The engines' Mamba cache mode, ``align`` or ``all``; set it where the model has Mamba layers."""
    eagle_groups: tuple[int, ...] = ()
    """Numbers of the KV cache groups whose look-up drops the last block (EAGLE or MTP drafter, vLLM before
    0.33)."""
    partial_hash_hits: bool | None = None
    """Whether a hit may end inside a block. Not set: derived from the groups as vLLM does."""
    report_mode_full: bool = False
    """Set if clients send ``kv_cache_report_mode=full``: repeated store events are then not counted as new
    copies. Predictions are less exact with it; better keep clients from sending the field
    (``proxy.kv_cache_report_mode``)."""
    retention_interval: int | Literal["dense"] = 0
    """The engines' ``--prefix-cache-retention-interval`` in tokens, or ``dense`` (0 is vLLM's default
    since 0.29)."""
    hash_seeds: tuple[str, ...] = ()
    """Values of the engines' PYTHONHASHSEED; tried first when the hash scheme is detected. Needed for
    seeds that are not numbers from 0 to 65535."""
    kinds: dict[str, str] = {}
    """Group number -> kind of attention; needed for vLLM 0.20 and 0.21, whose events do not carry it."""
    windows: dict[str, int] = {}
    """Group number -> sliding window in tokens; needed for vLLM 0.20 and 0.21, whose events do not carry
    it."""
    shared_stores: tuple[str, ...] = ()
    """Stores that every engine of the model loads from, named by the ``ownership`` field of KV events. An
    engine that writes to a store is known to load from it without this."""
    shared_store_ttl_s: float = 1800.0
    """How long a block that was reported as written to a shared store is counted on (stores do not report
    evictions). A block may be dropped after half of this time. Set it to the age at which the store
    evicts."""
    first_connector_loads: bool = False
    """Set if the engines combine connectors with vLLM's MultiConnector: the first connector that has
    anything loads. Unset, the connector with the most tokens loads, as in ``HybridMultiConnector``."""
    shadow: ShadowConfig = ShadowConfig()
    """Block pool assumed for engines that publish no events."""

    def facts(self) -> ModelFacts:
        """The part the index needs."""
        return ModelFacts(
            attention_chunk_size=self.attention_chunk_size,
            attention_chunk_sizes={int(idx): tokens for idx, tokens in self.attention_chunk_sizes.items()},
            mamba_cache_mode=self.mamba_cache_mode,
            eagle_groups=self.eagle_groups,
            partial_hash_hits=self.partial_hash_hits,
            report_mode_full=self.report_mode_full,
            hash_seeds=self.hash_seeds,
            lora_paths=self.lora_paths,
            kinds={int(idx): kind for idx, kind in self.kinds.items()},
            windows={int(idx): window for idx, window in self.windows.items()},
            shared_stores=self.shared_stores,
            shared_store_ttl_s=self.shared_store_ttl_s,
            first_connector_loads=self.first_connector_loads,
        )

    def prompts(self) -> ModelPrompts:
        """The part the prompt reader needs."""
        return ModelPrompts(
            tokenizer_dir=self.tokenizer,
            chat_template=self.chat_template,
            chat_template_content_format=self.chat_template_content_format,
            default_chat_template_kwargs=self.default_chat_template_kwargs,
            exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
            lora_paths=self.lora_paths,
        )

    def retention(self) -> int | None:
        """The retention interval in tokens; None for dense."""
        return None if self.retention_interval == "dense" else self.retention_interval

    def shadow_spec(self) -> ShadowSpec:
        """The pool assumed for engines of this model that publish no events. Raises ``ValueError``."""
        given = self.shadow
        size = 16 if given.block_size is None else given.block_size
        groups = [GroupSpec(0, "full_attention", size)]
        if given.sliding_window is not None:
            groups.append(GroupSpec(1, "sliding_window", size, sliding_window=given.sliding_window))
        return ShadowSpec(
            groups=tuple(groups),
            num_blocks=ShadowSpec().num_blocks if given.num_blocks is None else given.num_blocks,
            scheme=HashScheme(hash_block_size=size),
            retention_interval=self.retention() if given.sliding_window is not None else 0,
            assumed=tuple(name for name in ("block_size", "num_blocks") if getattr(given, name) is None),
        )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router listens, and what it logs."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all addresses of the machine."""
    port: int = 8000
    """TCP port to listen on; 0 takes a free one, which the log then names."""
    expose_decision: bool = False
    """Add `x-kvatlas-engine` and `x-kvatlas-hit-tokens` to every answer."""
    log_level: str = "info"
    """Least severe level that is logged: `debug`, `info`, `warning` or `error`."""
    log_format: str = "console"
    """`console` for people, `json` for log collectors (one object per line)."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything ``kvatlas serve`` can be told."""

    server: ServerConfig = ServerConfig()
    engines: tuple[Engine, ...] = ()
    models: dict[str, ModelConfig] = {}
    """By served model name; ``*`` is for any model not named."""
    fleet: FleetSettings = FleetSettings()
    policy: PolicySettings = PolicySettings()
    proxy: ProxySettings = ProxySettings()
    listen: ListenSettings = ListenSettings()
    feeds: FeedSettings = FeedSettings()
    prompts: PromptSettings = PromptSettings()
    index: IndexSettings = IndexSettings()
    admin: AdminSettings = AdminSettings()
    access_log: AccessLogSettings = AccessLogSettings()

    def model(self, name: str) -> ModelConfig:
        """The configuration of a served model."""
        return self.models.get(name) or self.models.get(ANY_MODEL) or ModelConfig()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "server": ServerConfig,
    "fleet": FleetSettings,
    "fleet.file": FileSettings,
    "fleet.dns": DnsSettings,
    "fleet.kubernetes": KubernetesSettings,
    "policy": PolicySettings,
    "proxy": ProxySettings,
    "listen": ListenSettings,
    "feeds": FeedSettings,
    "prompts": PromptSettings,
    "index": IndexSettings,
    "admin": AdminSettings,
    "access_log": AccessLogSettings,
}
"""Sections whose keys are plain values, so that a flag or an environment variable can set each."""


def variable(section: str, key: str = "") -> str:
    """The environment variable of a setting; without ``key`` what all of its section begin with."""
    return f"{ENV_PREFIX}{section}_{key}".replace(".", "_").upper()


def plain_keys(section: str) -> list[str]:
    """Keys of a section that are values, not sections themselves."""
    return [key for key in SECTIONS[section].__struct_fields__ if f"{section}.{key}" not in SECTIONS]


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, and where every value that is not a default came from (``section.key`` -> source)."""

    config: Config
    sources: dict[str, str]


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    index_file: Path | None = None,
    engines: tuple[Engine, ...] = (),
    models: Mapping[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Merge all sources. ``flags`` maps ``section.key`` to a value; ``index_file`` holds ``index.url``.

    Raises ``ConfigError``, also for a password among the flags, which every user of the machine can read.
    """
    tree = _read_toml(path) if path is not None else {}
    sources = dict.fromkeys(_leaves(tree), f"file {path}")
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
    if engines:
        tree["engines"] = [msgspec.to_builtins(engine) for engine in engines]
        sources["engines"] = "flag"
    for name, settings in (models or {}).items():
        tree.setdefault("models", {}).setdefault(name, {}).update(settings)
        sources |= {f"models.{name}.{key}": "flag" for key in settings}
    config = _build(tree, Config, "")
    check_config(config)
    return Loaded(config, sources)


def parse_engine(text: str) -> Engine:
    """``URL[,events=tcp://..][,replay=tcp://..][,topic=..][,dp-rank=N]`` as ``--engine`` takes it."""
    url, *options = text.split(",")
    values: dict[str, Any] = {"base_url": url.rstrip("/")}
    names = {"events": "events", "replay": "replay", "topic": "topic", "dp-rank": "dp_rank"}
    for option in options:
        name, separator, value = option.partition("=")
        if name not in names or not separator:
            raise ConfigError(f"--engine {text!r}: {option!r} is not one of {', '.join(names)} with =VALUE")
        values[names[name]] = value
    try:
        engine = msgspec.convert(values, Engine, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--engine {text!r}: {error}") from None
    check_engine(engine)
    return engine


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from None


def _read_url(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--index-file {path}: {error}") from None


def _environment(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(key, text, variable) of every variable that names a setting. An unknown one is refused."""
    known = {
        variable(section, key): f"{section}.{key}" for section in SECTIONS for key in plain_keys(section)
    }
    found = []
    for name, text in environ.items():
        if name in known:
            found.append((known[name], text, name))
        elif any(name.startswith(variable(section)) for section in SECTIONS):
            raise ConfigError(f"environment variable {name} names no setting; see docs/configuration.md")
    return found


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, field = key.rpartition(".")
    if section not in SECTIONS or field not in plain_keys(section):
        raise ConfigError(f"{key} is not a setting; see docs/configuration.md")
    table: Any = tree
    for part in section.split("."):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: expected a table of settings, got {table!r}")
    table[field] = value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in tree.items():
        keys += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


def _build(tree: Any, struct: type[_S], prefix: str) -> _S:
    """``tree`` as ``struct``, key by key. Raises ``ConfigError`` that names the key and the value."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix.rstrip('.')}: expected a table of settings, got {tree!r}")
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    values = {}
    for name, value in tree.items():
        if name not in types:
            raise ConfigError(f"unknown key {prefix}{name}; known: {', '.join(sorted(types))}")
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
    if isinstance(value, str) and kind == tuple[str, ...]:  # from a flag or a variable
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{key} = {value!r}: {error}") from None


def _engine(fields: Any, prefix: str) -> Engine:
    engine = _build(fields, Engine, prefix)
    return msgspec.structs.replace(engine, base_url=engine.base_url.rstrip("/"))
