"""Checks of a configuration beyond the types of its fields.

Each error names the key, the value and the remedy; nothing is contacted and nothing is loaded.

Every text, and every list of texts, has a rule for its syntax; files and servers are tried later
(``router/server_lifecycle.py``). Settings with a fixed set of values are ``Literal`` in their struct and need
no rule. Invariant: every setting has one of both (a test walks the whole tree).
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvatlas.publisher.groups import GroupSpec
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.config.schema import WORKERS_MAX, Config, ModelConfig, ServerConfig, is_loopback
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.sources import check_address, socket_fault
from kvatlas.router.http.addresses import base_url_fault, is_host, port_fault, split_address
from kvatlas.router.http.setting_texts import meant
from kvatlas.router.http.settings import ListenSettings
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.placement.candidate import POLICIES
from kvatlas.router.placement.shadow import Shadow
from kvatlas.router.prompts.settings import zone_of
from kvatlas.router.prompts.tokenizer_source import download_command, has_tokenizer, parse_source
from kvatlas.router.proxy.aliases import Aliases

# Returns the fault of a text with its remedy; "" if it is valid.
Rule = Callable[[str], str]
# Rules by section and key, for any model. Defaults are always valid: "" means none.
RULES: dict[str, Rule] = {}

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_LABEL_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_LABEL_VALUES = rf"\(\s*{_LABEL_VALUE}\s*(,\s*{_LABEL_VALUE}\s*)*\)"
_REQUIREMENT = (
    rf"\s*(!\s*{_LABEL_KEY}|{_LABEL_KEY}(\s*(=|==|!=)\s*{_LABEL_VALUE}|\s+(in|notin)\s*{_LABEL_VALUES})?)\s*"
)
# Kubernetes' label selectors (apimachinery, pkg/labels/selector.go).
_SELECTOR = re.compile(rf"{_REQUIREMENT}(,{_REQUIREMENT})*")
_HASH_SEED_MAX = (1 << 32) - 1
_NAME_LENGTH_MAX = 200


def _checks(*keys: str) -> Callable[[Rule], Rule]:
    """Register the rule that checks these keys."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(keys, rule))
        return rule

    return register


@_checks("server.host", "server.ops_host", "server.ops_names", "admin.host")
def _host(text: str) -> str:
    return "" if is_host(text) else "expected an IP address or a host name, e.g. 0.0.0.0 for all addresses"


@_checks("epp.listen", "epp.health_listen")
def _address(text: str) -> str:
    try:
        split_address(text)
    except ValueError:
        return "expected HOST:PORT, e.g. 0.0.0.0:9002"
    return ""


@_checks(
    "server.ops_token_file",
    "server.tls_cert_file",
    "server.tls_key_file",
    "server.client_ca_file",
    "fleet.api_key_file",
    "fleet.ca_file",
    "fleet.client_cert_file",
    "fleet.client_key_file",
    "fleet.file.path",
    "fleet.kubernetes.kubeconfig",
    "fleet.kubernetes.credentials_dir",
    "admin.token_file",
    "admin.tls_cert_file",
    "admin.tls_key_file",
    "admin.client_ca_file",
    "epp.tls_cert_file",
    "epp.tls_key_file",
    "epp.client_ca_file",
    "keys.file",
    "keys.secret_file",
    "keys.isolate_secret_file",
    "usage.path",
    "usage.key_file",
)
def _path(text: str) -> str:
    if not text.strip():
        return "expected the path of a file; leave the setting out for none"
    return "" if text.isprintable() else "a path with such characters cannot be used"


@_checks("traces.service_name", "models.lora_paths", "models.shared_stores")
def _name(text: str) -> str:
    fits = 0 < len(text) <= _NAME_LENGTH_MAX and text.isprintable() and text == text.strip()
    return "" if fits else f"expected 1 to {_NAME_LENGTH_MAX} printable characters, no space around them"


@_checks("fleet.kubernetes.api", "prompts.hub_endpoint", "prompts.renderers")
def _web_url(text: str) -> str:
    return base_url_fault(text, "http", "https")


@_checks("traces.endpoint")
def _collector(text: str) -> str:
    if text.rstrip("/").endswith("/v1/traces"):
        return "leave out /v1/traces, the exporter adds it"
    return base_url_fault(text, "http", "https")


@_checks("fleet.kubernetes.selector", "fleet.kubernetes.service_selector")
def _selector(text: str) -> str:
    fits = _SELECTOR.fullmatch(text) is not None
    return "" if fits else "expected a label selector, e.g. app=vllm or app in (a,b)"


@_checks("policy.policy")
def _policy(text: str) -> str:
    return "" if text in POLICIES else f"expected one of {', '.join(POLICIES)}{meant(text, POLICIES)}"


@_checks("proxy.refused_paths", "proxy.passed_paths")
def _url_path(text: str) -> str:
    fits = text.startswith("/") and text.isprintable() and not set(text) & set(" ?#")
    return "" if fits else "expected a path as clients send it, e.g. /reset_prefix_cache"


@_checks("cors.allowed_origins")
def _origin(text: str) -> str:
    if text in {"*", "null"}:
        return ""
    fits = text.count("/") == 2 and not base_url_fault(text.lower(), text.lower().partition("://")[0])
    return "" if fits else "expected SCHEME://HOST without a path, e.g. https://chat.example.com, or *"


@_checks("cors.allowed_methods", "cors.allowed_headers")
def _token(text: str) -> str:
    return "" if _TOKEN.fullmatch(text) else "expected a name as in HTTP, or *"


@_checks("models.hash_seeds")
def _hash_seed(text: str) -> str:
    """Check a value of PYTHONHASHSEED: Python exits on any other one; vLLM hashes the text itself."""
    fits = text == "random" or (text.isascii() and text.isdecimal() and int(text) <= _HASH_SEED_MAX)
    return "" if fits else f"PYTHONHASHSEED is a whole number from 0 to {_HASH_SEED_MAX}, or random"


@_checks("models.time_zone")
def _time_zone(text: str) -> str:
    try:
        zone_of(text)
    except ValueError as error:
        return f"{error}; expected e.g. UTC or Europe/Berlin"
    return ""


@_checks(
    "fleet.dns.names",
    "fleet.dns.servers",
    "fleet.kubernetes.inference_pool",
    "fleet.kubernetes.namespaces",
    "fleet.kubernetes.port_name",
    "fleet.kubernetes.events_port_name",
    "fleet.kubernetes.replay_port_name",
    "index.url",
    "index.replica",
    "index.namespace",
    "models.tokenizer",
    "models.kinds",
)
def _elsewhere(text: str) -> str:
    """Accept any text: the struct itself, or its user, has the rule, which needs more than the text."""
    return ""


# Of a template in the model's directory, which may not be here.
_TEMPLATE_NAME = re.compile(r"[\w-]+")


@_checks("models.chat_template")
def _chat_template(text: str) -> str:
    # jinja2 takes 40 ms to import.
    from kvatlas.router.prompts.chat.compiled import template_fault  # noqa: PLC0415
    from kvatlas.router.prompts.model_dir import ModelDirError, load_chat_template  # noqa: PLC0415

    try:
        source = load_chat_template(text)
    except ModelDirError:
        named = _TEMPLATE_NAME.fullmatch(text) is not None
        return "" if named else "no such file; expected that of a Jinja template, or the template itself"
    except UnicodeDecodeError:
        return "the file is no text in UTF-8; expected that of a Jinja template"
    fault = template_fault(source)
    return f"no Jinja template: {fault}" if fault else ""


def unreadable(config: Config) -> list[str]:
    """Return the files and folders of settings that cannot be read here and now."""
    found = []
    for key, text in _texts(config):
        if RULES[key] is _path and not key.startswith("usage.") and not os.access(text, os.R_OK):
            why = "this user may not read it" if os.path.lexists(text) else "there is no such file"
            found.append(f"{key} = {text!r}: cannot be read: {why}")
    return found


def check_texts(config: Config) -> None:
    """Raise ``ConfigError`` for the first text that breaks its rule."""
    for key, text in _texts(config):
        if fault := RULES[key](text):
            raise ConfigError(f"{key} = {text!r}: {fault}")
    for name, model in config.models.items():
        for key, text in _leaves("models", model, ModelConfig()):
            if fault := RULES[key](text):
                raise ConfigError(f"models.{name}.{key.removeprefix('models.')}: {text!r}: {fault}")


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    for section in Config.__struct_fields__:
        settings = getattr(config, section)
        if isinstance(settings, msgspec.Struct):
            yield from _leaves(section, settings, type(settings)())


def _leaves(section: str, settings: msgspec.Struct, defaults: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Yield every text that has a rule and is not the default, with its key."""
    for name in settings.__struct_fields__:
        key, value = f"{section}.{name}", getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from _leaves(key, value, getattr(defaults, name))
        elif key not in RULES or value == getattr(defaults, name):
            continue
        elif isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            yield from ((key, text) for text in value.values())
        else:
            yield from ((key, text) for text in value)


# Three years: longer times overflow timers of event loops and of ZMQ.
_SECONDS_MAX = 1e8
_COUNT_MAX = (1 << 31) - 1  # a C int, as ZMQ's limits are
_SIZE_MAX = 1 << 48

_MAY_BE_ZERO = frozenset(
    {
        "suspect_s",  # an engine that died keeps no request from the next one
        "stall_s",
        "move_drained_s",
        "ageing",
        "answers_watched_share",
        "drain_delay_s",
        "decode_delay_weight",
        "drain_s_max",
        "fallbacks",
        "keepalive_comment_s",
        "lease_margin_s",
        "leg_overhead_s",
        "min_remote_tokens",
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
    if fault := port_fault(server.port):
        raise ConfigError(f"server.port: {fault}")
    if server.workers != "auto" and not 1 <= server.workers <= WORKERS_MAX:
        raise ConfigError(f"server.workers = {server.workers}: expected 1 to {WORKERS_MAX}, or auto")
    if server.workers != 1 and sys.platform != "linux":
        raise ConfigError(f"server.workers = {server.workers}: several workers need Linux; leave it at 1")


def _check_ops(config: Config) -> None:
    server = config.server
    number = server.ops_listens_on
    if number is None:
        return
    if fault := port_fault(number):
        raise ConfigError(f"server.ops_port: {fault}")
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


def _check_engines(engines: Iterable[EngineAddress]) -> None:
    """Check each engine, and that none is listed twice, by its URL or by its events."""
    servers: dict[tuple[object, ...], str] = {}
    streams: dict[tuple[str, str], str] = {}
    for engine in engines:
        check_engine(engine)
        url, own = urlsplit(engine.base_url), engine.engine_id
        port = url.port or (443 if url.scheme == "https" else 80)
        server = (url.scheme, url.hostname, port, url.path, engine.dp_rank)
        if server in servers:
            spelled = "" if servers[server] == own else f", also as {servers[server]}"
            remedy = "list it once, or each of its ranks with dp_rank"
            raise ConfigError(f"engines: {own} is listed twice{spelled}; {remedy}")
        servers[server] = own
        if engine.events is None:
            continue
        stream = (engine.events, engine.topic)
        if stream in streams:
            raise ConfigError(
                f"engines: {own} has the same events={engine.events} as {streams[stream]}; give each engine "
                "its own address, or its own topic behind a proxy of ZMQ"
            )
        streams[stream] = own


def check_config(config: Config) -> None:
    """Check every rule that involves several fields. Raises ``ConfigError``."""
    _check_engines(config.engines)
    check_texts(config)
    path = config.fleet.kubernetes.kubeconfig
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"fleet.kubernetes.kubeconfig: there is no file {path}")
    _check_roles(config)
    _check_pull(config)
    _check_hints(config)
    _check_server(config.server)
    _check_ops(config)
    _check_stores(config.stores)
    _check_usage(config.usage)
    _check_listen(config.listen)
    for section in (
        "fleet",
        "proxy",
        "listen",
        "feeds",
        "prompts",
        "index",
        "admin",
        "usage",
        "epp",
        "queue",
        "pd",
        "pull",
        "fleet.file",
        "fleet.dns",
        "fleet.kubernetes",
    ):
        _check_numbers(section, attrgetter(section)(config))
    _check_admin(config)
    _check_epp(config)
    _check_renderers(config.prompts.renderers)
    _check_by_making("", config.fleet.headers)
    _check_by_making("aliases.", lambda: Aliases(config.alias_shares()))
    for name, model in config.models.items():
        kind, folder, _ = parse_source(model.tokenizer)
        if kind == "directory" and "://" in folder:
            repository = "/".join(urlsplit(folder).path.strip("/").split("/")[:2]) or "ORG/NAME"
            raise ConfigError(
                f"models.{name}.tokenizer: {folder} is a URL; give the name of the repository, {repository} "
                "(of another hub: set prompts.hub_endpoint too), or a directory with a tokenizer.json in it"
            )
        if kind == "directory" and not has_tokenizer(Path(folder)):
            raise ConfigError(
                f"models.{name}.tokenizer: {folder} is not a directory with a tokenizer.json in it; give the "
                f"name of a repository (ORG/NAME), or fill it: {download_command('ORG/NAME', folder)}"
            )
        for key in ("kinds", "windows", "attention_chunk_sizes"):
            if not all(idx.isdecimal() and len(idx) < 5 for idx in getattr(model, key)):
                raise ConfigError(f"models.{name}.{key}: keys must be group numbers, e.g. {{0 = ...}}")
        if isinstance(model.retention_interval, int) and model.retention_interval < 0:
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


def _check_stores(stores: tuple[StoreSettings, ...]) -> None:
    for number, store in enumerate(stores):
        where = f"stores[{number}]"
        if any(store.name == other.name for other in stores[:number]):
            raise ConfigError(
                f"{where}.name: {store.name} twice; give each store and model a name of its own"
            )
        for address in store.events:
            if fault := socket_fault(address):
                raise ConfigError(f"{where}.events: {address!r} {fault.replace('the engine', 'the store')}")
        for url in store.engines:
            if fault := base_url_fault(url, "http", "https"):
                raise ConfigError(f"{where}.engines: {url!r}: {fault}")
        for key in ("model", "key_model", "instances"):
            value = getattr(store, key)
            for text in (value,) if isinstance(value, str) else value or ():
                if fault := _name(text):
                    raise ConfigError(f"{where}.{key}: {text!r}: {fault}")


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
            raise ConfigError(f"prompts.renderers: {url} is listed twice; list it once")


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
