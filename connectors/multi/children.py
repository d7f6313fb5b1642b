"""The connectors inside a ``HybridMultiConnector``: parsed from its settings and checked before any is made.

Each entry of ``connectors`` has the form of ``--kv-transfer-config`` for that connector alone; it inherits
missing fields (role, engine id) from the outer one. Every fault is a ``ConfigError`` that names the entry,
not an ``assert``, so that ``python -O`` does not disable the checks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from connectors.compat import KVConnectorFactory, KVTransferConfig
from connectors.settings import ConfigError
from connectors.tiered import EXTRA_CONFIG, TieredConnector

WHERE = f"{EXTRA_CONFIG}.connectors"

_ENGINE_WIDE = {
    "kv_load_failure_policy": "an engine has one policy; set it beside connectors, not inside",
}
# vLLM configures the engine for these by name, and looks for the names in its own MultiConnector only.
_KNOWN_BY_NAME = (
    "HiSparseConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
)


@dataclass(frozen=True)
class Child:
    """One connector, before it is made."""

    name: str
    """Name in statistics and errors; unique among the children."""
    where: str
    """Its path in the settings."""
    connector_class: Any
    transfer_config: Any
    tell_apart: bool
    """Another child has the same class, so its KV events carry ``name`` as ownership."""

    def vllm_config(self, outer: Any) -> Any:
        """The engine's configuration for this child."""
        config = copy.copy(outer)
        config.kv_transfer_config = self.transfer_config
        return config


def read_children(
    extra: Mapping[str, Any],
    *,
    kv_role: str | None = None,
    engine_id: str | None = None,
    load_failure_policy: str = "recompute",
) -> list[Child]:
    """Parse ``kv_connector_extra_config``; classes are imported, none is instantiated.

    ``ConfigError`` for no connectors, an entry that cannot be parsed or imported, or a duplicate name.
    """
    for key in extra:
        if key != "connectors":
            raise ConfigError(
                f"{EXTRA_CONFIG}.{key}", extra[key], "no such setting; settings of children go inside them"
            )
    entries = extra.get("connectors")
    if not isinstance(entries, list) or not entries:
        remedy = 'list the connectors, each as it would stand alone: [{"kv_connector": ...}, ...]'
        raise ConfigError(WHERE, entries, remedy)
    outer = {
        "kv_role": kv_role or "kv_both",
        "engine_id": engine_id,
        "kv_load_failure_policy": load_failure_policy,
    }
    found = [_read(entry, f"{WHERE}[{index}]", outer) for index, entry in enumerate(entries)]
    of_class = Counter(connector_class for _, connector_class in found)
    children: list[Child] = []
    seen: Counter[str] = Counter()
    for index, (transfer_config, connector_class) in enumerate(found):
        where = f"{WHERE}[{index}]"
        default = str(connector_class.__name__)
        seen[default] += 1
        if seen[default] > 1:
            default = f"{default}-{seen[default]}"
        name = entries[index].get("name", default)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}.name", name, "give a text, or leave it out")
        if any(child.name == name for child in children):
            raise ConfigError(f"{where}.name", name, "another connector has this name; give each its own")
        tell_apart = of_class[connector_class] > 1
        children.append(Child(name, where, connector_class, transfer_config, tell_apart))
    return children


def children_of(vllm_config: Any) -> list[Child]:
    """The children in an engine's configuration. ``ConfigError`` as in ``read_children``."""
    outer = vllm_config.kv_transfer_config
    extra = outer.kv_connector_extra_config or {}
    return read_children(
        extra,
        kv_role=outer.kv_role,
        engine_id=outer.engine_id,
        load_failure_policy=outer.kv_load_failure_policy,
    )


def check_hma(children: list[Child], vllm_config: Any) -> None:
    """Raise ``ConfigError`` naming the first child without support for the engine's hybrid KV cache manager.

    vLLM checks the outer class only, which must therefore check all children.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    for child in children:
        if not KVConnectorFactory.supports_hma_config(child.transfer_config):
            raise ConfigError(
                f"{child.where}.kv_connector",
                child.transfer_config.kv_connector,
                "this connector does not support the hybrid KV cache manager (it is no SupportsHMA); leave "
                "it out, or start vLLM with --disable-hybrid-kv-cache-manager",
            )


def required_layout(children: list[Child], vllm_config: Any) -> str | None:
    """The KV cache layout for all children; None if no child has a preference. ``ConfigError`` if two
    children require different ones."""
    # Layouts of our own connectors are preferences, because they copy from any layout; requirements of others
    # take precedence.
    required: dict[str, str] = {}
    preferred: dict[str, str] = {}
    for child in children:
        layout = child.connector_class.get_required_kvcache_layout(child.vllm_config(vllm_config))
        if layout is not None:
            ours = issubclass(child.connector_class, TieredConnector)
            (preferred if ours else required).setdefault(layout, child.name)
    if len(required) > 1:
        value = ", ".join(f"{name} requires {layout}" for layout, name in required.items())
        raise ConfigError(WHERE, value, "an engine has one KV cache layout; leave out all but one of these")
    return next(iter(required or preferred), None)


def _read(entry: object, where: str, outer: Mapping[str, Any]) -> tuple[Any, Any]:
    """(Transfer configuration, connector class) of one entry."""
    if not isinstance(entry, Mapping):
        raise ConfigError(where, entry, 'give an object such as {"kv_connector": ...}')
    known = {field.name for field in fields(KVTransferConfig)} - set(_ENGINE_WIDE)
    for key, value in entry.items():
        if key in _ENGINE_WIDE:
            raise ConfigError(f"{where}.{key}", value, _ENGINE_WIDE[key])
        if key not in known and key != "name":
            names = ", ".join(sorted({*known, "name"}))
            raise ConfigError(f"{where}.{key}", value, f"no such setting; there are: {names}")
    wanted = entry.get("kv_connector")
    key = f"{where}.kv_connector"
    if not isinstance(wanted, str):
        raise ConfigError(key, wanted, "name the connector's class")
    if wanted in _KNOWN_BY_NAME:
        remedy = "vLLM sets engines up for it only where it stands alone or in vLLM's MultiConnector"
        raise ConfigError(key, wanted, remedy)
    if wanted == "HybridMultiConnector":
        raise ConfigError(key, wanted, "list its connectors here instead")
    try:
        settings = {name: value for name, value in entry.items() if name != "name"}
        transfer_config = KVTransferConfig(**{**outer, **settings})
        return transfer_config, KVConnectorFactory.get_connector_class(transfer_config)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(key, wanted, f"it cannot be used: {error}") from error
