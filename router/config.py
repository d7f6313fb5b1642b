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
from router.admin.settings import AdminSettings
from router.config_checks import ConfigError, check_config, check_engine, is_loopback
from router.feeds.base import FeedSettings
from router.fleet.engine import Engine
from router.fleet.settings import DnsSettings, FileSettings, FleetSettings, KubernetesSettings
from router.index.layout import ModelFacts
from router.index.shared.settings import has_password
from router.observe.access_log import AccessLogSettings
from router.policy.base import PolicySettings
from router.policy.shadow import ShadowSpec
from router.prompts.config import ModelPrompts, PromptSettings
from router.proxy.settings import ListenSettings, ProxySettings
from router.replicas.settings import IndexSettings

ENV_PREFIX = "KVATLAS_"
ANY_MODEL = "*"
OPS_PORT = 9001
"""Where ``server.ops_port`` is not set."""
_S = TypeVar("_S", bound=msgspec.Struct)


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the block pool of engines that publish no events (None: assumed, and marked so)."""

    num_blocks: int | None = None
    """Blocks of the engine's KV cache, all groups together."""
    block_size: int | None = None
    """Tokens per block."""
    sliding_window: int | None = None
    """Adds a sliding-window group of this many tokens to the full-attention group."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One served model. ``tokenizer`` is a local directory with tokenizer.json (Hugging Face layout).

    ``lora_paths`` gives the path each LoRA was loaded from, which enters block hashes; the rest says what no
    event carries (see ``ModelFacts``).
    """

    tokenizer: str | None = None
    """Without it an engine is asked for the tokens of each prompt."""
    chat_template: str | None = None
    """File or text, where the engines were started with ``--chat-template``."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """As the engines were started with ``--chat-template-content-format``."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """As the engines were started with ``--default-chat-template-kwargs``."""
    exclude_tools_when_tool_choice_none: bool = False
    """As the engines were started with ``--exclude-tools-when-tool-choice-none``."""
    lora_paths: dict[str, str] = {}
    """Adapter name -> path; what an engine's ``/v1/models`` says is added for names not given here."""
    attention_chunk_size: int | None = None
    """Tokens; needed where the model has chunked local attention."""
    mamba_cache_mode: str | None = None
    """``align`` or ``all``, as the engines use it; matters where the model has Mamba groups."""
    eagle_groups: tuple[int, ...] = ()
    """Numbers of the groups whose look-up drops the last block (EAGLE or MTP drafter, vLLM before 0.33)."""
    partial_hash_hits: bool | None = None
    """Whether hits may end inside a block; derived from the groups where not set."""
    report_mode_full: bool = False
    """Requests set ``kv_cache_report_mode=full``; better never do."""
    retention_interval: int | Literal["dense"] = 0
    """The engines' ``prefix_cache_retention_interval`` in tokens (0 is vLLM's default since 0.29)."""
    hash_seeds: tuple[str, ...] = ()
    """The engines' PYTHONHASHSEED, if it is set there; tried first when the scheme is detected."""
    kinds: dict[str, str] = {}
    """Group number -> kind, for vLLM 0.20 and 0.21, whose events do not tell it."""
    windows: dict[str, int] = {}
    """Group number -> sliding window in tokens, for vLLM 0.20 and 0.21."""
    shared_stores: tuple[str, ...] = ()
    """Stores that every engine of the model loads from, by the ``ownership`` in KV events; an engine that
    writes to a store is known to load from it without this."""
    shared_store_ttl_s: float = 1800.0
    """Blocks that nobody was heard to write to a shared store for so long are not counted on: what a store
    evicts nobody tells. They may go after half of it."""
    first_connector_loads: bool = False
    """The engines run several connectors in vLLM's MultiConnector: the first that has anything loads. In
    ``HybridMultiConnector`` the one with the most tokens does."""
    shadow: ShadowConfig = ShadowConfig()
    """The pool assumed for engines that publish no events."""

    def facts(self) -> ModelFacts:
        """The part the index needs."""
        return ModelFacts(
            attention_chunk_size=self.attention_chunk_size,
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
    """Where the router listens, and what it tells."""

    host: str = "127.0.0.1"
    """Address that clients are answered on: `/v1/*`, `/health`, `/ready`, `/version`."""
    port: int = 8000
    """0 takes a free one."""
    ops_host: str = "127.0.0.1"
    """Address of the ops port: `/metrics` and `/kvatlas/*`, which tell what others send. On a loopback
    address everybody on this machine may ask; for any other one give tokens, or `ops_open`."""
    ops_port: int | Literal["off", "public"] | None = None
    """Not set: 9001, or a free one where `port` is 0. 0 takes a free one, `off` answers nowhere, `public`
    answers everybody on the router's own port."""
    ops_token_file: str | None = None
    """Who has one of these tokens (`Authorization: Bearer`) may ask the ops port; a file like
    `admin.token_file`, which is taken where this is not set and `ops_host` is not loopback."""
    ops_open: bool = False
    """Answer everybody who reaches the ops port, on any address: for where a firewall guards it."""
    expose_decision: bool = False
    """Answer with ``x-kvatlas-engine`` and ``x-kvatlas-hit-tokens``."""
    log_level: str = "info"
    log_format: str = "console"
    """``console`` for people, ``json`` for machines."""

    @property
    def ops_listens_on(self) -> int | None:
        """The port number of the ops listener (0: a free one); None where there is no such listener."""
        if self.ops_port is None:
            return OPS_PORT if self.port else 0
        return self.ops_port if isinstance(self.ops_port, int) else None


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

    @property
    def ops_tokens(self) -> tuple[str, str] | None:
        """Setting and path of the file with the tokens that the ops port wants; None where it wants none."""
        server = self.server
        if server.ops_listens_on is None or server.ops_open:
            return None
        if server.ops_token_file is not None:
            return "server.ops_token_file", server.ops_token_file
        if is_loopback(server.ops_host) or self.admin.token_file is None:
            return None
        return "admin.token_file", self.admin.token_file


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
