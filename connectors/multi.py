"""``HybridMultiConnector``: several connectors in one. Blocks are saved to all and loaded from the best.

``--kv-transfer-config '{"kv_connector": "HybridMultiConnector",
"kv_connector_module_path": "kvatlas.connectors.multi", "kv_role": "kv_both",
"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"connectors":
[{"kv_connector": "HybridOffloadConnector", "kv_connector_module_path": "kvatlas.connectors.offload",
"kv_connector_extra_config": {"host_bytes": "8GiB"}}, ...]}}'``

It is vLLM's ``MultiConnector`` with these differences: the child that offers the most tokens loads (the first
of equals), a request whose load failed is computed next, saves of partial blocks are counted, children of
this package share their metrics' names, and every fault in the settings is a ``ConfigError`` that names the
entry, not an ``assert``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvatlas.connectors.compat import (
    KVConnectorFactory,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVTransferConfig,
    MultiConnector,
    MultiKVConnectorPromMetrics,
    require_tested_vllm,
)
from kvatlas.connectors.offload import EXTRA_CONFIG, TieredConnector
from kvatlas.connectors.settings import ConfigError

WHERE = f"{EXTRA_CONFIG}.connectors"
# Label of the children's metrics: the class of the connector.
LABEL = "connector"

# vLLM configures the engine for these by name, and looks for the names in its own MultiConnector only.
_KNOWN_BY_NAME = (
    "HiSparseConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
)


def read_children(extra: Mapping[str, Any], **outer: Any) -> list[tuple[Any, Any]]:
    """Parse ``kv_connector_extra_config``: (class, transfer configuration) of each child, none instantiated.

    ``outer``: fields of the engine's transfer configuration that entries inherit. ``ConfigError`` for no
    connectors, an unknown setting, or an entry that cannot be parsed or imported.
    """
    for key in extra:
        if key != "connectors":
            remedy = "no such setting; settings of children go inside them"
            raise ConfigError(f"{EXTRA_CONFIG}.{key}", extra[key], remedy)
    entries = extra.get("connectors")
    if not isinstance(entries, list) or not entries:
        remedy = 'list the connectors, each as it would stand alone: [{"kv_connector": ...}, ...]'
        raise ConfigError(WHERE, entries, remedy)
    outer = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **outer}
    return [_read(entry, f"{WHERE}[{index}]", outer) for index, entry in enumerate(entries)]


def _read(entry: object, where: str, outer: Mapping[str, Any]) -> tuple[Any, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(where, entry, 'give an object such as {"kv_connector": ...}')
    if "kv_load_failure_policy" in entry:
        remedy = "an engine has one policy; set it beside connectors, not inside"
        raise ConfigError(f"{where}.kv_load_failure_policy", entry["kv_load_failure_policy"], remedy)
    wanted, key = entry.get("kv_connector"), f"{where}.kv_connector"
    if not isinstance(wanted, str):
        raise ConfigError(key, wanted, "name the connector's class")
    if wanted in _KNOWN_BY_NAME:
        remedy = "vLLM sets engines up for it only where it stands alone or in vLLM's MultiConnector"
        raise ConfigError(key, wanted, remedy)
    if wanted == "HybridMultiConnector":
        raise ConfigError(key, wanted, "list its connectors here instead")
    try:
        config = KVTransferConfig(**{**outer, **entry})
        connector_class = KVConnectorFactory.get_connector_class(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(key, wanted, f"it cannot be used: {error}") from error
    # vLLM rebuilds statistics by the registered name, also of children that were loaded by module path.
    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(wanted, connector_class.__module__, connector_class.__name__)
    return connector_class, config


def _children_of(vllm_config: Any) -> list[tuple[Any, Any]]:
    """The children in an engine's configuration. ``ConfigError`` as in ``read_children``."""
    outer = vllm_config.kv_transfer_config
    fields = ("kv_role", "engine_id", "kv_load_failure_policy")
    inherited = {field: getattr(outer, field) for field in fields}
    return read_children(outer.kv_connector_extra_config or {}, **inherited)


def _with_roles(extra: Mapping[str, Any], kv_role: str | None = "kv_both") -> dict[str, Any]:
    """Settings as vLLM's own code reads them, with a role in every entry."""
    read_children(extra)
    return {"connectors": [{"kv_role": kv_role, **entry} for entry in extra["connectors"]]}


class HybridMultiConnector(MultiConnector):
    """vLLM's ``MultiConnector``, loading from the best child. vLLM makes one object per role.

    Only the engine core's thread calls the methods of the scheduler's object.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ``ConfigError`` for invalid settings or a child without support for this engine's hybrid KV
        cache manager, and errors of the children's constructors."""
        require_tested_vllm(type(self).__name__)
        # vLLM checks the outer class only, which must therefore check all children.
        for index, (_, child) in enumerate(_children_of(vllm_config)):
            hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
            if hybrid and not KVConnectorFactory.supports_hma_config(child):
                raise ConfigError(
                    f"{WHERE}[{index}].kv_connector",
                    child.kv_connector,
                    "this connector does not support the hybrid KV cache manager (it is no SupportsHMA); "
                    "leave it out, or start vLLM with --disable-hybrid-kv-cache-manager",
                )
        # Requests whose load failed since they were last admitted.
        self._must_compute: set[str] = set()
        # Children that took over a request's last, partial blocks.
        self._tail_savers: dict[str, set[int]] = {}
        self._connectors: list[Any] = []
        config = copy.copy(vllm_config)
        config.kv_transfer_config = transfer = copy.copy(vllm_config.kv_transfer_config)
        extra = transfer.kv_connector_extra_config
        transfer.kv_connector_extra_config = _with_roles(extra, transfer.kv_role)
        try:
            super().__init__(config, role, kv_cache_config)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[Any, Any]]:
        found = []
        for connector_class, child in _children_of(vllm_config):
            config = copy.copy(vllm_config)
            config.kv_transfer_config = child
            found.append((connector_class, config))
        return found

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The KV cache layout for all children; None if no child has a preference. ``ConfigError`` if two
        children require different ones."""
        # Layouts of our own connectors are preferences, because they copy from any layout; requirements of
        # others take precedence.
        required: dict[str, str] = {}
        preferred: dict[str, str] = {}
        for connector_class, config in cls._get_connector_classes_and_configs(vllm_config):
            layout = connector_class.get_required_kvcache_layout(config)
            if layout is not None:
                ours = issubclass(connector_class, TieredConnector)
                (preferred if ours else required).setdefault(layout, connector_class.__name__)
        if len(required) > 1:
            value = ", ".join(f"{name} requires {layout}" for layout, name in required.items())
            raise ConfigError(
                WHERE, value, "an engine has one KV cache layout; leave out all but one of these"
            )
        return next(iter(required or preferred), None)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(super().requires_piecewise_for_cudagraph(_with_roles(extra_config)))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether every child supports the sleep mode of vLLM 0.33."""
        children = read_children(kv_transfer_config.kv_connector_extra_config)
        return all(child.supports_sleep_mode(config) for child, config in children)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Metrics of every child's class, with its name as a label."""
        shared = {kind: _made_once(metric_class) for kind, metric_class in metric_types.items()}
        parts: dict[str, Any] = {}
        for connector_class, config in cls._get_connector_classes_and_configs(vllm_config):
            name = connector_class.__name__
            values = {engine: [*labels, name] for engine, labels in per_engine_labelvalues.items()}
            metrics = connector_class.build_prom_metrics(config, shared, [*labelnames, LABEL], values)
            if metrics is not None:
                parts.setdefault(name, metrics)
        return MultiKVConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, parts
        )

    # -- scheduler half ----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The longest offer; a child without an answer makes the request wait."""
        # Every child is called every time, as some keep state in this call.
        offers = [
            connector.get_num_new_matched_tokens(request, num_computed_tokens)
            for connector in self._connectors
        ]
        self._requests_to_connector.pop(request.request_id, None)
        if any(tokens is None for tokens, _ in offers):
            return None, False
        loader = max(range(len(offers)), key=lambda child: (offers[child][0], -child))
        if request.request_id in self._must_compute or not offers[loader][0]:
            return 0, False
        self._requests_to_connector[request.request_id] = loader
        tokens, asynchronous = offers[loader]
        return tokens, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The child whose offer was taken loads; for the others the request was admitted without a load."""
        if not num_external_tokens:
            self._must_compute.discard(request.request_id)
        elif request.request_id not in self._requests_to_connector:
            raise RuntimeError(f"request {request.request_id} is to be loaded, but no connector offered to")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._must_compute |= connector_output.failed_recving

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        savers = {
            child
            for child, connector in enumerate(self._connectors)
            if connector.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        }
        if savers:
            self._tail_savers[request.request_id] = savers
        return bool(savers)

    def _aggregate_request_finished(
        self, request: Any, per_connector_fn: Callable[[Any], tuple[bool, dict[str, Any] | None]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(Whether any child still saves the blocks, merged parameters of all children).

        ``RuntimeError`` if two children return the same key.
        """
        # vLLM's count of saves omits children that only took over partial blocks: with them, blocks would be
        # freed while one child still reads them.
        self._must_compute.discard(request.request_id)
        savers = self._tail_savers.pop(request.request_id, set())

        def recorded(connector: Any) -> tuple[bool, dict[str, Any] | None]:
            saves, params = per_connector_fn(connector)
            if saves:
                savers.add(self._connectors.index(connector))
            return saves, params

        answer: tuple[bool, dict[str, Any] | None] = super()._aggregate_request_finished(request, recorded)
        if len(savers) > 1:
            self._extra_async_saves[request.request_id] = len(savers) - 1
        return answer


def _made_once(metric_class: Any) -> Any:
    """Cache metrics by name: children of this package make the same ones, which Prometheus registers only
    once."""
    made: dict[str, Any] = {}

    def make(*args: Any, **settings: Any) -> Any:
        name = settings["name"] if "name" in settings else args[0]
        if name not in made:
            made[name] = metric_class(*args, **settings)
        return made[name]

    return make
