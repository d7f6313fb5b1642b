"""Settings in ``kv_connector_extra_config``, parsed and checked once at start.

Unknown keys and values out of range are errors, so that a misspelt limit does not silently become the
default. Sizes may be numbers of bytes or text such as ``"8GiB"``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from publisher.pool.host_tier import OWNER_SHARE


class ConfigError(ValueError):
    """An invalid setting. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.remedy)


POLICIES = ("lru", "boundary", "hinted")
LAYOUTS = ("BLHNC", "engine")
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class OffloadSettings:
    """Limits and choices of one connector. Times in seconds, sizes in bytes, for the whole engine."""

    host_bytes: int
    """Host memory for rows, of all ranks together."""
    policy: str = "boundary"
    """Eviction policy when the host memory is full: ``lru``, ``boundary`` or ``hinted``."""
    hint_share: float = OWNER_SHARE
    """Policy ``hinted``: the largest share of the rows that the retention hints of one tenant cover."""
    pinned_source_blocks_max: float = 0.1
    """Largest share of the GPU's blocks that running stores may pin; beyond it, stores wait."""
    lookup_deadline_s: float = 0.05
    """How long a request may wait for a lookup; after that it is computed."""
    load_min_tokens: int = 1
    """Hits that would load fewer tokens than this are computed instead."""
    store_generated: bool = True
    """Also store the blocks that decoding fills, not only those of prompts."""
    store_threshold: int = 1
    """Store a block after this many requests have computed or read it; 2 skips blocks used only once."""
    store_lazy: bool = False
    """Store a block only when the GPU is about to reuse it."""
    share_replicas: bool = True
    """Keep one copy for all ranks that hold the same KV (MLA), in shared memory."""
    layout: str = "BLHNC"
    """``BLHNC``: ask vLLM to place all layers of a block side by side; ``engine``: leave it to vLLM."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], where: str, *, others: Iterable[str] = ()) -> Self:
        """Parse ``kv_connector_extra_config``; ``where``: its name in errors, ``others``: keys read
        elsewhere.

        Raises ``ConfigError`` for an unknown key, a missing ``host_bytes`` or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for key in extra:
            if key not in known and key not in others:
                names = ", ".join(sorted({*known, *others}))
                raise ConfigError(f"{where}.{key}", extra[key], f"no such setting; there are: {names}")
        if "host_bytes" not in extra:
            raise ConfigError(f"{where}.host_bytes", None, 'say how much host memory to use, e.g. "8GiB"')
        return cls(
            host_bytes=size_bytes(extra["host_bytes"], f"{where}.host_bytes"),
            policy=_choice(extra, where, "policy", cls.policy, POLICIES),
            hint_share=_number(extra, where, "hint_share", cls.hint_share, low=0, high=1),
            pinned_source_blocks_max=_number(
                extra, where, "pinned_source_blocks_max", cls.pinned_source_blocks_max, low=0, high=1
            ),
            lookup_deadline_s=_number(
                extra, where, "lookup_deadline_s", cls.lookup_deadline_s, low=0, high=60
            ),
            load_min_tokens=_whole(extra, where, "load_min_tokens", cls.load_min_tokens, low=1),
            store_generated=_flag(extra, where, "store_generated", default=cls.store_generated),
            store_threshold=_whole(extra, where, "store_threshold", cls.store_threshold, low=1),
            store_lazy=_flag(extra, where, "store_lazy", default=cls.store_lazy),
            share_replicas=_flag(extra, where, "share_replicas", default=cls.share_replicas),
            layout=layout_setting(extra, where),
        )


def layout_setting(extra: Mapping[str, Any], where: str) -> str:
    """Parse ``layout`` alone: vLLM needs it before it makes the connector."""
    return _choice(extra, where, "layout", OffloadSettings.layout, LAYOUTS)


def size_bytes(value: object, key: str) -> int:
    """Parse a size such as ``4096``, ``"512 MiB"`` or ``"8G"``. ``ConfigError`` for anything else and
    zero."""
    remedy = 'give a positive number of bytes, or text such as "8GiB" or "500MB"'
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)) and found[2].lower() in _UNITS:
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(key, value, remedy)
    return value


def _number(
    extra: Mapping[str, Any], where: str, name: str, default: float, *, low: float, high: float
) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}.{name}", value, "give a number")
    if not low < value <= high:
        raise ConfigError(f"{where}.{name}", value, f"give a number above {low} and up to {high}")
    return float(value)


def _whole(extra: Mapping[str, Any], where: str, name: str, default: int, *, low: int) -> int:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{where}.{name}", value, f"give a whole number of at least {low}")
    return value


def _flag(extra: Mapping[str, Any], where: str, name: str, *, default: bool) -> bool:
    value = extra.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}.{name}", value, "give true or false")
    return value


def _choice(extra: Mapping[str, Any], where: str, name: str, default: str, choices: tuple[str, ...]) -> str:
    value = extra.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where}.{name}", value, f"choose one of: {', '.join(choices)}")
    return value
