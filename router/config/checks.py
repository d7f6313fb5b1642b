"""Checks of a configuration beyond the types of its fields.

Each error names the key, the value and the remedy; nothing is contacted and nothing is loaded.
"""

from __future__ import annotations

import ipaddress
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from publisher.events import GroupSpec
from router.config.errors import ConfigError
from router.config.schema import WORKERS_MAX, Config, ModelConfig, ServerConfig, is_loopback
from router.config.texts import check_texts
from router.fleet.identity import EngineAddress
from router.fleet.sources import check_address
from router.http.settings import ListenSettings
from router.observe.usage import UsageSettings
from router.placement.affinity import Shadow
from router.prompts.hub import download_command, has_tokenizer, parse_source
from router.proxy.aliases import Aliases

# Three years: longer times overflow timers of event loops and of ZMQ.
_SECONDS_MAX = 1e8
_COUNT_MAX = (1 << 31) - 1  # a C int, as ZMQ's limits are
_SIZE_MAX = 1 << 48

_MAY_BE_ZERO = frozenset(
    {
        "ageing",
        "answers_watched_share",
        "drain_delay_s",
        "decode_delay_weight",
        "drain_s_max",
        "fallbacks",
        "lease_margin_s",
        "leg_overhead_s",
        "min_remote_tokens",
        "mooncake_early_max",
        "partitions",
        "port",
        "replay_backoff_s",
        "retry_after_s_max",
        "retry_time_s_max",
        "transfer_s_per_token",
        "warm_up_s_max",
    }
)


def _check_server(server: ServerConfig) -> None:
    if not 0 <= server.port < 1 << 16:
        raise ConfigError(f"server.port: {server.port} is not a port number")
    if server.workers != "auto" and not 1 <= server.workers <= WORKERS_MAX:
        raise ConfigError(f"server.workers = {server.workers}: expected 1 to {WORKERS_MAX}, or auto")
    if server.workers != 1 and sys.platform != "linux":
        raise ConfigError(f"server.workers = {server.workers}: several workers need Linux; leave it at 1")


def _check_ops(config: Config) -> None:
    server = config.server
    number = server.ops_listens_on
    if number is None:
        return
    if not 0 <= number < 1 << 16:
        raise ConfigError(f"server.ops_port: {number} is not a port number")
    if number == server.port != 0:
        raise ConfigError(
            f"server.ops_port: {number} is the public port (server.port); give another one, or public to let "
            "everybody ask there"
        )
    if number == config.admin.port != 0 and config.admin.enabled:
        raise ConfigError(f"server.ops_port: {number} is admin.port; give another one")
    if server.ops_open and server.ops_token_file is not None:
        raise ConfigError("server.ops_open: with it no token is needed; leave out server.ops_token_file")
    if not is_loopback(server.ops_host) and config.ops_tokens is None and not server.ops_open:
        raise ConfigError(
            f"server.ops_host = {server.ops_host!r}: anyone who reaches it could read what others send; "
            "give server.ops_token_file, or set server.ops_open where a network policy or firewall guards it"
        )


def _check_listen(listen: ListenSettings) -> None:
    if listen.client_share_max > 1:
        raise ConfigError(
            f"listen.client_share_max = {listen.client_share_max}: expected more than 0 and at most 1"
        )


def _check_usage(settings: UsageSettings) -> None:
    for name in ("path", "key_file"):
        text = getattr(settings, name)
        if text and not _can_be_written(Path(text)):
            raise ConfigError(f"usage.{name} = {text!r}: expected a file in a folder that can be written")


def _can_be_written(path: Path) -> bool:
    """Whether it seems writable, without writing."""
    try:
        if path.exists():
            return not path.is_dir() and os.access(path, os.W_OK)
        return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)
    except (OSError, ValueError):
        # A folder without search permission, or an invalid name.
        return False


def check_config(config: Config) -> None:
    """Check every rule that involves several fields. Raises ``ConfigError``."""
    ids = [engine.engine_id for engine in config.engines]
    for engine in config.engines:
        check_engine(engine)
        if ids.count(engine.engine_id) > 1:
            raise ConfigError(f"engines: {engine.engine_id} is listed twice")
    check_texts(config)
    path = config.fleet.kubernetes.kubeconfig
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"fleet.kubernetes.kubeconfig: there is no file {path}")
    _check_roles(config)
    _check_pull(config)
    _check_hints(config)
    _check_server(config.server)
    _check_ops(config)
    _check_usage(config.usage)
    _check_listen(config.listen)
    for section in (
        *("fleet", "proxy", "listen", "feeds", "prompts", "index", "admin", "usage"),
        *("epp", "queue", "pd", "pull"),
    ):
        _check_numbers(section, getattr(config, section))
    for source in ("file", "dns", "kubernetes"):
        _check_numbers(f"fleet.{source}", getattr(config.fleet, source))
    _check_admin(config)
    _check_epp(config)
    _check_renderers(config.prompts.renderers)
    _check_by_making("", config.fleet.headers)
    _check_by_making("aliases.", lambda: Aliases(config.alias_shares()))
    for name, model in config.models.items():
        kind, folder, _ = parse_source(model.tokenizer)
        if kind == "directory" and not has_tokenizer(Path(folder)):
            raise ConfigError(
                f"models.{name}.tokenizer: {folder} is not a directory with a tokenizer.json in it; give the "
                f"name of a repository (ORG/NAME), or fill it: {download_command('ORG/NAME', folder)}"
            )
        for key in ("kinds", "windows", "attention_chunk_sizes"):
            if not all(idx.isdecimal() and len(idx) < 5 for idx in getattr(model, key)):
                raise ConfigError(f"models.{name}.{key}: keys must be group numbers, e.g. {{0 = ...}}")
        if model.retention_interval != "dense" and model.retention_interval < 0:
            raise ConfigError(
                f"models.{name}.retention_interval = {model.retention_interval}: 0 or more, or dense"
            )
        if not 0 < model.shared_store_ttl_s < math.inf:
            where = f"models.{name}.shared_store_ttl_s"
            raise ConfigError(f"{where} = {model.shared_store_ttl_s}: expected seconds, more than 0")
        _check_facts(name, model)
        _check_kinds(name, model)
        _check_shadow(name, model)


def _check_roles(config: Config) -> None:
    """Check that the roles complete each other, unless discovered engines may have the missing ones."""
    engines = config.engines
    if config.fleet.discovers or not any(engine.role for engine in engines):
        return
    for role, fits in (("prefill", [e.prefills for e in engines]), ("decode", [e.decodes for e in engines])):
        if not any(fits):
            other = "decode" if role == "prefill" else "prefill"
            given = next(engine for engine in engines if engine.role == other)
            raise ConfigError(
                f"engines: {given.engine_id} has role={other}, but none has role={role}; give another engine "
                f"role={role} (or both), or leave the roles out"
            )


def _check_pull(config: Config) -> None:
    if not config.pull.enabled:
        return
    if config.policy.policy != "kvatlas":
        raise ConfigError(
            f'pull.enabled: policy.policy = "{config.policy.policy}" compares no costs; use "kvatlas", or '
            "leave pull.enabled out"
        )
    for engine in config.engines:
        if engine.role is not None:
            raise ConfigError(
                f"pull.enabled: {engine.engine_id} has role={engine.role}, and engines with roles do not "
                "pull; leave one of the two out"
            )


def _check_hints(config: Config) -> None:
    """Check that clients cannot claim a share of the engines' memory."""
    if config.policy.retention_hints and config.proxy.trust_client_kv_transfer_params:
        raise ConfigError(
            "policy.retention_hints: with proxy.trust_client_kv_transfer_params, clients could set retention "
            "hints of their own; leave one of the two out"
        )


def _check_by_making(section: str, make: Callable[[], object]) -> None:
    try:
        make()
    except ValueError as error:
        raise ConfigError(f"{section}{error}") from None


def _check_renderers(urls: tuple[str, ...]) -> None:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise ConfigError(f"prompts.renderers: {url!r} is no http://host:port")
        if urls.count(url) > 1:
            raise ConfigError(f"prompts.renderers: {url} is listed twice")


def _check_admin(config: Config) -> None:
    admin = config.admin
    if not admin.enabled:
        return
    if config.server.log_level not in {"debug", "info"}:
        raise ConfigError(
            "admin.enabled: changes must be logged, but server.log_level = "
            f"{config.server.log_level} suppresses them; use info"
        )
    if admin.port is not None and admin.port == config.server.port != 0:
        raise ConfigError(f"admin.port: {admin.port} is the router's own; leave it out to use that one")
    for key in ("tls_cert_file", "tls_key_file", "client_ca_file"):
        path = getattr(admin, key)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"admin.{key}: there is no file {path}")


def _check_epp(config: Config) -> None:
    if not config.epp.listen:
        if config.epp.health_listen:
            raise ConfigError("epp.health_listen: there is no endpoint picker; give epp.listen too")
        return
    if config.server.workers != 1:
        raise ConfigError(
            "epp.listen: the endpoint picker is one process; leave server.workers at 1 and run several"
        )
    for engine in config.engines:
        parts = urlsplit(engine.base_url)
        try:
            ipaddress.ip_address(parts.hostname or "")
        except ValueError:
            raise ConfigError(
                f"engines: {engine.base_url}: gateways take an IP address only; give it instead of the name"
            ) from None
        if parts.path not in {"", "/"}:
            raise ConfigError(f"engines: {engine.base_url}: a gateway knows no path before /v1; leave it out")


def _check_facts(name: str, model: ModelConfig) -> None:
    """Check that sizes in tokens are positive and group numbers are not negative."""
    sizes = {"attention_chunk_size": [model.attention_chunk_size]}
    sizes |= {key: list(getattr(model, key).values()) for key in ("attention_chunk_sizes", "windows")}
    for key, tokens in sizes.items():
        for size in tokens:
            if size is not None and not 0 < size <= _COUNT_MAX:
                raise ConfigError(f"models.{name}.{key} = {size}: expected tokens, more than 0")
    if not 0 <= model.replay_tokens <= _COUNT_MAX:
        raise ConfigError(
            f"models.{name}.replay_tokens = {model.replay_tokens}: expected tokens, or 0 for no replay"
        )
    if model.eagle_groups_apart and (model.eagle_groups == "all" or not model.eagle_groups):
        raise ConfigError(
            f"models.{name}.eagle_groups_apart: expected the numbers of the drafter's groups in eagle_groups"
        )
    for group in () if model.eagle_groups == "all" else model.eagle_groups or ():
        if not 0 <= group <= _COUNT_MAX:
            raise ConfigError(f"models.{name}.eagle_groups: {group} is not the number of a group")


def _check_kinds(name: str, model: ModelConfig) -> None:
    try:
        for idx, kind in model.kinds.items():
            GroupSpec(int(idx), kind, 16).family  # noqa: B018  # raises for an unknown kind
    except ValueError as error:
        raise ConfigError(f"models.{name}.kinds: {error}") from None


def _check_shadow(name: str, model: ModelConfig) -> None:
    try:
        Shadow(model.shadow_spec())
    except ValueError as error:
        raise ConfigError(f"models.{name}.shadow: {error}") from None


def _check_numbers(section: str, settings: msgspec.Struct) -> None:
    """Check limits, counts and durations: finite, and positive unless 0 means "none" or "immediately"."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least_ok = value >= 0 if name in _MAY_BE_ZERO else value > 0
        if not least_ok or not math.isfinite(value):
            wanted = "0 or more" if name in _MAY_BE_ZERO else "more than 0"
            raise ConfigError(f"{section}.{name} = {value}: expected a finite number, {wanted}")
        most = _SECONDS_MAX if isinstance(value, float) else _SIZE_MAX if "bytes" in name else _COUNT_MAX
        if value > most:
            raise ConfigError(f"{section}.{name} = {value}: expected at most {most:g}")


def check_engine(engine: EngineAddress) -> None:
    """Check the addresses of an engine. Raises ``ConfigError``."""
    try:
        check_address(engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
