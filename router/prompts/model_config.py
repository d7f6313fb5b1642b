"""A model's ``config.json``: the attention of its layers, and layers of a drafter.

Only a hint: it does not prove how an engine runs the model; evidence from events takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvatlas.publisher.groups import Family, GroupSpec

_BYTES_MAX: Final = 4 << 20
_LAYERS_MAX: Final = 4096
# Keys under which multimodal models have the configuration of their text model.
_TEXT_PARTS: Final = ("text_config", "llm_config")
# vLLM's kind of KV cache by transformers' layer type. Models with other types are left out: the grouping of
# Mamba layers depends on flags of the engine.
_KINDS: Final = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local_attention",
}
# Each n-th layer has full attention: defaults of transformers' configuration classes (4.50), for files
# without ``layer_types``.
_PERIODS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
# ``sliding_window`` without ``layer_types`` is the window of every layer.
_ALIKE: Final = frozenset({"mistral", "mixtral"})
# Types of layers whose numbers differ by less than this factor are one group each, padded: vLLM
# ``_get_kv_cache_groups_uniform_page_size``, 1.5 in 0.32, 1.25 in earlier versions.
_PADDING: Final = (1.5, 1.25)
_MTP: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_DRAFTERS: Final = (*_MTP, "eagle_config", "speculators_config")
# Model types whose windows vLLM rebuilds by replay (models/deepseek_v41/attention.py, vLLM 0.32).
_REPLAYS: Final = frozenset({"deepseek_v41"})


class ModelConfigFile(msgspec.Struct, frozen=True):
    """Sizes in tokens. ``layer_kinds``: vLLM's kind of each layer that has a KV cache of its own; empty if
    the file does not say. ``drafter``: the entry that describes a drafter's layers."""

    attention_chunk_size: int | None = None
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    drafter: str = ""
    replay_window: int | None = None
    """Window of the layers that vLLM may rebuild by replay after a hit."""

    @property
    def drafter_kind(self) -> Literal["", "mtp", "eagle"]:
        """Layers for multi-token prediction are the model's own; other drafters are of the EAGLE family."""
        return "" if not self.drafter else "mtp" if self.drafter in _MTP else "eagle"

    def group_kinds(self, groups: int) -> tuple[str, ...]:
        """Kind of each KV cache group of an engine with this number of groups; empty if these layers make
        another number, as with vLLM's hybrid cache manager off."""
        return next((kinds for kinds in self._groupings() if len(kinds) == groups), ())

    @property
    def likely_kinds(self) -> tuple[str, ...]:
        """Kind of each group in the latest release of vLLM; empty if the file does not say."""
        return next(self._groupings(), ())

    def _groupings(self) -> Iterator[tuple[str, ...]]:
        """Yield the groups that these layers make, by release of vLLM, the latest first."""
        # In order of first appearance, as vLLM numbers its groups.
        layers = dict[str, int]()
        for kind in self.layer_kinds:
            layers[kind] = layers.get(kind, 0) + 1
        if not layers:
            return
        fewest, most = min(layers.values()), max(layers.values())
        for factor in _PADDING:
            size = most if most < fewest * factor else fewest
            yield tuple(kind for kind, count in layers.items() for _ in range(-(-count // size)))

    def other_windows(self, groups: Iterable[GroupSpec]) -> list[int]:
        """Windows of these groups that are not in the file."""
        windows = {group.sliding_window for group in groups if group.family is Family.WINDOW}
        return [] if self.sliding_window is None else sorted(filter(None, windows - {self.sliding_window}))


def read_model_file(folder: Path) -> ModelConfigFile:
    """Read the file of this directory; empty if it is missing or has another shape."""
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return ModelConfigFile()
    if not isinstance(found, dict):
        return ModelConfigFile()
    parts = [*(part for name in _TEXT_PARTS if isinstance(part := found.get(name), dict)), found]
    text = parts[0]
    window = None if text.get("use_sliding_window") is False else _count(text.get("sliding_window"))
    drafters = (name for part in parts for name in _DRAFTERS if part.get(name))
    return ModelConfigFile(
        next((size for part in parts if (size := _count(part.get("attention_chunk_size")))), None),
        window,
        _layer_kinds(text, window),
        next(drafters, ""),
        window if text.get("model_type") in _REPLAYS else None,
    )


def _layer_kinds(text: dict[str, Any], window: int | None) -> tuple[str, ...]:
    # The last ones use the cache of others.
    shared = _count(text.get("num_kv_shared_layers")) or 0
    types = text.get("layer_types")
    if isinstance(types, list):
        kinds = [_KINDS.get(str(one), "") for one in types[:_LAYERS_MAX]]
    else:
        layers = min(_count(text.get("num_hidden_layers")) or 0, _LAYERS_MAX)
        model = str(text.get("model_type"))
        period = _count(text.get("sliding_window_pattern")) or _PERIODS.get(model)
        if window is None or not (period or model in _ALIKE):
            return ()
        kinds = [
            "full_attention" if period and (layer + 1) % period == 0 else "sliding_window"
            for layer in range(layers)
        ]
    # vLLM gives such layers full attention.
    if window is None:
        kinds = ["full_attention" if kind == "sliding_window" else kind for kind in kinds]
    own = kinds[: len(kinds) - shared] if shared else kinds
    return tuple(own) if all(own) else ()


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
