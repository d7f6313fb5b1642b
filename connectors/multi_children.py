"""The connectors inside a ``HybridMultiConnector``, their messages and their statistics.

Each entry of ``connectors`` has the form of ``--kv-transfer-config`` for that connector alone; it inherits
missing fields (role, engine id) from the outer one. Every fault is a ``ConfigError`` that names the entry,
not an ``assert``, so that ``python -O`` does not disable the checks.

Children are parsed from the settings and checked before any is made. Messages are plain data, pickled between
the engine core and its workers: one part per child, opaque here. Invariant: each child receives only the
parts that its other half sent.

Statistics cross processes as plain dictionaries, and a class method without access to the configuration
rebuilds them. So each part names its class; connectors loaded by module path keep their statistics too. In
Prometheus every child's metrics have its name in an additional label, ``connector``.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from connectors.compat import (
    KVConnectorFactory,
    KVConnectorHandshakeMetadata,
    KVConnectorKVEvents,
    KVConnectorPromMetrics,
    KVTransferConfig,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from connectors.offload import EXTRA_CONFIG, TieredConnector
from connectors.settings import ConfigError

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


@dataclass
class MultiMetadata(MultiKVConnectorMetadata):
    """A step, scheduler to worker: vLLM's metadata, and the children that save ended requests."""

    saves: dict[str, frozenset[int]] = field(default_factory=dict)
    """Requests that ended, and the children (by position) that still save their blocks."""


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """Handshake metadata of a rank's children for other engines."""

    parts: tuple[KVConnectorHandshakeMetadata | None, ...]

    @staticmethod
    def parts_for(child: int, metadata: Mapping[Any, MultiHandshake]) -> dict[Any, Any]:
        """One child's parts by rank; ranks without a part are omitted."""
        parts = {rank: handshake.parts[child] for rank, handshake in metadata.items()}
        return {rank: part for rank, part in parts.items() if part is not None}


@dataclass(frozen=True)
class _Part:
    child: int
    events: Any


class MultiKvEvents(KVConnectorKVEvents):
    """KV events of the children's workers, by child.

    vLLM merges the containers of several ranks by adding one's "events" to another's. Here the events are the
    children's complete containers, so that each counts its own ranks.
    """

    def __init__(self, parts: Mapping[int, Any]) -> None:
        self.parts = dict(parts)
        self._ranks = 1

    def add_events(self, events: list[Any]) -> None:
        for part in events:
            mine = self.parts.get(part.child)
            if mine is None:
                self.parts[part.child] = part.events
            else:
                mine.add_events(part.events.get_all_events())
                mine.increment_workers(part.events.get_number_of_workers())

    def aggregate(self) -> MultiKvEvents:
        self.parts = {child: events.aggregate() for child, events in self.parts.items()}
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._ranks += count

    def get_all_events(self) -> list[Any]:
        return [_Part(child, events) for child, events in self.parts.items()]

    def get_number_of_workers(self) -> int:
        return self._ranks

    def clear_events(self) -> None:
        for events in self.parts.values():
            events.clear_events()


class RunningSaves:
    """Children of a rank that still save the blocks of ended requests.

    A request's blocks may be freed only when the last save is done. The scheduler announces a request in the
    same step in which the children learn of its end.
    """

    def __init__(self) -> None:
        self._saving: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._saving)

    def announce(self, saves: Mapping[str, Iterable[int]]) -> None:
        for request_id, children in saves.items():
            self._saving[request_id] = set(children)

    def ended(self, child: int, request_ids: Iterable[str]) -> set[str]:
        """Handle the end of a child's saves; returns the requests that no child saves any longer."""
        done: set[str] = set()
        for request_id in request_ids:
            saving = self._saving.get(request_id)
            if saving is not None:
                saving.discard(child)
                if saving:
                    continue
                del self._saving[request_id]
            done.add(request_id)
        return done


LABEL = "connector"


class MultiStats(MultiKVConnectorStats):
    """``data``: child's name -> its statistics."""

    @classmethod
    def rebuild(cls, data: Mapping[str, Mapping[str, Any]]) -> MultiStats:
        """Inverse of ``to_dict``."""
        return cls({name: _class_at(part["source"])(data=part["data"]) for name, part in data.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data with each part's class (``module:name``), for another process."""
        return {
            name: {"source": f"{type(stats).__module__}:{type(stats).__qualname__}", "data": stats.to_dict()}
            for name, stats in self.data.items()
        }

    def reduce(self) -> dict[str, Any]:
        return {
            f"{name} {what}": value
            for name, values in super().reduce().items()
            for what, value in values.items()
        }


def _class_at(source: str) -> Any:
    module, _, name = source.partition(":")
    return attrgetter(name)(importlib.import_module(module))


class MultiPromMetrics(KVConnectorPromMetrics):
    """Metrics of every child, with its name as a label."""

    def __init__(
        self,
        children: list[Child],
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        shared = {kind: _made_once(metric_class) for kind, metric_class in metric_types.items()}
        self._parts: dict[str, Any] = {}
        for child in children:
            metrics = child.connector_class.build_prom_metrics(
                child.vllm_config(vllm_config),
                shared,
                [*labelnames, LABEL],
                {engine: [*values, child.name] for engine, values in per_engine_labelvalues.items()},
            )
            if metrics is not None:
                self._parts[child.name] = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, part in transfer_stats_data.items():
            if name in self._parts:
                self._parts[name].observe(part["data"], engine_idx)


def _made_once(metric_class: Any) -> Any:
    """Cache metrics by name: children of one class make the same ones, which Prometheus registers only
    once."""
    made: dict[str, Any] = {}

    def make(*args: Any, **settings: Any) -> Any:
        name = settings["name"] if "name" in settings else args[0]
        if name not in made:
            made[name] = metric_class(*args, **settings)
        return made[name]

    return make
