"""Syntax of texts in a configuration: a rule for every setting that is a text or a list of texts.

A rule checks the syntax only; files and servers are tried later (``router/server_process.py``). Settings with
a fixed set of values are ``Literal`` in their struct and need no rule. Invariant: every setting has one of
both (a test walks the whole tree).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator

import msgspec

from router.config.errors import ConfigError, meant
from router.config.schema import Config, ModelConfig
from router.http.sockets import base_url_fault, is_host, split_address
from router.placement.policies import POLICIES
from router.prompts.settings import zone_of

# Returns the fault of a text with its remedy; "" if it is valid.
Rule = Callable[[str], str]

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


def _host(text: str) -> str:
    return "" if is_host(text) else "expected an IP address or a host name, e.g. 0.0.0.0 for all addresses"


def _address(text: str) -> str:
    try:
        split_address(text)
    except ValueError:
        return "expected HOST:PORT, e.g. 0.0.0.0:9002"
    return ""


def _path(text: str) -> str:
    if not text.strip():
        return "expected the path of a file; leave the setting out for none"
    return "" if text.isprintable() else "a path with such characters cannot be used"


def _name(text: str) -> str:
    fits = 0 < len(text) <= _NAME_LENGTH_MAX and text.isprintable() and text == text.strip()
    return "" if fits else f"expected 1 to {_NAME_LENGTH_MAX} printable characters, no space around them"


def _web_url(text: str) -> str:
    return base_url_fault(text, "http", "https")


def _collector(text: str) -> str:
    if text.rstrip("/").endswith("/v1/traces"):
        return "leave out /v1/traces, the exporter adds it"
    return base_url_fault(text, "http", "https")


def _prefill(text: str) -> str:
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_network(bare)
    except ValueError:
        fits = is_host(bare)
    else:
        fits = True
    fits = fits and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
    return "" if fits else "expected HOST:PORT or NETWORK:PORT, e.g. 10.4.0.0/16:8000"


def _selector(text: str) -> str:
    fits = _SELECTOR.fullmatch(text) is not None
    return "" if fits else "expected a label selector, e.g. app=vllm or app in (a,b)"


def _policy(text: str) -> str:
    return "" if text in POLICIES else f"expected one of {', '.join(POLICIES)}{meant(text, POLICIES)}"


def _url_path(text: str) -> str:
    fits = text.startswith("/") and text.isprintable() and not set(text) & set(" ?#")
    return "" if fits else "expected a path as clients send it, e.g. /reset_prefix_cache"


def _origin(text: str) -> str:
    if text in {"*", "null"}:
        return ""
    fits = text.count("/") == 2 and not base_url_fault(text.lower(), text.lower().partition("://")[0])
    return "" if fits else "expected SCHEME://HOST without a path, e.g. https://chat.example.com, or *"


def _token(text: str) -> str:
    return "" if _TOKEN.fullmatch(text) else "expected a name as in HTTP, or *"


def _hash_seed(text: str) -> str:
    """Check a value of PYTHONHASHSEED: Python exits on any other one; vLLM hashes the text itself."""
    fits = text == "random" or (text.isascii() and text.isdecimal() and int(text) <= _HASH_SEED_MAX)
    return "" if fits else f"PYTHONHASHSEED is a whole number from 0 to {_HASH_SEED_MAX}, or random"


def _time_zone(text: str) -> str:
    try:
        zone_of(text)
    except ValueError as error:
        return f"{error}; expected e.g. UTC or Europe/Berlin"
    return ""


def _elsewhere(text: str) -> str:
    """Accept any text: the struct itself, or its user, has the rule, which needs more than the text."""
    return ""


# Rules by section and key, for any model. Defaults are always valid: "" means none.
RULES: dict[str, Rule] = {
    "server.host": _host,
    "server.ops_host": _host,
    "server.ops_names": _host,
    "server.ops_token_file": _path,
    "server.tls_cert_file": _path,
    "server.tls_key_file": _path,
    "server.client_ca_file": _path,
    "fleet.api_key_file": _path,
    "fleet.ca_file": _path,
    "fleet.client_cert_file": _path,
    "fleet.client_key_file": _path,
    "fleet.file.path": _path,
    "fleet.dns.names": _elsewhere,
    "fleet.dns.servers": _elsewhere,
    "fleet.kubernetes.selector": _selector,
    "fleet.kubernetes.inference_pool": _elsewhere,
    "fleet.kubernetes.service_selector": _selector,
    "fleet.kubernetes.namespaces": _elsewhere,
    "fleet.kubernetes.port_name": _elsewhere,
    "fleet.kubernetes.events_port_name": _elsewhere,
    "fleet.kubernetes.replay_port_name": _elsewhere,
    "fleet.kubernetes.kubeconfig": _path,
    "fleet.kubernetes.api": _web_url,
    "fleet.kubernetes.credentials_dir": _path,
    "policy.policy": _policy,
    "proxy.refused_paths": _url_path,
    "proxy.passed_paths": _url_path,
    "cors.allowed_origins": _origin,
    "cors.allowed_methods": _token,
    "cors.allowed_headers": _token,
    "prompts.hub_endpoint": _web_url,
    "prompts.renderers": _web_url,
    "index.url": _elsewhere,
    "index.replica": _elsewhere,
    "index.namespace": _elsewhere,
    "admin.token_file": _path,
    "admin.host": _host,
    "admin.tls_cert_file": _path,
    "admin.tls_key_file": _path,
    "admin.client_ca_file": _path,
    "epp.listen": _address,
    "epp.health_listen": _address,
    "epp.tls_cert_file": _path,
    "epp.tls_key_file": _path,
    "epp.client_ca_file": _path,
    "keys.file": _path,
    "keys.isolate_secret_file": _path,
    "sidecar.engine": _web_url,
    "sidecar.prefills": _prefill,
    "traces.endpoint": _collector,
    "traces.service_name": _name,
    "usage.path": _path,
    "usage.key_file": _path,
    "models.tokenizer": _elsewhere,
    "models.chat_template": _elsewhere,
    "models.time_zone": _time_zone,
    "models.lora_paths": _name,
    "models.hash_seeds": _hash_seed,
    "models.kinds": _elsewhere,
    "models.shared_stores": _name,
}


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
